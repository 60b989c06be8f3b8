//! The deadline of a switchover: the longest time for which nobody can write.

use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};
use wire::CancelHandle;

use crate::error::{Class, Failure, Result};
use crate::scoped_thread;
use crate::sqlstate;
use crate::stopping::interrupt::cancel;

/// From the deadline to the first attempt to cancel. Loops that look at the deadline end by themselves, and say what
/// they waited for: a cancel that meets their last look would hide that.
const GRACE: Duration = Duration::from_secs(1);
/// Between two attempts to cancel what a server waits for.
const CANCEL_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(pub(super) Instant);

impl Deadline {
    pub(super) fn after(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    pub(super) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    pub(super) fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    pub(super) fn check(self) -> Result<()> {
        if !self.is_over() {
            return Ok(());
        }
        Err(Failure::new(Class::Behind, "the switchover took longer than --deadline"))
    }

    /// Runs `work`, and cancels the statements of these sessions from a moment after the deadline on until it ends.
    /// A statement may wait for a lock, and a commit for a synchronous standby, as long as the server likes. A commit
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
                let mut pause = self.left() + GRACE;
                while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                    cancel();
                    pause = CANCEL_EVERY;
                }
            })?;
            let result = work();
            drop(done);
            result
        });
        result.map_err(|failure| {
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

    #[test]
    fn work_that_ends_in_time_is_not_waited_for() {
        let deadline = Deadline::after(Duration::from_secs(3600));
        assert_eq!(deadline.enforce(&[], || Ok(7)).ok(), Some(7));
        assert!(deadline.check().is_ok() && !deadline.is_over());
    }

    #[test]
    fn a_loop_that_looks_at_the_deadline_is_not_disturbed() {
        let begun = Instant::now();
        let (canceled, cancels) = unbounded();
        let canceled = || canceled.send(begun.elapsed()).unwrap_or_default();
        let first = Deadline::after(Duration::ZERO)
            .enforce_by(&canceled, || Ok(cancels.recv().unwrap_or_default()));
        assert!(first.is_ok_and(|first| first >= GRACE));
    }

    #[test]
    fn a_statement_that_was_canceled_names_the_deadline() {
        let canceled = |sqlstate: &str| {
            let mut failure = Failure::new(Class::Subscriber, "a statement failed");
            failure.sqlstate = Some(sqlstate.to_owned());
            failure
        };
        let hint = |sqlstate: &str, deadline: Deadline| {
            let failed = deadline.enforce::<()>(&[], || Err(canceled(sqlstate)));
            failed.err().and_then(|failure| failure.hint)
        };
        let over = Deadline::after(Duration::ZERO);
        assert!(hint("57014", over).is_some_and(|hint| hint.contains("--deadline")));
        assert_eq!(hint("42501", over), None);
        assert_eq!(hint("57014", Deadline::after(Duration::from_secs(3600))), None);
        assert_eq!(over.check().map_err(|failure| failure.class), Err(Class::Behind));
    }
}
