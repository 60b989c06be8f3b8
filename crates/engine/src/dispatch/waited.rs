//! How long work has waited for a worker.

use std::time::Duration;

/// The time in which work waited since a measurement began.
#[derive(Debug, Default)]
pub(super) struct Waited {
    /// Since when it waits now.
    since: Option<Duration>,
    /// How long it waited before that.
    before: Duration,
}

impl Waited {
    /// Whether work waits from now on.
    pub(super) fn note(&mut self, waits: bool, now: Duration) {
        match (self.since, waits) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.before += now.saturating_sub(since);
                self.since = None;
            }
            _ => {}
        }
    }

    /// A measurement begins.
    pub(super) fn restart(&mut self, now: Duration) {
        self.before = Duration::ZERO;
        if let Some(since) = &mut self.since {
            *since = now;
        }
    }

    /// The time until now.
    pub(super) fn until(&self, now: Duration) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }
}
