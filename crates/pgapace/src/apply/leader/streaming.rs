//! The leader's part in streamed transactions that are executed while they are open, and in the detection
//! of lock waits of the oldest transaction.

use std::time::{Duration, Instant};

use engine::dispatch::SerializationChange;
use engine::streaming::Said;

use crate::apply::blockers::Detection;
use crate::apply::leader::Leader;
use crate::apply::streams::{Event, StreamReport};
use crate::error::Result;

/// How long memory may be full while streams are executed: their changes in memory may keep the rest of
/// them from being received.
const FULL: Duration = Duration::from_secs(1);

impl Leader<'_> {
    pub(super) fn stream_reported(&mut self, (session, ticket, report): Event) -> Result<()> {
        let (said, committed) = match &report {
            StreamReport::Done => (Said::Done, None),
            StreamReport::Committed { range, .. } => (Said::Committed, Some(*range)),
            StreamReport::Abandoned => (Said::Abandoned, None),
            StreamReport::Failed(_) => (Said::Failed, None),
        };
        if self.intake.stream_said(session, ticket, said, committed)?.is_none() {
            return Ok(());
        }
        match report {
            StreamReport::Failed(failure) => return Err(failure),
            StreamReport::Committed { range, counters, in_doubt, user_code } => {
                self.doubt(in_doubt);
                if user_code {
                    self.intake.progress.needs_flush_through(range.through);
                }
                self.around.counters.groups_parallel += 1;
                let changes = counters.inserts + counters.updates + counters.deletes;
                self.around.decoded.changes += changes + counters.truncates;
                self.around.decoded.transactions += counters.transactions;
                self.applied(&counters);
                self.take_rest()?;
            }
            StreamReport::Abandoned => self.around.counters.retries += 1,
            StreamReport::Done => {}
        }
        Ok(())
    }

    /// See [`crate::apply::pool::Pool::look_at_stalls`].
    pub(super) fn look_at_stalls(&mut self) -> Duration {
        let streams = &self.intake.streams;
        let backends = || self.streams.backends(streams);
        self.around.pool.look_at_stalls(streams.first(), backends)
    }

    /// Rolls back later transactions that hold locks for which the oldest waits, if it is the oldest still.
    pub(super) fn resolve_deadlock(&mut self, seen: &Detection) {
        let change = self.around.pool.resolve_deadlock(seen);
        self.serialized(&change);
        if !self.around.pool.is_stalled(seen.oldest) {
            return;
        }
        let (sessions, abandoned) = self.intake.streams.resolve_deadlock(&seen.victims);
        self.streams.cancel(&sessions);
        self.around.counters.victims += abandoned as u64;
    }

    /// Tables are serialized from now on.
    pub(super) fn serialized(&mut self, change: &SerializationChange) {
        self.around.counters.tables_serialized += change.roots.len() as u64;
        self.around.tables.record_serialization(change);
    }

    /// Streams wait for each other's locks, and their changes in memory keep the rest of them from being
    /// received: then none is executed before its commit.
    pub(super) fn free_memory(&mut self) {
        let streams = &mut self.intake.streams;
        // While one is ended, no received chunk is taken; the monitor looks after it.
        let open = !streams.is_idle() && streams.committing().is_none();
        let full = self.receiver.memory.is_full() && open;
        match self.full_since {
            _ if !full => self.full_since = None,
            None => self.full_since = Some(Instant::now()),
            Some(since) if since.elapsed() >= FULL && self.around.pool.dispatch().is_idle() => {
                streams.abandon_all();
            }
            Some(_) => {}
        }
    }
}
