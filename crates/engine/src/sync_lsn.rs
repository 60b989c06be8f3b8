//! Which changes of a table are already in its initial copy.
//!
//! A copied table holds everything that had committed at its snapshot's consistent point. A
//! change passes the sync LSN if its transaction commits at or after that point (the commit record
//! starts at or after it); earlier ones are in the copy.

use pgoutput::Lsn;

/// The consistent point of the snapshot from which a table was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SyncLsn(pub Lsn);

impl SyncLsn {
    /// Whether a change of a transaction with this commit LSN must be applied.
    #[must_use]
    pub fn passes(self, commit_lsn: Lsn) -> bool {
        commit_lsn >= self.0
    }
}

/// Whether a transaction is already in the subscriber: its commit record starts before the progress.
///
/// Progress is always the end of a commit record or a position that only skipped work precedes,
/// so a commit record that starts before it also ends at or before it.
#[must_use]
pub fn already_applied(commit_lsn: Lsn, progress: Lsn) -> bool {
    commit_lsn < progress
}
