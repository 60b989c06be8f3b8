//! The relief session. While a flush of the durability session waits for a synchronous standby, it does the
//! bookkeeping. It ends the wait if that standby is the subscription in the opposite direction.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use wire::Session;

use super::{BegunJobs, FromDurability, bookkeep, report};
use crate::apply::blockers::Pulse;
use crate::apply::bookkeeping::BookkeepingJob;
use crate::apply::opposite_standbys::{AwaitedStandbys, OppositeStandbys};
use crate::apply::standby_wait;
use crate::error::{Failure, Result};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership;

/// How often the thread looks whether the durability session waits.
const WATCH: Duration = Duration::from_millis(500);
/// The time without a sign of life of the leader after which the thread looks whether the subscriber answers.
const LEADER_WAITS: Duration = Duration::from_secs(10);

pub(super) struct Relief {
    pub(super) subscriber: Subscriber,
    pub(super) subscription: String,
    pub(super) id: SubscriptionId,
    /// The backend of the durability session.
    pub(super) relieved: i32,
    pub(super) pulse: Pulse,
    /// The leader's. It may wait for the control session before the durability session has a job.
    pub(super) leader: Pulse,
    pub(super) opposites: Arc<OppositeStandbys>,
}

impl Relief {
    /// Ends with the durability thread.
    pub(super) fn run(
        &self,
        (jobs, begun): &(Receiver<BookkeepingJob>, BegunJobs),
        sender: &Sender<FromDurability>,
        ended: &Receiver<()>,
    ) {
        let (mut session, mut told, mut is_silent) = (None, None, false);
        while ended.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout) {
            if !self.pulse.is_silent_for(self.patience())
                && !self.leader.is_silent_for(LEADER_WAITS)
            {
                (session, told, is_silent) = (None, None, false);
                continue;
            }
            let open = match self.open(&mut session, &mut told) {
                Ok(open) => open,
                Err(failure) => {
                    tracing::debug!(%failure, "cannot do the jobs of the durability session");
                    // A server that refuses the session answers.
                    let lost = failure.is_connection_lost() && failure.sqlstate.is_none();
                    if lost && !std::mem::replace(&mut is_silent, true) {
                        self.tell_of_silence(&failure);
                    }
                    session = None;
                    continue;
                }
            };
            while self.pulse.is_silent_for(standby_wait::TELL_AFTER)
                && let Ok(job) = jobs.try_recv().or_else(|_| begun.receiver.try_recv())
            {
                if !report(bookkeep(open, self.id, job, begun), sender) {
                    return;
                }
            }
        }
    }

    /// All sessions may wait so, until their connections are given up.
    fn tell_of_silence(&self, error: &Failure) {
        tracing::warn!(
            event = "subscriber_silent",
            subscription = self.subscription,
            %error,
            "subscriber does not answer a session of the run, and another session could not be opened"
        );
    }

    /// How long a flush may last before this thread looks why.
    fn patience(&self) -> Duration {
        if self.opposites.are_possible() { WATCH } else { standby_wait::TELL_AFTER }
    }

    /// The session. It ends a wait for a subscription in the opposite direction, and logs once what else the durability
    /// session waits for. A subscription that is new in the opposite direction may be found later.
    fn open<'s>(
        &self,
        session: &'s mut Option<Session>,
        told: &mut Option<AwaitedStandbys>,
    ) -> Result<&'s mut Session> {
        let session = match session {
            Some(session) => session,
            None => {
                let mut opened = self.subscriber.connect(Purpose::Relief)?;
                ownership::join(&mut opened, self.id)?;
                session.insert(opened)
            }
        };
        if standby_wait::is_waiting(session, self.relieved)? {
            let awaited = self.opposites.release(session, self.relieved)?;
            if awaited == AwaitedStandbys::Opposite {
                tracing::info!(
                    event = "opposite_standby_passed",
                    subscription = self.subscription,
                    "flushes no longer wait for the subscriber's synchronous standby, which is the subscription in the \
                     opposite direction"
                );
            } else if self.pulse.is_silent_for(standby_wait::TELL_AFTER) {
                self.tell_of_wait(told, awaited);
            }
        }
        Ok(session)
    }

    fn tell_of_wait(&self, told: &mut Option<AwaitedStandbys>, awaited: AwaitedStandbys) {
        if told.is_none() {
            standby_wait::tell(&self.subscription, "durability session", self.relieved);
        }
        if awaited == AwaitedStandbys::Mixed && *told != Some(AwaitedStandbys::Mixed) {
            tracing::warn!(
                event = "opposite_standby_awaited",
                subscription = self.subscription,
                "synchronous_standby_names of the subscriber names the subscription in the opposite direction beside \
                 others; if the publisher's names this one, commits of both may wait for each other"
            );
        }
        if *told != Some(AwaitedStandbys::Mixed) {
            *told = Some(awaited);
        }
    }
}
