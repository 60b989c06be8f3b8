//! Sessions that may wait for a lock without a group of the leader.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::apply::blockers::Pulse;

/// A session in which its thread may be blocked.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) pid: i32,
    pub(crate) pulse: Pulse,
    /// The session's name in the log.
    pub(crate) name: &'static str,
}

/// The sessions of the subscriber that copy tables beside the stream. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct CopyWatch(Arc<Mutex<Vec<i32>>>);

impl CopyWatch {
    /// The monitor looks at the session of this backend until the result is dropped.
    pub(crate) fn watch(&self, pid: i32) -> WatchedCopy {
        self.backends().push(pid);
        WatchedCopy { of: self.clone(), pid }
    }

    pub(super) fn pids(&self) -> Vec<i32> {
        self.backends().clone()
    }

    fn backends(&self) -> MutexGuard<'_, Vec<i32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session that is watched while it copies.
#[derive(Debug)]
pub(crate) struct WatchedCopy {
    of: CopyWatch,
    pid: i32,
}

impl Drop for WatchedCopy {
    fn drop(&mut self) {
        self.of.backends().retain(|pid| *pid != self.pid);
    }
}
