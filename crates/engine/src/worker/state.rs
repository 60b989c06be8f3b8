//! Where a group stands on its worker: one state each, and all transitions between them.
//!
//! ```text
//!  queued ◄──────────────────────────────────────────────────────┐
//!    │ next: it is encoded                                       │ rolled_back
//!    ├────────► Encoded                                          │
//!    │             │ the group before it is completely sent   RollingBack
//!    ▼             ▼                                             ▲
//!  (sent) ──┬─► WaitingForDependencies ──┐ the groups that it    │ from every
//!           │                            │ depends on have ended │ state of a
//!           ├─► Executing ◄──────────────┘                       │ group that
//!           │      │ every statement is answered                 │ is sent
//!           │      ▼                                             │
//!           │   WaitingForTurn ──────────────────────────────────┤
//!           │      │ every group before it has ended             │
//!           ├─► Committing ──────────────────────────────────────┤
//!           │      │ everything is answered                      │
//!           │      ▼                                             │
//!           │    gone                                            │
//!           │      ▲                                             │
//!           │      │ every statement is answered                 │
//!           ├─► ExecutingPart ───────────────────────────────────┤
//!           └─► Incomplete ──────────────────────────────────────┘
//! ```
//!
//! Groups stand in commit order: those that are sent, then those that are encoded, then those that are
//! queued. Of those that are sent, only the last one can be in another state than `Committing`. An
//! unordered worker (without predecessors in progress rows) takes its turn at once.
//!
//! A part in the middle of a transaction that is executed as sets holds back the next one, which replaces
//! its savepoint: a part that finds other rows than it must is rolled back to that savepoint.

use std::collections::VecDeque;

use pgoutput::Lsn;

use crate::group::GroupSeq;
use crate::worker::{Dependent, Further, Group, GroupMember, GroupMode, Retry, WorkerTypes};

/// The state of a group whose statements are encoded.
pub(super) enum GroupState<T: WorkerTypes> {
    /// The statements of the group are set aside until the group before it on the session is completely
    /// sent, and answered if it is a part in the middle of a transaction.
    Encoded { statements: T::Statements, rest: Rest<T> },
    /// The independent changes are sent. The dependent ones wait until other groups have ended.
    WaitingForDependencies {
        statements: T::Statements,
        replies: VecDeque<T::Expected>,
        ending: T::Ending,
    },
    /// All of its changes are sent, and not all of them are answered.
    Executing { ending: T::Ending },
    /// The same for a part in the middle of a transaction. It has no end.
    ExecutingPart,
    /// All of its statements had the expected effect. Its COMMIT waits until every group before it has
    /// ended.
    WaitingForTurn { ending: T::Ending },
    /// Everything is sent: its COMMIT too, unless it is a part in the middle of a large transaction that is
    /// executed by rows, or answered.
    Committing,
    /// A change of it cannot be encoded; only the statements before that one are sent.
    Incomplete,
    /// The first group in flight has failed. It and the groups sent behind it are rolled back.
    RollingBack(Retry),
}

/// The part of a group that is sent after its first statements.
pub enum Rest<T: WorkerTypes> {
    /// Nothing: they end it, or this part of a large transaction.
    Nothing,
    /// The end of the group.
    Ending(T::Ending),
    /// The dependent changes, the replies that they get, and the end of the group.
    Dependent(T::Statements, VecDeque<T::Expected>, T::Ending),
}

/// A group as its worker has encoded it.
pub struct EncodedGroup<T: WorkerTypes> {
    /// The group.
    pub group: Group<T::Member>,
    /// Where the encoder stood before it.
    pub position: T::EncoderPosition,
    /// Groups before it were in flight on other sessions: they may be why it fails.
    pub ahead: bool,
    /// The replies to its first statements.
    pub replies: VecDeque<T::Expected>,
    /// The part that is sent after them.
    pub rest: Rest<T>,
}

/// A group that is encoded, and not completely answered.
pub struct ActiveGroup<T: WorkerTypes> {
    /// The group.
    pub group: Group<T::Member>,
    /// Where the encoder stood before it.
    pub position: T::EncoderPosition,
    /// Groups before it were in flight on other sessions: they may be why it fails.
    pub ahead: bool,
    /// The replies that are still to come to statements of it that are sent, or set aside.
    pub replies: VecDeque<T::Expected>,
    /// How many of its transactions are committed already (when it is applied by rows).
    committed: usize,
    /// See [`Self::has_rules`]: known once, because every reply may ask.
    has_rules: bool,
    pub(super) state: GroupState<T>,
}

impl<T: WorkerTypes> ActiveGroup<T> {
    /// A group whose first statements are sent.
    pub(super) fn sent(encoded: EncodedGroup<T>) -> Self {
        let is_part = encoded.group.is_part_as_sets();
        Self::new(encoded, |rest| GroupState::sent(rest, is_part))
    }

