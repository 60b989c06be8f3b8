//! What a worker decides about its groups: when each is begun, when more of it is sent, what an answer
//! or an error means for it, and how it is carried out again.
//!
//! A [`WorkerGroups`] holds what a worker has at hand. Whoever has the session asks it what to do next, does it,
//! and tells what came of it. What statements, answers and endings are, is theirs (a [`WorkerTypes`]): that is
//! how the program and its simulation decide by the same code.

mod answers;
mod group;
mod halving;
mod in_flight;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use answers::{AfterReply, ErrorKind, Outcome, Retry, Verdict};
pub use group::{Dependent, Group, GroupMember, GroupMode};
use halving::Halving;
pub use in_flight::InFlight;
use in_flight::{Ready, follow};
use pgoutput::Lsn;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;
use crate::order::{Ended, Waits};

/// What the things are that a worker has to do with, to whoever carries them out.
pub trait WorkerTypes {
    /// Of what a group consists.
    type Member: GroupMember;
    /// Statements that are put together, and not sent.
    type Statements;
    /// An answer that is awaited.
    type Awaited: Awaited;
    /// What is sent when all statements of a group are answered as they must be.
    type Ending;
    /// Where the session was before a group was put together.
    type EncoderPosition;
}

/// An answer that is awaited.
pub trait Awaited {
    /// That of a Sync with which nothing is committed.
    fn sync() -> Self;

    /// Whether it is that of a Sync.
    fn is_sync(&self) -> bool;

    /// The end of what is committed with it.
    fn commits(&self) -> Option<Lsn>;
}

/// What a worker has at hand.
pub struct WorkerGroups<C: WorkerTypes> {
    /// Whether the subscriber refuses a commit before its predecessor's.
    ordered: bool,
    /// A lone transaction up to so many changes is sent as it is.
    lone: usize,
    /// The statements of a group up to so many changes count themselves what they find, if any do.
    counted: Option<usize>,
    /// Groups that are put together behind the one in flight.
    most_ready: usize,
    /// All groups up to this one are known to have ended.
    ended_through: GroupSeq,
    /// Groups that are not begun, those that were rolled back before any new one.
    queue: VecDeque<Group<C::Member>>,
    /// In the order in which they were sent: those of the first group in flight come first.
    awaited: VecDeque<C::Awaited>,
    /// Sent, and not completely answered. Only the last of them may be open.
    in_flight: VecDeque<InFlight<C>>,
    /// Their statements are ready, and cannot be sent before what is in flight has ended.
    ready: VecDeque<Ready<C>>,
    /// The first group in flight has failed: answers are only counted until all are there.
    recovering: Option<Retry>,
    /// Which groups are halved.
    halving: Halving,
    /// Groups answered, and ended, and not yet reported.
    answered: usize,
    ended: Vec<GroupSeq>,
    /// The parts of a large transaction that are answered are not committed: they would be lost
    /// with the session.
    in_parts: bool,
}

/// What to do when nothing more can be sent of what is in flight.
#[derive(Debug)]
pub enum Next<T> {
    /// Roll back what is open on the session, and then [say so](WorkerGroups::rolled_back): the first group in
    /// flight has failed, and all answers are there.
    RollBack,
    /// Put this group together.
    Start(Start<T>),
    /// Wait for an answer, for mail, or until one of these is met.
    Wait(Vec<Waits>),
}

/// A group that is to be put together.
#[derive(Debug)]
pub struct Start<T> {
    /// The group, in the mode in which it is carried out now.
    pub group: Group<T>,
    /// Others before it are in flight on other sessions: what goes wrong may be due to that.
    pub early: bool,
    /// Something before it is still to be sent on this session.
    pub behind: bool,
    /// Its statements count themselves what they find, and fail if it is not what it must be: if all of
    /// them can, its end is sent with them.
    pub counted: bool,
}

