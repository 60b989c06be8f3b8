//! Rows that an update or delete did not find: counted and logged with their keys, as natively.

use std::time::{Duration, Instant};

use crate::error::Offender;

/// Lines per second that are written in full; the rest are counted in one line.
const LINES_PER_SECOND: u32 = 20;

/// Writes missing rows to the log without drowning it.
#[derive(Debug)]
pub(crate) struct MissingLog {
    subscription: String,
    second: Instant,
    lines: u32,
    suppressed: u64,
}

impl MissingLog {
    pub(crate) fn new(subscription: &str) -> Self {
        Self {
            subscription: subscription.to_owned(),
            second: Instant::now(),
            lines: 0,
            suppressed: 0,
        }
    }

    /// Logs one missing row of a transaction that has committed.
    pub(crate) fn log(&mut self, offender: &Offender) {
        if self.second.elapsed() >= Duration::from_secs(1) {
            self.flush();
            self.second = Instant::now();
            self.lines = 0;
        }
        if self.lines == LINES_PER_SECOND {
            self.suppressed += 1;
            return;
        }
        self.lines += 1;
        tracing::warn!(
            subscription = self.subscription,
            conflict = if offender.operation == "UPDATE" { "update_missing" } else { "delete_missing" },
            table = offender.table.as_deref().unwrap_or_default(),
            key = offender.key.as_deref().unwrap_or_default(),
            lsn = %offender.commit_lsn,
            xid = %offender.xid,
            "conflict: the row to be changed is not on the target, the change is skipped"
        );
    }

    /// Counts missing rows that are not named.
    pub(crate) fn suppress(&mut self, rows: u64) {
        self.suppressed += rows;
    }

    /// Says how many lines were left out.
    pub(crate) fn flush(&mut self) {
        if self.suppressed > 0 {
            tracing::warn!(
                subscription = self.subscription,
                count = self.suppressed,
                "more conflicts of missing rows in the last second; all are counted in status"
            );
            self.suppressed = 0;
        }
    }
}

impl Drop for MissingLog {
    fn drop(&mut self) {
        self.flush();
    }
}
