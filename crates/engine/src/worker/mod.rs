//! Decisions of an apply worker about its groups: when it encodes one, when it sends more of it, the
//! meaning of a reply or an error, and how a group that was rolled back is executed again.
//!
//! [`WorkerGroups`] holds the groups of one worker. Its caller owns the session: it asks for the next
//! step, takes it, and reports the outcome. The caller also defines what statements, replies and
//! endings are ([`WorkerTypes`]), so the program and its simulation decide by the same code.
//!
//! Each group is in one state; the module `state` has the diagram, and all transitions.

mod group;
mod halving;
mod replies;
mod state;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use group::{Dependent, Group, GroupMember, GroupMode};
use halving::Halving;
use pgoutput::Lsn;
pub use replies::{AfterReply, ErrorKind, Outcome, Retry, Verdict};
pub use state::{ActiveGroup, EncodedGroup, Rest};
use state::{GroupState, follow};

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::{Ended, Prerequisites};

/// The types that the owner of the session defines: statements, replies and endings.
pub trait WorkerTypes {
    /// A group consists of these.
    type Member: GroupMember;
    /// Statements that are encoded, and not sent.
    type Statements;
    /// A reply that the subscriber has to send.
    type Expected: ExpectedReply;
    /// The end of a group: its progress row and its COMMIT.
    type Ending;
    /// Where the encoder stood before a group.
    type EncoderPosition;
}

/// A reply that the subscriber has to send.
pub trait ExpectedReply {
    /// The reply to a Sync that commits nothing.
    fn sync() -> Self;

    /// Whether it is the reply to a Sync.
    fn is_sync(&self) -> bool;

    /// The end of the last transaction that is committed when it comes.
    fn commits(&self) -> Option<Lsn>;
}

/// The groups of an apply worker.
pub struct WorkerGroups<T: WorkerTypes> {
    /// Whether the subscriber refuses a commit before its predecessor's.
    ordered: bool,
    /// A lone transaction with at most so many changes is sent by rows, and a group change by change.
    few: usize,
    /// Far from the subscriber, the statements of a group with at most so many changes count their rows
    /// themselves.
    counted: Option<usize>,
    /// How many groups are encoded behind those that are sent.
    most_encoded: usize,
    /// See [`Self::with_lone_commits`].
    lone_commits: bool,
    /// Every group up to this one is known to have ended.
    ended_through: GroupSeq,
    /// Groups in flight, then those that are encoded.
    active: VecDeque<ActiveGroup<T>>,
    /// Groups that are not begun; those that were rolled back come first.
    queue: VecDeque<Group<T::Member>>,
    /// Which groups are halved.
    halving: Halving,
    /// How many groups are answered, and which of them have ended, since the last report.
    answered: usize,
    ended: Vec<GroupSeq>,
    /// The answered parts of a large transaction are not committed: they would be lost with the session.
    in_parts: bool,
}

/// The next step when nothing more can be sent of the groups in flight.
#[derive(Debug)]
pub enum Next<M> {
    /// Roll back the open transaction, then call [`WorkerGroups::rolled_back`]. The first group in
    /// flight has failed, and all replies are there.
    RollBack,
    /// Encode this group.
    Start(Start<M>),
    /// Wait for a reply, for mail, or until one of these is met.
    Wait(Vec<Prerequisites>),
}

/// A group that is to be encoded.
#[derive(Debug)]
pub struct Start<M> {
    /// The group, in the mode in which it is executed now.
    pub group: Group<M>,
    /// Groups before it are in flight on other sessions: they may be why it fails.
    pub ahead: bool,
    /// A group before it is not completely sent on this session, or is a part that is not answered.
    pub behind: bool,
    /// The statements of the group count their rows themselves, and fail if they find others. If all of
    /// them can, the end of the group is sent with them.
    pub counted: bool,
    /// The few changes of several transactions are sent one by one, in stream order, in one subscriber
    /// transaction, and its end with them. A set would have to find its rows before the end is sent; a
    /// single change says itself that its row is missing.
    pub in_order: bool,
}

