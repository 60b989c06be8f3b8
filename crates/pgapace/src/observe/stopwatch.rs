//! How long a thread waits, by reason.
//!
//! A thread reports when it begins to wait and when it wakes. The clock is read then, and only if the
//! reason has changed. Another thread collects the times, with that of the current wait, so that a
//! stuck subscription is visible.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::subscriber::state::statistics::WaitTimes;

/// The reasons for which a thread waits. See [`WaitTimes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Dependency,
    CommitOrder,
    SubscriberLock,
    Worker,
    Memory,
    Publisher,
    Subscriber,
    Idle,
}

impl Reason {
    /// The name, as in [`WaitTimes`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dependency => "dependency",
            Self::CommitOrder => "commit_order",
            Self::SubscriberLock => "subscriber_lock",
            Self::Worker => "worker",
            Self::Memory => "memory",
            Self::Publisher => "publisher",
            Self::Subscriber => "subscriber",
            Self::Idle => "idle",
        }
    }
}

/// The stopwatch of one thread; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stopwatch(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Time waited and not yet collected.
    waited: WaitTimes,
    running: Option<(Reason, Instant)>,
}

impl Stopwatch {
    /// From now on the thread waits for this, or for nothing.
    pub(crate) fn set(&self, reason: Option<Reason>) {
        let mut state = self.state();
        if state.running.map(|(reason, _)| reason) != reason {
            state.set(reason, Instant::now());
        }
    }

    /// Counts the time of `work` as a wait for this.
    pub(crate) fn during<T>(&self, reason: Reason, work: impl FnOnce() -> T) -> T {
        let before = self.reason();
        self.set(Some(reason));
        let done = work();
        self.set(before);
        done
    }

    /// The reason for which the thread waits now; `None` while it does not wait.
    pub(crate) fn reason(&self) -> Option<Reason> {
        self.state().running.map(|(reason, _)| reason)
    }

    /// Takes the time waited since the last call, by reason.
    pub(crate) fn take(&self) -> WaitTimes {
        self.state().take(Instant::now())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn set(&mut self, reason: Option<Reason>, now: Instant) {
        if let Some((reason, since)) = self.running {
            *self.waited.of(reason) += now.saturating_duration_since(since);
        }
        self.running = reason.map(|reason| (reason, now));
    }

    fn take(&mut self, now: Instant) -> WaitTimes {
        self.set(self.running.map(|(reason, _)| reason), now);
        std::mem::take(&mut self.waited)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Reason, State};
    use crate::subscriber::state::statistics::WaitTimes;

    #[test]
    fn a_wait_is_collected_in_pieces_and_never_twice() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut state = State::default();
        state.set(Some(Reason::Publisher), at(0));
        let publisher =
            |seconds| WaitTimes { publisher: Duration::from_secs(seconds), ..WaitTimes::default() };
        assert_eq!(state.take(at(3)), publisher(3));
        state.set(None, at(5));
        state.set(Some(Reason::Worker), at(10));
        state.set(Some(Reason::Memory), at(11));
        let both = WaitTimes {
            worker: Duration::from_secs(1),
            memory: Duration::from_secs(4),
            ..publisher(2)
        };
        assert_eq!(state.take(at(15)), both);
        state.set(None, at(15));
        assert_eq!(state.take(at(99)), WaitTimes::default());
    }
}
