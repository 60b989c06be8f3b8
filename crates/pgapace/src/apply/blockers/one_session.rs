//! Lock waits of a session that no monitor watches: that of a verb, or of a run that is not the owner yet.
//!
//! While it waits, a thread with a session of its own looks who blocks it, and logs that. So the user of a verb sees
//! which transaction to end, and a wait that the verb limits by lock_timeout ends with an error that names it: when
//! that has ended the wait, the server no longer knows who was in the way.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use wire::Session;

use super::WaitLog;
use super::before_stream::CONTROL_SESSION;
use super::detection::{self, Blocker};
use crate::apply::thread;
use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;

/// Time between two looks. Work that waits less for the subscriber has none, and no session for them.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The shortest lock_timeout: with 0, a session waits without limit.
const SHORTEST: Duration = Duration::from_secs(1);

type Seen = Arc<Mutex<Vec<Blocker>>>;

/// Does `work` on a session of `subscriber`, and logs meanwhile who blocks it. If lock_timeout ends a wait, the failure
/// is [`Class::Busy`] and names who held the lock. No `id`: no subscription of pgapace takes part yet.
pub(crate) fn naming_blockers<T>(
    subscriber: &Subscriber,
    session: &mut Session,
    id: Option<SubscriptionId>,
    work: impl FnOnce(&mut Session) -> Result<T>,
) -> Result<T> {
    let seen = Seen::default();
    let (alive, ended) = bounded::<()>(0);
    let watch = Watch {
        subscriber: subscriber.clone(),
        pid: session.backend_pid(),
        id: id.unwrap_or(SubscriptionId(0)),
        seen: Arc::clone(&seen),
    };
    // It is not waited for: a look may take as long as the server wants.
    thread::spawn("lock waits".to_owned(), move || watch.run(&ended))?;
    let result = work(session);
    drop(alive);
    result.map_err(|failure| {
        if failure.sqlstate.as_deref() != Some(sqlstate::LOCK_NOT_AVAILABLE) {
            return failure;
        }
        busy(failure, &seen.lock().unwrap_or_else(PoisonError::into_inner))
    })
}

/// The same. No wait for a lock takes longer than `patience`.
pub(crate) fn limiting_lock_waits<T>(
    subscriber: &Subscriber,
    session: &mut Session,
    patience: Duration,
    work: impl FnOnce(&mut Session) -> Result<T>,
) -> Result<T> {
    // The server takes an integer of milliseconds.
    let limit = i32::try_from(patience.max(SHORTEST).as_millis()).unwrap_or(i32::MAX);
    session
        .simple(&format!("SET lock_timeout = {limit}"))
        .map_err(|e| Failure::subscriber(&e, "limiting waits for locks"))?;
    naming_blockers(subscriber, session, None, work)
}

struct Watch {
    subscriber: Subscriber,
    /// The backend of the session that may wait.
    pid: i32,
    id: SubscriptionId,
    /// The sessions that blocked it when the thread last saw any.
    seen: Seen,
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
                    *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = found;
                }
                Err(failure) => {
                    tracing::debug!(%failure, "cannot read which sessions block");
                    session = None;
                }
            }
        }
    }

    fn look(&self, session: &mut Option<Session>, observer: &Subscriber) -> Result<Vec<Blocker>> {
        let session = observer.session_to_keep(session, Purpose::Look)?;
        detection::look(session, self.id, self.pid, observer.has_citus())
    }
}

/// The failure of a wait that lock_timeout has ended.
fn busy(mut failure: Failure, seen: &[Blocker]) -> Failure {
    failure.class = Class::Busy;
    // One that waits itself is in the way only as long as another one is.
    let ends = |blocker: &&Blocker| !seen.iter().any(|other| other.waiting == blocker.pid);
    let Some(blocker) = seen.iter().find(ends) else { return failure };
    let end = match &blocker.prepared {
        Some(_) => "COMMIT PREPARED or ROLLBACK PREPARED".to_owned(),
        None => format!("SELECT pg_terminate_backend({})", blocker.pid),
    };
    let said = failure.detail.take().map_or_else(String::new, |said| format!("\n         {said}"));
    failure.detail =
        Some(format!("On the subscriber, {} holds the lock.{said}", blocker.described()));
    let more = failure.hint.take().filter(|hint| hint != Failure::LOCK_HINT);
    let more = more.map_or_else(String::new, |hint| format!(" {hint}"));
    failure.hint = Some(format!("Wait until its transaction has ended, or end it: {end}.{more}"));
    failure
}
