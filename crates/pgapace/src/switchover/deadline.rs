//! The deadline of a switchover: the longest time for which nobody can write. A signal before it ends all waits too.
//!
//! Three means end a wait. The mildest one comes first:
//!
//! 1. Loops look at the deadline.
//! 2. Statements are canceled, a moment later. A server that waits for a lock or for a standby obeys at once.
//! 3. A server that leaves this without an effect is silent ([`silence`](super::silence)). Its sessions are given up on this
//!    side, so that the work fails, and everything is undone ([`settle`](super::undo::settle)) where a server answers.
//!
//! An attempt to connect takes no longer than there is time.

use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};
use wire::CancelHandle;

use super::silence::{SILENCE, Servers, Watch};
use crate::error::{Class, Failure, Result};
use crate::scoped_thread;
use crate::sqlstate;
use crate::stopping::interrupt::{Cancels, is_cancelled};
use crate::stopping::shutdown::Shutdown;

/// Completes "stopped during …".
pub(super) const SWITCHOVER: &str = "the switchover";

/// From the deadline to the first attempt to cancel. Loops that look at the deadline end by themselves, and say what
/// they waited for: a cancel that meets their last look would hide that.
const GRACE: Duration = Duration::from_secs(1);
/// The same from a signal on.
const GRACE_OF_SIGNAL: Duration = Duration::from_millis(300);
/// Between two looks whether the deadline is over or a signal has come.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Between two attempts to cancel what a server waits for.
const CANCEL_EVERY: Duration = Duration::from_millis(200);
/// How long an undo waits for a server at least. One that has just lost a session needs a moment to end it.
const UNDO_AT_LEAST: Duration = Duration::from_secs(5);
/// How long an undo after a signal waits for a server, unless the deadline is earlier.
const UNDO_AFTER_SIGNAL: Duration = Duration::from_secs(10);

/// The end of all waits before the end of the subscription: a moment, or a signal before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline<'a> {
    /// Writes stay stopped until then at most.
    pub(super) at: Instant,
    stop: &'a Shutdown,
}

impl<'a> Deadline<'a> {
    pub(super) fn after(patience: Duration, stop: &'a Shutdown) -> Self {
        Self { at: Instant::now() + patience, stop }
    }

    pub(super) fn left(self) -> Duration {
        if self.stop.requested() {
            return Duration::ZERO;
        }
        self.at.saturating_duration_since(Instant::now())
    }

