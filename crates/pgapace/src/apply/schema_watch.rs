//! The times at which pgapace looks whether the subscriber's tables have changed.

use std::time::{Duration, Instant};

use pgoutput::Lsn;

/// Shortest time between two looks.
const INTERVAL: Duration = Duration::from_secs(2);
/// A look may take this share of the time: with very many tables it is made less often.
const SHARE: u32 = 20;

/// Decides when the next look is due: only when something was applied since the last one.
#[derive(Debug)]
pub(crate) struct SchemaWatch {
    asked: Instant,
    pause: Duration,
    waiting: bool,
    applied: Lsn,
}

impl SchemaWatch {
    pub(crate) fn new() -> Self {
        Self { asked: Instant::now(), pause: INTERVAL, waiting: false, applied: Lsn::INVALID }
    }

    /// Whether to look now; if so, an answer follows.
    pub(crate) fn is_due(&mut self, applied: Lsn) -> bool {
        if self.waiting || applied == self.applied || self.asked.elapsed() < self.pause {
            return false;
        }
        self.applied = applied;
        self.asked = Instant::now();
        self.waiting = true;
        true
    }

    /// The answer has come.
    pub(crate) fn answered(&mut self) {
        self.waiting = false;
        self.pause = INTERVAL.max(self.asked.elapsed() * SHARE);
    }
}
