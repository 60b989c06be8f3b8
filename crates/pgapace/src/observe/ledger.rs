//! Counts of the session of one apply worker, by table, conflict and SQLSTATE.
//!
//! The worker adds to it once per group, and the leader takes it about once per second. Both hold the
//! mutex for some additions only.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use engine::group::GroupSeq;
use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use engine::transaction::ChangeCounts;
use pgoutput::{Lsn, Xid};

use crate::observe::board::wall;
use crate::observe::figures::SlowGroup;
use crate::observe::stopwatch::Stopwatch;
use crate::subscriber::conflict::ConflictType;

/// The stopwatch and the counts of a worker's session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    pub(crate) waits: Stopwatch,
    pub(crate) ledger: Ledger,
}

/// Counts since they were taken last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Committed changes of the publisher.
    pub(crate) tables: HashMap<TableName, ChangeCounts>,
    pub(crate) conflicts: HashMap<(TableName, &'static str), u64>,
    /// Groups that were rolled back and executed again, by the SQLSTATE of the error.
    pub(crate) retries: HashMap<String, u64>,
}

impl Counts {
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.conflicts.is_empty() && self.retries.is_empty()
    }

    /// Takes the counts of so many tables, and all others that are not of changes.
    pub(crate) fn take_some(&mut self, tables: usize) -> Self {
        let names: Vec<_> = self.tables.keys().take(tables).cloned().collect();
        let taken = names.into_iter().filter_map(|name| self.tables.remove_entry(&name));
        Self {
            tables: taken.collect(),
            conflicts: std::mem::take(&mut self.conflicts),
            retries: std::mem::take(&mut self.retries),
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        for (table, counts) in other.tables {
            self.tables.entry(table).or_default().add(&counts);
        }
        for (conflict, count) in other.conflicts {
            *self.conflicts.entry(conflict).or_default() += count;
        }
        for (sqlstate, count) in other.retries {
            *self.retries.entry(sqlstate).or_default() += count;
        }
    }
}

/// A group that a worker has.
#[derive(Debug, Clone)]
pub(crate) struct CurrentGroup {
    pub(crate) seq: GroupSeq,
    /// When it was encoded first.
    pub(crate) since: Instant,
    /// The commit LSN of the group's last transaction.
    pub(crate) commit_lsn: Lsn,
    pub(crate) xid: Xid,
    pub(crate) transactions: usize,
    pub(crate) changes: usize,
    /// A table of its last transaction.
    pub(crate) table: Option<Arc<RemoteRelation>>,
}

/// The ledger of one worker; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Pages>>);

#[derive(Debug, Default)]
struct Pages {
    tables: Vec<(Arc<RemoteRelation>, ChangeCounts)>,
    rest: Counts,
    /// Groups in flight, the first one first.
    current: VecDeque<CurrentGroup>,
    /// Of the groups that ended, those that took longest.
    slowest: Vec<SlowGroup>,
}

/// How many of the slowest groups are kept.
const SLOWEST: usize = 10;

/// Keeps the slowest of all, the slowest first.
pub(crate) fn keep_slowest(all: &mut Vec<SlowGroup>) {
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all.truncate(SLOWEST);
}

impl Ledger {
    /// Changes of a table are committed.
    pub(crate) fn committed(
        &self,
        changes: impl Iterator<Item = (Arc<RemoteRelation>, ChangeCounts)>,
    ) {
        let mut pages = self.pages();
        for (relation, counts) in changes {
            let known = pages.tables.iter_mut().rev().take(LOOK_BACK);
            match known.into_iter().find(|(known, _)| Arc::ptr_eq(known, &relation)) {
                Some((_, known)) => known.add(&counts),
                None => pages.tables.push((relation, counts)),
            }
        }
    }

    /// Conflicts on a table are counted.
    pub(crate) fn conflicts(&self, relation: &RemoteRelation, kind: ConflictType, count: u64) {
        let key = (relation.name.clone(), kind.name());
        *self.pages().rest.conflicts.entry(key).or_default() += count;
    }

    /// A group is executed again because of an error.
    pub(crate) fn retried(&self, sqlstate: &str) {
        *self.pages().rest.retries.entry(sqlstate.to_owned()).or_default() += 1;
    }

    /// The worker begins with this group, perhaps again.
    pub(crate) fn begins(&self, group: CurrentGroup) {
        let mut pages = self.pages();
        if pages.current.iter().all(|known| known.seq != group.seq) {
            pages.current.push_back(group);
        }
    }

    /// The group, and all before it, have ended.
    pub(crate) fn ended(&self, seq: GroupSeq) {
        let mut pages = self.pages();
        while let Some(group) = pages.current.front()
            && group.seq <= seq
        {
            let seconds = group.since.elapsed().as_secs_f64();
            let least = pages.slowest.last().map_or(0.0, |slow| slow.seconds);
            if let Some(group) = pages.current.pop_front()
                && (seconds > least || pages.slowest.len() < SLOWEST)
            {
                pages.slowest.push(SlowGroup {
                    seconds,
                    ended_at: wall(),
                    commit_lsn: group.commit_lsn.to_string(),
                    xid: group.xid.0,
                    transactions: group.transactions,
                    changes: group.changes,
                    table: group.table.map(|table| table.name.to_string()),
                });
                keep_slowest(&mut pages.slowest);
            }
        }
    }

    /// The worker has nothing to do.
    pub(crate) fn rests(&self) {
        self.pages().current.clear();
    }

    /// The first group that the worker has.
    pub(crate) fn current(&self) -> Option<CurrentGroup> {
        self.pages().current.front().cloned()
    }

    /// The slowest groups since the last call.
    pub(crate) fn take_slowest(&self) -> Vec<SlowGroup> {
        std::mem::take(&mut self.pages().slowest)
    }

    /// Takes the counts since the last call.
    pub(crate) fn take(&self) -> Counts {
        let mut pages = self.pages();
        let (tables, mut counts) =
            (std::mem::take(&mut pages.tables), std::mem::take(&mut pages.rest));
        // The worker may go on meanwhile.
        drop(pages);
        for (relation, changes) in tables {
            counts.tables.entry(relation.name.clone()).or_default().add(&changes);
        }
        counts
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of the last tables are compared before another entry is made.
const LOOK_BACK: usize = 32;

#[cfg(test)]
mod tests {
    use super::{ChangeCounts, Counts, TableName};

    #[test]
    fn all_counts_are_taken_in_steps() {
        let changes = ChangeCounts { inserts: 3, ..ChangeCounts::default() };
        let mut counts = Counts::default();
        for table in 0..150 {
            let name = TableName { schema: "public".to_owned(), name: format!("t{table}") };
            counts.tables.insert(name, changes);
        }
        counts.retries.insert("40P01".to_owned(), 2);
        let (all, mut taken) = (counts.clone(), Counts::default());
        for expected in [64, 64, 22] {
            let some = counts.take_some(64);
            assert_eq!(some.tables.len(), expected);
            taken.add(some);
        }
        assert!(counts.is_empty());
        assert_eq!(taken, all);
    }
}
