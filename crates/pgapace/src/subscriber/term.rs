//! Terms, in which the statements of a table expect what was found in its changes before.
//!
//! *Missing rows.* A set statement that finds fewer rows than it must does not say which are missing. Its group would be
//! halved and then applied by rows to find out. Where a user deletes old rows on the subscriber, rows are
//! missing again and again, and no group would be applied as sets any more. So after a row was missing, the
//! statements of its table return the numbers of the rows that they did not find for a while
//! ([`Check::Listed`](crate::subscriber::statement::cache::Check)), and the group goes on. Such a statement
//! takes the subscriber some 2 µs more for each row. Without a key, equal rows can make it impossible to say which are
//! missing ([`Seeks`](engine::net::Seeks)). Then the group is halved.
//!
//! *Changes of identity columns* that are GENERATED ALWAYS on the subscriber, beside the key. UPDATE cannot set such a
//! column, and pgoutput does not tell whether it has changed. So a set of updates finds only the rows where it has not,
//! and if there are fewer than sent, the group is applied by rows: the row of such a change is deleted and inserted
//! again. After such a change, the updates of the table are *moves* for a while
//! ([`set::moving`](crate::subscriber::statement::set)), which tell these rows from others, and cost more.

use std::sync::atomic::{AtomicU32, Ordering};

/// Statements without another find, after which it is not expected any more.
const STATEMENTS: u32 = 256;

/// Whether something is expected, for so many more statements.
#[derive(Debug, Default)]
pub(crate) struct Term {
    /// Workers set and count it. Nothing else depends on it: a term decides only how statements are executed, and either
    /// way leads to the same rows and conflicts.
    statements_left: AtomicU32,
}

impl Term {
    pub(crate) fn runs(&self) -> bool {
        self.statements_left.load(Ordering::Relaxed) > 0
    }

    /// It was found: the term begins, or begins again.
    pub(crate) fn begin(&self) {
        self.statements_left.store(STATEMENTS, Ordering::Relaxed);
    }

    /// A statement was executed that expected it.
    pub(crate) fn count_statement(&self) {
        // Two workers may count the same statement as one: the term is a little longer then.
        let left = self.statements_left.load(Ordering::Relaxed);
        self.statements_left.store(left.saturating_sub(1), Ordering::Relaxed);
    }
}
