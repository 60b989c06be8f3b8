//! From the publisher's relations to the subscriber's tables: mapped once per version.
//!
//! The subscriber's catalogue is read for a table when the first change of a version comes, together
//! with the tables of the transaction and of those whose first changes follow (`announced.rs`). It
//! is not read earlier, for all tables: a definition that was read before the publisher described the
//! table may be older than that description. And a subscription with very many tables starts as quickly
//! as one with few.

use std::collections::BTreeSet;
use std::sync::Arc;

use engine::dispatch::{Serialization, SerializationChange};
use engine::net::TableFolding;
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::{Lsn, RelId};
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::apply::offender::of_table;
use crate::apply::read_tables::ReadTables;
use crate::cli::table_name::shell_word;
use crate::config::{ApplyModeSetting, OnMissedChanges};
use crate::error::{Class, Failure, Result};
use crate::publisher::announced::{Announced, Version};
use crate::publisher::dump_command::dump_command;
use crate::publisher::publication::PublishedTable;
use crate::publisher::watch::Commits;
use crate::subscriber::catalogue::{CatalogueReader, TableFacts};
use crate::subscriber::citus;
use crate::subscriber::conflict::Policy;
use crate::subscriber::format::{self, PublisherTypes};
use crate::subscriber::locks::Locking;
use crate::subscriber::mapping::{
    Definition, DefinitionChanges, Search, TableMap, ToldTables, lacks_columns,
};
use crate::subscriber::state::{self, RelationMode, RelationState, SubscriptionId};

/// Schema of our state: never mapped, copied or applied, whatever the publication says.
pub(crate) const OWN_SCHEMA: &str = "pgapace";

/// Most tables that are read at once. It bounds the memory that their descriptions take before they are
/// used: some 2 kB, and 400 bytes for each column.
const READ_AT_ONCE: usize = 1000;

/// Shown in `status` as the reason, while it lasts.
fn serialized_because(serialization: Serialization) -> Option<&'static str> {
    match serialization {
        Serialization::Ended => None,
        Serialization::ForLocks => Some(
            "its transactions are applied one after the other for a while: they often held locks that \
             earlier ones needed",
        ),
        Serialization::ForUniqueValues => Some(
            "its transactions are applied one after the other for a while: unique values move between \
             its rows",
        ),
    }
}

/// The first of these tables by name, and how many there are: one event tells of all partitions of a table.
fn shown(modes: &[RelationMode]) -> (String, usize) {
    let names: BTreeSet<_> = modes.iter().map(|mode| &mode.name).collect();
    let first = names.first().map(|name| name.to_string());
    (first.unwrap_or_default(), names.len())
}

/// A relation version, resolved.
#[derive(Debug, Clone)]
enum Resolved {
    /// A table of ours, or one that the user keeps out.
    Ignored,
    Table {
        sync_lsn: SyncLsn,
        map: Arc<TableMap>,
        /// Whether its oid was found to be that of its name: see [`Tables::is_another`].
        is_its: bool,
    },
}

/// Known tables with their sync LSNs, and relation versions with their maps.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    sync_lsns: FxHashMap<TableName, SyncLsn>,
    /// By the address of the version, which the value keeps alive.
    resolved: FxHashMap<usize, (Arc<RemoteRelation>, Resolved)>,
    /// Of the relation versions that are resolved.
    versions: FxHashSet<Version>,
    /// Tables that were not published any more at this point. Changes of them that commit before it are
    /// ignored.
    gone: FxHashMap<TableName, Lsn>,
    /// Tables of which nothing is applied.
    blocked: FxHashSet<TableName>,
    /// Those among them that were not published when the run began, nor at any look since.
    unpublished: FxHashSet<TableName>,
    /// The oids on the publisher that names have: of a copied table as of its copy, of any other as of its
    /// first change in this run.
    oids: FxHashMap<TableName, RelId>,
    /// Stale tables to which changes of any table of their name are applied: that is asked for, or they are copied again.
    of_any_oid: FxHashSet<TableName>,
    types: PublisherTypes,
    locking: Locking,
    apply_mode: ApplyModeSetting,
    /// See [`TableMap::told_lacking`].
    told_lacking: ToldTables,
    /// See [`TableMap::definition`].
    definitions: DefinitionChanges,
    policy: Policy,
    subscription: Option<SubscriptionId>,
    /// The sessions that apply were opened in a database without Citus.
    without_citus: bool,
    /// How tables that were resolved are applied, to be recorded.
    modes: Vec<RelationMode>,
    reader: CatalogueReader,
    read: ReadTables<ReadTable>,
}

/// Facts from the subscriber that are needed to resolve the relation of a table.
#[derive(Debug)]
struct ReadTable {
    facts: TableFacts,
    /// See [`crate::subscriber::conflict::TablePolicy::copied_at`].
    copied_at: Option<i64>,
}

