//! Reading the definitions of the subscriber's tables, and mapping relations to them.

use std::sync::Arc;

use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::Session;

use super::{OWN_SCHEMA, Resolved, Tables};
use crate::cli::table_name::shell_word;
use crate::config::ApplyModeSetting;
use crate::error::{Class, Failure, Result};
use crate::publisher::announced::Announced;
use crate::publisher::dump_command::dump_command;
use crate::subscriber::catalogue::TableFacts;
use crate::subscriber::citus;
use crate::subscriber::format;
use crate::subscriber::mapping::{Definition, TableMap, lacks_columns};
use crate::subscriber::state::{self, RelationMode};

/// Most tables that are read at once. It bounds the memory that their descriptions take before they are
/// used: some 2 kB, and 400 bytes for each column.
const READ_AT_ONCE: usize = 1000;

/// Facts from the subscriber that are needed to resolve the relation of a table.
#[derive(Debug)]
pub(super) struct ReadTable {
    facts: TableFacts,
    /// See [`crate::subscriber::conflict::TablePolicy::copied_at`].
    copied_at: Option<i64>,
}

impl Tables {
    /// The tables to read now: those of these relations, and of the others that were announced as many as
    /// there is room for.
    pub(crate) fn unread(
        &mut self,
        relations: &[Arc<RemoteRelation>],
        announced: &Announced,
    ) -> Vec<TableName> {
        let of_these = relations.iter().filter(|remote| !self.has_resolved(remote));
        let mut unread: Vec<_> = of_these
            .map(|remote| &remote.name)
            .filter(|key| self.is_to_read(key))
            .cloned()
            .collect();
        unread.truncate(READ_AT_ONCE);
        if unread.is_empty() {
            return unread;
        }
        self.read.begin(announced.take());
        while unread.len() < READ_AT_ONCE {
            let Some(next) = self.read.next_described() else { break };
            if !self.versions.contains(&next.version) && self.is_to_read(&next.table) {
                unread.push(next.table);
            }
        }
        unread.sort_unstable();
        unread.dedup();
        unread
    }

    /// Whether the changes of a table may be applied, and nothing of it is read.
    fn is_to_read(&self, key: &TableName) -> bool {
        key.schema != OWN_SCHEMA
            && self.sync_lsns.contains_key(key)
            && !self.blocked.contains(key)
            && !self.read.contains(key)
    }

    /// Reads tables, so that they can be resolved. A table that cannot be read is left out: resolving
    /// reads it alone, and reports why. So one table does not stop the others.
    pub(crate) fn read(&mut self, session: &mut Session, tables: Vec<TableName>) {
        match self.try_read(session, tables) {
            Ok(read) => self.read.add(read),
            Err(error) => tracing::debug!(%error, "cannot read several tables at once"),
        }
    }

    fn try_read(
        &mut self,
        session: &mut Session,
        tables: Vec<TableName>,
    ) -> Result<Vec<(TableName, ReadTable)>> {
        let found = self.reader.read(session, &tables)?;
        let copied_at = self.copied_at(session, &tables)?;
        let read = tables.into_iter().zip(found).filter_map(|(key, found)| {
            let facts = found.ok().flatten()?;
            let copied_at = copied_at.get(&key).copied();
            Some((key, ReadTable { facts, copied_at }))
        });
        Ok(read.collect())
    }

    /// Reads one table. Fails if its changes cannot be applied.
    fn read_alone(&mut self, session: &mut Session, table: &TableName) -> Result<ReadTable> {
        let facts = self.reader.read_one(session, table)?.ok_or_else(|| missing(table))?;
        let copied_at = self.copied_at(session, std::slice::from_ref(table))?.remove(table);
        Ok(ReadTable { facts, copied_at })
    }

    /// When those of the tables were copied that have a rule by time.
    fn copied_at(
        &self,
        session: &mut Session,
        tables: &[TableName],
    ) -> Result<FxHashMap<TableName, i64>> {
        let timed =
            |table: &&TableName| self.policy.of(table).is_some_and(|policy| policy.is_timed());
        let timed: Vec<_> = tables.iter().filter(timed).cloned().collect();
        match self.subscription {
            Some(id) if !timed.is_empty() => state::copied_at(session, id, &timed),
            _ => Ok(FxHashMap::default()),
        }
    }

