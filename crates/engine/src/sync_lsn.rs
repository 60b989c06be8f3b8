//! Which changes of a table its initial copy already contains.
//!
//! The copy contains everything that had committed at the consistent point of its snapshot. A
//! change must be applied if its transaction commits at or after that point, that is, if the commit
//! record starts there. Earlier changes are in the copy.

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

/// Whether the subscriber has already applied a transaction: its commit record starts before the
/// progress.
///
/// The progress is always the end of a commit record, or a position before which all transactions
/// were skipped or applied. So a commit record that starts before it also ends at or before it.
#[must_use]
pub fn already_applied(commit_lsn: Lsn, progress: Lsn) -> bool {
    commit_lsn < progress
}
