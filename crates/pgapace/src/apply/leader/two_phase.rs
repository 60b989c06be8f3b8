//! Transactions that are prepared on the subscriber: when, and what becomes of their end.

use std::sync::Arc;
use std::time::Duration;

use engine::history::{HistoryError, Memory};
use engine::transaction::TransactionPart;

use crate::apply::leader::{Leader, Parts, expect_before_applied};
use crate::apply::offender::of_relation;
use crate::apply::work::{TwoPhase, Work};
use crate::error::{Failure, Result};
use crate::publisher::history::another_history;
use crate::subscriber::state::prepared::{self, PreparedHere};

/// When a transaction that is prepared and not resolved is worth a word.
const OVERDUE: Duration = Duration::from_secs(60);

impl Leader<'_> {
    /// Takes the end of a transaction that is prepared on the subscriber.
    pub(super) fn take_step(&mut self, part: TransactionPart, step: TwoPhase) -> Result<()> {
        let Some(end) = part.end_lsn else { return Err(Failure::internal("a step has no end")) };
        let lsn = part.head.commit_lsn;
        self.pass_applied(lsn);
        self.passed(end)?;
        let predecessor = self.parts.progress.last_dispatched();
        if end <= predecessor {
            return Err(another_history(&HistoryError::EndedBefore { end, progress: predecessor }));
        }
        expect_before_applied(&self.parts.applied_beyond, end)?;
        if !part.is_idle() {
            self.memory = Some(Memory::of(part.head.ends_at(end)));
        }
        let step = match step {
            TwoPhase::Commit(here) if self.parts.skip == Some(lsn) => {
                tracing::warn!(
                    event = "transaction_skipped",
                    lsn = %lsn,
                    xid = %here.xid,
                    "transaction was skipped"
                );
                self.counters.transactions_skipped += 1;
                TwoPhase::Rollback(here)
            }
            step => step,
        };
        self.parts.progress.dispatched(end);
        let after_applied = std::mem::take(&mut self.after_applied);
        let two_phase = Some(step);
        let memory = self.memory;
        let work = Work { part, tables: Vec::new(), predecessor, memory, after_applied, two_phase };
        self.waiting().push(work);
        Ok(())
    }

    /// Takes a part of a transaction that is to be prepared on the subscriber. It has no place in the
    /// order of commits, and no progress.
    pub(super) fn take_prepared_part(
        &mut self,
        part: TransactionPart,
        here: Arc<PreparedHere>,
    ) -> Result<()> {
        // It commits, if it does, behind everything that was received.
        let later = self.parts.progress.positions().write;
        let skipped = self.parts.skip == Some(part.head.commit_lsn);
        if skipped && part.end_lsn.is_some() {
            tracing::warn!(
                event = "transaction_skipped",
                lsn = %part.head.commit_lsn,
                xid = %here.xid,
                "transaction was skipped"
            );
            self.counters.transactions_skipped += 1;
        }
        let mut tables = Vec::with_capacity(part.relations().len());
        for (index, remote) in part.relations().iter().enumerate() {
            let table = if skipped { Ok(None) } else { self.resolve(remote, later) };
            tables.push(table.map_err(|failure| failure.of(|| of_relation(&part, index)))?);
        }
        self.partly_dispatched = part.end_lsn.is_none();
        let predecessor = self.parts.progress.last_dispatched();
        let two_phase = Some(TwoPhase::Prepare(here));
        let work =
            Work { part, tables, predecessor, memory: None, after_applied: false, two_phase };
        self.waiting().push(work);
        Ok(())
    }

    /// Has transactions prepared on the subscriber that have been held for too long.
    ///
    /// That is right wherever the stream stands by then: on the publisher they have held the locks of
    /// their rows since their PREPARE, so nothing that was sent since touches them. Not while what
    /// was applied before is sent again: their end may be among that.
    pub(super) fn prepare_due(&mut self) -> Result<()> {
        if self.parts.preparing.hold.is_none()
            || self.closing.is_some()
            || self.partly_dispatched
            || self.parts.incoming.has_parts()
            || self.parts.progress.is_catching_up()
            || !self.parts.applied_beyond.is_empty()
        {
            return Ok(());
        }
        let Parts { incoming, control, tables, joining, progress, preparing, .. } = &mut self.parts;
        let received = progress.positions().write;
        let mut due = incoming.due(|prepared, relations| {
            // Deferred changes of a table come first: they committed before this transaction ends.
            if relations.iter().any(|relation| joining.has(relation)) {
                return Ok(false);
            }
            // All of what was received is before its end, and so is what the progress covers.
            tables.may_be_prepared(control, relations, received.max(prepared.end_lsn))
        })?;
        let room = preparing.limit.saturating_sub(incoming.prepared_here());
        for one in due.drain(room.min(due.len())..) {
            incoming.put_back(one.xid);
        }
        let due: Vec<_> = due
            .iter()
            .map(|one| PreparedHere::new(preparing.subscription, &preparing.prefix, one))
            .collect();
        if due.is_empty() {
            return Ok(());
        }
        prepared::note(control, preparing.epoch, &due.iter().collect::<Vec<_>>())?;
        let mut due = due.into_iter();
        while let Some(here) = due.next() {
            tracing::debug!(xid = %here.xid, gid = here.gid, name = here.name, "is prepared");
            self.parts.incoming.begin_prepare(here);
            self.take_parts()?;
            if self.parts.incoming.has_parts() {
                // It does not fit into memory. The others follow it, if they are still held then.
                for here in due {
                    self.parts.incoming.put_back(here.xid);
                    self.parts.incoming.noted(here);
                }
                break;
            }
        }
        self.dispatch()?;
        Ok(())
    }

    /// Names transactions that the publisher has left prepared.
    pub(super) fn name_overdue(&mut self) {
        for gid in self.parts.incoming.overdue(OVERDUE) {
            tracing::warn!(
                event = "prepared_transaction_unresolved",
                gid,
                "transaction is prepared on the publisher and not resolved"
            );
        }
    }
}
