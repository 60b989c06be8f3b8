//! Transactions that are prepared on the subscriber: when they are prepared, and how they end.

use std::sync::Arc;
use std::time::Duration;

use pgoutput::{Lsn, Xid};
use rustc_hash::FxHashMap;

use super::{
    Intake, IntakeError, IntakeResult, Outcome, PreparedTransaction, Surroundings, unreadable,
};
use crate::history::{HistoryError, HistoryMark};
use crate::other_table::others_among;
use crate::transaction::TransactionPart;
use crate::work::{TwoPhase, Work};

impl<E: Surroundings> Intake<E> {
    /// Takes the end of a transaction that is prepared on the subscriber.
    pub(super) fn take_step(
        &mut self,
        part: TransactionPart,
        step: TwoPhase<E::Prepared>,
        env: &mut E,
    ) -> IntakeResult<(), E> {
        let end = part.end_lsn.ok_or(IntakeError::Lost("the end of a prepared transaction"))?;
        let lsn = part.head.commit_lsn;
        self.pass_applied(lsn, env);
        self.passed(end)?;
        let predecessor = self.progress.last_dispatched();
        if end <= predecessor {
            let progress = predecessor;
            return Err(IntakeError::History(HistoryError::EndedBefore { end, progress }));
        }
        self.expect_before_applied(end)?;
        if !part.is_idle() {
            self.history = Some(HistoryMark::of(part.head.ends_at(end)));
        }
        let step = match (step, self.skip_request.of(lsn)) {
            (TwoPhase::Commit(here), Some(request)) => {
                env.skipped(request, lsn, here.xid()).map_err(IntakeError::Outside)?;
                TwoPhase::Rollback(here)
            }
            (step, _) => step,
        };
        self.end_left_out(&part, &step, end)?;
        self.progress.dispatched(end);
        self.dispatch_in_order(part, Vec::new(), predecessor, Some(step), env);
        Ok(())
    }

    /// A transaction ends that may have left changes of deferred tables out.
    fn end_left_out(
        &mut self,
        part: &TransactionPart,
        step: &TwoPhase<E::Prepared>,
        end: Lsn,
    ) -> IntakeResult<(), E> {
        let Self { deferred, incoming, .. } = self;
        let limits = incoming.part_limits();
        let spool = incoming.spool_mut();
        match step {
            TwoPhase::Commit(here) => deferred
                .defer_left_out(here.xid(), (part.head, end), limits, spool)
                .map_err(unreadable),
            TwoPhase::Rollback(here) | TwoPhase::Prepare(here) => {
                deferred.forget_left_out(here.xid(), spool).map_err(IntakeError::Outside)
            }
        }
    }

    /// A transaction commits. If it is held, its PREPARE may be acknowledged as soon as what it does to the other tables is
    /// durable; and the position that a table has reached can be between the two, so that it does not show that the table
    /// lacks the changes.
    pub(super) fn note_left_out(&mut self, xid: Xid, env: &mut E) -> IntakeResult<(), E> {
        let Self { deferred, incoming, .. } = self;
        if !deferred.are_acknowledged() || deferred.tables().is_empty() {
            return Ok(());
        }
        let without: Vec<_> = incoming
            .held_relations(xid)
            .iter()
            .filter(|relation| deferred.has(relation))
            .map(|relation| &relation.name)
            .collect();
        if !without.is_empty() {
            env.note_prepared(&[], &without).map_err(IntakeError::Outside)?;
        }
        Ok(())
    }

    /// Takes a part of a transaction that is to be prepared on the subscriber. It has no place in the
    /// order of commits, and no progress.
    pub(super) fn take_prepared_part(
        &mut self,
        part: TransactionPart,
        here: Arc<E::Prepared>,
        env: &mut E,
    ) -> IntakeResult<(), E> {
        // If it commits, it does so after everything that was received.
        let later = self.progress.positions().write;
        let request = self.skip_request.of(part.head.commit_lsn);
        let skipped = request.is_some();
        if let Some(request) = request
            && part.end_lsn.is_some()
        {
            let lsn = part.head.commit_lsn;
            env.skipped(request, lsn, here.xid()).map_err(IntakeError::Outside)?;
        }
        let mut tables = Vec::with_capacity(part.relations().len());
        for index in 0..part.relations().len() {
            let relation = &part.relations()[index];
            let left_out = self.deferred.leaves_out(here.xid(), relation)
                || env.is_gone(relation, here.prepare_lsn());
            let table = if skipped || left_out { Ok(None) } else { env.table(&part, index, later) };
            tables.push(table.map_err(IntakeError::Outside)?);
        }
        if !skipped {
            let spool = self.incoming.spool_mut();
            let kept = self.deferred.keep_left_out(here.xid(), &part, spool);
            kept.map_err(IntakeError::Outside)?;
        }
        let lacking = part.lacking().into_iter().filter_map(|index| tables[index].as_deref());
        let lacking: Vec<_> = lacking.collect();
        if !lacking.is_empty() {
            env.mark_lacking(&lacking, later).map_err(IntakeError::Outside)?;
        }
        self.partly_dispatched = part.end_lsn.is_none();
        let (predecessor, history, held) = (self.progress.last_dispatched(), None, None);
        let (after_applied, two_phase) = (false, Some(TwoPhase::Prepare(here)));
        let work = Work { part, tables, predecessor, history, held, after_applied, two_phase };
        env.dispatch(work, self.progress.outstanding());
        Ok(())
    }

