//! The deadline of a switchover: the longest time for which nobody can write. A signal before it ends all waits too.

use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};
use wire::CancelHandle;

use crate::error::{Class, Failure, Result};
use crate::scoped_thread;
use crate::sqlstate;
use crate::stopping::interrupt::{cancel, is_cancelled};
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
    /// whose wait is canceled is done, so `work` must look at the deadline itself.
    pub(super) fn enforce<T>(
        self,
        sessions: &[CancelHandle],
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.enforce_by(&|| sessions.iter().for_each(cancel), work)
    }

    fn enforce_by<T>(
        self,
        cancel: &(impl Fn() + Sync),
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (done, ended) = bounded::<()>(0);
        let result = std::thread::scope(|scope| {
            scoped_thread::spawn(scope, "deadline", move || {
                let (mut pause, mut signaled) = (LOOK_EVERY, None);
                while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                    let now = Instant::now();
                    if self.stop.requested() {
                        signaled.get_or_insert(now);
                    }
                    let stopped = signaled.is_some_and(|at| now >= at + GRACE_OF_SIGNAL);
                    if stopped || now >= self.at + GRACE {
                        cancel();
                        pause = CANCEL_EVERY;
                    }
                }
            })?;
            let result = work();
            drop(done);
            result
        });
        result.map_err(|failure| {
            if is_cancelled(&failure)
                && let Err(stopped) = self.stop.check(SWITCHOVER)
            {
                return stopped;
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

    use super::{Deadline, GRACE};
    use crate::error::{Class, Failure};
    use crate::stopping::shutdown::Shutdown;

    #[test]
    fn work_that_ends_in_time_is_not_waited_for() {
        let stop = Shutdown::default();
        let deadline = Deadline::after(Duration::from_secs(3600), &stop);
        assert_eq!(deadline.enforce(&[], || Ok(7)).ok(), Some(7));
        assert!(deadline.check().is_ok() && !deadline.is_over());
    }

    #[test]
    fn a_loop_that_looks_at_the_deadline_is_not_disturbed() {
        let stop = Shutdown::default();
        let begun = Instant::now();
        let (canceled, cancels) = unbounded();
        let canceled = || canceled.send(begun.elapsed()).unwrap_or_default();
        let first = Deadline::after(Duration::ZERO, &stop)
            .enforce_by(&canceled, || Ok(cancels.recv().unwrap_or_default()));
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
            let failed = deadline.enforce::<()>(&[], || Err(canceled(sqlstate)));
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
        let ended = deadline.enforce_by(&canceled, || {
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
        let other = deadline
            .enforce_by(&|| {}, || Err::<(), _>(Failure::new(Class::Different, "rows differ")));
        assert_eq!(other.map_err(|failure| failure.class), Err(Class::Different));
    }
}
