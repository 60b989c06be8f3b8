//! Counts of the transactions of a worker's session, added when they commit. Missing rows are kept until
//! their transaction has committed.

use std::sync::Arc;

use engine::net::ChangeAt;
use engine::progress::Range;
use engine::relation::RemoteRelation;
use engine::transaction::ChangeCounts;
use pgoutput::Xid;

use crate::apply::conflict_log::ConflictLog;
use crate::apply::conflicts::Judged;
use crate::apply::context::Context;
use crate::apply::expected::Committing;
use crate::error::Result;
use crate::observe::ledger::Ledger;
use crate::subscriber::conflict::{Action, ConflictType};
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;

/// Missing rows of one transaction that are kept to be named in the log; the rest are counted.
const KEPT_MISSING: usize = 100;

/// The counts from the replies so far.
#[derive(Debug)]
pub(super) struct Tally {
    log: ConflictLog,
    ledger: Ledger,
    /// Counters of the transaction that is being answered, and of those committed and not reported.
    current: Counters,
    committed: Counters,
    ranges: Vec<Range>,
    /// Transactions of the publisher that are prepared on the subscriber.
    prepared: Vec<Xid>,
    /// Whether one of both has run user code.
    user_code: bool,
    /// The first missing rows of the transaction being answered, and how many more there are.
    missing: Vec<(ChangeAt, Conflict)>,
    more_missing: u64,
    /// Conflicts that were logged, and are still to be written to `pgapace.conflict`.
    named: Vec<Conflict>,
    /// Conflicts that rules have decided in the transaction that is executed change by change.
    conflicts: Vec<Conflict>,
    /// Where the part of a large transaction began that is being answered.
    part: PartStart,
    /// Conflicts of the transaction that is being answered, by table, in the order in which they occurred.
    by_table: Vec<TableConflicts>,
    /// Changes of groups that are answered. Those of a part count when its transaction is committed.
    changes: Vec<(Arc<RemoteRelation>, ChangeCounts)>,
}

/// Adjacent conflicts of one type on one table.
#[derive(Debug, Clone)]
pub(crate) struct TableConflicts {
    pub(crate) table: Arc<RemoteRelation>,
    pub(crate) kind: ConflictType,
    pub(crate) count: u64,
}

impl TableConflicts {
    /// Counts a conflict.
    pub(crate) fn count(all: &mut Vec<Self>, table: &Arc<RemoteRelation>, kind: ConflictType) {
        match all.last_mut() {
            Some(last) if last.kind == kind && Arc::ptr_eq(&last.table, table) => last.count += 1,
            _ => all.push(Self { table: Arc::clone(table), kind, count: 1 }),
        }
    }
}

/// The counts at the end of the part before the present one, in a transaction of several parts.
#[derive(Debug, Clone, Copy, Default)]
struct PartStart {
    counters: Counters,
    missing: usize,
    more_missing: u64,
    conflicts: usize,
    /// Entries of `by_table`, and the count of the last one.
    by_table: (usize, u64),
}