impl Tables {
    pub(crate) fn new(states: &[RelationState], types: PublisherTypes, locking: Locking) -> Self {
        let sync_lsns = states.iter().filter_map(|s| Some((s.name.clone(), s.sync_lsn?))).collect();
        let blocked = states
            .iter()
            .filter(|s| s.state == TableSyncState::Blocked)
            .map(|s| s.name.clone())
            .collect();
        Self { sync_lsns, blocked, types, locking, ..Self::default() }
    }

    /// Takes from a look at the publications which tables they contain, and the oids of copied tables. Since its
    /// copy, such a table was published without a gap: all changes from its sync LSN on are of the table with this oid.
    pub(crate) fn with_oids(mut self, states: &[RelationState], look: &[PublishedTable]) -> Self {
        let copied = states.iter().filter(|state| state.is_copied_without_gap());
        let copied: FxHashSet<_> = copied.map(|s| &s.name).collect();
        let found = look.iter().filter(|table| copied.contains(&&table.name));
        self.oids.extend(found.map(|table| (table.name.clone(), RelId(table.oid))));
        let published: FxHashSet<_> = look.iter().map(|table| table.name.clone()).collect();
        self.unpublished.extend(self.blocked.difference(&published).cloned());
        self
    }

    /// Sets what becomes of stale tables.
    pub(crate) fn with_missed_changes(
        mut self,
        states: &[RelationState],
        decision: OnMissedChanges,
    ) -> Self {
        let any = states.iter().filter(|state| {
            let goes_on = decision == OnMissedChanges::Ignore || state.requested.is_some();
            state.stale_from.is_some() && goes_on
        });
        self.of_any_oid.extend(any.map(|state| state.name.clone()));
        self
    }

    /// Takes from a later look at the publications which tables are published again.
    pub(crate) fn find_published(&mut self, look: &[PublishedTable]) {
        if !self.unpublished.is_empty() {
            let published: FxHashSet<_> = look.iter().map(|table| table.name.clone()).collect();
            self.unpublished.retain(|table| !published.contains(table));
        }
    }

    /// Sets the form in which changes are applied.
    pub(crate) fn with_apply_mode(self, apply_mode: ApplyModeSetting) -> Self {
        Self { apply_mode, ..self }
    }

    /// Whether the sessions that apply have what Citus needs.
    pub(crate) fn with_citus(self, citus: bool) -> Self {
        Self { without_citus: !citus, ..self }
    }

    /// Sets the policy for conflicts.
    pub(crate) fn with_policy(self, policy: Policy, subscription: SubscriptionId) -> Self {
        Self { policy, subscription: Some(subscription), ..self }
    }

    /// Whether the treatment of the table's changes in a transaction with this commit LSN is known; if
    /// not, the table was added to the publication later.
    #[inline]
    pub(crate) fn knows(&self, remote: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool {
        self.has_resolved(remote)
            || remote.name.schema == OWN_SCHEMA
            || self.sync_lsns.contains_key(&remote.name)
            || self.is_blocked(remote)
            || self.is_gone(remote, commit_lsn)
    }

    /// Nothing more of a table is applied, until it is copied.
    pub(crate) fn block(&mut self, table: &TableName) {
        self.remove([table]);
        self.blocked.insert(table.clone());
    }

    /// Published tables of which nothing is applied, in order.
    pub(crate) fn blocked(&self) -> Vec<String> {
        let published = self.blocked.difference(&self.unpublished);
        let mut names: Vec<_> = published.map(TableName::to_string).collect();
        names.sort();
        names
    }

    fn is_blocked(&self, remote: &RemoteRelation) -> bool {
        !self.blocked.is_empty() && self.blocked.contains(&remote.name)
    }

    /// Whether this is another table of the publisher than the one that had the name before: the rows
    /// that are here are not of it. Before its sync LSN, nothing is applied to a table.
    #[inline]
    pub(crate) fn is_another(&mut self, remote: &Arc<RemoteRelation>, commit_lsn: Lsn) -> bool {
        let address = Arc::as_ptr(remote) as usize;
        let resolved = self.resolved.get_mut(&address).map(|(_, resolved)| resolved);
        let is_its = match resolved {
            Some(Resolved::Ignored | Resolved::Table { is_its: true, .. }) => return false,
            Some(Resolved::Table { is_its, .. }) => Some(is_its),
            None => None,
        };
        if !self.sync_lsns.get(&remote.name).is_some_and(|sync_lsn| sync_lsn.passes(commit_lsn)) {
            return false;
        }
        let same = self.of_any_oid.contains(&remote.name)
            || *self.oids.entry(remote.name.clone()).or_insert(remote.id) == remote.id;
        if let Some(is_its) = is_its {
            *is_its = same;
        }
        !same
    }

    /// Adds a table that was copied while the stream went on, under a snapshot with this oid.
    pub(crate) fn add_copied(&mut self, table: &PublishedTable, sync_lsn: SyncLsn) {
        self.add(table.name.clone(), sync_lsn);
        self.oids.insert(table.name.clone(), RelId(table.oid));
    }

    /// Adds a table without a copy at a change: the changes of another table of its name are not its own.
    pub(crate) fn add_streamed(&mut self, remote: &RemoteRelation) {
        self.add(remote.name.clone(), SyncLsn(Lsn::INVALID));
        self.oids.insert(remote.name.clone(), remote.id);
    }

    /// Adds a table while the stream goes on.
    pub(crate) fn add(&mut self, table: TableName, sync_lsn: SyncLsn) {
        self.sync_lsns.insert(table, sync_lsn);
    }

    /// Forgets tables that are about to be copied.
    pub(crate) fn remove<'k>(&mut self, keys: impl IntoIterator<Item = &'k TableName>) {
        let mut removed: FxHashSet<&TableName> = FxHashSet::default();
        for key in keys {
            self.sync_lsns.remove(key);
            self.oids.remove(key);
            self.of_any_oid.remove(key);
            self.blocked.remove(key);
            self.read.take(key);
            removed.insert(key);
        }
        self.keep(|remote, _| !removed.contains(&remote.name));
    }

