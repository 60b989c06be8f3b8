//! Rows of a table that are missing on the subscriber, and that changes look for all the same.
//!
//! A set statement that finds fewer rows than it must does not say which are missing. Its group would be
//! halved and then applied by rows to find out. Where a user deletes old rows on the subscriber, rows are
//! missing again and again, and no group would be applied as sets any more. So after a row was missing, the
//! statements of its table return the numbers of the rows that they did not find for a while
//! ([`Check::Listed`](crate::subscriber::statement::cache::Check)), and the group goes on. Such a statement
//! takes the subscriber some 2 µs more for each row.

use std::sync::atomic::{AtomicU32, Ordering};

/// Statements that find all of their rows, after which the table's statements list nothing any more.
const TERM: u32 = 256;

/// Whether rows of a table are expected to be missing.
#[derive(Debug, Default)]
pub(crate) struct MissingRows {
    /// Workers set and count it. Nothing else depends on it: both ways lead to the same rows and conflicts.
    statements_left: AtomicU32,
}

impl MissingRows {
    /// Whether statements list the rows that they do not find.
    pub(crate) fn are_expected(&self) -> bool {
        self.statements_left.load(Ordering::Relaxed) > 0
    }

    /// A row was missing.
    pub(crate) fn found(&self) {
        self.statements_left.store(TERM, Ordering::Relaxed);
    }

    /// A statement that lists them found every row.
    pub(crate) fn found_none(&self) {
        // Two workers may count the same statement as one: the term is a little longer then.
        let left = self.statements_left.load(Ordering::Relaxed);
        self.statements_left.store(left.saturating_sub(1), Ordering::Relaxed);
    }
}
