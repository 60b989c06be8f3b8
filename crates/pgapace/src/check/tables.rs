//! Checks of every published table against its subscriber table.

use std::collections::HashSet;
use std::sync::Arc;

use engine::relation::{RemoteColumn, RemoteRelation};
use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::{RelId, ReplicaIdentity, TypeOid};
use wire::{Session, quote_ident, quote_literal};

use crate::check::asked::{Asked, Hook, Lacking};
use crate::check::report::{Finding, Reporter, Severity, Side};
use crate::check::same_rows::{self, Overlap};
use crate::check::{SubscriptionState, failed, shown_conninfo, types};
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::{Failure, Result};
use crate::publisher::dump_command::dump_command;
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::subscriber::catalogue::{
    CatalogueReader, Column, Identity, Table, TableFacts, field, oid_array,
};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::mode::TableApplyMode;
use crate::subscriber::other_subscriptions;
use crate::subscriber::state::{self, Phase};
use crate::subscriber::storage::{self, TableStorage};
use crate::tablesync::check_absent;

const SIDE: Side = Side::Subscriber;

/// Most tables that one statement of a fix names.
const NAMED: usize = 50;

/// Tables that are read together. Some memory is needed for each.
const TABLES_AT_ONCE: usize = 1000;

const TOPICS: [&str; 9] = [
    "schema",
    "table",
    "columns",
    "types",
    "privileges",
    "row_security",
    "rows",
    "search",
    "triggers",
];

struct Checker<'a, 'r> {
    session: &'a mut Session,
    config: &'a Config,
    known: &'a SubscriptionState,
    reporter: &'a mut Reporter<'r>,
    /// Tables that a run would copy, but that are not empty: the name, and the name as SQL.
    filled: Vec<(TableName, String)>,
    /// Published tables that do not exist.
    missing: Vec<TableName>,
    shared: Shared,
    asked: Asked,
}

/// Published tables that other subscriptions change, too.
#[derive(Default)]
struct Shared {
    tables: HashSet<TableName>,
    /// Those of which another one has copied the same rows.
    same_rows: HashSet<TableName>,
}

/// Checks all tables.
pub(super) fn check(
    (publisher, session): (&mut Session, &mut Session),
    config: &Config,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) {
    if known.creates_tables(config) {
        created(session, known, published, reporter);
        return;
    }
    let shared = reporter.group("shared", |reporter| {
        shared((&mut *publisher, &mut *session), (config, known), published, reporter)
    });
    let mut checker = Checker {
        session,
        config,
        known,
        reporter,
        filled: Vec::new(),
        missing: Vec::new(),
        shared: shared.unwrap_or_default(),
        asked: Asked::default(),
    };
    let before = checker.reporter.report.findings.len();
    let (session, reporter) = (&mut *checker.session, &mut *checker.reporter);
    reporter.group("schema", |reporter| schemas(session, known, published, reporter));
    reporter.group("types", |reporter| types::missing(publisher, session, published, reporter));
    reporter.group("storage", |reporter| storage(session, published, reporter));
    let mut catalogue = CatalogueReader::default();
    for some in published.chunks(TABLES_AT_ONCE) {
        checker.tables(&mut catalogue, some);
    }
    checker.report_missing(published.len());
    if let Err(failure) = checker.report_filled() {
        checker.reporter.failure("rows", &failure);
    }
    let found = &checker.reporter.report.findings[before..];
    if !published.is_empty() && !found.iter().any(|f| TOPICS.contains(&f.topic)) {
        let count = published.len();
        checker.reporter.ok("table", format!("tables that fit the published ones: {count}"));
    }
}

/// Checks that the subscriber has none of the tables that a run creates with `--copy-schema`.
fn created(
    session: &mut Session,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) {
    // An interrupted first run may have created some of them, and creates the others.
    let absent = match known.settled() {
        Some(_) => Some(()),
        None => reporter.group("table", |_| check_absent(session, published)),
    };
    if absent.is_some() && !published.is_empty() {
        let count = published.len();
        reporter.ok("table", format!("tables that a run creates: {count}"));
    }
}

