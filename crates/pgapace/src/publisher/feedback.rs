//! The positions that the publisher may be told: the leader writes them, the receiver sends them.

use std::sync::{Arc, Mutex, PoisonError};

use engine::progress::Positions;

/// Shared positions. A mutex is enough: it is taken once per batch, only to copy three integers
/// that must be read together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Feedback {
    positions: Arc<Mutex<Positions>>,
}

impl Feedback {
    pub(crate) fn new(positions: Positions) -> Self {
        Self { positions: Arc::new(Mutex::new(positions)) }
    }

    /// Sets the positions; returns whether they changed.
    pub(crate) fn set(&self, positions: Positions) -> bool {
        let mut current = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *current != positions;
        *current = positions;
        changed
    }

    pub(crate) fn get(&self) -> Positions {
        *self.positions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
