//! Changes of columns of a table that are GENERATED ALWAYS AS IDENTITY on the subscriber, beside its key.
//!
//! UPDATE cannot set such a column, and pgoutput does not tell whether it has changed. So a set of updates finds only
//! the rows where it has not, and if there are fewer than sent, the group is applied by rows: the row of such a change
//! is deleted and inserted again. After such a change, the updates of the table are *moves* for a while
//! ([`set::moving`](crate::subscriber::statement::set)), which tell these rows from others, and cost more.

use std::sync::atomic::{AtomicU32, Ordering};

/// Statements with moves, after which updates are tried again.
const TERM: u32 = 256;

/// Whether identity columns of a table are expected to change.
#[derive(Debug, Default)]
pub(crate) struct IdentityChanges {
    /// Workers set and count it. Nothing else depends on it: both ways lead to the same rows.
    statements_left: AtomicU32,
}

impl IdentityChanges {
    pub(crate) fn are_expected(&self) -> bool {
        self.statements_left.load(Ordering::Relaxed) > 0
    }

    /// An update has changed an identity column.
    pub(crate) fn found(&self) {
        self.statements_left.store(TERM, Ordering::Relaxed);
    }

    /// Updates are executed as moves once more.
    pub(crate) fn moved(&self) {
        // Two workers may count the same statement as one: the term is a little longer then.
        let left = self.statements_left.load(Ordering::Relaxed);
        self.statements_left.store(left.saturating_sub(1), Ordering::Relaxed);
    }
}
