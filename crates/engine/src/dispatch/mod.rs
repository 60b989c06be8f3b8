//! Which group goes to which worker, and when.
//!
//! Transactions come in commit order, and wait. After every event the leader asks for the next step
//! ([`Dispatch::next`]), and takes it:
//!
//! ```text
//!  push() ──► waiting ──► next() ──►  assign  ──► queue of a worker ──► answered()
//!                           │
//!                           ├──► wait: a larger group soon, or the time between small groups
//!                           └──► busy: until a worker has answered, or another one comes
//! ```
//!
//! A group is assigned with the groups that it must wait for: the [writeset](crate::writeset) says
//! which of its changes conflict with groups in flight. These are the rules. The simulation
//! (`crates/engine/simulation`) breaks each but the fifth and the eleventh on purpose, to see that it notices.
//! Unit tests check those two. Without the fifth, locks of the subscriber make most wait that have to:
//!
//! 1. The parts of one transaction go to one worker, under one number.
//! 2. While the writeset is full, nothing new is assigned: its memory is bounded.
//! 3. A worker has a bounded number of groups.
//! 4. A worker that leaves gets no more groups.
//! 5. The end of a transaction that is prepared on the subscriber is isolated: whatever comes behind it
//!    waits until it has ended.
//! 6. So is a group that meets a table under another topmost relation than before: its locks have other
//!    names.
//! 7. Transactions that are prepared at once wait for what came before their run of PREPAREs only, so
//!    that they run side by side.
//! 8. Transactions that must be committed alone (user code, rules by time) and steps of two-phase
//!    transactions are applied change by change. Small transactions between them are, too, and share commits.
//! 9. Transactions that wait are assigned at once when no worker is busy, unless the group can grow and
//!    there is a backlog or concurrent committers; then after a bounded time (promise P9).
//! 10. A table is serialized between groups only: when groups with it have often given way, or when a
//!     unique value was found to move between its rows.
//! 11. A worker that is alone locks nothing. While groups without locks are in flight, only their worker
//!     gets more.
//! 12. Where updates are executed one by one, a group has few of one row ([`RowVersions`]).
//!
//! Time is a value: the time since the run began. Constants are in [`pacing`].

mod attention;
mod blame;
mod committers;
mod contents;
mod in_use;
mod locks;
mod one_by_one;
pub mod pacing;
mod reader_gathering;
mod room;
mod row_versions;
pub mod scaling;
mod stalls;
#[cfg(test)]
pub(crate) mod tests;
mod waited;
mod workers;

use std::collections::VecDeque;
use std::time::Duration;

pub use attention::Attention;
use blame::Blame;
pub use blame::{Serialization, SerializationChange, TableId};
use committers::Committers;
pub use contents::GroupContents;
pub use locks::{LockError, Locks};
use one_by_one::OneByOne;
pub use pacing::Pacing;
pub use reader_gathering::ReaderGathering;
use room::Room;
pub use row_versions::RowVersions;
use scaling::Scaling;
pub use stalls::{Look, Stalls};
pub use workers::{Leaves, Want, Workers};

use crate::group::{Batcher, GroupLimits, GroupSeq, Size};
use crate::order::Prerequisites;
use crate::worker::{Group, GroupMember, GroupMode};
use crate::writeset::{Writeset, WritesetLimits};

/// A part of a transaction, as far as dispatch decides by it.
pub trait Dispatchable: GroupMember {
    /// Its size, and the conditions that it sets for its group.
    fn size(&self) -> Size;

    /// Whether it ends a transaction that is prepared on the subscriber.
    fn ends_prepared(&self) -> bool;

    /// The tables that it may change.
    fn tables(&self) -> impl Iterator<Item = TableId>;

    /// Takes the locks of its changes, in stream order.
    ///
    /// # Errors
    /// When the locks of a change are not known.
    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError>;

    /// Counts the row versions that its updates leave, of those that are executed one by one.
    fn count_versions(&self, versions: &mut RowVersions);
}

/// How one subscription's work is dispatched.
#[derive(Debug, Clone, Copy)]
pub struct DispatchSettings {
    /// The most workers that there can be.
    pub workers: usize,
    /// Whether workers come and go: other subscriptions share their sessions, or there may be too few.
    pub vary: bool,
    /// Whether the number of workers in use follows from the measured rate. See [`scaling`].
    pub scaled: bool,
    /// Whether commits keep the publisher's order.
    pub ordered: bool,
    /// The longest round trip to the subscriber that is expected.
    pub round_trip: Duration,
    /// The limits of one group.
    pub group: GroupLimits,
    /// Locks that all transactions of the subscriber can hold together.
    pub lock_table: usize,
    /// How many locks are remembered.
    pub writeset: WritesetLimits,
    /// Time until pgapace looks for sessions that block the oldest group.
    pub deadlock_timeout: Duration,
    /// The constants.
    pub pacing: Pacing,
}