    /// The leader has taken so many bytes more of the stream.
    pub(crate) fn taken(&mut self, bytes: usize) {
        self.read.taken(bytes);
    }

    /// Another version of the relation was mapped by another definition of this table.
    fn end_other_definitions(&self, map: &TableMap) {
        let others = self.maps().filter(|other| {
            other.table.oid == map.table.oid && other.table.fingerprint != map.table.fingerprint
        });
        if others.map(|other| other.definition.end()).count() > 0 {
            self.definitions.count();
        }
    }

    pub(super) fn load(
        &mut self,
        session: &mut Session,
        remote: &Arc<RemoteRelation>,
    ) -> Result<Resolved> {
        if remote.name.schema == OWN_SCHEMA {
            return Ok(Resolved::Ignored);
        }
        let sync_lsn = self
            .sync_lsns
            .get(&remote.name)
            .copied()
            .ok_or_else(|| Failure::internal("a table was resolved before it was copied"))?;
        let ReadTable { facts, copied_at } = match self.read.take(&remote.name) {
            Some(read) => read,
            None => self.read_alone(session, &remote.name)?,
        };
        let mut conflicts = self.policy.of(&remote.name);
        if let Some(policy) = &mut conflicts {
            policy.copied_at = copied_at;
        }
        let TableFacts { table, constraints } = facts;
        if self.without_citus && !table.placement.is_plain() {
            return Err(citus::came_later(&table.name.to_string()));
        }
        let lacking: Vec<_> =
            remote.columns.iter().filter(|column| table.column(&column.name).is_none()).collect();
        if !lacking.is_empty() {
            let types = self.types.names.of(session, &lacking)?;
            let names = lacking.iter().zip(&types);
            let names: Vec<_> = names.map(|(c, name)| (c.name.as_str(), name.as_deref())).collect();
            return Err(lacks_columns((&table.name.to_string(), &table.sql_name()), &names));
        }
        let mut map = TableMap::new(Arc::clone(remote), table, &self.types)?;
        let unlike = map.unlike(&self.types);
        let columns: Vec<_> = unlike.iter().map(|index| &remote.columns[*index]).collect();
        let names = self.types.names.of(session, &columns)?;
        map.unlike = unlike.into_iter().zip(names).collect();
        map.named_alike = map.named_alike(&self.types);
        map.told_lacking = self.told_lacking.clone();
        map.definition = Definition::counted_by(&self.definitions);
        map = map.with_constraints(&constraints, &self.types, self.locking);
        if self.apply_mode == ApplyModeSetting::Row {
            map = map.applied_as_sent();
        }
        let map = Arc::new(map.with_conflict_rules(conflicts));
        self.end_other_definitions(&map);
        if self.types.binary() {
            format::check_binary(session, &map, &mut self.types)?;
        }
        if map.table.hooks.rules {
            tracing::warn!(
                event = "replica_rules_enabled",
                table = map.table.name.to_string(),
                "rewrite rules that are enabled for replica run on the subscriber"
            );
        }
        tracing::debug!(
            table = map.table.name.to_string(),
            search = ?map.search,
            mode = map.mode.name(),
            reason = map.mode.reason(),
            rules = ?map.rules,
            locks = ?map.locks,
            "mapped"
        );
        self.modes.push(RelationMode {
            name: remote.name.clone(),
            mode: map.mode.name().to_owned(),
            reason: map.mode.reason().map(str::to_owned),
        });
        Ok(Resolved::Table { sync_lsn, map, is_its: false })
    }
}

/// A published table that the subscriber does not have.
fn missing(table: &TableName) -> Failure {
    let remedy = format!(
        "Create it on the subscriber: {}",
        dump_command(&[table], "PUBLISHER", "SUBSCRIBER")
    );
    let copy = shell_word(table);
    let hint = format!(
        "{remedy}; or take it out of the publication; then start pgapace again. If the table had rows before, they are \
         not sent again: pgapace resync {copy} copies them."
    );
    let message = format!("the subscriber has no table {table}");
    Failure { remedy: Some(remedy.into()), ..Failure::new(Class::Mismatch, message) }.hint(hint)
}
