//! A publisher that waits for the subscription: deferred changes are acknowledged, transactions are prepared at once,
//! and a table that lacks something is copied again after a crash.

use std::rc::Rc;

use engine::table_sync::{TableSyncEvent as Event, TableSyncState};
use engine::transaction::TransactionPart;
use engine::work::TwoPhase;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::deferred::applying::{apply, changes};
use crate::simulation::deferred::{Subscriber, World};
use crate::simulation::history::History;
use crate::simulation::rng::Rng;
use crate::simulation::subscriber::{PreparedHere, RowOp};
use crate::simulation::worker::Work;

/// A transaction that is prepared on the subscriber, and what it does to the table.
pub(super) type Prepared = (PreparedHere, Vec<RowOp>);

/// Whether the publisher waits. The copy of a table would wait for ever for a transaction that stays prepared.
pub(super) fn choose(history: &Rc<History>, rng: &mut Rng) -> bool {
    rng.chance(1, 2) && history.preparations.iter().all(|one| one.ended.is_some())
}

/// Leaves only tables that prepared transactions change, if there are any.
pub(super) fn prefer_prepared(history: &History, tables: &mut Vec<usize>) {
    let is_prepared = |xid| history.preparations.iter().any(|one| one.xid == xid);
    let prepared: Vec<_> = history.transactions.iter().filter(|one| is_prepared(one.xid)).collect();
    let changes = |table: &usize| {
        prepared.iter().any(|one| one.changes.iter().any(|change| change.touches(*table)))
    };
    if tables.iter().any(changes) {
        tables.retain(changes);
    }
}

impl Subscriber {
    /// Whether the next run copies the table again, if the publisher has an acknowledgement up to here.
    pub(super) fn is_copied_again(&self, acknowledged: Lsn) -> bool {
        let lacks = self.lacks_prepared || self.through < acknowledged;
        self.state == TableSyncState::CatchUp && lacks
    }
}

impl World<'_> {
    /// Has transactions prepared, and carries out what the engine says meanwhile.
    pub(super) fn prepare(&mut self) -> Result<(), String> {
        if self.run.prepares_at().is_none_or(|at| at > self.clock) {
            return Ok(());
        }
        self.run.prepare_due(self.clock)?;
        self.carry_out()
    }

    /// Records what the surroundings were told: that the table is to be copied, and that transactions are to be
    /// prepared without it.
    pub(super) fn record(&mut self) -> Result<(), String> {
        if std::mem::take(&mut self.run.outside.begun) {
            self.begin()?;
        }
        self.run.outside.forget_notes();
        let without = std::mem::take(&mut self.run.outside.without);
        self.seen.left_out += usize::from(without);
        self.now.lacks_prepared |= without && self.sabotage != Sabotage::UnnotedLeftOut;
        Ok(())
    }

    /// The table is to be copied beside the stream.
    pub(super) fn begin(&mut self) -> Result<(), String> {
        self.now.requested = false;
        self.now.lacks_prepared = false;
        self.happens(Event::CopyWanted)
    }

    /// Executes a part of a transaction that is prepared, or its end. Both are durable at once.
    pub(super) fn execute(&mut self, work: &Work, step: &TwoPhase<PreparedHere>) {
        let TransactionPart { end_lsn, .. } = work.part;
        match step {
            TwoPhase::Prepare(here) => {
                self.taken.extend(changes(work));
                if end_lsn.is_some() {
                    self.now.prepared.push((**here, std::mem::take(&mut self.taken)));
                }
            }
            TwoPhase::Commit(here) | TwoPhase::Rollback(here) => {
                let mut done = Vec::new();
                let is_it = |(one, _): &mut Prepared| one.xid == here.xid;
                for (_, changes) in self.now.prepared.extract_if(.., is_it) {
                    done = changes;
                }
                if matches!(step, TwoPhase::Commit(_)) {
                    apply(&mut self.now.rows, done);
                }
                self.now.progress = end_lsn.unwrap_or(self.now.progress);
            }
        }
        if end_lsn.is_some() {
            self.durable = self.now.clone();
        }
    }

    /// After a crash, a table that may lack what was acknowledged is to be copied again. A verb has that requested, or
    /// its first change.
    pub(super) fn copy_again(&mut self, slot: Lsn) -> Result<(), String> {
        if self.now.is_copied_again(slot) {
            self.happens(Event::CopyInstead)?;
        }
        self.now.requested |= self.now.state.is_to_copy();
        Ok(())
    }

    /// A new slot waits for the end of the transactions that are prepared.
    pub(super) fn earliest_snapshot(&self) -> Lsn {
        // A transaction is sent from where its COMMIT begins, after all of that was written.
        let written =
            self.history.wal.iter().find(|one| one.at <= self.sent && one.end > self.sent);
        let sent = written.map_or(self.sent, |commit| commit.end);
        if !self.synchronous || self.sabotage == Sabotage::EarlySnapshot {
            return sent;
        }
        let waits = self.history.preparations.iter().filter(|one| one.prepare_lsn < sent);
        let ends = waits.filter_map(|one| one.ended).map(|(_, end, _)| end);
        ends.fold(sent, Lsn::max)
    }
}
