//! What the leader hands to a worker.

use std::sync::Arc;

use engine::group::{GroupSeq, Size};
use engine::net::Fold;
use engine::order::Waits;
use engine::transaction::TransactionPart;
use pgoutput::Lsn;

use crate::apply::conflicts;
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

impl Work {
    /// Whether it is a transaction from beginning to end, which can be carried out again.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_one_part() && self.two_phase.is_none()
    }

    fn is_one_part(&self) -> bool {
        self.part.first && self.part.end_lsn.is_some()
    }

    /// Whether it is to be prepared, and all of it is here.
    fn is_prepared_at_once(&self) -> bool {
        self.is_one_part() && matches!(self.two_phase, Some(TwoPhase::Prepare(_)))
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

/// The changes of a group that other groups in flight may be in the way of.
#[derive(Debug, Default)]
pub(crate) struct Contended {
    /// What they wait for.
    pub(crate) waits: Waits,
    /// By number of the change in the group; empty if there is none.
    pub(crate) changes: Vec<bool>,
}

impl Contended {
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// Adjacent committed transactions, or one part of a larger one, in commit order; never empty.
#[derive(Debug)]
pub(crate) struct Group {
    /// The parts of one transaction share a number.
    pub(crate) seq: GroupSeq,
    pub(crate) works: Vec<Work>,
    pub(crate) mode: Mode,
    pub(crate) contended: Contended,
    /// How often it was rolled back. From then on it runs only as the oldest.
    pub(crate) attempts: u32,
}

impl Group {
    /// Whether it holds whole transactions, so that it can be carried out again.
    pub(crate) fn is_whole(&self) -> bool {
        self.works.iter().all(Work::is_whole)
    }

    /// A step of a transaction in two phases is alone in its group.
    pub(crate) fn two_phase(&self) -> Option<&TwoPhase> {
        self.works.first().and_then(|work| work.two_phase.as_ref())
    }

    /// Whether it is prepared on the target, and all of it is here.
    pub(crate) fn is_prepared_at_once(&self) -> bool {
        self.works.iter().any(Work::is_prepared_at_once)
    }

    /// Whether it is carried out change by change, because rules may decide about conflicts.
    pub(crate) fn is_by_rules(&self) -> bool {
        self.mode == Mode::Rows && self.works.iter().any(conflicts::decides)
    }

    /// Whether its changes may be executed before everything that was committed before them is
    /// there: net changes in two steps, a lone transaction by rows when nothing is in its way.
    /// The others end transactions as they go, or cannot be carried out again, or failed once.
    fn may_be_early(&self) -> bool {
        self.attempts == 0
            && self.is_whole()
            && match self.mode {
                Mode::Net => true,
                Mode::Rows => {
                    let [work] = &self.works[..] else { return false };
                    !work.runs_user_code() && !conflicts::decides(work)
                }
            }
    }

    /// What must have ended before any of it is sent.
    pub(crate) fn waits_to_start(&self) -> Waits {
        if self.is_prepared_at_once() {
            return self.contended.waits.clone();
        }
        if !self.may_be_early() {
            return Waits::all_before(self.seq);
        }
        match self.mode {
            Mode::Net => Waits::default(),
            // In stream order, so not in two steps.
            Mode::Rows => self.contended.waits.clone(),
        }
    }

    /// The commit LSN of its last transaction.
    pub(crate) fn last_commit(&self) -> Lsn {
        self.works.last().map_or(Lsn::INVALID, |work| work.part.head.commit_lsn)
    }

    pub(crate) fn changes(&self) -> usize {
        self.works.iter().map(|work| work.part.len()).sum()
    }
}
