//! Waits of several sessions, as another thread sees them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Counts the waits of all sessions that share it. A thread that uses sessions is alive while one of them
/// waits for its server, and as long as waits end.
#[derive(Debug, Clone, Default)]
pub struct Activity(Arc<Waits>);

#[derive(Debug, Default)]
struct Waits {
    now: AtomicUsize,
    ended: AtomicU64,
}

impl Activity {
    /// Whether a session waits for its server now.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.0.now.load(Ordering::Relaxed) > 0
    }

    /// How many waits have ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.0.ended.load(Ordering::Relaxed)
    }

    /// Counts work that has no session as a wait that has ended.
    pub fn note(&self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a wait until the answer is dropped.
    pub(crate) fn wait(&self) -> ActivityWait {
        self.0.now.fetch_add(1, Ordering::Relaxed);
        ActivityWait(self.clone())
    }
}

/// A wait that has begun.
pub(crate) struct ActivityWait(Activity);

impl Drop for ActivityWait {
    fn drop(&mut self) {
        self.0.note();
        self.0.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}