/// The next action of the leader for the transactions that wait in [`Dispatch`].
#[derive(Debug)]
pub enum Step<T> {
    /// Nothing waits.
    Nothing,
    /// Nothing, until this time has passed or something happens.
    Wait(Duration),
    /// Nothing, until a worker has answered. `short`: another worker could take it.
    Busy {
        /// Whether more workers would help.
        short: bool,
    },
    /// Hand this group to this worker, and ask again.
    Assign {
        /// The worker.
        worker: usize,
        /// Others are busy at the same time.
        beside_others: bool,
        /// The group.
        group: Group<T>,
    },
}

/// The dispatcher of one subscription.
#[derive(Debug)]
pub struct Dispatch<T> {
    settings: DispatchSettings,
    waiting: Batcher<T>,
    workers: Workers,
    /// Locks of the groups in flight. `None` with a single worker, whose groups never overlap.
    writeset: Option<Writeset>,
    /// The last group that locked nothing there, because its worker was alone.
    unlocked: Option<GroupSeq>,
    blame: Blame,
    stalls: Stalls,
    /// If their number is not fixed.
    scaling: Option<Scaling>,
    sizes: in_use::GroupSizes,
    /// What the next group has so far.
    contents: GroupContents,
    /// If transactions are committed one by one.
    one_by_one: Option<OneByOne>,
    /// By worker, the groups that it has.
    given: Vec<VecDeque<in_use::Given>>,
    /// When all workers were busy and enough waited for a group.
    pressed_at: Option<Duration>,
    /// The group that was assigned last.
    last: GroupSeq,
    /// The last of them that was not prepared at once.
    last_ordinary: GroupSeq,
    last_at: Duration,
    /// The worker that has the first parts of a transaction whose rest is still to come.
    pinned: Option<usize>,
    /// When the workers last became idle.
    idle_since: Duration,
    /// How old the newest transaction was when the publisher sent it.
    behind: Duration,
    /// Whether threads wait for processors, so that each wake-up takes time from others.
    short_of_processors: bool,
    committers: Committers,
}

impl DispatchSettings {
    /// Whether every transaction is committed alone.
    fn is_one_by_one(&self) -> bool {
        self.group.transactions == 1
    }
}

impl<T: Dispatchable> Dispatch<T> {
    /// Nothing waits.
    #[must_use]
    pub fn new(settings: DispatchSettings) -> Self {
        let DispatchSettings { workers, vary, scaled, ordered, group, writeset, pacing, .. } =
            settings;
        // Unordered transactions need no turn.
        let in_turn = ordered || workers == 1;
        let one_by_one = (in_turn && settings.is_one_by_one())
            .then(|| OneByOne::new(workers, settings.round_trip, pacing));
        Self {
            waiting: Batcher::new(group, pacing),
            one_by_one,
            workers: Workers::new(workers, vary || scaled, pacing),
            writeset: (workers > 1).then(|| Writeset::new(writeset, ordered)),
            unlocked: None,
            scaling: scaled.then(|| Scaling::new(workers)),
            sizes: in_use::GroupSizes::new(workers),
            contents: GroupContents::new(&pacing),
            given: vec![VecDeque::new(); workers],
            pressed_at: None,
            blame: Blame::new(&pacing),
            stalls: Stalls::new(settings.deadlock_timeout, pacing.longest_deadlock_check),
            last: GroupSeq::NONE,
            last_ordinary: GroupSeq::NONE,
            last_at: Duration::ZERO,
            pinned: None,
            idle_since: Duration::ZERO,
            behind: Duration::ZERO,
            short_of_processors: false,
            committers: Committers::default(),
            settings,
        }
        .begin()
    }

    fn begin(mut self) -> Self {
        if self.scaling.is_some() {
            self.waiting.close_at(self.settings.pacing.first_group_changes);
        }
        if let Some(one_by_one) = &self.one_by_one {
            self.waiting.close_run_at(one_by_one.run());
        }
        self
    }

    /// The next part in commit order.
    pub fn push(&mut self, part: T) {
        if part.end().is_some() {
            self.committers.arrived();
        }
        let (by_rows, small) = (self.is_by_rows(&part), self.is_small(&part));
        self.waiting.push(Size { by_rows, small, ..part.size() }, part);
    }

    /// Whether a part is applied change by change, in a transaction of its own: because it must be, or
    /// because that is as fast where every transaction is committed alone.
    fn is_by_rows(&self, part: &T) -> bool {
        part.size().by_rows || self.one_by_one.is_some() && self.is_small(part)
    }