/// What more can be sent.
pub enum Further<C: WorkerTypes> {
    /// Statements, whose answers are awaited from now on.
    Statements(C::Statements),
    /// The end of a group: see [`WorkerGroups::await_ending`].
    Ending(C::Ending),
}

/// Why a group in flight with nothing to be answered does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// Groups that it depends on have not ended.
    Dependency,
    /// It is not its turn to commit.
    CommitOrder,
}

impl<C: WorkerTypes> WorkerGroups<C> {
    /// Nothing is to be done. `ordered`: whether the subscriber refuses a commit before its predecessor's;
    /// `far`: whether answers take long, so that groups which count their rows need not be looked at
    /// before they commit.
    #[must_use]
    pub fn new(ordered: bool, far: bool, pacing: &Pacing) -> Self {
        Self {
            ordered,
            lone: pacing.lone_changes,
            counted: far.then_some(pacing.counted_changes),
            most_ready: pacing.ready_groups,
            ended_through: GroupSeq::NONE,
            queue: VecDeque::new(),
            awaited: VecDeque::new(),
            in_flight: VecDeque::new(),
            ready: VecDeque::new(),
            recovering: None,
            halving: Halving::default(),
            answered: 0,
            ended: Vec::new(),
            in_parts: false,
        }
    }

    /// Takes a group, in commit order.
    pub fn push(&mut self, group: Group<C::Member>) {
        self.queue.push_back(group);
    }

    /// Gives a group back that was to be begun: it comes again.
    pub fn put_back(&mut self, group: Group<C::Member>) {
        self.queue.push_front(group);
    }

    /// What more can be sent now. It is to be sent in the order in which it is given.
    pub fn further(&mut self, order: &impl Ended) -> Option<Further<C>> {
        if self.is_recovering() {
            return None;
        }
        let Some(waits) = self.waits_to_advance() else {
            if self.in_flight.back().is_some_and(InFlight::is_open) {
                return None;
            }
            let Ready { group, statements, mut awaited } = self.ready.pop_front()?;
            self.awaited.append(&mut awaited);
            self.in_flight.push_back(group);
            return Some(Further::Statements(statements));
        };
        if !self.is_met(&waits, order) {
            return None;
        }
        let last = self.in_flight.back_mut()?;
        if let Some((statements, mut awaited)) = last.dependent.take() {
            last.awaited += awaited.len();
            self.awaited.append(&mut awaited);
            return Some(Further::Statements(statements));
        }
        last.ending.take().map(Further::Ending)
    }

    /// The end that [`Self::further`] gave is queued by `queue`, which adds what is to be answered.
    pub fn await_ending<R>(&mut self, queue: impl FnOnce(&mut VecDeque<C::Awaited>) -> R) -> R {
        let before = self.awaited.len();
        let queued = queue(&mut self.awaited);
        if let Some(last) = self.in_flight.back_mut() {
            last.awaited = self.awaited.len() - before;
        }
        queued
    }

    /// What to do when [`Self::further`] has nothing more.
    pub fn next(&mut self, order: &impl Ended) -> Next<C::Member> {
        let mut waits = Vec::new();
        if self.is_recovering() {
            return if self.is_awaiting() { Next::Wait(waits) } else { Next::RollBack };
        }
        if self.has_room()
            && let Some(to_start) = self.queue.front().map(Group::waits_to_start)
        {
            if self.is_met(&to_start, order)
                && let Some(group) = self.queue.pop_front()
            {
                return Next::Start(self.start(group, order));
            }
            waits.push(to_start);
        }
        waits.extend(self.waits_to_advance());
        Next::Wait(waits)
    }