    /// Forgets all other relation versions.
    fn keep(&mut self, kept: impl Fn(&RemoteRelation, &Resolved) -> bool) {
        let before = self.resolved.len();
        self.resolved.retain(|_, (remote, resolved)| kept(remote, resolved));
        if self.resolved.len() < before {
            let resolved = self.resolved.values();
            self.versions = resolved.map(|(remote, _)| Version::of(remote)).collect();
        }
    }

    /// Takes the types of a table that was published while the stream went on.
    pub(crate) fn add_types(&mut self, published: &PublishedTable) {
        self.types.add(published);
    }

    /// Modes that are not recorded yet.
    pub(crate) fn take_modes(&mut self) -> Vec<RelationMode> {
        std::mem::take(&mut self.modes)
    }

    /// Oids of the subscriber tables that are mapped, each once: several versions of a published table may have the same one.
    pub(crate) fn watched(&self) -> Vec<u32> {
        let mut oids: Vec<u32> = self.maps().map(|map| map.table.oid).collect();
        oids.sort_unstable();
        oids.dedup();
        oids
    }

    /// Records that transactions of tables are applied one at a time from now on, or not any more.
    pub(crate) fn record_serialization(&mut self, change: &SerializationChange) {
        let because = serialized_because(change.serialization);
        for root in &change.roots {
            let maps: Vec<_> = self.maps().filter(|map| map.table.root == *root).collect();
            if change.serialization == Serialization::Ended {
                maps.iter().for_each(|map| map.unique.end_moving());
            }
            let modes: Vec<_> = maps
                .iter()
                .map(|map| RelationMode {
                    name: map.remote.name.clone(),
                    mode: map.mode.name().to_owned(),
                    reason: because.or_else(|| map.mode.reason()).map(str::to_owned),
                })
                .collect();
            if modes.is_empty() {
                continue;
            }
            let (table, tables) = shown(&modes);
            if let Some(reason) = because {
                tracing::info!(
                    event = "table_serialized",
                    table,
                    tables,
                    reason,
                    "transactions of the table are applied one at a time for a while"
                );
            } else {
                tracing::debug!(table, tables, "its transactions are applied side by side again");
            }
            // Modes of the same table that are not recorded yet are out of date.
            let new: FxHashSet<_> = modes.iter().map(|new| &new.name).collect();
            self.modes.retain(|mode| !new.contains(&&mode.name));
            self.modes.extend(modes);
        }
    }

    /// Forgets the maps of tables that look otherwise now: the next change of each loads it again. Returns whether
    /// there are some.
    pub(crate) fn compare(&mut self, now: &FxHashMap<u32, Option<String>>) -> bool {
        let before = self.resolved.len();
        self.keep(|_, resolved| match resolved {
            Resolved::Ignored => true,
            Resolved::Table { map, .. } => {
                // One that was mapped since the look is not in it.
                let same = now
                    .get(&map.table.oid)
                    .is_none_or(|found| found.as_ref() == Some(&map.table.fingerprint));
                if !same {
                    tracing::info!(
                        event = "table_definition_changed",
                        table = map.table.name.to_string(),
                        "table definition has changed on the subscriber"
                    );
                    map.definition.end();
                }
                same
            }
        });
        let changed = self.resolved.len() < before;
        if changed {
            self.definitions.count();
        }
        changed
    }