impl Tally {
    pub(super) fn new(log: ConflictLog, ledger: Ledger) -> Self {
        Self {
            log,
            ledger,
            current: Counters::default(),
            committed: Counters::default(),
            ranges: Vec::new(),
            prepared: Vec::new(),
            user_code: false,
            missing: Vec::new(),
            more_missing: 0,
            named: Vec::new(),
            conflicts: Vec::new(),
            part: PartStart::default(),
            by_table: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// A transaction, or a part of it, was executed change by change.
    pub(super) fn judged(&mut self, judged: Judged) {
        let room = KEPT_MISSING.saturating_sub(self.conflicts.len());
        self.more_missing += judged.more + judged.conflicts.len().saturating_sub(room) as u64;
        self.current.add(&judged.counters);
        self.by_table.extend(judged.by_table);
        self.conflicts.extend(judged.conflicts.into_iter().take(room));
        match &judged.committed {
            Some(committed) => self.transaction_committed(committed),
            None => self.part_answered(),
        }
    }

    /// The statements of a part in the middle of a transaction had the expected effect. Its counts stay,
    /// whatever becomes of the next part.
    pub(super) fn part_answered(&mut self) {
        self.sort_missing();
        self.part = PartStart {
            counters: self.current,
            missing: self.missing.len(),
            more_missing: self.more_missing,
            conflicts: self.conflicts.len(),
            by_table: (self.by_table.len(), self.by_table.last().map_or(0, |last| last.count)),
        };
    }

    /// A row was missing. It is named in the log when its transaction has committed.
    pub(super) fn row_missing(&mut self, at: ChangeAt, context: &Context<'_>) -> Result<()> {
        let kind = context.missing(at);
        self.current.count_conflict(kind);
        if let Some(map) = context.map(at) {
            TableConflicts::count(&mut self.by_table, &map.remote, kind);
        }
        if self.missing.len() < KEPT_MISSING {
            let conflict = context.conflict(at, kind, (Action::Skip, false), None)?;
            self.missing.push((at, conflict));
        } else {
            self.more_missing += 1;
        }
        Ok(())
    }

    /// Sorts the missing rows of a part by their changes: a set of deletes is executed before the updates
    /// that precede them on the publisher.
    fn sort_missing(&mut self) {
        self.missing[self.part.missing..].sort_by_key(|(at, _)| (at.part, at.change));
    }

    /// The Sync of a transaction is answered: it is committed.
    pub(super) fn transaction_committed(&mut self, committing: &Committing) {
        self.sort_missing();
        for (_, missing) in self.missing.drain(..) {
            if self.log.log(&missing) {
                self.named.push(missing);
            }
        }
        for conflict in self.conflicts.drain(..) {
            self.log.log(&conflict);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
        self.committed.add(&std::mem::take(&mut self.current));
        for conflicts in self.by_table.drain(..) {
            self.ledger.conflicts(&conflicts.table, conflicts.kind, conflicts.count);
        }
        self.part = PartStart::default();
        self.committed.add_changes(&committing.changes);
        self.user_code |= committing.user_code;
        if let Some(xid) = committing.prepared {
            self.prepared.push(xid);
            return;
        }
        let Committing { after, end, .. } = *committing;
        match self.ranges.last_mut() {
            Some(last) if last.through == after => last.through = end,
            _ => self.ranges.push(Range { after, through: end }),
        }
    }

    /// The transaction is rolled back and executed again: forgets its counts.
    pub(super) fn roll_back(&mut self) {
        self.part = PartStart::default();
        self.changes.clear();
        self.roll_back_part();
    }

    /// Only the present part of the transaction is rolled back and executed again.
    pub(super) fn roll_back_part(&mut self) {
        let PartStart { counters, missing, more_missing, conflicts, by_table } = self.part;
        (self.current, self.more_missing) = (counters, more_missing);
        self.missing.truncate(missing);
        self.conflicts.truncate(conflicts);
        self.by_table.truncate(by_table.0);
        if let Some(last) = self.by_table.last_mut() {
            last.count = by_table.1;
        }
    }

    /// A group, or a part of a large transaction, is answered.
    pub(super) fn applied(
        &mut self,
        changes: impl Iterator<Item = (Arc<RemoteRelation>, ChangeCounts)>,
    ) {
        self.changes.extend(changes);
    }

    /// The changes that were applied are committed: adds them to the ledger.
    pub(super) fn count_tables(&mut self) {
        if !self.changes.is_empty() {
            self.ledger.committed(self.changes.drain(..));
        }
    }

    /// Counts something else than changes, with the next commit.
    pub(super) fn count(&mut self, count: impl FnOnce(&mut Counters)) {
        count(&mut self.committed);
    }

    /// The session is lost, and the transaction that is being answered may have committed. Then it is not
    /// applied again, so its missing rows are logged now.
    pub(super) fn abandon(&mut self) {
        if !self.missing.is_empty() {
            tracing::warn!(
                event = "conflicts_in_doubt",
                rows = self.missing.len() as u64 + self.more_missing,
                "session was lost during COMMIT: conflicts logged next are reported again if it did not commit"
            );
        }
        for (_, missing) in self.missing.drain(..) {
            self.log.log(&missing);
        }
        self.log.suppress(std::mem::take(&mut self.more_missing));
    }

    /// Whether a row of the transaction, or of the part, being answered was missing.
    pub(super) fn is_missing(&self) -> bool {
        self.missing.len() > self.part.missing || self.more_missing > self.part.more_missing
    }

    /// The ranges that were committed since the last call, and their counters.
    pub(super) fn take_committed(&mut self) -> (Vec<Range>, Counters) {
        let ranges = std::mem::take(&mut self.ranges);
        // Counters are reported only with a commit.
        let counters = if ranges.is_empty() {
            Counters::default()
        } else {
            std::mem::take(&mut self.committed)
        };
        (ranges, counters)
    }

    /// Missing rows that were logged since the last call.
    pub(super) fn take_named(&mut self) -> Vec<Conflict> {
        std::mem::take(&mut self.named)
    }

    /// Whether a transaction that was committed or prepared since the last call has run user code.
    pub(super) fn take_user_code(&mut self) -> bool {
        std::mem::take(&mut self.user_code)
    }

    /// Transactions that were prepared since the last call.
    pub(super) fn take_prepared(&mut self) -> Vec<Xid> {
        std::mem::take(&mut self.prepared)
    }
}
