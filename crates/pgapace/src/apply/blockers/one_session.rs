//! Lock waits of a session that no monitor watches: that of a verb, or of a run that is not the owner yet.
//!
//! While it waits, a thread with a session of its own looks who blocks it, and logs that. So the user of a verb sees
//! which transaction to end.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use wire::Session;

use super::WaitLog;
use super::before_stream::CONTROL_SESSION;
use super::detection::{self, Blocker};
use crate::apply::thread;
use crate::error::Result;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;

/// Time between two looks. Work that waits less for the subscriber has none, and no session for them.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Does `work` on a session of `subscriber`, and logs meanwhile who blocks it. No `id`: no subscription of pgapace takes
/// part yet.
pub(crate) fn naming_blockers<T>(
    subscriber: &Subscriber,
    session: &mut Session,
    id: Option<SubscriptionId>,
    work: impl FnOnce(&mut Session) -> Result<T>,
) -> Result<T> {
    let (alive, ended) = bounded::<()>(0);
    let watch = Watch {
        subscriber: subscriber.clone(),
        pid: session.backend_pid(),
        id: id.unwrap_or(SubscriptionId(0)),
    };
    // It is not waited for: a look may take as long as the server wants.
    thread::spawn("lock waits".to_owned(), move || watch.run(&ended))?;
    let result = work(session);
    drop(alive);
    result
}

struct Watch {
    subscriber: Subscriber,
    /// The backend of the session that may wait.
    pid: i32,
    id: SubscriptionId,
}

impl Watch {
    fn run(self, ended: &Receiver<()>) {
        let activity = self.subscriber.activity();
        let observer = self.subscriber.observer();
        let mut log = WaitLog::new(observer.subscription());
        let (mut session, mut before, mut blocked) = (None, None, false);
        while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
            // A wait that has gone on since the last time.
            let waits = activity.is_waiting().then(|| activity.ended());
            if waits.is_none() || std::mem::replace(&mut before, waits) != waits {
                blocked = false;
                log.named.clear();
                continue;
            }
            match self.look(&mut session, &observer) {
                Ok(found) if found.is_empty() => blocked = false,
                Ok(found) => {
                    // A wait that two looks have seen is no short one.
                    if std::mem::replace(&mut blocked, true) {
                        log.name((CONTROL_SESSION, self.pid), &found.iter().collect::<Vec<_>>());
                    }
                }
                Err(failure) => {
                    tracing::debug!(%failure, "cannot read which sessions block");
                    session = None;
                }
            }
        }
    }

    fn look(&self, session: &mut Option<Session>, observer: &Subscriber) -> Result<Vec<Blocker>> {
        let session = match session {
            Some(session) => session,
            None => session.insert(observer.connect(Purpose::Look)?),
        };
        detection::look(session, self.id, self.pid, observer.has_citus())
    }
}
