//! `pgapace adopt` and `pgapace release` when their session on the subscriber is lost: they open another one
//! and go on, as the same command would if a user repeated it.
//!
//! The answer of the last COMMIT may be lost with the session. Then the rows of schema `pgapace`, which the
//! transaction wrote, tell whether it took effect.

use std::time::{Duration, Instant};

use wire::Session;

use super::{adopt, plan, release};
use crate::apply::blockers::limiting_lock_waits;
use crate::error::{Class, Result};
use crate::publisher::session::Publisher;
use crate::retried::until;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state;
use crate::subscriber::state::adoption::Adoption;

/// Between two attempts.
const RETRY_EVERY: Duration = Duration::from_millis(300);

/// Where sessions are opened.
pub(crate) struct Servers<'a> {
    pub(crate) subscriber: &'a Subscriber,
    pub(crate) publisher: &'a Publisher,
}

/// The next step if it is not known how far an adoption has come.
const ADOPT_AGAIN: &str = "The native subscription runs as before, is disabled, or is adopted. pgapace adopt again goes \
     on, or says that it is adopted; pgapace adopt --abort enables it again.";

/// Adopts a native subscription.
pub(crate) fn adopt(
    servers: &Servers<'_>,
    (control, source): (&mut Session, &mut Session),
    request: &adopt::AdoptRequest<'_>,
    shutdown: &Shutdown,
) -> Result<plan::Plan> {
    let mut handed = None;
    let stopping = || shutdown.requested();
    let again =
        Again { servers, patience: request.patience, stopping: &stopping, hint: ADOPT_AGAIN };
    again.repeat((control, source), |control, source| {
        limiting_lock_waits(servers.subscriber, control, request.patience, |control| {
            adopt::attempt(control, source, request, shutdown, &mut handed)
        })
    })
}

/// The next step if it is not known whether a release took effect.
pub(crate) const RELEASE_AGAIN: &str = "The subscription is as before, or was handed back. pgapace release again hands it \
     back, or says that there is no such subscription any more.";

/// Hands a subscription back. `owned`: the subscription and the adoption that this session owns.
pub(crate) fn release(
    servers: &Servers<'_>,
    (control, source): (&mut Session, &mut Session),
    owned: (state::Subscription, Option<Adoption>),
    request: &release::ReleaseRequest<'_>,
    stopping: &dyn Fn() -> bool,
) -> Result<release::Released> {
    let mut handed = None;
    let mut owned = Some(owned);
    let again = Again { servers, patience: request.patience, stopping, hint: RELEASE_AGAIN };
    again.repeat((control, source), |control, source| {
        limiting_lock_waits(servers.subscriber, control, request.patience, |control| {
            let (row, adopted) = match owned.take() {
                Some(owned) => owned,
                None => {
                    let gone = || Ok(state::find_in_any(control, request.name)?.is_none());
                    if let Some(released) = took_effect(&handed, gone)? {
                        return Ok(released);
                    }
                    release::own(control, request.name, stopping)?
                }
            };
            release::attempt(control, source, (&row, adopted), request, (stopping, &mut handed))
        })
    })
}

/// Returns what was handed over if the COMMIT whose answer was lost took effect. `handed` stays: the session on which
/// `looks` asks may be lost too.
pub(super) fn took_effect<T: Clone>(
    handed: &Option<T>,
    looks: impl FnOnce() -> Result<bool>,
) -> Result<Option<T>> {
    match handed {
        Some(done) if looks()? => Ok(Some(done.clone())),
        _ => Ok(None),
    }
}

struct Again<'a> {
    servers: &'a Servers<'a>,
    patience: Duration,
    stopping: &'a dyn Fn() -> bool,
    /// The hint if no other session can be opened.
    hint: &'static str,
}

impl Again<'_> {
    /// Repeats an action that has lost its session on the subscriber. The server may not have ended that
    /// session yet, so that it still holds its locks.
    fn repeat<T>(
        &self,
        (control, source): (&mut Session, &mut Session),
        mut attempt: impl FnMut(&mut Session, &mut Session) -> Result<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + self.patience;
        let ended = || Instant::now() >= deadline || (self.stopping)();
        let mut lost = false;
        loop {
            let failure = match attempt(control, source) {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            if control.is_broken() {
                lost = true;
                tracing::warn!(
                    event = "native_session_lost",
                    error = failure.message,
                    "session on the subscriber was lost; connecting again"
                );
                self.reconnect(control, source, &ended).map_err(|second| {
                    failure.detail(format!("No other session: {second}")).hint(self.hint)
                })?;
            } else if !(lost && failure.class == Class::Busy) || ended() {
                return Err(failure);
            }
            std::thread::sleep(RETRY_EVERY);
        }
    }

    fn reconnect(
        &self,
        control: &mut Session,
        source: &mut Session,
        ended: &dyn Fn() -> bool,
    ) -> Result<()> {
        let Servers { subscriber, publisher } = self.servers;
        *control = until(ended, RETRY_EVERY, || subscriber.connect(Purpose::Control))?;
        if source.is_broken() {
            *source = until(ended, RETRY_EVERY, || publisher.connect())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::took_effect;
    use crate::error::{Class, Failure};

    /// The session with which the rows are read may be lost as the one before it.
    #[test]
    fn a_lost_answer_is_looked_up_until_it_is_known() {
        let handed = Some("plan");
        let lost = || Err(Failure::new(Class::Subscriber, "the session was lost"));
        assert!(took_effect(&handed, lost).is_err());
        assert_eq!(took_effect(&handed, || Ok(false)).unwrap(), None);
        assert_eq!(took_effect(&handed, || Ok(true)).unwrap(), Some("plan"));
        assert_eq!(took_effect::<&str>(&None, lost).unwrap(), None);
    }
}
