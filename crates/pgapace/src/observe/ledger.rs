//! What the session of one apply worker did, by table, conflict and SQLSTATE.
//!
//! The worker adds to it once per group, and the leader takes it about once per second. Both hold the
//! mutex for some additions only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use engine::relation::RemoteRelation;
use engine::transaction::ChangeCounts;
use pgoutput::{Lsn, Xid};

use crate::observe::stopwatch::Stopwatch;
use crate::subscriber::conflict::ConflictType;

/// Schema and name of a table.
pub(crate) type TableKey = (String, String);

/// What is measured in the session of a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    pub(crate) waits: Stopwatch,
    pub(crate) ledger: Ledger,
}

/// Counts since they were taken last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Committed changes of the publisher.
    pub(crate) tables: HashMap<TableKey, ChangeCounts>,
    pub(crate) conflicts: HashMap<(TableKey, &'static str), u64>,
    /// Groups that were rolled back and executed again, by the SQLSTATE of the error.
    pub(crate) retries: HashMap<String, u64>,
}

impl Counts {
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.conflicts.is_empty() && self.retries.is_empty()
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

/// The group that a worker was handed last.
#[derive(Debug, Clone)]
pub(crate) struct CurrentGroup {
    pub(crate) since: Instant,
    /// Its last transaction.
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
    current: Option<CurrentGroup>,
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
        let key = (key(relation), kind.name());
        *self.pages().rest.conflicts.entry(key).or_default() += count;
    }

    /// A group is executed again because of an error.
    pub(crate) fn retried(&self, sqlstate: &str) {
        *self.pages().rest.retries.entry(sqlstate.to_owned()).or_default() += 1;
    }

    /// The worker begins with this group, or has nothing to do.
    pub(crate) fn works_on(&self, group: Option<CurrentGroup>) {
        self.pages().current = group;
    }

    /// What the worker has now.
    pub(crate) fn current(&self) -> Option<CurrentGroup> {
        self.pages().current.clone()
    }

    /// What was counted since the last call.
    pub(crate) fn take(&self) -> Counts {
        let mut pages = self.pages();
        let (tables, mut counts) =
            (std::mem::take(&mut pages.tables), std::mem::take(&mut pages.rest));
        // The worker may go on meanwhile.
        drop(pages);
        for (relation, changes) in tables {
            counts.tables.entry(key(&relation)).or_default().add(&changes);
        }
        counts
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of the last tables are compared before another entry is made.
const LOOK_BACK: usize = 32;

fn key(relation: &RemoteRelation) -> TableKey {
    (relation.schema.clone(), relation.name.clone())
}
