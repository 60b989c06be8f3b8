//! From the publisher's relations to the subscriber's tables: mapped once per version.
//!
//! The subscriber's catalogue is read for a table when the first change of a version comes, together
//! with the tables of the transaction and of those whose first changes follow (`announced.rs`). It
//! is not read earlier, for all tables: a definition that was read before the publisher described the
//! table may be older than that description. And a subscription with very many tables starts as quickly
//! as one with few.

mod modes;
mod reading;

use std::sync::Arc;

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
use crate::config::{ApplyModeSetting, OnMissedChanges};
use crate::error::Result;
use crate::publisher::announced::Version;
use crate::publisher::publication::PublishedTable;
use crate::publisher::watch::Commits;
use crate::subscriber::catalogue::CatalogueReader;
use crate::subscriber::conflict::Policy;
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::locks::Locking;
use crate::subscriber::mapping::{DefinitionChanges, Search, TableMap, ToldTables};
use crate::subscriber::state::{RelationMode, RelationState, SubscriptionId};
use reading::ReadTable;

/// Schema of our state: never mapped, copied or applied, whatever the publication says.
pub(crate) const OWN_SCHEMA: &str = "pgapace";

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

    /// Those of these oids that tables of the subscription have on the publisher.
    pub(crate) fn members_among(&self, oids: &FxHashSet<u32>) -> Vec<u32> {
        self.oids.values().map(|oid| oid.0).filter(|oid| oids.contains(oid)).collect()
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
}