/// The next statements or ending to send for the groups in flight.
pub enum Further<T: WorkerTypes> {
    /// Statements, whose replies are expected from now on.
    Statements(T::Statements),
    /// The end of the last group in flight, whose replies are added to that group's.
    Ending(T::Ending),
}

/// Why a worker waits that expects no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// Groups that its group depends on have not ended.
    Dependency,
    /// The worker's group waits for its turn to commit.
    CommitOrder,
}

impl<T: WorkerTypes> WorkerGroups<T> {
    /// Starts without groups. `ordered`: whether the subscriber refuses a commit before its
    /// predecessor's. `far`: whether replies take long, so that statements count their rows themselves.
    #[must_use]
    pub fn new(ordered: bool, far: bool, pacing: &Pacing) -> Self {
        Self {
            ordered,
            few: pacing.few_changes,
            counted: far.then_some(pacing.counted_changes),
            most_encoded: pacing.ready_groups,
            lone_commits: false,
            ended_through: GroupSeq::NONE,
            active: VecDeque::new(),
            queue: VecDeque::new(),
            halving: Halving::default(),
            answered: 0,
            ended: Vec::new(),
            in_parts: false,
        }
    }

    /// The same. If `lone`, nothing is sent behind a COMMIT that is not answered.
    #[must_use]
    pub fn with_lone_commits(self, lone: bool) -> Self {
        Self { lone_commits: lone, ..self }
    }

    /// Queues a group, in commit order.
    pub fn push(&mut self, group: Group<T::Member>) {
        self.queue.push_back(group);
    }