    /// Whether held transactions may be prepared on the subscriber now. Not while the publisher sends
    /// again transactions that were applied before: their end may be among those.
    pub fn may_prepare(&self) -> bool {
        self.settings.prepares
            && self.closing.is_none()
            && !self.partly_dispatched
            && !self.incoming.has_parts()
            && !self.progress.is_catching_up()
            && self.applied_beyond.is_empty()
    }

    /// Has transactions prepared on the subscriber that have been held for too long.
    ///
    /// That is right wherever the stream stands by then: on the publisher they have held the locks of
    /// their rows since their PREPARE, so nothing that was sent since touches them. Without a place on the
    /// subscriber, they stay held.
    ///
    /// # Errors
    /// When the subscriber cannot be asked, or the spool cannot be read.
    pub fn prepare_due(&mut self, now: Duration, env: &mut E) -> IntakeResult<(), E> {
        if !self.may_prepare() {
            return Ok(());
        }
        let Self { incoming, deferred, progress, streams, .. } = self;
        let received = progress.positions().write;
        let (mut left_out, mut others) = (FxHashMap::default(), Vec::new());
        let mut due = incoming.take_due(now, |prepared, relations| {
            // Everything that was received is before its end, and so is what the progress covers.
            let after = received.max(prepared.end_lsn);
            // Changes of a table that is no longer published are left out, as they would be later. They are before the
            // PREPARE, whatever was received since.
            let head = prepared.head();
            if deferred.are_acknowledged() {
                for relation in relations {
                    if !deferred.has(relation) && !env.knows(relation, after) {
                        streams.abandon_all();
                        env.add_table(relation, head, deferred, progress)?;
                    }
                }
            } else if relations.iter().any(|relation| deferred.has(relation)) {
                // Deferred changes of a table come first: they committed before this transaction ends.
                return Ok(false);
            }
            let (later, mut ready): (Vec<_>, Vec<_>) =
                relations.iter().cloned().partition(|relation| deferred.has(relation));
            if deferred.are_acknowledged() {
                ready.retain(|relation| !env.is_gone(relation, head.commit_lsn));
                others.extend(others_among(&ready, head.commit_lsn, |relation| {
                    env.is_another(relation, after)
                }));
            }
            let may = others.is_empty() && env.may_be_prepared(&ready, after)?;
            if may {
                let tables: Vec<_> = later.iter().map(|relation| relation.name.clone()).collect();
                left_out.insert(prepared.xid, tables);
            }
            Ok(may)
        })?;
        if !others.is_empty() {
            // The next run looks at the publications, and leaves changes of such a table out.
            self.others = others;
            self.close(Outcome::Changed);
            return Ok(());
        }
        let room = self.settings.most_prepared.saturating_sub(incoming.prepared_here());
        let mut lacks = room < due.len();
        for one in due.drain(room.min(due.len())..) {
            incoming.put_back(one.xid, now);
        }
        if due.is_empty() {
            if lacks {
                env.lacks_places();
            }
            return Ok(());
        }
        let mut due: Vec<_> = due.iter().map(|one| env.prepare_as(one)).collect();
        let without: Vec<_> = due.iter().flat_map(|here| &left_out[&here.xid()]).collect();
        let there = env.note_prepared(&due, &without).map_err(IntakeError::Outside)?;
        // Others may have taken places, and one that is being prepared may be among those that are there.
        let taken = there + self.incoming.preparing();
        let room = self.settings.most_prepared.saturating_sub(taken);
        lacks |= room < due.len();
        if lacks {
            env.lacks_places();
        }
        let later = due.split_off(room.min(due.len()));
        self.hold_noted(later, now);
        let mut due = due.into_iter();
        while let Some(here) = due.next() {
            let xid = here.xid();
            self.deferred.leave_out(xid, left_out.remove(&xid).unwrap_or_default());
            self.incoming.begin_prepare(here);
            self.take_parts(env)?;
            if self.incoming.has_parts() {
                // It does not fit into memory. The others follow it, if they are still held then.
                self.hold_noted(due, now);
                break;
            }
        }
        Ok(())
    }

    /// Transactions that the subscriber has a note of are prepared later.
    fn hold_noted(&mut self, noted: impl IntoIterator<Item = E::Prepared>, now: Duration) {
        for here in noted {
            self.incoming.put_back(here.xid(), now);
            self.incoming.noted(here);
        }
    }
}