    fn is_small(&self, part: &T) -> bool {
        let size = part.size();
        size.whole && size.changes <= self.settings.pacing.few_changes && !part.is_under_rules()
    }

    fn is_in_pipeline(&self) -> bool {
        self.one_by_one.as_ref().is_some_and(OneByOne::is_pipeline)
    }

    /// Transactions of a group, at most.
    fn most_transactions(&self) -> usize {
        if self.one_by_one.is_some() {
            self.waiting.run()
        } else {
            self.settings.group.transactions
        }
    }

    /// A transaction was this old when the publisher sent it, by the publisher's own clock.
    pub fn sent_after(&mut self, age: Duration) {
        self.behind = age;
    }

    /// So many transactions are received and not committed on the subscriber.
    pub fn on_their_way(&mut self, transactions: usize) {
        if !self.is_backlog() {
            self.waiting.on_their_way(transactions);
        }
    }

    /// Whether the publisher sends old transactions.
    #[must_use]
    pub fn is_backlog(&self) -> bool {
        self.settings.pacing.is_backlog(self.behind)
    }

    /// Notes whether processors are `short`, and how many `sessions` of the publisher were in a transaction
    /// that writes.
    pub fn observed(&mut self, short: bool, sessions: usize, now: Duration) {
        self.short_of_processors = short;
        self.committers.counted(sessions, now);
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether no worker has anything.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.workers.is_idle()
    }

    /// The workers, with their groups.
    #[must_use]
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Everything up to this group has ended.
    #[must_use]
    pub fn ended_through(&self) -> GroupSeq {
        self.oldest().map_or(self.last, GroupSeq::previous)
    }

    fn oldest(&self) -> Option<GroupSeq> {
        self.workers.running().map(|(_, group)| group).min()
    }

    /// The next action for the transactions that wait. `reading`: whether more is being received.
    ///
    /// # Errors
    /// When the locks of a change are not known; then the run must end.
    pub fn next(&mut self, now: Duration, reading: bool) -> Result<Step<T>, LockError> {
        self.limit_to_load(now);
        let step = self.next_step(now, reading);
        let busy = matches!(step, Ok(Step::Busy { .. }));
        if busy && self.waiting.is_worth_a_group() {
            self.pressed_at = Some(now);
        }
        if let Some(scaling) = &mut self.scaling {
            scaling.waits(busy, now);
        }
        if let Some(one_by_one) = &mut self.one_by_one {
            one_by_one.waits(busy, now);
        }
        step
    }

    fn next_step(&mut self, now: Duration, reading: bool) -> Result<Step<T>, LockError> {
        if self.waiting.is_empty() {
            return Ok(Step::Nothing);
        }
        let worker = match self.room(now, reading) {
            Room::At(worker) => worker,
            Room::In(time) => return Ok(Step::Wait(time)),
            Room::Busy => return Ok(Step::Busy { short: true }),
            Room::Full => return Ok(Step::Busy { short: false }),
        };
        // A run of transactions that are committed one by one gains nothing from its length.
        if self.is_idle() && reading && !self.is_in_pipeline() {
            let waited = now.saturating_sub(self.idle_since);
            let gathering = self.waiting.gathering(self.behind, waited);
            if !gathering.is_zero() {
                return Ok(Step::Wait(gathering));
            }
        }
        let most_relations = self.most_relations();
        match self.waiting.take(self.contents.begin(most_relations)) {
            Some(works) => self.assign(worker, works, now),
            None => Ok(Step::Nothing),
        }
    }

    /// Relations that a group may lock.
    fn most_relations(&self) -> usize {
        let open = self.workers.open().count().max(1);
        self.settings.lock_table / self.settings.pacing.lock_table_part / open
    }

    fn assign(
        &mut self,
        worker: usize,
        works: Vec<T>,
        now: Duration,
    ) -> Result<Step<T>, LockError> {
        let continued = self.pinned.is_some();
        let seq = if continued { self.last } else { self.last.next() };
        let ends = works.last().is_some_and(|work| work.end().is_some());
        let dependent = self.lock(worker, seq, continued, &works)?;
        let (mode, attempts) = (self.mode(&works), 0);
        let shares_commits = !self.settings.is_one_by_one();
        let mut group =
            Group { seq, works, mode, dependent, attempts, more: false, shares_commits };
        if group.is_prepared_at_once() {
            // Those of one run of them were all prepared on the publisher at the same time, so none is
            // in the way of another. They need no turn, since a prepared transaction is not visible.
            // Together they share the subscriber's writes to disk.
            group.dependent.prerequisites = Prerequisites::through(self.last_ordinary);
        } else {
            self.last_ordinary = seq;
        }
        let beside_others = !self.is_idle();
        self.note_work(worker, &group, now);
        (self.last, self.last_at) = (seq, now);
        self.pinned = (!ends).then_some(worker);
        self.workers.push(worker, seq);
        Ok(Step::Assign { worker, beside_others, group })
    }