    fn start(&mut self, group: Group<C::Member>, order: &impl Ended) -> Start<C::Member> {
        self.ended_through = self.ended_through.max(order.ended_through());
        // One that is prepared at once has nothing in its way, so what goes wrong is its own.
        let early = !group.is_prepared_at_once() && !self.is_next(group.seq);
        let behind = self.in_flight.back().is_some_and(InFlight::is_open) || !self.ready.is_empty();
        let at_once = !early && (self.is_clear() || self.ordered);
        let lone = group.works.len() == 1 && group.is_whole() && group.changes() <= self.lone;
        let mode = if lone && at_once && !group.works[0].is_under_rules() {
            GroupMode::Rows
        } else {
            group.mode
        };
        let counts = |most| group.is_whole() && group.changes() <= most;
        let counted = at_once && !behind && self.counted.is_some_and(counts);
        Start { group: Group { mode, ..group }, early, behind, counted }
    }

    /// Whether the dependent changes of a group are put together by themselves, to be sent when what
    /// they wait for has ended.
    pub fn is_split(&mut self, start: &Start<C::Member>, order: &impl Ended) -> bool {
        let Start { group, early, .. } = start;
        *early
            && group.mode == GroupMode::Net
            && !group.dependent.is_empty()
            && !self.is_met(&group.dependent.waits, order)
    }

    /// The first statements of a group are sent; these are their answers.
    pub fn sent(&mut self, group: InFlight<C>, mut awaited: VecDeque<C::Awaited>) {
        self.awaited.append(&mut awaited);
        self.in_flight.push_back(group);
    }

    /// The first statements of a group are put together, and not sent. [`Self::further`] gives them.
    pub fn set_aside(
        &mut self,
        group: InFlight<C>,
        statements: C::Statements,
        awaited: VecDeque<C::Awaited>,
    ) {
        self.ready.push_back(Ready { group, statements, awaited });
    }

    /// Whether nothing is in flight, or ready to be.
    fn is_clear(&self) -> bool {
        self.in_flight.is_empty() && self.ready.is_empty()
    }

    /// Whether another group may be begun, or put together behind the one in flight.
    fn has_room(&self) -> bool {
        match self.queue.front() {
            // A transaction may be sent with its COMMIT behind others that are not answered only
            // where the subscriber refuses it if one of them fails.
            Some(next)
                if next.attempts > 0
                    || next.is_by_rules()
                    || next.is_step()
                    || next.follows_applied()
                    || next.mode == GroupMode::Rows && !self.ordered =>
            {
                self.is_clear()
            }
            _ => self.ready.len() < self.most_ready,
        }
    }

    /// Whether all of this has ended. What this session was told to commit comes before anything
    /// that it is sent now, and counts.
    fn is_met(&mut self, waits: &Waits, order: &impl Ended) -> bool {
        let sent = self.in_flight.iter().take_while(|group| !group.is_open());
        let through = follow(self.ended_through, sent);
        if waits.through <= through && waits.groups.is_empty() {
            return true;
        }
        self.ended_through = order.ended_through();
        order.is_met(waits)
    }

    /// Whether everything before this group has ended, or comes before it on this session.
    fn is_next(&self, group: GroupSeq) -> bool {
        let before = self.in_flight.iter().chain(self.ready.iter().map(|ready| &ready.group));
        group.previous() <= follow(self.ended_through, before)
    }

    /// What the group in flight waits for before more of it can be sent.
    fn waits_to_advance(&self) -> Option<Waits> {
        let last = self.in_flight.back()?;
        if last.dependent.is_some() {
            return Some(last.group.dependent.waits.clone());
        }
        (last.ending.is_some() && last.awaited == 0 && self.in_flight.len() == 1).then(|| {
            if self.ordered { Waits::all_before(last.group.seq) } else { Waits::default() }
        })
    }

    /// Why it does not go on, when that is not because of the subscriber, and there is something to do.
    #[must_use]
    pub fn kept(&self) -> Option<WaitReason> {
        if self.is_awaiting() {
            return None;
        }
        match self.in_flight.back() {
            Some(last) if last.dependent.is_some() => Some(WaitReason::Dependency),
            Some(last) if last.ending.is_some() => Some(WaitReason::CommitOrder),
            Some(_) => None,
            None => (!self.queue.is_empty()).then_some(WaitReason::Dependency),
        }
    }
}
