//! May a publisher's timeline be followed from where we are?
//!
//! After a failover the publisher continues on a new timeline that left the old one at a switch
//! point. If we have applied beyond that point, the promoted standby lacks transactions that the
//! target has: following it would silently diverge.

use pgoutput::Lsn;
use thiserror::Error;

/// A timeline id of PostgreSQL, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timeline(pub u32);

/// Why a publisher's history cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// We have applied beyond the point where the new timeline branched off.
    #[error(
        "the publisher is on timeline {current}, which left timeline {recorded} at {switch}, \
         but the target has applied up to {progress}: the promoted server lacks what was applied"
    )]
    Diverged {
        /// Timeline that our progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
        /// Where the new one left ours.
        switch: Lsn,
        /// What the target has.
        progress: Lsn,
    },
    /// The publisher's timeline does not descend from ours.
    #[error("timeline {recorded} of our progress is not in the history of timeline {current}")]
    Unrelated {
        /// Timeline that our progress belongs to.
        recorded: u32,
        /// Timeline of the publisher now.
        current: u32,
    },
    /// The history file has a line that is no history.
    #[error("cannot read line {line} of the timeline history: {text:?}")]
    Unreadable {
        /// Line number from 1.
        line: usize,
        /// The line.
        text: String,
    },
}

/// Checks progress on `recorded` against a publisher on `current` with this history file.
///
/// The format is that of `src/backend/access/transam/timeline.c`: parent timeline, switch point
/// and a reason, separated by tabs; `#` starts a comment.
///
/// # Errors
/// When the publisher's history does not contain all that was applied.
pub fn check_history(
    recorded: Timeline,
    progress: Lsn,
    current: Timeline,
    history: &str,
) -> Result<(), HistoryError> {
    if recorded == current {
        return Ok(());
    }
    for (index, text) in history.lines().enumerate() {
        let trimmed = text.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let unreadable = || HistoryError::Unreadable { line: index + 1, text: text.to_owned() };
        let mut fields = trimmed.split_whitespace();
        let parent: u32 = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        let switch: Lsn = fields.next().and_then(|f| f.parse().ok()).ok_or_else(unreadable)?;
        if parent == recorded.0 {
            if progress <= switch {
                return Ok(());
            }
            return Err(HistoryError::Diverged {
                recorded: recorded.0,
                current: current.0,
                switch,
                progress,
            });
        }
    }
    Err(HistoryError::Unrelated { recorded: recorded.0, current: current.0 })
}

#[cfg(test)]
mod tests {
    use super::{HistoryError, Timeline, check_history};
    use pgoutput::Lsn;

    const HISTORY: &str = "1\t0/3000060\tno recovery target specified\n\n2\t0/5000000\tpromoted\n";

    fn check(recorded: u32, progress: u64, current: u32) -> Result<(), HistoryError> {
        check_history(Timeline(recorded), Lsn(progress), Timeline(current), HISTORY)
    }

    #[test]
    fn same_timeline_needs_no_history() {
        assert!(check_history(Timeline(3), Lsn(u64::MAX), Timeline(3), "garbage").is_ok());
    }

    #[test]
    fn progress_up_to_the_switch_point_may_follow() {
        assert_eq!(check(1, 0x0300_0060, 3), Ok(()));
        assert_eq!(check(2, 0x0400_0000, 3), Ok(()));
    }

    #[test]
    fn progress_beyond_the_switch_point_diverged() {
        assert!(matches!(check(1, 0x0300_0061, 3), Err(HistoryError::Diverged { .. })));
    }

    #[test]
    fn an_unknown_timeline_is_unrelated() {
        assert!(matches!(check(9, 0, 3), Err(HistoryError::Unrelated { .. })));
    }

    #[test]
    fn an_unreadable_line_is_an_error() {
        let result = check_history(Timeline(1), Lsn(1), Timeline(2), "x\t0/1\n");
        assert!(matches!(result, Err(HistoryError::Unreadable { line: 1, .. })));
    }
}
