//! A job that the leader has done again and again, and never twice at once.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct PeriodicJob {
    /// `None` while it is being done.
    due: Option<Instant>,
}

impl PeriodicJob {
    /// A job that is due at `first`.
    pub(super) fn new(first: Instant) -> Self {
        Self { due: Some(first) }
    }

    /// Whether the job is due. Then it is being done from now on, until [`Self::ended`].
    pub(super) fn begins(&mut self) -> bool {
        self.due.take_if(|due| *due <= Instant::now()).is_some()
    }

    /// The job has ended, and is due again after `pause`.
    pub(super) fn ended(&mut self, pause: Duration) {
        self.due = Some(Instant::now() + pause);
    }
}