    /// Whether there is no group.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.active.is_empty() && self.queue.is_empty()
    }

    /// Queues a group again that was to be encoded.
    pub fn put_back(&mut self, group: Group<T::Member>) {
        self.queue.push_front(group);
    }

    /// The next statements or ending that can be sent now. The caller sends them in the order in which
    /// it gets them.
    pub fn further(&mut self, order: &impl Ended) -> Option<Further<T>> {
        let sent = self.sent_groups();
        if self.last().is_none_or(ActiveGroup::is_completely_sent) {
            return self.active.get_mut(sent)?.advance();
        }
        let prerequisites = self.prerequisites_to_advance()?;
        if self.is_met(&prerequisites, order) { self.last_mut()?.advance() } else { None }
    }

    /// The next step when [`Self::further`] has nothing more.
    pub fn next(&mut self, order: &impl Ended) -> Next<T::Member> {
        let mut prerequisites = Vec::new();
        if self.is_rolling_back() {
            return if self.expects_replies() { Next::Wait(prerequisites) } else { Next::RollBack };
        }
        if self.has_room()
            && let Some(to_start) = self.queue.front().map(Group::prerequisites_to_start)
        {
            if self.is_met(&to_start, order)
                && let Some(group) = self.queue.pop_front()
            {
                return Next::Start(self.start(group, order));
            }
            prerequisites.push(to_start);
        }
        prerequisites.extend(self.prerequisites_to_advance());
        Next::Wait(prerequisites)
    }

    fn start(&mut self, mut group: Group<T::Member>, order: &impl Ended) -> Start<T::Member> {
        if self.lone_commits && group.mode == GroupMode::Rows {
            let first = group.subscriber_transactions().next().map_or(0, |members| members.end);
            if first < group.works.len() {
                let rest = group.split_off(first);
                self.queue.push_front(rest);
            }
        }
        self.ended_through = self.ended_through.max(order.ended_through());
        // No group can be in the way of one that is prepared at once: its errors are its own.
        let ahead = !group.is_prepared_at_once() && !self.is_next(group.seq);
        let behind = self.active.back().is_some_and(|last| !last.is_completely_sent());
        let at_once = !ahead && (self.active.is_empty() || self.ordered);
        let has_most = |most| group.is_whole() && group.changes() <= most;
        let by_rules = group.works.iter().any(GroupMember::is_under_rules);
        let (few, lone) = (at_once && !by_rules && has_most(self.few), group.works.len() == 1);
        let mode = if few && lone { GroupMode::Rows } else { group.mode };
        let counted = at_once && !behind && self.counted.is_some_and(has_most);
        let in_order = few && mode == GroupMode::Net;
        Start { group: Group { mode, ..group }, ahead, behind, counted, in_order }
    }

    /// Whether the dependent changes of a group are encoded apart, to be sent when the groups that they
    /// wait for have ended.
    pub fn is_split(&mut self, start: &Start<T::Member>, order: &impl Ended) -> bool {
        let Start { group, ahead, .. } = start;
        *ahead
            && group.mode == GroupMode::Net
            && !group.dependent.is_empty()
            && !self.is_met(&group.dependent.prerequisites, order)
    }

    /// The first statements of a group are sent.
    pub fn sent(&mut self, encoded: EncodedGroup<T>) {
        self.active.push_back(ActiveGroup::sent(encoded));
    }

    /// The statements before the change that cannot be encoded are sent. The group stays until
    /// [`Self::judge_incomplete`].
    pub fn sent_incomplete(&mut self, encoded: EncodedGroup<T>) {
        self.active.push_back(ActiveGroup::incomplete(encoded));
    }

    /// The first statements of a group are encoded, and not sent: [`Self::further`] gives them.
    pub fn set_aside(&mut self, encoded: EncodedGroup<T>, statements: T::Statements) {
        self.active.push_back(ActiveGroup::set_aside(encoded, statements));
    }

    /// How many groups are in flight.
    fn sent_groups(&self) -> usize {
        self.active.partition_point(ActiveGroup::is_sent)
    }

    /// Whether another group may be encoded now.
    fn has_room(&self) -> bool {
        match self.queue.front() {
            // The COMMIT of a transaction goes behind others that are not answered only where the
            // subscriber refuses it if one of them fails.
            Some(next)
                if next.attempts > 0
                    || next.is_by_rules()
                    || next.is_step()
                    || next.follows_applied()
                    || self.lone_commits && next.begins()
                    || next.mode == GroupMode::Rows && !self.ordered =>
            {
                self.active.is_empty()
            }
            _ => self.active.len() - self.sent_groups() < self.most_encoded,
        }
    }

    /// Whether all of this has ended. Groups whose COMMIT was sent on this session count, because they
    /// come before everything that is sent now.
    fn is_met(&mut self, prerequisites: &Prerequisites, order: &impl Ended) -> bool {
        let committing = self.active.iter().take_while(|group| group.is_completely_sent());
        let through = follow(self.ended_through, committing);
        if prerequisites.through <= through && prerequisites.groups.is_empty() {
            return true;
        }
        self.ended_through = order.ended_through();
        order.is_met(prerequisites)
    }

    /// Whether every group before this one has ended, or comes before it on this session.
    fn is_next(&self, group: GroupSeq) -> bool {
        group.previous() <= follow(self.ended_through, self.active.iter())
    }

    /// The groups that must have ended before more of the last group in flight can be sent.
    fn prerequisites_to_advance(&self) -> Option<Prerequisites> {
        let last = self.last()?;
        match last.state {
            GroupState::WaitingForDependencies { .. } => {
                Some(last.group.dependent.prerequisites.clone())
            }
            GroupState::WaitingForTurn { .. } if !self.ordered => Some(Prerequisites::default()),
            GroupState::WaitingForTurn { .. } => Some(Prerequisites::all_before(last.group.seq)),
            _ => None,
        }
    }

    /// Why the worker waits, if that is not for a reply and it has something to do.
    #[must_use]
    pub fn wait_reason(&self) -> Option<WaitReason> {
        if self.expects_replies() {
            return None;
        }
        match self.last().map(|last| &last.state) {
            Some(GroupState::WaitingForDependencies { .. }) => Some(WaitReason::Dependency),
            Some(GroupState::WaitingForTurn { .. }) => Some(WaitReason::CommitOrder),
            Some(_) => None,
            None => (!self.queue.is_empty()).then_some(WaitReason::Dependency),
        }
    }

    /// The group that was sent last.
    fn last(&self) -> Option<&ActiveGroup<T>> {
        self.sent_groups().checked_sub(1).map(|last| &self.active[last])
    }

    /// The group that was sent last.
    pub fn last_mut(&mut self) -> Option<&mut ActiveGroup<T>> {
        self.sent_groups().checked_sub(1).and_then(|last| self.active.get_mut(last))
    }
}
