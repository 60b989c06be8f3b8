//! What a worker is handed: a group, and when it may be begun.

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::order::Waits;

/// A transaction or a part of one, as far as a worker decides by it.
pub trait GroupMember {
    /// The end of the transaction; `None` in the middle of a large one.
    fn end(&self) -> Option<Lsn>;

    /// Where it commits on the publisher.
    fn commit_lsn(&self) -> Lsn;

    /// How many changes it has.
    fn length(&self) -> usize;

    /// Whether it is a transaction from beginning to end, which can be carried out again.
    fn is_whole(&self) -> bool;

    /// Whether code of users may run on the subscriber. It may look at where transactions end: a deferred
    /// constraint trigger runs there.
    fn runs_user_code(&self) -> bool;

    /// Whether rules may decide about its conflicts.
    fn is_under_rules(&self) -> bool;

    /// Whether it is a step of a transaction in two phases. Such a step is alone in its group.
    fn is_step(&self) -> bool;

    /// Whether it is to be prepared, and all of it is here.
    fn is_prepared_at_once(&self) -> bool;

    /// Whether what comes right before it was applied in an earlier run, beyond a gap: then its progress
    /// row finds its predecessor's whether what was sent before it took effect or not.
    fn follows_applied(&self) -> bool;
}

/// How a group is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupMode {
    /// One subscriber transaction: net changes, as sets where that means the same.
    Net,
    /// One subscriber transaction per source transaction, one statement per change in stream order:
    /// what the net changes are judged by, and what names an offender exactly.
    Rows,
}

/// The changes of a group that other groups in flight may be in the way of.
#[derive(Debug, Clone, Default)]
pub struct Dependent {
    /// What they wait for.
    pub waits: Waits,
    /// By number of the change in the group; empty if there is none.
    pub changes: Vec<bool>,
}

impl Dependent {
    /// Whether nothing of the group is dependent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }
}

/// Adjacent committed transactions, or one part of a larger one, in commit order; never empty.
#[derive(Debug)]
pub struct Group<T> {
    /// The parts of one transaction share a number.
    pub seq: GroupSeq,
    /// What it consists of.
    pub works: Vec<T>,
    /// How it is carried out.
    pub mode: GroupMode,
    /// What of it other groups may be in the way of.
    pub dependent: Dependent,
    /// How often it was rolled back. From then on it runs only as the oldest.
    pub attempts: u32,
    /// It is a piece of a group that was halved, and another one follows it on the same worker.
    pub more: bool,
}

impl<T: GroupMember> Group<T> {
    /// Halves it: the first half stays, the second one is returned. Both run as the oldest, so nothing
    /// is in their way.
    pub(super) fn halve(&mut self) -> Self {
        let works = self.works.split_off(self.works.len() / 2);
        self.dependent = Dependent::default();
        let (seq, mode, attempts) = (self.seq, self.mode, self.attempts);
        let more = std::mem::replace(&mut self.more, true);
        Self { seq, works, mode, dependent: Dependent::default(), attempts, more }
    }

    /// Whether it holds whole transactions, so that it can be carried out again.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.works.iter().all(GroupMember::is_whole)
    }

    /// Whether it is a step of a transaction in two phases.
    #[must_use]
    pub fn is_step(&self) -> bool {
        self.works.first().is_some_and(GroupMember::is_step)
    }

    /// Whether the subscriber would take its commit even if those before it on the session had failed.
    #[must_use]
    pub fn follows_applied(&self) -> bool {
        self.works.first().is_some_and(GroupMember::follows_applied)
    }

    /// Whether it is prepared on the subscriber, and all of it is here.
    #[must_use]
    pub fn is_prepared_at_once(&self) -> bool {
        self.works.iter().any(GroupMember::is_prepared_at_once)
    }

    /// Whether it is carried out change by change, because rules may decide about conflicts.
    #[must_use]
    pub fn is_by_rules(&self) -> bool {
        self.mode == GroupMode::Rows && self.works.iter().any(GroupMember::is_under_rules)
    }

    /// Whether its changes may be executed before everything that was committed before them is
    /// there: net changes in two steps, a lone transaction by rows when nothing is in its way.
    /// The others end transactions as they go, or cannot be carried out again, or failed once.
    fn may_be_early(&self) -> bool {
        self.attempts == 0
            && self.is_whole()
            && match self.mode {
                GroupMode::Net => true,
                GroupMode::Rows => {
                    let [work] = &self.works[..] else { return false };
                    !work.runs_user_code() && !work.is_under_rules()
                }
            }
    }

    /// What must have ended before any of it is sent.
    #[must_use]
    pub fn waits_to_start(&self) -> Waits {
        if self.is_prepared_at_once() {
            return self.dependent.waits.clone();
        }
        if !self.may_be_early() {
            return Waits::all_before(self.seq);
        }
        match self.mode {
            GroupMode::Net => Waits::default(),
            // In stream order, so not in two steps.
            GroupMode::Rows => self.dependent.waits.clone(),
        }
    }

    /// The commit LSN of its last transaction.
    #[must_use]
    pub fn last_commit(&self) -> Lsn {
        self.works.last().map_or(Lsn::INVALID, GroupMember::commit_lsn)
    }

    /// How many changes it has.
    #[must_use]
    pub fn changes(&self) -> usize {
        self.works.iter().map(GroupMember::length).sum()
    }
}
