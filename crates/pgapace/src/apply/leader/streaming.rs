//! What the leader does for streamed transactions that are applied while they are open.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use engine::history::Memory;
use engine::net::TableFolding;
use engine::relation::RemoteRelation;
use engine::transaction::TransactionPart;
use engine::worker::GroupMode;
use pgoutput::{Lsn, Message, Xid};

use super::{Leader, Parts, expect_before_applied};
use crate::apply::blockers::Detection;
use crate::apply::streams::{Event, StreamReport};
use crate::apply::tables::OWN_SCHEMA;
use crate::apply::work::Work;
use crate::error::Result;
use crate::subscriber::mapping::TableMap;

/// How long memory may be full while streams are applied: what they hold of it may be what keeps the
/// rest of them from being received.
const FULL: Duration = Duration::from_secs(1);

impl Leader<'_> {
    /// Takes note of a message that was assembled; it stands at `position` of the publisher's WAL.
    pub(super) fn look_at_streams(&mut self, position: Lsn, message: &Message<'_>) {
        let Parts { streams, incoming, progress, .. } = &mut self.parts;
        streams.passed(position);
        streams.saw(message, |xid| incoming.spooled_length(xid), progress.last_dispatched());
        if let Message::StreamCommit(commit) = message {
            self.stream_committed(commit.xid, commit.commit_lsn);
        }
    }

    /// Takes note of what came of a block that has not ended.
    pub(super) fn look_at_block(&mut self) {
        let Parts { streams, incoming, progress, .. } = &mut self.parts;
        streams.received(|xid| incoming.spooled_length(xid), progress.last_dispatched());
    }

    /// A stream has committed: it is ended where it was begun, if it is to be applied like all others.
    fn stream_committed(&mut self, xid: Xid, commit_lsn: Lsn) {
        let head = self.parts.incoming.committed_head().map(|(head, _)| head);
        let usual = head.is_some_and(|head| head.xid == xid)
            && self.closing.is_none()
            && self.parts.skip != Some(commit_lsn)
            && !self.is_beyond_the_goal(commit_lsn);
        if !usual {
            self.parts.streams.forget(xid);
        } else if self.parts.streams.begin_commit(xid) {
            self.pass_applied(commit_lsn);
            self.parts.progress.passed(commit_lsn);
        }
    }

    /// Hands over what may be applied now, and ends the stream that has committed when it is next.
    pub(super) fn feed_streams(&mut self) -> Result<()> {
        loop {
            let committed = self.parts.progress.committed();
            let Parts { streams, incoming, stream_limits, .. } = &mut self.parts;
            let subtransactions = |xid| incoming.subtransactions(xid);
            let Some(next) = streams.next(committed, subtransactions)? else { break };
            let (part, through) =
                incoming.read_spooled(next.xid, next.step.range.clone(), *stream_limits)?;
            let Some(tables) = self.tables_of_stream(&part) else {
                tracing::debug!(xid = %next.xid, "a stream waits for its commit");
                self.parts.streams.abandon(next.xid);
                continue;
            };
            let by_rows = self.parts.rows_through == Lsn(u64::MAX);
            let mode = if by_rows { GroupMode::Rows } else { GroupMode::Net };
            let work = Work {
                part,
                tables,
                predecessor: Lsn::INVALID,
                memory: None,
                after_applied: false,
                two_phase: None,
            };
            self.parts.streams.hand_over(&next, through, work, mode);
        }
        self.end_stream()
    }

    /// The tables of a part, if all of it may be applied before its commit is known.
    fn tables_of_stream(&mut self, part: &TransactionPart) -> Option<Vec<Option<Arc<TableMap>>>> {
        // Its lock would make readers wait until the end.
        if part.truncates() {
            return None;
        }
        // It commits after all that was received.
        let floor = self.parts.progress.last_dispatched();
        part.relations().iter().map(|remote| self.table_of_stream(remote, floor)).collect()
    }

    fn table_of_stream(
        &mut self,
        remote: &Arc<RemoteRelation>,
        floor: Lsn,
    ) -> Option<Option<Arc<TableMap>>> {
        if remote.schema == OWN_SCHEMA {
            return Some(None);
        }
        // What is put off is applied in commit order.
        if self.parts.joining.has(remote) || !self.parts.tables.knows(remote, floor) {
            return None;
        }
        // Whatever is wrong with it is said if the transaction commits.
        let map = self.resolve(remote, floor).ok().flatten()?;
        let alone = matches!(map.rules.fold, TableFolding::Never { .. }) || map.conflicts.is_some();
        (!alone).then_some(Some(map))
    }

    /// Commits the stream that is next, when everything before it has ended.
    fn end_stream(&mut self) -> Result<()> {
        let applied = self.is_idle() && self.is_drained();
        let Parts { streams, incoming, progress, applied_beyond, .. } = &mut self.parts;
        let Some(xid) = streams.committing() else { return Ok(()) };
        let quiet = applied && progress.outstanding() == 0;
        if let (Some((head, end)), Some(length)) =
            (incoming.committed_head(), incoming.committed_length())
            && quiet
            && streams.is_through(xid, length)
        {
            expect_before_applied(applied_beyond, end)?;
            if length > 0 {
                self.memory = Some(Memory::of(head.ends_at(end)));
            }
            let part = TransactionPart::end_of(head, end);
            let predecessor = progress.last_dispatched();
            let work = Work {
                part,
                tables: Vec::new(),
                predecessor,
                memory: self.memory,
                after_applied: false,
                two_phase: None,
            };
            streams.commit(xid, work);
        }
        Ok(())
    }

    pub(super) fn stream_reported(&mut self, event: Event) -> Result<()> {
        match self.parts.streams.reported(event) {
            Some((_, StreamReport::Failed(failure))) => return Err(failure),
            Some((xid, StreamReport::Committed { range, counters })) => {
                self.parts.progress.dispatched(range.through);
                self.parts.progress.committed_range(range);
                self.parts.advanced.store(true, Ordering::Release);
                if self.parts.durable_commits {
                    self.parts.progress.committed_is_durable();
                }
                self.after_applied = false;
                self.counters.add(&counters);
                self.counters.groups_parallel += 1;
                self.parts.streams.forget(xid);
                self.parts.incoming.give_up();
                self.publish_positions();
                self.take_rest()?;
            }
            Some((xid, StreamReport::Abandoned)) => {
                self.counters.retries += 1;
                if self.parts.streams.committing() == Some(xid) {
                    // Now it is one like all others.
                    self.parts.streams.forget(xid);
                }
            }
            Some((_, StreamReport::Done)) | None => {}
        }
        Ok(())
    }

    /// See [`crate::apply::pool::Pool::look_at_stalls`].
    pub(super) fn look_at_stalls(&mut self) -> Duration {
        let Parts { streams, pool, .. } = &mut self.parts;
        pool.look_at_stalls(streams.first(), || streams.sessions())
    }

    /// What keeps the oldest transaction: later ones that hold its locks go back.
    pub(super) fn resolve_deadlock(&mut self, found: &Detection) {
        let turned = self.parts.pool.resolve_deadlock(found);
        self.counters.tables_serialized += turned.roots.len() as u64;
        self.parts.tables.turned(&turned);
        self.counters.victims += self.parts.streams.resolve_deadlock(&found.victims);
    }

    /// Streams wait for each other's locks, and what they hold of memory keeps the rest of them from
    /// being received: then none is applied early.
    pub(super) fn free_memory(&mut self) {
        let Parts { streams, receiver, .. } = &self.parts;
        // While one is ended, nothing is taken of what was received; the monitor looks after it.
        let open = !streams.is_idle() && streams.committing().is_none();
        let full = receiver.memory.is_full() && open;
        match self.full_since {
            _ if !full => self.full_since = None,
            None => self.full_since = Some(Instant::now()),
            Some(since) if since.elapsed() >= FULL && self.is_idle() => {
                self.parts.streams.abandon_all();
            }
            Some(_) => {}
        }
    }
}