/// Reports tables that other subscriptions change, too.
fn shared(
    (publisher, session): (&mut Session, &mut Session),
    (config, known): (&Config, &SubscriptionState),
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<Shared> {
    let keys: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
    let listed = other_subscriptions::list(session, &config.name, &keys)?;
    let others = other_subscriptions::labels(&listed);
    let same_rows = same_rows::among(publisher, listed, &config.publications, published)?;
    let mut shared = Shared::default();
    for (place, others) in others {
        let table = &published[place];
        let name = table.name.to_string();
        let of_it = || same_rows.iter().filter(|same| same.place == place);
        let message = if let Some(same) = of_it().find(|same| same.overlap == Overlap::Certain) {
            if same.copies_data {
                shared.same_rows.insert(table.name.clone());
            }
            same_rows::message(&name, same)
        } else {
            let same = of_it().next().map(same_rows::message_of_possible).unwrap_or_default();
            format!(
                "table {name} is changed by {others}, too. pgapace resync and rebase refuse it, and pgapace verify \
                 reports rows of the others{same}"
            )
        };
        let refused = shared.same_rows.contains(&table.name)
            && config.if_not_empty != IfNotEmpty::Keep
            && known.to_copy(config, table);
        let severity = if refused { Severity::Blocker } else { Severity::Warning };
        let side = reporter.side;
        reporter.report.add(severity, side, "shared", message).on(&name);
        shared.tables.insert(table.name.clone());
    }
    Ok(shared)
}

/// Reports unlogged tables, and tables with an access method that is not tested.
fn storage(
    session: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    for TableStorage { table, unlogged, access_method } in storage::read(session, published)? {
        let name = table.name.to_string();
        if unlogged {
            reporter
                .warn(
                    "storage",
                    format!(
                        "table {name} is unlogged: after a crash of the server, and on standbys, \
                         it is empty"
                    ),
                )
                .on(&name)
                .sql(format!("ALTER TABLE {} SET LOGGED;", table.sql_name()));
        }
        if let Some(method) = access_method {
            reporter
                .warn(
                    "storage",
                    format!(
                        "table {name} uses access method {method}: pgapace is tested with heap \
                         only"
                    ),
                )
                .on(&name);
        }
    }
    Ok(())
}

/// Reports missing schemas, and schemas that the role may not use.
fn schemas(
    session: &mut Session,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let mut names: Vec<&str> = published.iter().map(|table| table.name.schema.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let rows = session
            .query(
                "SELECT pg_catalog.has_schema_privilege(oid, 'USAGE') \
                 FROM pg_catalog.pg_namespace WHERE nspname = $1",
                &[Some(name)],
            )
            .map_err(|e| failed(SIDE, &e, "reading the schemas"))?;
        let quoted = quote_ident(name);
        let role = &known.role;
        match rows.first().map(|row| row.get(0) == Some("t")) {
            None => {
                reporter
                    .block("schema", format!("schema {name} does not exist"))
                    .on(name)
                    .sql(format!("CREATE SCHEMA {quoted};"));
            }
            Some(false) => {
                reporter
                    .block("privileges", format!("role {role} may not use schema {name}"))
                    .on(name)
                    .sql(format!("GRANT USAGE ON SCHEMA {quoted} TO {role};"));
            }
            Some(true) => {}
        }
    }
    Ok(())
}

impl Checker<'_, '_> {
    fn tables(&mut self, catalogue: &mut CatalogueReader, published: &[PublishedTable]) {
        let names: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
        let read = catalogue.read(self.session, &names).and_then(|found| {
            let tables = found.iter().filter_map(|found| found.as_ref().ok()?.as_ref());
            let tables: Vec<_> = tables.map(|found| &found.table).collect();
            self.asked = Asked::read(self.session, &tables)?;
            Ok(found)
        });
        let found = match read {
            Ok(found) => found,
            Err(failure) => {
                self.reporter.failure("table", &failure);
                return;
            }
        };
        for (table, found) in published.iter().zip(found) {
            if let Err(failure) = found.and_then(|found| self.table(table, found)) {
                self.reporter.failure("table", &failure).on(table.name.to_string());
            }
        }
    }

    fn table(&mut self, published: &PublishedTable, found: Option<TableFacts>) -> Result<()> {
        let name = published.name.to_string();
        let Some(table) = found.map(|found| found.table) else {
            self.missing.push(published.name.clone());
            return Ok(());
        };
        let fits = self.columns(published, &table)?;
        self.required_columns(published, &table)?;
        if table.row_security {
            let role = &self.known.role;
            self.reporter
                .block(
                    "row_security",
                    format!("row-level security is active for role {role} on table {name}"),
                )
                .on(&name)
                .fix(self.known.service.bypass_row_security(role));
        }
        let readable = self.privileges(published, &table);
        if readable
            && self.known.refuses_rows(self.config)
            && self.known.to_copy(self.config, published)
            && !self.known.is_emptied(published, table.oid)
            && !self.known.is_judged(published)
        {
            let sql = format!("SELECT 1 FROM {} LIMIT 1", table.sql_only());
            let rows = self
                .session
                .query(&sql, &[])
                .map_err(|e| failed(SIDE, &e, &format!("checking whether {name} is empty")))?;
            if !rows.is_empty() {
                self.filled.push((published.name.clone(), table.sql_only()));
            }
        }
        self.triggers(&table);
        if fits && !table.row_security {
            self.search(published, table)?;
        }
        Ok(())
    }

    /// Whether every published column has a column on the subscriber.
    fn columns(&mut self, published: &PublishedTable, table: &Table) -> Result<bool> {
        let name = published.name.to_string();
        let mut fits = true;
        let mut compared = Vec::new();
        for column in &published.columns {
            let quoted = quote_ident(&column.name);
            let Some((_, local)) = table.column(&column.name) else {
                fits = false;
                self.reporter
                    .block(
                        "columns",
                        format!("table {name} lacks published column {}", column.name),
                    )
                    .on(&name)
                    .sql(format!(
                        "ALTER TABLE {} ADD COLUMN {quoted} {};",
                        table.sql_name(),
                        column.type_name
                    ));
                continue;
            };
            if local.generated {
                fits = false;
                let fix = self.ungenerate(table, column)?;
                self.reporter
                    .block(
                        "columns",
                        format!(
                            "published column {} is a generated column of table {name}. Make it a \
                             plain column, or exclude it with a column list in the publication",
                            column.name
                        ),
                    )
                    .on(&name)
                    .sql(fix);
                continue;
            }
            compared.push((column, local));
        }
        self.types(&name, &compared);
        Ok(fits)
    }

    fn ungenerate(&mut self, table: &Table, column: &PublishedColumn) -> Result<String> {
        let rows = self
            .session
            .query(
                "SELECT attgenerated FROM pg_catalog.pg_attribute \
                 WHERE attrelid = $1::pg_catalog.oid AND attname = $2",
                &[Some(&table.oid.to_string()), Some(&column.name)],
            )
            .map_err(|e| failed(SIDE, &e, "reading the generated columns"))?;
        let quoted = quote_ident(&column.name);
        let name = table.sql_name();
        Ok(if rows.first().is_some_and(|row| row.get(0) == Some("v")) {
            let declared = &column.type_name;
            format!("ALTER TABLE {name} DROP COLUMN {quoted}, ADD COLUMN {quoted} {declared};")
        } else {
            format!("ALTER TABLE {name} ALTER COLUMN {quoted} DROP EXPRESSION;")
        })
    }

    /// Compares base types by name, because the oid of a type that is not built in differs between
    /// servers.
    fn types(&mut self, name: &str, compared: &[(&PublishedColumn, &Column)]) {
        for (column, local) in compared {
            let names = &self.asked.types;
            let local_name = names.get(&local.base_type).map(String::as_str).unwrap_or_default();
            if local_name != column.base_type_name {
                self.reporter
                    .warn(
                        "types",
                        format!(
                            "column {} of table {name} is {} on the publisher and {} on the \
                             subscriber: values are converted through text, which must be valid \
                             for the subscriber's type",
                            column.name, column.type_name, local.type_name
                        ),
                    )
                    .on(name);
            }
        }
    }

    /// Reports NOT NULL columns without a default that are not published.
    fn required_columns(&mut self, published: &PublishedTable, table: &Table) -> Result<()> {
        let name = published.name.to_string();
        let unfilled: Vec<_> = table
            .columns
            .iter()
            .filter(|c| c.not_null && !c.generated && c.identity == Identity::None)
            .filter(|c| published.columns.iter().all(|column| column.name != c.name))
            .collect();
        for column in unfilled {
            let rows = self
                .session
                .query(
                    "SELECT atthasdef FROM pg_catalog.pg_attribute \
                     WHERE attrelid = $1::pg_catalog.oid AND attnum = $2::pg_catalog.int2",
                    &[Some(&table.oid.to_string()), Some(&column.attnum.to_string())],
                )
                .map_err(|e| failed(SIDE, &e, "reading the defaults"))?;
            if rows.first().is_some_and(|row| row.get(0) == Some("t")) {
                continue;
            }
            self.reporter
                .block(
                    "columns",
                    format!(
                        "column {} of table {name} is not published, is NOT NULL and has no \
                         default: no row can be inserted",
                        column.name
                    ),
                )
                .on(&name)
                .sql(format!(
                    "ALTER TABLE {} ALTER COLUMN {} DROP NOT NULL;",
                    table.sql_name(),
                    quote_ident(&column.name)
                ));
        }
        Ok(())
    }

    /// Checks the role's privileges on the table; returns whether it may read the table.
    fn privileges(&mut self, published: &PublishedTable, table: &Table) -> bool {
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
    fn triggers(&mut self, table: &Table) {
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
    fn search(&mut self, published: &PublishedTable, table: Table) -> Result<()> {
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

    /// The fix is one command for all tables: pg_dump orders them by their dependencies.
    fn report_missing(&mut self, published: usize) {
        let names: Vec<_> = self.missing.iter().collect();
        let command = dump_command(
            &names,
            &shown_conninfo(&self.config.publisher),
            &shown_conninfo(&self.config.subscriber),
        );
        let is_new = self.known.settled().is_none() && self.known.is_read;
        let hint = if self.missing.len() == published && is_new {
            "; the first run creates all tables with --copy-schema"
        } else {
            ""
        };
        for name in &self.missing {
            self.reporter
                .block("table", format!("table {name} does not exist{hint}"))
                .on(name.to_string())
                .command(&command);
        }
    }

    /// The fix is one TRUNCATE of all tables, because TRUNCATE refuses a table that another one
    /// references.
    fn report_filled(&mut self) -> Result<()> {
        let is_lost =
            |found: &Finding| found.topic == "slot" && found.severity == Severity::Blocker;
        let streamed = self.known.row.as_ref().is_some_and(|row| row.phase == Phase::Streaming);
        if streamed && self.reporter.report.findings.iter().any(is_lost) {
            // The way on compares the tables. Their rows may exist nowhere else.
            return Ok(());
        }
        if let Some(row) = &self.known.row
            && !self.filled.is_empty()
        {
            // A running process may have copied a table since the state was read, or may be copying
            // it now.
            let states = state::relations_by_name(self.session, row.id)?;
            self.filled.retain(|(key, _)| {
                states.get(key).is_none_or(|table| {
                    table.sync_lsn.is_none() && table.state != TableSyncState::DataSync
                })
            });
        }
        let (shared, filled): (Vec<_>, Vec<_>) =
            self.filled.iter().partition(|(key, _)| self.shared.tables.contains(key));
        // Another finding names the subscription already.
        for (name, _) in shared.iter().filter(|(key, _)| !self.shared.same_rows.contains(key)) {
            let message = format!(
                "table {name} is not empty. If the other subscription has other rows, pass --if-not-empty keep to \
                 copy into it, and keep them. If it is the native one of this publisher: pgapace adopt"
            );
            self.reporter.block("rows", message).on(name.to_string());
        }
        // A statement that nobody can paste is none for each of so many tables.
        let all: Vec<_> = filled.iter().take(NAMED + 1).map(|(_, sql)| sql.as_str()).collect();
        let fix = (all.len() <= NAMED).then(|| format!("TRUNCATE {};", all.join(", ")));
        for (name, _) in filled {
            let finding = self.reporter.block(
                "rows",
                format!(
                    "table {name} is not empty. Empty it, or pass --copy-data=false if it \
                         already holds the publisher's rows as of the slot"
                ),
            );
            finding.on(name.to_string());
            if let Some(fix) = &fix {
                finding.sql(fix);
            }
        }
        Ok(())
    }
}

/// Reports labels that the subscriber's enums lack. The first row with such a label stops the
/// subscription.
pub(super) fn enums(
    publisher_session: &mut Session,
    subscriber_session: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let oids: HashSet<u32> = published
        .iter()
        .flat_map(|table| table.columns.iter().map(|column| column.base_type))
        .collect();
    let oids: Vec<_> = oids.into_iter().collect();
    let doing = "reading the labels of enums";
    let labels = publisher_session
        .query(
            "SELECT pg_catalog.format_type(e.enumtypid, NULL), e.enumlabel \
             FROM pg_catalog.pg_enum e WHERE e.enumtypid = ANY ($1::pg_catalog.oid[]) \
             ORDER BY 1, e.enumsortorder",
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(Side::Publisher, &e, doing))?;
    let existing = subscriber_session
        .query(
            "SELECT pg_catalog.format_type(e.enumtypid, NULL), e.enumlabel \
             FROM pg_catalog.pg_enum e",
            &[],
        )
        .map_err(|e| failed(SIDE, &e, doing))?;
    let pair = |row: wire::Row<'_>| Ok((field::<String>(&row, 0)?, field::<String>(&row, 1)?));
    let existing: HashSet<_> = existing.iter().map(pair).collect::<Result<_>>()?;
    for row in labels.iter() {
        let (name, label) = pair(row)?;
        // A type that does not exist is reported with its columns.
        if !existing.contains(&(name.clone(), label.clone()))
            && existing.iter().any(|(known, _)| *known == name)
        {
            reporter
                .warn(
                    "types",
                    format!("enum {name} lacks label {label:?}, which the publisher has"),
                )
                .on(&name)
                .sql(format!("ALTER TYPE {name} ADD VALUE {};", quote_literal(&label)));
        }
    }
    Ok(())
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
