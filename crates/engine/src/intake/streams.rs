//! Execution of streamed transactions while they are open: the parts that can be executed now.

use std::sync::Arc;
use std::time::Duration;

use pgoutput::{Lsn, Message, Xid};

use super::{Intake, IntakeResult, Surroundings, is_beyond};
use crate::history::HistoryMark;
use crate::net::TableFolding;
use crate::progress::Range;
use crate::relation::RemoteRelation;
use crate::streaming::{Said, Ticket};
use crate::transaction::TransactionPart;
use crate::work::{Table, Work};

/// The state of the subscriber that decides which changes of open streams may be executed.
#[derive(Debug, Clone, Copy)]
pub struct StreamReadiness {
    /// Everything that ends up to here is committed.
    pub committed: Lsn,
    /// Everything that was received before is committed.
    pub quiet: bool,
}

impl<E: Surroundings> Intake<E> {
    /// Takes note of a message that was assembled.
    pub(super) fn look_at_streams(
        &mut self,
        position: Lsn,
        message: &Message<'_>,
        now: Duration,
        env: &mut E,
    ) {
        let Self { streams, incoming, progress, .. } = self;
        streams.passed(position);
        streams.saw(message, |xid| incoming.spooled_length(xid), progress.last_dispatched(), now);
        if let Message::StreamCommit(commit) = message {
            self.stream_committed(commit.xid, commit.commit_lsn, env);
        }
    }

    /// Takes note of the changes of a block that has not ended.
    pub fn look_at_block(&mut self) {
        let Self { streams, incoming, progress, .. } = self;
        streams.received(|xid| incoming.spooled_length(xid), progress.last_dispatched());
    }

    /// A stream has committed. Its session ends it, if the transaction is applied like all others.
    fn stream_committed(&mut self, xid: Xid, commit_lsn: Lsn, env: &mut E) {
        let head = self.incoming.committed_head().map(|(head, _)| head);
        let usual = head.is_some_and(|head| head.xid == xid)
            && self.closing.is_none()
            && self.skip_request.of(commit_lsn).is_none()
            && !is_beyond(env.goal(), commit_lsn);
        if !usual {
            self.streams.forget(xid);
        } else if self.streams.begin_commit(xid) {
            self.pass_applied(commit_lsn, env);
            self.progress.passed(commit_lsn);
        }
    }

    /// The present state of the subscriber, as far as streams depend on it.
    pub fn stream_readiness(&self, env: &E) -> StreamReadiness {
        let applied = env.is_idle() && env.is_drained();
        let quiet = applied && self.progress.outstanding() == 0;
        StreamReadiness { committed: self.progress.committed(), quiet }
    }

    /// Assigns the changes that may be executed now, and ends the stream that has committed when it
    /// is next.
    ///
    /// # Errors
    /// When the spool cannot be read, or the publisher has another history.
    pub fn feed_streams(
        &mut self,
        ready: StreamReadiness,
        now: Duration,
        env: &mut E,
    ) -> IntakeResult<(), E> {
        loop {
            let Self { streams, incoming, settings, .. } = self;
            let subtransactions = |xid| incoming.subtransactions(xid);
            let Some(next) = streams.next(ready.committed, subtransactions, now) else { break };
            let limits = settings.stream_limits;
            let (part, through) =
                incoming.read_spooled(next.xid, next.step.range.clone(), limits)?;
            let Some(tables) = self.tables_of_stream(&part, env) else {
                self.streams.abandon(next.xid);
                continue;
            };
            let (predecessor, history, two_phase) = (Lsn::INVALID, None, None);
            let (held, after_applied) = (None, false);
            let work = Work { part, tables, predecessor, history, held, after_applied, two_phase };
            self.streams.assign(&next, through, Box::new(work), now);
        }
        self.end_stream(ready.quiet)
    }

    /// The tables of a part, if all of it may be applied before its commit is known.
    fn tables_of_stream(
        &mut self,
        part: &TransactionPart,
        env: &mut E,
    ) -> Option<Vec<Option<Arc<E::Table>>>> {
        // The lock of a TRUNCATE would block readers until the transaction ends.
        if part.truncates() {
            return None;
        }
        // It commits after everything that was received.
        let floor = self.progress.last_dispatched();
        let table = |(index, relation): (usize, &Arc<RemoteRelation>)| {
            if env.is_own(relation) {
                return Some(None);
            }
            // Deferred changes are applied in commit order. Nothing is applied to another table of the
            // same name.
            if self.deferred.has(relation)
                || !env.knows(relation, floor)
                || env.is_another(relation, floor)
            {
                return None;
            }
            // An error is reported if the transaction commits.
            let table = env.table(part, index, floor).ok().flatten()?;
            let alone =
                matches!(table.fold(), TableFolding::Never { .. }) || table.is_under_rules();
            (!alone).then_some(Some(table))
        };
        part.relations().iter().enumerate().map(table).collect()
    }

    /// Commits the stream that is next, when everything before it has ended.
    fn end_stream(&mut self, quiet: bool) -> IntakeResult<(), E> {
        let Some(xid) = self.streams.committing() else { return Ok(()) };
        if let (Some((head, end)), Some(length)) =
            (self.incoming.committed_head(), self.incoming.committed_length())
            && quiet
            && self.streams.is_through(xid, length)
        {
            self.expect_before_applied(end)?;
            if length > 0 {
                self.history = Some(HistoryMark::of(head.ends_at(end)));
            }
            let (part, tables, two_phase) = (TransactionPart::end_of(head, end), Vec::new(), None);
            let (predecessor, history) = (self.progress.last_dispatched(), self.history);
            let (held, after_applied) = (self.incoming.held(), false);
            let work = Work { part, tables, predecessor, history, held, after_applied, two_phase };
            self.streams.commit(xid, Box::new(work));
        }
        Ok(())
    }

    /// Takes the answer of a stream's session; `committed` is the range that it has committed. Returns
    /// the stream that has come to an end on its session.
    ///
    /// # Errors
    /// When the spool cannot be written.
    pub fn stream_said(
        &mut self,
        slot: usize,
        ticket: Ticket,
        said: Said,
        committed: Option<Range>,
    ) -> IntakeResult<Option<Xid>, E> {
        let Some(xid) = self.streams.said(slot, ticket, said) else { return Ok(None) };
        if let (Said::Committed, Some(range)) = (said, committed) {
            self.progress.dispatched(range.through);
            self.progress.committed_range(range);
            self.after_applied = false;
            self.incoming.drop_replay()?;
        }
        Ok(Some(xid))
    }
}
