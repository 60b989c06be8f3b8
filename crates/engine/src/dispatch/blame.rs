//! Changes of the groups in flight, by table: which tables of a group that gives way are to blame, and
//! whether rows are known by another topmost relation than before.

use std::collections::VecDeque;
use std::time::Duration;

use pgoutput::RelId;
use rustc_hash::FxHashMap;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::serialized::SerializedTables;
use crate::writeset::Writeset;

/// Tables that are serialized from now on, or not any more, by the oid of their topmost relation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SerializationChange {
    /// The tables.
    pub roots: Vec<u32>,
    /// Whether they are serialized now, and why.
    pub serialization: Serialization,
}

/// Why transactions of a table are applied one after the other, or not any more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Serialization {
    /// Transactions of the table are applied side by side again.
    #[default]
    Ended,
    /// Transactions of the table have often held locks that an earlier group needed.
    ForLocks,
    /// Unique values move between rows.
    ForUniqueValues,
}

/// A table of the subscriber that a change touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableId {
    /// The oid of the published table on the publisher.
    pub published: RelId,
    /// The table's oid.
    pub oid: u32,
    /// The oid of its topmost relation, which may be its own.
    pub root: u32,
    /// How many relations a statement for the table locks: its indexes and partitions, too.
    pub relations: usize,
}

/// A group in flight.
#[derive(Debug)]
struct InFlight {
    seq: GroupSeq,
    /// The topmost relations that it changes.
    roots: Vec<u32>,
    /// The group counts once as a victim, however often the monitor finds it.
    gave_way: bool,
}

/// The tables of the groups in flight of one subscription.
#[derive(Debug)]
pub(super) struct Blame {
    policy: SerializedTables,
    /// In the order of their numbers.
    groups: VecDeque<InFlight>,
    /// By published table, the table of the subscriber when it was changed last.
    known: FxHashMap<RelId, TableId>,
    /// Decided, and not yet known to the writeset.
    decided: Vec<(u32, bool)>,
}

impl Blame {
    pub(super) fn new(pacing: &Pacing) -> Self {
        Self {
            policy: SerializedTables::new(pacing),
            groups: VecDeque::new(),
            known: FxHashMap::default(),
            decided: Vec::new(),
        }
    }

    /// A group is about to be opened: tables are locked in another way from now on.
    pub(super) fn settle(&mut self, writeset: &mut Writeset) {
        for (root, serialized) in self.decided.drain(..) {
            writeset.serialize(root, serialized);
        }
    }

    /// Notes the tables of a group, or of a part of one. Returns whether the changes of a published table
    /// lead to another table of the subscriber than before (another one has its name), or to one with another
    /// topmost relation (ATTACH or DETACH PARTITION), so that its rows are locked by other names than those
    /// that groups in flight have.
    pub(super) fn note(&mut self, group: GroupSeq, tables: impl Iterator<Item = TableId>) -> bool {
        if self.groups.back().is_none_or(|last| last.seq != group) {
            self.groups.push_back(InFlight { seq: group, roots: Vec::new(), gave_way: false });
        }
        let Some(InFlight { roots, .. }) = self.groups.back_mut() else { return false };
        let (mut moved, mut last) = (false, None);
        for table in tables {
            if last.replace(table) == Some(table) {
                continue;
            }
            if !roots.contains(&table.root) {
                roots.push(table.root);
            }
            let before = self.known.insert(table.published, table);
            moved |= before.is_some_and(|before| before != table);
        }
        moved
    }

    /// A group has ended.
    pub(super) fn ended(&mut self, group: GroupSeq) {
        if let Some(at) = self.place(group) {
            self.groups.remove(at);
        }
    }

    fn place(&self, group: GroupSeq) -> Option<usize> {
        self.groups.binary_search_by_key(&group, |group| group.seq).ok()
    }

    /// A group gives way to the oldest. The tables that both change are to blame; returns those of them
    /// that are serialized for it.
    pub(super) fn gave_way(
        &mut self,
        oldest: GroupSeq,
        victim: GroupSeq,
        now: Duration,
    ) -> Vec<u32> {
        let (Some(oldest), Some(victim)) = (self.place(oldest), self.place(victim)) else {
            return Vec::new();
        };
        if std::mem::replace(&mut self.groups[victim].gave_way, true) {
            return Vec::new();
        }
        let (needs, holds) = (&self.groups[oldest].roots, &self.groups[victim].roots);
        let both = holds.iter().copied().filter(|root| needs.contains(root));
        let roots: Vec<_> = both.filter(|root| self.policy.victim(*root, now)).collect();
        self.decided.extend(roots.iter().map(|root| (*root, true)));
        roots
    }

    /// Tables whose term is over.
    pub(super) fn release(&mut self, now: Duration) -> SerializationChange {
        let roots = self.policy.release(now);
        self.decided.extend(roots.iter().map(|root| (*root, false)));
        SerializationChange { roots, serialization: Serialization::Ended }
    }

    /// A group met a unique value that another row has, in a table below this topmost relation.
    pub(super) fn unique_value_moved(&mut self, root: u32, now: Duration) -> SerializationChange {
        let roots = if self.policy.conflict(root, now) { vec![root] } else { Vec::new() };
        self.decided.extend(roots.iter().map(|root| (*root, true)));
        SerializationChange { roots, serialization: Serialization::ForUniqueValues }
    }

    /// Groups that are remembered.
    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }
}
