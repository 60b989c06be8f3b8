//! The thread that looks who holds the subscriptions of one subscriber database.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wire::{ConnInfo, Session};

use super::{Shared, Standing};
use crate::apply::thread;
use crate::config::Subscription;
use crate::error::{Failure, Result};
use crate::process::Process;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{membership, schema};

/// Time between two looks: how long a released lock stays free.
const LOOK: Duration = Duration::from_millis(150);
/// Time between two beats of our own. Owners beat as often.
const BEAT: Duration = Duration::from_secs(1);
/// Pause after a failed attempt to reach the subscriber.
const AWAY: Duration = Duration::from_millis(500);

/// Starts the thread. It ends when the last [`super::Membership`] of `shared` is dropped.
pub(super) fn spawn(
    of: &Subscription,
    process: Process,
    shared: Arc<Shared>,
) -> Result<JoinHandle<()>> {
    let watcher = Watcher {
        subscriber: of.subscriber.clone(),
        name: of.name.clone(),
        process,
        shared,
        session: None,
        cut_off: false,
        beaten: None,
    };
    thread::spawn("standby".to_owned(), move || watcher.run())
}

struct Watcher {
    subscriber: ConnInfo,
    /// One of the subscriptions, which names the session.
    name: String,
    process: Process,
    shared: Arc<Shared>,
    session: Option<Session>,
    /// The subscriber cannot be reached, which was logged.
    cut_off: bool,
    beaten: Option<Instant>,
}

impl Watcher {
    fn run(mut self) {
        loop {
            let mut seen = self.shared.lock();
            while seen.waiting.is_empty() && !seen.ended {
                if self.session.is_some() {
                    drop(seen);
                    self.leave();
                    seen = self.shared.lock();
                } else {
                    seen = self.shared.wait(seen, Duration::from_secs(1));
                }
            }
            if seen.ended {
                drop(seen);
                return self.leave();
            }
            let waits_for: Vec<_> = seen.waiting.keys().cloned().collect();
            drop(seen);
            let pause = match self.look(&waits_for) {
                Ok(pause) => pause,
                Err(failure) => self.failed(&failure),
            };
            self.shared.news.notify_all();
            // Somebody who begins to wait is not kept waiting, and nobody is looked for more often.
            std::thread::sleep(pause);
        }
    }

    /// One look. Returns the pause after it.
    fn look(&mut self, waits_for: &[String]) -> Result<Duration> {
        let session = match &mut self.session {
            Some(session) => session,
            None => {
                let subscriber = Subscriber::new(self.subscriber.clone(), &self.name);
                let mut session = subscriber.connect(Purpose::Standby)?;
                if schema::version(&mut session)? != schema::newest() {
                    self.shared.lock().lost(Standing::Refused);
                    return Ok(AWAY);
                }
                self.beaten = None;
                self.session.insert(session)
            }
        };
        let due = self.beaten.is_none_or(|beaten| beaten.elapsed() >= BEAT);
        let held = if due {
            let held = membership::round(session, &self.process, waits_for)?;
            self.beaten = Some(Instant::now());
            held
        } else {
            membership::look(session)?
        };
        self.cut_off = false;
        self.shared.lock().saw(held, due);
        Ok(LOOK)
    }

    fn failed(&mut self, failure: &Failure) -> Duration {
        self.session = None;
        let passes = failure.transient || failure.away || failure.connection_lost;
        self.shared.lock().lost(if passes { Standing::Unknown } else { Standing::Refused });
        if passes && !std::mem::replace(&mut self.cut_off, true) {
            tracing::warn!(
                event = "standby_cut_off",
                error = %failure,
                "standby cannot see its subscriptions until the subscriber is back"
            );
        }
        AWAY
    }

    /// Nobody of this process waits any more.
    fn leave(&mut self) {
        if let Some(mut session) = self.session.take()
            && let Err(failure) = membership::leave(&mut session, &self.process)
        {
            tracing::debug!(%failure, "cannot remove this process from pgapace.member");
        }
        self.shared.lock().lost(Standing::Unknown);
    }
}
