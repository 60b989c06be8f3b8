//! Logs the number of workers in use when it changes.

use engine::dispatch::scaling::{Decision, Reason};

/// The decisions that were logged.
#[derive(Debug, Default)]
pub(super) struct ReportedWorkers {
    last: Option<Decision>,
    /// The last number at level info.
    named: u16,
}

impl ReportedWorkers {
    /// Logs a decision that is new; at level info if the number has changed by half or more.
    pub(super) fn look(&mut self, decision: Decision, subscription: &str) {
        if self.last.replace(decision) == Some(decision) {
            return;
        }
        let Decision { workers, reason } = decision;
        tracing::debug!(subscription, workers, ?reason, "apply workers in use");
        if !matches!(reason, Reason::Measured { .. }) {
            return;
        }
        let before = std::mem::replace(&mut self.named, workers).max(1);
        if workers >= 2 * before || 2 * workers <= before {
            tracing::info!(
                event = "apply_workers_changed",
                subscription,
                workers,
                before,
                "number of apply workers in use has changed"
            );
        } else {
            self.named = before;
        }
    }
}
