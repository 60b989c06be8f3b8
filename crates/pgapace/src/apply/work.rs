//! What the leader hands to a worker.

use std::sync::Arc;

use engine::group::Size;
use engine::net::Fold;
use engine::transaction::TransactionPart;
use engine::worker::Task;
use pgoutput::Lsn;

use crate::target::conflict::TablePolicy;
use crate::target::mapping::TableMap;
use crate::target::state::prepared::PreparedHere;

/// A step of a transaction that is prepared on the target: a target transaction of its own kind.
#[derive(Debug, Clone)]
pub(crate) enum TwoPhase {
    /// The changes of the part are prepared.
    Prepare(Arc<PreparedHere>),
    /// What was prepared is committed. The part has no changes.
    Commit(Arc<PreparedHere>),
    /// What was prepared is rolled back. The part has no changes.
    Rollback(Arc<PreparedHere>),
}

/// What a worker is handed.
pub(crate) type Group = engine::worker::Group<Work>;

/// A part of a transaction, with the target tables of its relations.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) part: TransactionPart,
    /// By index of `part.relations()`; `None` where the changes are not to be applied (already in
    /// the initial copy, or a table of ours).
    pub(crate) tables: Vec<Option<Arc<TableMap>>>,
    /// The progress before this transaction.
    pub(crate) predecessor: Lsn,
    /// The transaction before it was applied in an earlier run: a progress row stands for adjacent
    /// transactions, so a group cannot reach over it.
    pub(crate) after_applied: bool,
    /// `None` for an ordinary transaction.
    pub(crate) two_phase: Option<TwoPhase>,
}

impl Task for Work {
    fn end(&self) -> Option<Lsn> {
        self.part.end_lsn
    }

    fn commit_lsn(&self) -> Lsn {
        self.part.head.commit_lsn
    }

    fn length(&self) -> usize {
        self.part.len()
    }

    fn is_whole(&self) -> bool {
        self.is_one_part() && self.two_phase.is_none()
    }

    fn runs_user_code(&self) -> bool {
        self.tables.iter().flatten().any(|map| map.rules.fold == Fold::Never { barrier: true })
    }

    fn is_under_rules(&self) -> bool {
        self.tables.iter().flatten().any(|map| map.conflicts.is_some())
    }

    fn is_step(&self) -> bool {
        self.two_phase.is_some()
    }

    fn is_prepared_at_once(&self) -> bool {
        self.is_one_part() && matches!(self.two_phase, Some(TwoPhase::Prepare(_)))
    }
}

impl Work {
    fn is_one_part(&self) -> bool {
        self.part.first && self.part.end_lsn.is_some()
    }

    pub(crate) fn size(&self) -> Size {
        Size {
            changes: self.part.len(),
            bytes: self.part.bytes(),
            whole: self.is_whole(),
            by_rows: self.is_alone(),
            starts_group: self.after_applied,
        }
    }

    /// Whether it must be committed alone, as the publisher committed it.
    pub(crate) fn is_alone(&self) -> bool {
        let timed = |map: &Arc<TableMap>| map.conflicts.as_ref().is_some_and(TablePolicy::is_timed);
        self.runs_user_code() || self.tables.iter().flatten().any(timed)
    }
}
