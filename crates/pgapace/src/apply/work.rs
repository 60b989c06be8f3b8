//! What the leader hands to a worker.

use std::sync::Arc;

use engine::group::Size;
use engine::net::Fold;
use engine::transaction::TransactionPart;
use pgoutput::Lsn;

use crate::target::mapping::TableMap;

/// A part of a transaction, with the target tables of its relations.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) part: TransactionPart,
    /// By index of `part.relations()`; `None` where the changes are not to be applied (already in
    /// the initial copy, or a table of ours).
    pub(crate) tables: Vec<Option<Arc<TableMap>>>,
    /// The progress that must be committed before this transaction.
    pub(crate) predecessor: Lsn,
}

impl Work {
    /// Whether it is a transaction from beginning to end.
    pub(crate) fn is_whole(&self) -> bool {
        self.part.first && self.part.end_lsn.is_some()
    }

    pub(crate) fn size(&self) -> Size {
        Size {
            changes: self.part.len(),
            bytes: self.part.bytes(),
            whole: self.is_whole(),
            by_rows: self.runs_user_code(),
        }
    }

    /// Whether code of users may run on the target. It may look at where transactions end: a
    /// deferred constraint trigger runs there.
    pub(crate) fn runs_user_code(&self) -> bool {
        self.tables.iter().flatten().any(|map| map.rules.fold == Fold::Never { barrier: true })
    }
}

/// How a group is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One target transaction: net changes, as sets where that means the same.
    Net,
    /// One target transaction per source transaction, one statement per change in stream order:
    /// what the net changes are judged by, and what names an offender exactly.
    Rows,
}

/// Adjacent committed transactions, or one part of a larger one, in commit order; never empty.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) works: Vec<Work>,
    pub(crate) mode: Mode,
}

impl Group {
    /// Whether it holds whole transactions, so that it can be carried out again.
    pub(crate) fn is_whole(&self) -> bool {
        self.works.iter().all(Work::is_whole)
    }

    /// The commit LSN of its last transaction.
    pub(crate) fn last_commit(&self) -> Lsn {
        self.works.last().map_or(Lsn::INVALID, |work| work.part.head.commit_lsn)
    }

    pub(crate) fn changes(&self) -> usize {
        self.works.iter().map(|work| work.part.len()).sum()
    }
}
