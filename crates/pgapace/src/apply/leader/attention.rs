//! Where few commits wait, the leader reads the stream and executes groups itself, without the threads of
//! the receiver and of a worker. [`engine::dispatch::Attention`] decides when.
//!
//! Meanwhile reports of other threads wait: while the leader executes a group, for [`Pacing::attended_wait`]
//! at most; while it waits for the publisher, for [`Pacing::attended_receive`].

use std::time::Duration;

use engine::dispatch::Pacing;

use crate::apply::leader::Leader;
use crate::error::Result;
use crate::publisher::reader::FromPublisher;

impl Leader<'_> {
    /// Whether the leader may execute groups itself: commits wait for it, there is no backlog, and the run
    /// does not end.
    pub(super) fn may_attend(&self) -> bool {
        self.commits_wait()
            && self.stopping_since.is_none()
            && self.intake.closing().is_none()
            && !self.around.pool.dispatch().is_backlog()
    }

    /// Asks for the connection to the publisher, or gives it back. It is kept only while nothing is in
    /// flight, and where commits need no flush of their own, because both reports would wait for the
    /// publisher, which may wait for them.
    pub(super) fn look_at_connection(&mut self) {
        let attends = self.durable_commits
            && self.around.pool.attends()
            && self.may_attend()
            && self.wants_chunks()
            && !self.receiver.is_without_haste()
            && !self.receiver.memory.is_full();
        if attends {
            self.receiver.ask_for_connection();
        } else {
            self.receiver.give_connection_back();
        }
    }

    /// Receives from the publisher in this thread, for `longest` at most. Returns how long the leader may
    /// wait for the other threads then.
    pub(super) fn receive(&mut self, longest: Duration) -> Result<Duration> {
        if !self.around.pool.events().is_empty() {
            return Ok(longest);
        }
        self.look_at_connection();
        if !self.receiver.has_connection() {
            return Ok(longest);
        }
        let received = self.receiver.receive(longest.min(Pacing::MEASURED.attended_receive))?;
        received.map_or(Ok(()), |message| self.received(message))?;
        Ok(Duration::ZERO)
    }

    /// A message of the receiver.
    pub(super) fn received(&mut self, message: FromPublisher) -> Result<()> {
        match message {
            FromPublisher::Chunk(chunk) => {
                self.waits.set(None);
                self.take_or_delay(&chunk.bytes)?;
                // A group that the leader executes itself is received and committed at nearly the same time,
                // so one status message says both.
                let executes =
                    self.receiver.has_connection() && !self.around.pool.dispatch().is_drained();
                if self.commits_wait() && !executes {
                    // A commit on the publisher may wait for it: a keepalive tells that nothing of its
                    // transaction is published.
                    self.publish_positions();
                }
            }
            FromPublisher::Warned => self.around.table_sync.publications_changed(),
            FromPublisher::Ended(failure) => return Err(failure),
        }
        Ok(())
    }
}
