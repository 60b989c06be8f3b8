//! An apply group, and the groups that must have ended before a worker begins it.

use std::ops::Range;

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::order::Prerequisites;

/// A transaction or a part of one, with the properties by which a worker decides.
pub trait GroupMember {
    /// The end of the transaction; `None` in the middle of a large one.
    fn end(&self) -> Option<Lsn>;

    /// How many changes it has.
    fn length(&self) -> usize;

    /// Whether a transaction begins with it.
    fn begins(&self) -> bool;

    /// Whether it is a transaction from beginning to end, which can be executed again.
    fn is_whole(&self) -> bool;

    /// Whether user code may run on the subscriber. Where transactions end may matter to it: a deferred
    /// constraint trigger runs there.
    fn runs_user_code(&self) -> bool;

    /// Whether it must be committed alone, as the publisher committed it.
    fn is_alone(&self) -> bool;

    /// Whether conflict rules apply to a table of it.
    fn is_under_rules(&self) -> bool;

    /// Whether it is a step of a two-phase transaction. A group has nothing else then: one PREPARE, or ends.
    fn is_step(&self) -> bool;

    /// Whether it is to be prepared, and is complete.
    fn is_prepared_at_once(&self) -> bool;

    /// Whether an earlier run has applied its predecessor, beyond a gap. Then its progress row finds the
    /// predecessor's, whether what was sent before it took effect or not.
    fn follows_applied(&self) -> bool;
}

/// How a group is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupMode {
    /// One subscriber transaction: net changes, as sets where that means the same.
    Net,
    /// One statement per change in stream order, and one subscriber transaction per source transaction, unless the
    /// group [shares commits](Group::shares_commits). Net changes must have the same result; an error names its change
    /// exactly.
    Rows,
}

/// The changes of a group that depend on groups in flight.
#[derive(Debug, Clone, Default)]
pub struct Dependent {
    /// The groups that they depend on.
    pub prerequisites: Prerequisites,
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
    /// The transactions, or parts of one, that make up the group.
    pub works: Vec<T>,
    /// How it is executed.
    pub mode: GroupMode,
    /// Which of its changes depend on other groups.
    pub dependent: Dependent,
    /// How often it was rolled back. After the first time it runs only as the oldest.
    pub attempts: u32,
    /// The group is a piece of one that was halved, and another piece follows it on the same worker.
    pub more: bool,
    /// By rows: adjacent transactions that need not be committed alone share a subscriber transaction. Not after
    /// an error: then the transaction that fails must be alone.
    pub shares_commits: bool,
}

impl<T: GroupMember> Group<T> {
    /// Halves it: the first half stays, the second one is returned. Both run as the oldest, so neither
    /// depends on other groups.
    pub(super) fn halve(&mut self) -> Self {
        self.split_off(self.works.len() / 2)
    }

    /// Splits it behind so many members. Both pieces must run as the oldest.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let works = self.works.split_off(at);
        self.dependent = Dependent::default();
        let (seq, mode, attempts) = (self.seq, self.mode, self.attempts);
        let more = std::mem::replace(&mut self.more, true);
        let shares_commits = self.shares_commits;
        Self { seq, works, mode, dependent: Dependent::default(), attempts, more, shares_commits }
    }

    /// Whether it holds whole transactions, so that it can be executed again.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.works.iter().all(GroupMember::is_whole)
    }

    /// Whether a subscriber transaction begins with it.
    #[must_use]
    pub fn begins(&self) -> bool {
        self.works.first().is_some_and(GroupMember::begins)
    }

    /// Whether it is a part in the middle of a transaction, or the first one, that is executed as sets.
    pub(super) fn is_part_as_sets(&self) -> bool {
        self.mode == GroupMode::Net && self.works.last().is_some_and(|work| work.end().is_none())
    }

    /// Whether its members are steps of two-phase transactions.
    #[must_use]
    pub fn is_step(&self) -> bool {
        self.works.first().is_some_and(GroupMember::is_step)
    }

    /// Whether the subscriber would take its commit even if those before it on the session had failed.
    #[must_use]
    pub fn follows_applied(&self) -> bool {
        self.works.first().is_some_and(GroupMember::follows_applied)
    }

    /// Whether it is prepared on the subscriber, and is complete.
    #[must_use]
    pub fn is_prepared_at_once(&self) -> bool {
        self.works.iter().any(GroupMember::is_prepared_at_once)
    }

    /// Whether it is executed change by change, because conflict rules apply.
    #[must_use]
    pub fn is_by_rules(&self) -> bool {
        self.mode == GroupMode::Rows && self.works.iter().any(GroupMember::is_under_rules)
    }

    /// Whether its changes may be executed before every earlier group has ended: net changes, and a lone
    /// transaction by rows. Other groups commit as they go, cannot be executed again, or failed once.
    fn may_run_ahead(&self) -> bool {
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

    /// The groups that must have ended before any of it is sent.
    #[must_use]
    pub fn prerequisites_to_start(&self) -> Prerequisites {
        if self.is_prepared_at_once() {
            return self.dependent.prerequisites.clone();
        }
        if !self.may_run_ahead() {
            return Prerequisites::all_before(self.seq);
        }
        match self.mode {
            GroupMode::Net => Prerequisites::default(),
            // Its changes are executed in stream order, so the independent ones cannot go first.
            GroupMode::Rows => self.dependent.prerequisites.clone(),
        }
    }

    /// Whether it consists of whole transactions without further conditions: none is a step of a two-phase
    /// transaction or under conflict rules.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.is_whole() && !self.is_step() && !self.is_by_rules()
    }

    /// By rows: the members of each subscriber transaction, or the part of one that this group is.
    pub fn subscriber_transactions(&self) -> impl Iterator<Item = Range<usize>> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let start = from;
            from += self.works.get(start..)?.first().map(|_| 1)?;
            while self.shares_commits
                && let Some([before, next]) = self.works.get(from - 1..=from)
                && may_share_commit(before)
                && may_share_commit(next)
            {
                from += 1;
            }
            Some(start..from)
        })
    }

    /// Whether a subscriber transaction by rows has several of its transactions.
    pub(super) fn commits_several_together(&self) -> bool {
        self.mode == GroupMode::Rows && self.subscriber_transactions().any(|one| one.len() > 1)
    }

    /// How many changes it has.
    #[must_use]
    pub fn changes(&self) -> usize {
        self.works.iter().map(GroupMember::length).sum()
    }
}

/// Whether nobody can see where it ends, and nothing decides about it alone.
fn may_share_commit(member: &impl GroupMember) -> bool {
    member.is_whole() && !member.is_alone() && !member.is_under_rules() && !member.follows_applied()
}