    /// A group whose first statements are set aside.
    pub(super) fn set_aside(encoded: EncodedGroup<T>, statements: T::Statements) -> Self {
        Self::new(encoded, |rest| GroupState::Encoded { statements, rest })
    }

    /// The statements before the change that cannot be encoded are sent.
    pub(super) fn incomplete(encoded: EncodedGroup<T>) -> Self {
        Self::new(encoded, |_| GroupState::Incomplete)
    }

    fn new(encoded: EncodedGroup<T>, state: impl FnOnce(Rest<T>) -> GroupState<T>) -> Self {
        let EncodedGroup { group, position, ahead, replies, rest } = encoded;
        let has_rules =
            group.mode == GroupMode::Net && group.works.iter().any(GroupMember::is_under_rules);
        Self { group, position, ahead, replies, committed: 0, has_rules, state: state(rest) }
    }

    /// Takes the part that is sent next. The groups that it waits for have ended.
    pub(super) fn advance(&mut self) -> Option<Further<T>> {
        let (further, state) = match self.take_state() {
            GroupState::Encoded { statements, rest } => {
                let is_part = self.group.is_part_as_sets();
                (Further::Statements(statements), GroupState::sent(rest, is_part))
            }
            GroupState::WaitingForDependencies { statements, mut replies, ending } => {
                self.replies.append(&mut replies);
                (Further::Statements(statements), GroupState::Executing { ending })
            }
            GroupState::WaitingForTurn { ending } => {
                (Further::Ending(ending), GroupState::Committing)
            }
            other => {
                self.state = other;
                return None;
            }
        };
        self.state = state;
        Some(further)
    }

    /// A reply was taken; if it was the last one, the group waits for its turn.
    pub(super) fn answered(&mut self) {
        if self.replies.is_empty() {
            self.state = match self.take_state() {
                GroupState::Executing { ending } => GroupState::WaitingForTurn { ending },
                GroupState::ExecutingPart => GroupState::Committing,
                other => other,
            };
        }
    }

    /// The group failed, or one that was sent before it.
    pub(super) fn roll_back(&mut self, retry: Retry) {
        self.state = GroupState::RollingBack(retry);
    }

    fn take_state(&mut self) -> GroupState<T> {
        std::mem::replace(&mut self.state, GroupState::Committing)
    }

    /// Whether some of it is sent.
    pub(super) fn is_sent(&self) -> bool {
        !matches!(self.state, GroupState::Encoded { .. })
    }

    /// Whether all of it is sent.
    pub(super) fn is_completely_sent(&self) -> bool {
        matches!(self.state, GroupState::Committing)
    }

    /// Whether only the replies to its end are still to come. The end of a transaction of several parts is
    /// sent when all of its changes are answered.
    pub(super) fn is_ending(&self) -> bool {
        self.is_completely_sent()
            && self.group.works.last().is_some_and(|work| work.end().is_some())
    }

    /// Everything that ends up to here is committed.
    pub fn count_committed(&mut self, through: Option<Lsn>) {
        let is_committed = |work: &T::Member| work.end().is_some() && work.end() <= through;
        self.committed = self.committed.max(self.group.works.partition_point(is_committed));
    }

    /// How many of its members are committed.
    #[must_use]
    pub fn committed(&self) -> usize {
        self.committed
    }

    /// Whether all of it is committed.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.committed == self.group.works.len()
    }

    /// Whether rules may decide about conflicts of its net changes.
    pub(super) fn has_rules(&self) -> bool {
        self.has_rules
    }

    /// The transactions of it that are not committed.
    pub(super) fn into_rest(mut self) -> Group<T::Member> {
        if self.committed > 0 {
            self.group.works.drain(..self.committed);
            self.group.dependent = Dependent::default();
        }
        self.group
    }
}

impl<T: WorkerTypes> GroupState<T> {
    fn sent(rest: Rest<T>, is_part: bool) -> Self {
        match rest {
            Rest::Nothing if is_part => Self::ExecutingPart,
            Rest::Nothing => Self::Committing,
            Rest::Ending(ending) => Self::Executing { ending },
            Rest::Dependent(statements, replies, ending) => {
                Self::WaitingForDependencies { statements, replies, ending }
            }
        }
    }
}

/// The last group that has ended when these have, which follow on `through` without a gap.
pub(super) fn follow<'g, T: WorkerTypes + 'g>(
    through: GroupSeq,
    groups: impl Iterator<Item = &'g ActiveGroup<T>>,
) -> GroupSeq {
    groups.fold(through, |through, ActiveGroup { group, .. }| {
        if group.seq == through.next() && !group.more { group.seq } else { through }
    })
}
