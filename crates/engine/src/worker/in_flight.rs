//! A group on its way.

use std::collections::VecDeque;

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::worker::{Dependent, Group, GroupMember, GroupMode, WorkerTypes};

/// A group whose statements are put together, and not completely answered.
pub struct InFlight<C: WorkerTypes> {
    /// The group.
    pub group: Group<C::Member>,
    /// Where the session was before it.
    pub mark: C::EncoderPosition,
    /// It was begun while others before it were in flight on other sessions: what goes wrong may
    /// be due to that.
    pub early: bool,
    /// Answers that are still to come.
    pub(super) awaited: usize,
    /// Statements of the dependent changes, until what they wait for has ended.
    pub(super) dependent: Option<(C::Statements, VecDeque<C::Awaited>)>,
    /// What is sent when all statements are answered as they must be, in the group's turn.
    pub(super) ending: Option<C::Ending>,
    /// Of its transactions, those that are committed already (by rows).
    committed: usize,
}

impl<C: WorkerTypes> InFlight<C> {
    /// So many answers will come to what is sent first.
    #[must_use]
    pub fn new(
        group: Group<C::Member>,
        mark: C::EncoderPosition,
        early: bool,
        awaited: usize,
    ) -> Self {
        Self { group, mark, early, awaited, dependent: None, ending: None, committed: 0 }
    }

    /// What is still to be sent of it: its dependent changes, if they are apart, and its end.
    #[must_use]
    pub fn with_rest(
        self,
        dependent: Option<(C::Statements, VecDeque<C::Awaited>)>,
        ending: Option<C::Ending>,
    ) -> Self {
        Self { dependent, ending, ..self }
    }

    /// Whether something of it is still to be sent.
    pub(super) fn is_open(&self) -> bool {
        self.dependent.is_some() || self.ending.is_some()
    }

    /// Everything that ends up to here is committed.
    pub fn count_committed(&mut self, through: Option<Lsn>) {
        let is_committed = |work: &C::Member| work.end().is_some() && work.end() <= through;
        self.committed = self.committed.max(self.group.works.partition_point(is_committed));
    }

    /// Whether all of it is.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.committed == self.group.works.len()
    }

    /// Whether rules may decide about conflicts of what is sent as net changes.
    pub(super) fn has_rules(&self) -> bool {
        self.group.mode == GroupMode::Net
            && self.group.works.iter().any(GroupMember::is_under_rules)
    }

    /// What is left of it.
    pub(super) fn into_rest(mut self) -> Group<C::Member> {
        if self.committed > 0 {
            self.group.works.drain(..self.committed);
            self.group.dependent = Dependent::default();
        }
        self.group
    }
}

/// A group whose statements are ready, and cannot be sent before the one in flight has ended.
pub(super) struct Ready<C: WorkerTypes> {
    pub(super) group: InFlight<C>,
    pub(super) statements: C::Statements,
    pub(super) awaited: VecDeque<C::Awaited>,
}

/// How far groups that come one after the other lead on from `through`.
pub(super) fn follow<'g, C: WorkerTypes + 'g>(
    through: GroupSeq,
    groups: impl Iterator<Item = &'g InFlight<C>>,
) -> GroupSeq {
    groups.fold(through, |through, InFlight { group, .. }| {
        if group.seq == through.next() && !group.more { group.seq } else { through }
    })
}
