//! Whether a thread with a session of its own is stuck.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A thread that works says so at least every tenth of a second; one that has not for so many
/// milliseconds may wait for the server.
const STALE: u64 = 400;
/// The thread sleeps, and waits for nobody.
const AT_REST: u64 = u64::MAX;

/// A thread's sign of life; its clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Pulse(Arc<Beat>);

#[derive(Debug)]
struct Beat {
    from: Instant,
    /// Milliseconds after that, of the last sign of life.
    last: AtomicU64,
}

impl Default for Pulse {
    fn default() -> Self {
        Self(Arc::new(Beat { from: Instant::now(), last: AtomicU64::new(AT_REST) }))
    }
}

impl Pulse {
    /// The thread goes on working.
    pub(crate) fn beat(&self) {
        self.0.last.store(self.now(), Ordering::Relaxed);
    }

    /// The thread goes to sleep, for as long as it takes.
    pub(crate) fn rest(&self) {
        self.0.last.store(AT_REST, Ordering::Relaxed);
    }

    /// Whether the thread should have shown that it lives.
    pub(super) fn is_stale(&self) -> bool {
        let last = self.0.last.load(Ordering::Relaxed);
        last != AT_REST && self.now().saturating_sub(last) > STALE
    }

    fn now(&self) -> u64 {
        u64::try_from(self.0.from.elapsed().as_millis()).unwrap_or(AT_REST - 1)
    }
}
