//! How a run ends: on a signal, at its goal, or because another process asks for the subscription.

use std::time::{Duration, Instant};

use super::{Leader, Outcome, Surroundings};
use crate::apply::bookkeeping::BookkeepingJob;
use crate::apply::requests::Requests;
use crate::apply::standby_wait;
use crate::error::{Class, Failure, Result};
use crate::hand_over;
use crate::scoped_thread;

/// How long a stop waits for transactions that are being applied: a large one, or one that waits for a
/// lock on the subscriber.
const STOP_PATIENCE: Duration = Duration::from_secs(30);

/// How often the leader has the subscriber asked for requests of verbs. A hand-over is to take less than a
/// second.
const REQUESTS_EVERY: Duration = Duration::from_millis(200);

impl Leader<'_> {
    /// Has the subscriber asked for requests of verbs.
    pub(super) fn look_for_requests(&mut self) {
        if self.request_search.begins() {
            self.around.durability.bookkeep(BookkeepingJob::LookForRequests(self.owner));
        }
    }

    /// The subscriber's answer to [`Self::look_for_requests`].
    pub(super) fn requests_found(&mut self, found: Requests) -> Result<()> {
        self.request_search.ended(REQUESTS_EVERY);
        self.barrier_requested(found.barrier)?;
        if found.has_standbys {
            self.has_standbys();
        }
        let Some(request) = found.hand_over else { return Ok(()) };
        if self.intake.closing().is_some() {
            // The next run of this process obeys at its start.
            return Ok(());
        }
        tracing::info!(
            event = "hand_over_requested",
            stands_aside = request == hand_over::Request::StandAside,
            "another process asks for the subscription; stopping after the current transaction"
        );
        self.stopping_since.get_or_insert_with(Instant::now);
        self.intake.close(match request {
            hand_over::Request::HandOver => Outcome::HandedOver,
            hand_over::Request::StandAside => Outcome::StoodAside,
        });
        Ok(())
    }

    /// The subscriber has synchronous standbys. If apply sessions commit synchronously, their commits wait for those, and apply
    /// would stop while one is away. So the next run has sessions that commit asynchronously.
    fn has_standbys(&mut self) {
        if !self.sessions_are_synchronous {
            return;
        }
        if self.intake.closing().is_none() {
            tracing::info!(
                event = "asynchronous_commits",
                "subscriber has synchronous standbys now: sessions that apply are opened again, and wait for none"
            );
            self.intake.close(Outcome::Changed);
        }
        let subscription = self.watched.subscription.clone();
        self.around.durability.bookkeep(BookkeepingJob::EndStandbyWaits { subscription });
    }

    /// Whether the run may end before its last commits are durable: this process begins another one, which reads from the
    /// subscriber what is committed, and the flush waits, as for a synchronous standby that is away.
    pub(super) fn goes_on_without_flush(&self) -> bool {
        self.intake.closing() == Some(Outcome::Changed)
            && self.intake.has_ended_all()
            && self.last_flush.is_some_and(|begun| begun.elapsed() >= standby_wait::TELL_AFTER)
    }

    /// Decides whether to stop dispatching: a signal, or the goal is received.
    pub(super) fn look_for_the_end(&mut self) -> Result<()> {
        if self.around.shutdown.requested() {
            self.stopping_since.get_or_insert_with(Instant::now);
            self.intake.close(Outcome::Stopped);
        }
        self.intake.look_at_the_goal(engine::intake::Surroundings::goal(&self.around));
        if let Some(since) = self.stopping_since
            && (since.elapsed() > STOP_PATIENCE || self.around.shutdown.insisted())
            && !self.is_closed()
        {
            // If another process asked, the next run of this one finds that at its start.
            return Err(Failure::new(
                Class::Stopped,
                "stopped before the transaction in hand could be ended",
            )
            .hint("It is rolled back and sent again next time; nothing is lost."));
        }
        Ok(())
    }

    /// The end of a run that has settled everything that it began.
    pub(super) fn finish(mut self, outcome: Outcome) -> Outcome {
        self.write_last_statistics(outcome);
        self.publish_positions();
        let at = self.intake.progress.durable();
        let durable = self.intake.progress.is_settled();
        // Statistics are written before the durability session ends, and the publisher hears the last
        // positions before the stream ends.
        let Self { streams, receiver, owner, around, .. } = self;
        let Surroundings { pool, durability, mut control, .. } = around;
        let acknowledged = std::thread::scope(|scope| {
            scoped_thread::drop_beside(scope, streams);
            scoped_thread::drop_beside(scope, pool);
            scoped_thread::drop_beside(scope, durability);
            receiver.finish()
        });
        let told = match acknowledged {
            _ if !durable => "stopped before all applied transactions are durable",
            true => "stopped; all applied transactions are durable and acknowledged",
            // It sends some of them again, which the next run leaves out.
            false => {
                "stopped; all applied transactions are durable, but the publisher was not told"
            }
        };
        tracing::info!(event = "stopped", lsn = %at, ?outcome, acknowledged, "{told}");
        // Last: the process that waits for the answer takes the slot and the owner's lock.
        if matches!(outcome, Outcome::HandedOver | Outcome::StoodAside)
            && let Err(failure) = hand_over::done(&mut control, owner.id, Some(at))
        {
            tracing::debug!("{failure}");
        }
        outcome
    }
}
