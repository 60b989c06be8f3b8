//! Tables whose copy has failed. They are copied again, after increasing pauses.

use std::time::{Duration, Instant};

use engine::table_name::TableName;
use rustc_hash::{FxHashMap, FxHashSet};

/// Longest time before a table whose copy failed is copied again.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// A table whose copy has failed.
#[derive(Debug)]
struct FailedCopy {
    again: Instant,
    /// The pause after the next failure.
    pause: Duration,
}

/// The tables whose last copy has failed.
#[derive(Debug, Default)]
pub(super) struct FailedCopies(FxHashMap<TableName, FailedCopy>);

impl FailedCopies {
    /// The copy of a table has failed. `first` is the first pause of a table.
    pub(super) fn add(&mut self, name: &TableName, first: Duration, now: Instant) {
        let failed = self.0.entry(name.clone()).or_insert(FailedCopy { again: now, pause: first });
        failed.again = now + failed.pause;
        failed.pause = (failed.pause * 2).min(LONGEST_PAUSE);
    }

    /// The copy of a table has succeeded.
    pub(super) fn remove(&mut self, name: &TableName) {
        self.0.remove(name);
    }

    /// Whether the pause of a table has ended since then.
    pub(super) fn came_due(&self, since: Instant, now: Instant) -> bool {
        self.0.values().any(|failed| since < failed.again && failed.again <= now)
    }

    /// The tables whose pause has not ended.
    pub(super) fn not_due(&self, now: Instant) -> FxHashSet<TableName> {
        let not_due = self.0.iter().filter(|(_, failed)| failed.again > now);
        not_due.map(|(name, _)| name.clone()).collect()
    }
}
