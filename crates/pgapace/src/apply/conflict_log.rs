//! Logs conflicts: rows that an UPDATE or DELETE did not find, and decisions of conflict rules.

use std::time::{Duration, Instant};

use crate::subscriber::conflict::ConflictType;
use crate::subscriber::state::conflicts::Conflict;

/// So many conflicts per second are logged one by one; the rest are counted in one line.
const LINES_PER_SECOND: u32 = 20;

/// Logs conflicts, only a limited number per second.
#[derive(Debug)]
pub(crate) struct ConflictLog {
    subscription: String,
    second: Instant,
    lines: u32,
    suppressed: u64,
}

impl ConflictLog {
    pub(crate) fn new(subscription: &str) -> Self {
        Self {
            subscription: subscription.to_owned(),
            second: Instant::now(),
            lines: 0,
            suppressed: 0,
        }
    }

    /// Logs a conflict of a committed transaction. Returns false if it was only counted.
    pub(crate) fn log(&mut self, conflict: &Conflict) -> bool {
        let Conflict { kind, applied, offender, .. } = conflict;
        if self.second.elapsed() >= Duration::from_secs(1) {
            self.flush();
            self.second = Instant::now();
            self.lines = 0;
        }
        if self.lines == LINES_PER_SECOND {
            self.suppressed += 1;
            return false;
        }
        self.lines += 1;
        let missing = matches!(kind, ConflictType::UpdateMissing | ConflictType::DeleteMissing);
        tracing::warn!(
            event = "conflict",
            subscription = self.subscription,
            conflict = kind.name(),
            action = match (missing, *applied) {
                (_, false) => "skipped",
                (true, true) => "inserted",
                (false, true) => "replaced",
            },
            table = offender.table.as_deref().unwrap_or_default(),
            key = offender.key.as_deref().unwrap_or_default(),
            lsn = %offender.commit_lsn,
            xid = %offender.xid,
            "conflict detected on table"
        );
        true
    }

    /// Counts conflicts that are not logged one by one.
    pub(crate) fn suppress(&mut self, rows: u64) {
        self.suppressed += rows;
    }

    /// Logs how many conflicts were only counted.
    pub(crate) fn flush(&mut self) {
        if self.suppressed > 0 {
            tracing::warn!(
                event = "conflicts_not_logged",
                subscription = self.subscription,
                count = self.suppressed,
                "more conflicts were detected in the last second than are logged"
            );
            self.suppressed = 0;
        }
    }
}

impl Drop for ConflictLog {
    fn drop(&mut self) {
        self.flush();
    }
}
