//! Whether changes of a table can be applied: what the role may do, which user code runs, and how rows are found.

use std::sync::Arc;

use engine::relation::{RemoteColumn, RemoteRelation};
use pgoutput::{RelId, ReplicaIdentity, TypeOid};
use wire::{Session, quote_ident};

use super::Checker;
use crate::check::asked::{Hook, Lacking};
use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{Table, field};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::mode::TableApplyMode;

impl Checker<'_, '_> {
    /// Checks the role's privileges on the table; returns whether it may read the table.
    pub(super) fn privileges(&mut self, published: &PublishedTable, table: &Table) -> bool {
        let is_needed = |lacking: &&Lacking| match lacking.privilege.as_str() {
            "UPDATE" | "DELETE" => published.updates_or_deletes,
            "TRUNCATE" => published.truncates,
            _ => true,
        };
        let is_written = |lacking: &&Lacking| {
            let of_column = |name: &String| published.columns.iter().any(|c| c.name == *name);
            lacking.column.as_ref().is_none_or(of_column)
        };
        let lacking = self.asked.lacking.get(&table.oid).into_iter().flatten();
        let lacking = lacking.filter(is_needed).filter(is_written);
        let mut refused: Vec<_> = lacking.map(|lacking| lacking.privilege.as_str()).collect();
        refused.dedup();
        let (role, name) = (&self.known.role, published.name.to_string());
        let grant = |list: &str| format!("GRANT {list} ON TABLE {} TO {role};", table.sql_name());
        let truncate = refused.pop_if(|privilege| *privilege == "TRUNCATE");
        if !refused.is_empty() {
            let list = refused.join(", ");
            self.reporter
                .block("privileges", format!("role {role} lacks {list} on table {name}"))
                .on(&name)
                .sql(grant(&list));
        }
        if let Some(truncate) = truncate {
            let what = "a TRUNCATE of the publisher stops the subscription, and an interrupted copy cannot begin again";
            self.reporter
                .warn("privileges", format!("role {role} lacks {truncate} on table {name}: {what}"))
                .on(&name)
                .sql(grant(truncate));
        }
        !refused.contains(&"SELECT")
    }

    /// Reports triggers and rules that run even though session_replication_role is replica.
    pub(super) fn triggers(&mut self, table: &Table) {
        for Hook { is_rule, name, on } in self.asked.hooks.get(&table.oid).into_iter().flatten() {
            if *is_rule {
                self.reporter
                    .warn(
                        "rules",
                        format!(
                            "rule {name} of table {on} is enabled for replica and will run; a \
                             native subscription never runs rules"
                        ),
                    )
                    .on(table.name.to_string())
                    .sql(format!("ALTER TABLE {on} ENABLE RULE {};", quote_ident(name)));
            } else {
                self.reporter
                    .note(
                        "replica_triggers",
                        format!("trigger {name} of table {on} is enabled for replica and will run"),
                    )
                    .on(table.name.to_string());
            }
        }
    }

    /// Reports why the changes of a table cannot be applied as sets.
    fn mode(&mut self, published: &PublishedTable, map: &TableMap) {
        let name = published.name.to_string();
        let (what, reason) = match &map.mode {
            TableApplyMode::Row { reason } => ("changes", reason),
            // If rows cannot be found at all, `search` reports that.
            TableApplyMode::Append { reason }
                if published.updates_or_deletes
                    && !matches!(map.search, Search::Impossible { .. }) =>
            {
                ("updates and deletes", reason)
            }
            TableApplyMode::Set | TableApplyMode::Append { .. } => return,
        };
        self.reporter
            .note("apply_mode", format!("{what} of table {name} are applied one by one: {reason}"))
            .on(name);
    }

    /// Checks that the rows of updates and deletes can be found.
    pub(super) fn search(&mut self, published: &PublishedTable, table: Table) -> Result<()> {
        let name = published.name.to_string();
        let remote = Arc::new(remote_relation(published));
        let sql_name = table.sql_name();
        let mut types = PublisherTypes::default();
        types.add_identity(published);
        let map = TableMap::new(remote, table, &types)?;
        self.mode(published, &map);
        // Without a replica identity the publisher refuses updates and deletes, and its checks
        // report that.
        if !published.updates_or_deletes || !published.columns.iter().any(|column| column.key) {
            return Ok(());
        }
        match &map.search {
            Search::Key(_) => {}
            Search::WholeRow(_) => {
                self.reporter
                    .note(
                        "whole_row_search",
                        format!(
                            "table {name} has no key on the subscriber: each update and delete \
                             compares whole rows, in a scan of the table"
                        ),
                    )
                    .on(&name);
            }
            Search::Impossible { reason, hint } => {
                let in_the_way = deferrable_key(self.session, map.table.oid)?;
                let key: Vec<_> = published.columns.iter().filter(|column| column.key).collect();
                let finding = self
                    .reporter
                    .block("search", format!("updates and deletes cannot be applied: {reason}"))
                    .on(&name);
                let list: Vec<_> = key.iter().map(|column| quote_ident(&column.name)).collect();
                let list = list.join(", ");
                if published.replica_identity == 'f' {
                    finding.message.push_str(". ");
                    finding.message.push_str(hint);
                } else if map.table.identity_key.is_none() {
                    let instead = in_the_way
                        .map(|name| format!("DROP CONSTRAINT {}, ", quote_ident(&name)))
                        .unwrap_or_default();
                    finding
                        .sql(format!("ALTER TABLE {sql_name} {instead}ADD PRIMARY KEY ({list});"));
                } else {
                    let not_null: Vec<_> = key
                        .iter()
                        .map(|c| format!("ALTER COLUMN {} SET NOT NULL", quote_ident(&c.name)))
                        .collect();
                    let index = quote_ident(&format!("{}_published_key", published.name.name));
                    finding.sql(format!(
                        "ALTER TABLE {sql_name} {}; CREATE UNIQUE INDEX {index} ON {sql_name} \
                         ({list}); ALTER TABLE {sql_name} REPLICA IDENTITY USING INDEX {index};",
                        not_null.join(", ")
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The relation message that the publisher will send for the table.
fn remote_relation(published: &PublishedTable) -> RemoteRelation {
    RemoteRelation {
        id: RelId(published.oid),
        name: published.name.clone(),
        replica_identity: match published.replica_identity {
            'f' => ReplicaIdentity::Full,
            'n' => ReplicaIdentity::Nothing,
            'i' => ReplicaIdentity::Index,
            _ => ReplicaIdentity::Default,
        },
        columns: published
            .columns
            .iter()
            .map(|column| RemoteColumn {
                name: column.name.clone(),
                key: column.key,
                type_oid: TypeOid(column.base_type),
                type_modifier: column.base_type_modifier,
            })
            .collect(),
    }
}

/// The name of a table's primary key, if that is deferrable.
fn deferrable_key(session: &mut Session, table: u32) -> Result<Option<String>> {
    let sql = "SELECT k.conname FROM pg_catalog.pg_constraint k \
               WHERE k.conrelid = $1::pg_catalog.oid AND k.contype = 'p' AND k.condeferrable";
    let rows = session
        .query(sql, &[Some(&table.to_string())])
        .map_err(|e| Failure::subscriber(&e, "reading the primary key of a table"))?;
    rows.first().map(|row| field(&row, 0)).transpose()
}
