//! The positions that the publisher may be told: the leader writes them, the receiver sends them.

use std::sync::{Arc, Mutex, PoisonError};

use engine::progress::Positions;

/// What [`Feedback::set`] has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    Nothing,
    /// More was received, and nothing else.
    Receipt,
    /// More was applied, or is durable.
    Progress,
}

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

    /// Sets the positions; returns which of them changed.
    pub(crate) fn set(&self, positions: Positions) -> Change {
        let mut current = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *current, positions);
        if before == positions {
            Change::Nothing
        } else if (Positions { write: positions.write, ..before }) == positions {
            Change::Receipt
        } else {
            Change::Progress
        }
    }

    pub(crate) fn get(&self) -> Positions {
        *self.positions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