    fn maps(&self) -> impl Iterator<Item = &Arc<TableMap>> {
        self.resolved.values().filter_map(|(_, resolved)| match resolved {
            Resolved::Table { map, .. } => Some(map),
            Resolved::Ignored => None,
        })
    }

    /// Notes that a table which is not part of the subscription is not published at this LSN.
    pub(crate) fn set_gone(&mut self, table: TableName, at: Lsn) {
        self.gone.insert(table, at);
    }

    /// Whether a table is not part of the subscription, and was not published at an LSN behind this position.
    pub(crate) fn is_gone(&self, remote: &RemoteRelation, position: Lsn) -> bool {
        let at = self.gone.get(&remote.name);
        at.is_some_and(|at| position < *at) && !self.sync_lsns.contains_key(&remote.name)
    }

    /// Whether [`Self::resolve`] needs no look at the subscriber.
    pub(crate) fn has_resolved(&self, remote: &Arc<RemoteRelation>) -> bool {
        self.resolved.contains_key(&(Arc::as_ptr(remote) as usize))
    }

    /// Whether [`Self::resolve`] needs no query.
    #[inline]
    pub(crate) fn is_read(&self, remote: &Arc<RemoteRelation>) -> bool {
        self.has_resolved(remote) || self.read.contains(&remote.name)
    }

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

    /// The map for a change of a transaction with this commit LSN, `None` if it is not applied.
    pub(crate) fn resolve(
        &mut self,
        session: &mut Session,
        remote: &Arc<RemoteRelation>,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>> {
        let address = Arc::as_ptr(remote) as usize;
        if self.is_blocked(remote) {
            return Ok(None);
        }
        if !self.resolved.contains_key(&address) {
            if self.is_gone(remote, commit_lsn) {
                return Ok(None);
            }
            let resolved = self.load(session, remote)?;
            self.versions.insert(Version::of(remote));
            self.resolved.insert(address, (Arc::clone(remote), resolved));
        }
        Ok(match &self.resolved[&address].1 {
            Resolved::Table { sync_lsn, map, .. } if sync_lsn.passes(commit_lsn) => {
                Some(Arc::clone(map))
            }
            Resolved::Table { .. } | Resolved::Ignored => None,
        })
    }

    /// Whether a transaction that changes these relations, and commits after `lsn`, may be prepared
    /// on the subscriber: all its tables are copied, and no rule may decide about its conflicts, which
    /// would have to be undone one by one. Changes of blocked tables are left out, then as later.
    ///
    /// If the publisher does not `wait` for the PREPARE, the transaction is held too where it may lock rows
    /// here that it does not lock there: those that user code changes, and another one of several equal rows. A
    /// transaction that the publisher commits before it would wait for them, and its end for that one.
    pub(crate) fn may_be_prepared(
        &mut self,
        session: &mut Session,
        relations: &[Arc<RemoteRelation>],
        lsn: Lsn,
        commits: Commits,
    ) -> Result<bool> {
        for remote in relations {
            if remote.name.schema == OWN_SCHEMA || self.is_blocked(remote) {
                continue;
            }
            if !self.sync_lsns.contains_key(&remote.name) {
                return Ok(false);
            }
            if self.is_another(remote, lsn) {
                // `take_part` finds the same when the transaction commits, and ends the run before the table's
                // changes are applied.
                return Ok(false);
            }
            let map = match self.resolve(session, remote, lsn) {
                // An error is reported if it commits.
                Err(failure) if !commits.are_synchronous() && !failure.is_transient() => {
                    return Ok(false);
                }
                resolved => resolved.map_err(|failure| failure.of(|| of_table(remote, lsn)))?,
            };
            let Some(map) = map.filter(|map| map.conflicts.is_none()) else { return Ok(false) };
            let locks_others = matches!(map.rules.fold, TableFolding::Never { user_code: true })
                || matches!(map.search, Search::WholeRow(_));
            if locks_others && !commits.are_synchronous() {
                return Ok(false);
            }
        }
        Ok(true)
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

    fn load(&mut self, session: &mut Session, remote: &Arc<RemoteRelation>) -> Result<Resolved> {
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
pub(crate) fn missing(table: &TableName) -> Failure {
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

#[cfg(test)]
mod tests {
    use super::{RelationMode, TableName, shown};

    #[test]
    fn an_event_names_the_first_of_many_partitions() {
        let mode = |number: usize| RelationMode {
            name: TableName {
                schema: "public".to_owned(),
                name: format!("part_{:02}", number % 20),
            },
            mode: "set".to_owned(),
            reason: None,
        };
        // Each has two versions.
        let modes: Vec<_> = (0..40).rev().map(mode).collect();
        assert_eq!(shown(&modes), ("public.part_00".to_owned(), 20));
    }
}