    /// When an undo that begins now gives up to wait for servers. Writes are stopped until then.
    pub(super) fn of_undo<'n>(self, never: &'n Shutdown) -> Deadline<'n> {
        let now = Instant::now();
        let signaled = self.stop.requested().then(|| now + UNDO_AFTER_SIGNAL);
        let at = signaled.map_or(self.at, |signaled| signaled.min(self.at));
        Deadline { at: at.max(now + UNDO_AT_LEAST), stop: never }
    }

    pub(super) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Whether a signal has come.
    pub(super) fn stopping(self) -> impl Fn() -> bool + use<'a> {
        move || self.stop.requested()
    }

    pub(super) fn check(self) -> Result<()> {
        self.or_late(|| Failure::new(Class::Behind, "the switchover took longer than --deadline"))
    }

    /// Fails if a signal has come, or with this failure if the moment is over.
    pub(super) fn or_late(self, late: impl FnOnce() -> Failure) -> Result<()> {
        self.stop.check(SWITCHOVER)?;
        if Instant::now() < self.at { Ok(()) } else { Err(late()) }
    }

    /// Runs `work`, and cancels the statements of these sessions from a moment after the deadline, or after a signal, on
    /// until it ends. A statement may wait for a lock, and a commit for a synchronous standby, as long as the server likes. A commit
    /// whose wait is canceled is done, so `work` must look at the deadline itself. Sessions that wait for a silent server
    /// are given up.
    pub(super) fn enforce<T>(
        self,
        sessions: &[CancelHandle],
        servers: &Servers,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let cancels = Cancels::of(sessions);
        self.enforce_by(&|| cancels.send(), servers, work)
    }

    fn enforce_by<T>(
        self,
        cancel: &(impl Fn() + Sync),
        servers: &Servers,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (done, ended) = bounded::<()>(0);
        let mut watched = servers.watch();
        let watches = &mut watched;
        let result = std::thread::scope(|scope| {
            scoped_thread::spawn(scope, "deadline", move || {
                let (mut pause, mut signaled, mut canceled) = (LOOK_EVERY, None, None);
                while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                    let now = Instant::now();
                    watches.iter_mut().for_each(Watch::look);
                    if self.stop.requested() {
                        signaled.get_or_insert(now);
                    }
                    let stopped = signaled.is_some_and(|at| now >= at + GRACE_OF_SIGNAL);
                    if stopped || now >= self.at + GRACE {
                        cancel();
                        pause = CANCEL_EVERY;
                        if now >= *canceled.get_or_insert(now) + SILENCE {
                            watches.iter_mut().for_each(Watch::give_up_if_silent);
                        }
                    }
                }
            })?;
            let result = work();
            drop(done);
            result
        });
        result.map_err(|failure| {
            let said: Vec<_> = watched.iter().filter_map(Watch::said).collect();
            if is_cancelled(&failure)
                && let Err(stopped) = self.stop.check(SWITCHOVER)
            {
                return if said.is_empty() { stopped } else { stopped.detail(said.join(" ")) };
            }
            if failure.is_connection_lost() && !said.is_empty() {
                return failure.detail(said.join(" "));
            }
            let canceled = failure.sqlstate.as_deref() == Some(sqlstate::QUERY_CANCELED);
            if !canceled || !self.is_over() || failure.hint.is_some() {
                return failure;
            }
            failure.hint(
                "The server waited for something until --deadline: see pg_locks and pg_blocking_pids().",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crossbeam_channel::unbounded;

    use super::{Deadline, GRACE, Servers};
    use crate::error::{Class, Failure};
    use crate::stopping::shutdown::Shutdown;

    #[test]
    fn work_that_ends_in_time_is_not_waited_for() {
        let stop = Shutdown::default();
        let deadline = Deadline::after(Duration::from_secs(3600), &stop);
        assert_eq!(deadline.enforce(&[], &Servers::default(), || Ok(7)).ok(), Some(7));
        assert!(deadline.check().is_ok() && !deadline.is_over());
    }

    #[test]
    fn a_loop_that_looks_at_the_deadline_is_not_disturbed() {
        let stop = Shutdown::default();
        let begun = Instant::now();
        let (canceled, cancels) = unbounded();
        let canceled = || canceled.send(begun.elapsed()).unwrap_or_default();
        let first = Deadline::after(Duration::ZERO, &stop).enforce_by(
            &canceled,
            &Servers::default(),
            || Ok(cancels.recv().unwrap_or_default()),
        );
        assert!(first.is_ok_and(|first| first >= GRACE));
    }

    #[test]
    fn a_statement_that_was_canceled_names_the_deadline() {
        let stop = Shutdown::default();
        let canceled = |sqlstate: &str| {
            let mut failure = Failure::new(Class::Subscriber, "a statement failed");
            failure.sqlstate = Some(sqlstate.to_owned());
            failure
        };
        let hint = |sqlstate: &str, deadline: Deadline<'_>| {
            let failed =
                deadline.enforce::<()>(&[], &Servers::default(), || Err(canceled(sqlstate)));
            failed.err().and_then(|failure| failure.hint)
        };
        let over = Deadline::after(Duration::ZERO, &stop);
        assert!(hint("57014", over).is_some_and(|hint| hint.contains("--deadline")));
        assert_eq!(hint("42501", over), None);
        assert_eq!(hint("57014", Deadline::after(Duration::from_secs(3600), &stop)), None);
        assert_eq!(over.check().map_err(|failure| failure.class), Err(Class::Behind));
    }

    #[test]
    fn a_signal_ends_all_waits_at_once() {
        let stop = Shutdown::default();
        let deadline = Deadline::after(Duration::from_secs(3600), &stop);
        let (canceled, cancels) = unbounded();
        let canceled = || canceled.send(()).unwrap_or_default();
        let ended = deadline.enforce_by(&canceled, &Servers::default(), || {
            assert!(!deadline.is_over() && cancels.is_empty());
            stop.end();
            cancels.recv().unwrap_or_default();
            let mut failure = Failure::new(Class::Publisher, "a statement failed");
            failure.sqlstate = Some("57014".to_owned());
            Err::<(), _>(failure)
        });
        assert_eq!(ended.map_err(|failure| failure.class), Err(Class::Stopped));
        assert!(deadline.is_over() && deadline.left().is_zero());
        assert_eq!(deadline.check().map_err(|failure| failure.class), Err(Class::Stopped));
        // Another failure says more.
        let other = deadline.enforce_by(&|| {}, &Servers::default(), || {
            Err::<(), _>(Failure::new(Class::Different, "rows differ"))
        });
        assert_eq!(other.map_err(|failure| failure.class), Err(Class::Different));
    }
}