    fn mode(&self, works: &[T]) -> GroupMode {
        // Small transactions may share a group with those that must be committed alone.
        let by_rows = works.iter().any(|work| self.is_by_rows(work) || work.is_step());
        if by_rows { GroupMode::Rows } else { GroupMode::Net }
    }

    /// A worker is through with its first groups, and these groups have ended. Whether the worker is to
    /// go now.
    pub fn answered(
        &mut self,
        worker: usize,
        groups: usize,
        ended: &[GroupSeq],
        now: Duration,
    ) -> bool {
        let goes = self.workers.answered(worker, groups, now);
        if let Some(writeset) = &mut self.writeset {
            for group in ended {
                writeset.committed(*group);
                self.blame.ended(*group);
            }
        }
        if self.is_idle() {
            self.idle_since = now;
        }
        self.measure(worker, groups, now);
        goes
    }

    /// See [`Workers::want`].
    pub fn want(&mut self, short: bool, now: Duration, ask: impl FnOnce() -> bool) -> Want {
        self.workers.want(short, now, ask)
    }

    /// See [`Workers::give_back`]. Not the worker that has the first parts of a transaction.
    pub fn give_back(&mut self, now: Duration, gives: impl FnOnce(bool) -> bool) -> Option<Leaves> {
        self.workers.give_back(self.pinned, now, gives)
    }

    /// See [`Workers::retire`]. Not the worker that has the first parts of a transaction.
    pub fn retire(&mut self, now: Duration) -> Option<Leaves> {
        self.workers.retire(self.pinned, now)
    }

    /// See [`Workers::came`].
    pub fn came(&mut self, worker: usize, now: Duration) {
        self.workers.came(worker, now);
    }

    /// See [`Workers::left`].
    pub fn left(&mut self, worker: usize) {
        self.workers.left(worker);
        self.prepared(worker, Duration::ZERO);
    }

    /// See [`Workers::not_opened`].
    pub fn not_opened(&mut self, worker: usize, now: Duration) {
        self.workers.not_opened(worker, now);
    }

    /// Whether it is time to look for sessions that block the oldest group; `next` is the oldest if no
    /// worker has one. See [`Stalls::look`].
    pub fn look_at_stalls(&mut self, next: Option<GroupSeq>, now: Duration) -> Look {
        let oldest = self.oldest().or(next);
        self.stalls.look(oldest, now)
    }

    /// The group that was the oldest at the last look.
    #[must_use]
    pub fn stalled(&self) -> Option<GroupSeq> {
        self.stalls.oldest()
    }

    /// The monitor has looked at the group that was the oldest: whether it waited for a lock, and which
    /// later groups hold locks that it needs. Returns the workers that are to roll them back, and the
    /// tables that are serialized for it: none if that group has ended meanwhile.
    pub fn resolve_deadlock(
        &mut self,
        oldest: GroupSeq,
        (waits, victims): (bool, &[GroupSeq]),
        now: Duration,
    ) -> (Vec<(usize, GroupSeq)>, SerializationChange) {
        let mut change =
            SerializationChange { roots: Vec::new(), serialization: Serialization::ForLocks };
        if !self.stalls.found(oldest, waits) {
            return (Vec::new(), change);
        }
        let running: Vec<_> =
            self.workers.running().filter(|(_, group)| victims.contains(group)).collect();
        for victim in victims {
            if running.iter().any(|(_, group)| group == victim) {
                change.roots.extend(self.blame.gave_way(oldest, *victim, now));
            }
        }
        (running, change)
    }

    /// Tables that are not serialized any more.
    pub fn release(&mut self, now: Duration) -> SerializationChange {
        self.blame.release(now)
    }

    /// A group met a unique value that another row has, in a table below this topmost relation. Until
    /// they are [released](Self::release), groups with such tables run one after the other: the writeset
    /// does not see secondary unique values that an update frees.
    pub fn unique_value_moved(&mut self, root: u32, now: Duration) -> SerializationChange {
        self.blame.unique_value_moved(root, now)
    }

    /// The size of everything that is remembered.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        Remembered {
            waiting: self.waiting.len(),
            queued: self.workers.running().map(|(w, _)| self.workers.queue(w).len()).sum(),
            locks: self.writeset.as_ref().map_or(0, Writeset::len),
            groups: self.blame.len(),
        }
    }
}

/// How many things a dispatcher remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remembered {
    /// Parts that wait for a worker.
    pub waiting: usize,
    /// Groups that workers have not answered.
    pub queued: usize,
    /// Keys in the writeset.
    pub locks: usize,
    /// Groups whose tables are known.
    pub groups: usize,
}
