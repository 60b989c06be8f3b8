//! Signs of life of a thread with its own session.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A working thread gives a sign of life at least every tenth of a second. Without one for so long, it may wait
/// for the server.
const STALE: Duration = Duration::from_millis(400);
/// The thread sleeps and needs no sign of life.
const AT_REST: u64 = u64::MAX;

/// A thread's sign of life. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Pulse(Arc<Beat>);

#[derive(Debug)]
struct Beat {
    from: Instant,
    /// When the last sign of life was given, in milliseconds after `from`.
    last: AtomicU64,
}

impl Default for Pulse {
    fn default() -> Self {
        Self(Arc::new(Beat { from: Instant::now(), last: AtomicU64::new(AT_REST) }))
    }
}

impl Pulse {
    /// The thread works.
    pub(crate) fn beat(&self) {
        self.0.last.store(self.now(), Ordering::Relaxed);
    }

    /// The thread goes to sleep for an unknown time.
    pub(crate) fn rest(&self) {
        self.0.last.store(AT_REST, Ordering::Relaxed);
    }

    /// Whether a sign of life is overdue.
    pub(super) fn is_stale(&self) -> bool {
        self.is_silent_for(STALE)
    }

    /// Whether the thread has worked for so long without a sign of life.
    pub(crate) fn is_silent_for(&self, time: Duration) -> bool {
        let last = self.0.last.load(Ordering::Relaxed);
        let limit = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        last != AT_REST && self.now().saturating_sub(last) > limit
    }

    fn now(&self) -> u64 {
        u64::try_from(self.0.from.elapsed().as_millis()).unwrap_or(AT_REST - 1)
    }
}
