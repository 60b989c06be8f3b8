//! The relief session: it does the bookkeeping while a flush of the durability session waits for a
//! synchronous standby.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use wire::Session;

use super::{BegunJobs, FromDurability, bookkeep, report};
use crate::apply::blockers::Pulse;
use crate::apply::bookkeeping::BookkeepingJob;
use crate::apply::standby_wait;
use crate::error::Result;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership;

/// How often the thread looks whether the durability session waits.
const WATCH: Duration = Duration::from_millis(500);

pub(super) struct Relief {
    pub(super) subscriber: Subscriber,
    pub(super) subscription: String,
    pub(super) id: SubscriptionId,
    /// The backend of the durability session.
    pub(super) relieved: i32,
    pub(super) pulse: Pulse,
}

impl Relief {
    /// Ends with the durability thread.
    pub(super) fn run(
        &self,
        (jobs, begun): &(Receiver<BookkeepingJob>, BegunJobs),
        sender: &Sender<FromDurability>,
        ended: &Receiver<()>,
    ) {
        let (mut session, mut told) = (None, false);
        while ended.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout) {
            if !self.pulse.is_silent_for(standby_wait::TELL_AFTER) {
                (session, told) = (None, false);
                continue;
            }
            let open = match self.open(&mut session, &mut told) {
                Ok(open) => open,
                Err(failure) => {
                    tracing::debug!(%failure, "cannot do the jobs of the durability session");
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

    /// The session. Logs once what the durability session waits for.
    fn open<'s>(
        &self,
        session: &'s mut Option<Session>,
        told: &mut bool,
    ) -> Result<&'s mut Session> {
        let session = match session {
            Some(session) => session,
            None => {
                let mut opened = self.subscriber.connect(Purpose::Relief)?;
                ownership::join(&mut opened, self.id)?;
                session.insert(opened)
            }
        };
        if !*told && standby_wait::is_waiting(session, self.relieved)? {
            *told = true;
            standby_wait::tell(&self.subscription, "durability session", self.relieved);
        }
        Ok(session)
    }
}
