//! The positions that the publisher may be told: the leader writes them, the receiver sends them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::progress::Positions;
use pgoutput::Lsn;

/// Shared positions. A mutex is enough: it is taken once per batch, only to copy a few integers
/// that must be read together.
#[derive(Debug, Clone)]
pub(crate) struct Feedback(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    /// As the leader has set them.
    positions: Positions,
    /// The receiver has read everything before, whether or not the leader has.
    read: Lsn,
}

impl Known {
    fn positions(&self) -> Positions {
        Positions { write: self.positions.write.max(self.read), ..self.positions }
    }
}

impl Feedback {
    pub(crate) fn new(positions: Positions) -> Self {
        Self(Arc::new(Mutex::new(Known { positions, read: positions.write })))
    }

    /// Sets the positions; returns whether there is anything new for the publisher.
    pub(crate) fn set(&self, positions: Positions) -> bool {
        let mut known = self.lock();
        let before = known.positions();
        known.positions = positions;
        known.positions() != before
    }

    /// Everything before this position was read.
    pub(crate) fn read(&self, lsn: Lsn) {
        let mut known = self.lock();
        known.read = known.read.max(lsn);
    }

    pub(crate) fn get(&self) -> Positions {
        self.lock().positions()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Feedback, Lsn, Positions};

    fn positions(write: u64, applied: u64) -> Positions {
        Positions { write: Lsn(write), flush: Lsn(applied), apply: Lsn(applied) }
    }

    /// What the receiver has told the publisher by itself is nothing new when the leader gets there.
    #[test]
    fn a_receipt_is_news_once() {
        let feedback = Feedback::new(positions(10, 10));
        feedback.read(Lsn(30));
        assert_eq!(feedback.get(), positions(30, 10));
        assert!(!feedback.set(positions(20, 10)));
        assert!(!feedback.set(positions(30, 10)));
        assert!(feedback.set(positions(30, 20)));
        assert!(feedback.set(positions(40, 20)));
        assert_eq!(feedback.get(), positions(40, 20));
    }
}
