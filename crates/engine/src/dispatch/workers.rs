//! The apply workers of one subscription: which of them are open, and the groups that each has.
//!
//! ```text
//!             want()                came()
//!   Vacant ───────────► Opening ───────────► Open ◄──── push(), answered()
//!     ▲                    │                  │
//!     │  not_opened()      │                  │ give_back(), retire()
//!     ├────────────────────┘                  ▼
//!     └────────────────────────────────── Leaving ◄──── answered()
//!                       left()
//! ```
//!
//! The first worker is the subscription's own, and stays. The others come and go, if the number of
//! workers is not fixed or their sessions are shared with other subscriptions of the process. One comes
//! when there is more to do than the open workers take. It goes when another subscription asks for its
//! session, or when it was idle for long; its groups are completed first. The leader waits for neither.
//!
//! Only the first workers get groups, as many as [`Workers::limit`] says. The others stay for a while.

use std::collections::VecDeque;
use std::time::Duration;

use crate::dispatch::Pacing;
use crate::group::GroupSeq;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Vacant,
    /// The worker's session is being opened.
    Opening,
    Open,
    /// The worker gets no more groups, and goes when those that it has have ended.
    Leaving,
}

/// A place for a worker.
#[derive(Debug)]
struct WorkerSlot {
    stage: Stage,
    /// The groups that it has not answered, a part of a large transaction each for itself.
    queue: VecDeque<GroupSeq>,
    /// When it came.
    since: Duration,
    /// When it last had nothing more to do.
    idle_since: Duration,
}

impl WorkerSlot {
    fn is_done(&self) -> bool {
        self.stage == Stage::Leaving && self.queue.is_empty()
    }
}

/// The answer to work that all open workers are too busy for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Nothing.
    Nothing,
    /// Another session is not wanted any more.
    Content,
    /// This worker is to open its session: see [`Workers::came`] and [`Workers::not_opened`].
    Open(usize),
}

/// A worker that gives its session back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaves {
    /// Which one.
    pub worker: usize,
    /// Whether it has nothing left to do. If not, `Workers::answered` says when.
    pub done: bool,
}

/// The places.
#[derive(Debug)]
pub struct Workers {
    slots: Vec<WorkerSlot>,
    /// Whether workers come and go.
    vary: bool,
    pacing: Pacing,
    /// How many workers may get groups.
    limit: usize,
    /// Whether that many are to be there at once.
    eager: bool,
    /// Since when there is more to do than the workers take.
    short_since: Option<Duration>,
    /// When such times are counted from, and their sum before `short_since`.
    counted_from: Duration,
    short_for: Duration,
    /// No session is opened before.
    paused_until: Duration,
}

impl Workers {
    /// At most `most` workers, at least one. If they vary, the first is open, else all are.
    #[must_use]
    pub fn new(most: usize, vary: bool, pacing: Pacing) -> Self {
        let slot = |number| WorkerSlot {
            stage: if number == 0 || !vary { Stage::Open } else { Stage::Vacant },
            queue: VecDeque::new(),
            since: Duration::ZERO,
            idle_since: Duration::ZERO,
        };
        let slots = (0..most.max(1)).map(slot).collect();
        Self {
            slots,
            vary,
            pacing,
            limit: most.max(1),
            eager: false,
            short_since: None,
            counted_from: Duration::ZERO,
            short_for: Duration::ZERO,
            paused_until: Duration::ZERO,
        }
    }

    /// The most workers that there can be.
    #[must_use]
    pub fn most(&self) -> usize {
        self.slots.len()
    }

    /// From now on at most so many workers get groups, and at least one. `eager`: those that are missing
    /// are to come at once; otherwise when there is more to do than the others take.
    pub fn limit(&mut self, limit: usize, eager: bool) {
        (self.limit, self.eager) = (limit.clamp(1, self.slots.len()), eager);
    }

    /// See [`Self::limit`].
    #[must_use]
    pub fn limited_to(&self) -> usize {
        self.limit
    }

    /// Those that may be given groups, by number, with their groups; the first is always among them.
    pub fn open(&self) -> impl Iterator<Item = (usize, &VecDeque<GroupSeq>)> {
        let open = self.slots.iter().enumerate().filter(|(_, slot)| slot.stage == Stage::Open);
        open.map(|(number, slot)| (number, &slot.queue)).take(self.limit)
    }

    /// Whether all groups in flight are those of the first worker.
    #[must_use]
    pub fn only_first_is_busy(&self) -> bool {
        self.slots[1..].iter().all(|slot| slot.queue.is_empty())
    }

    /// The group that each busy worker executes, or executes next: the first of its queue.
    pub fn running(&self) -> impl Iterator<Item = (usize, GroupSeq)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(number, slot)| Some((number, *slot.queue.front()?)))
    }

    /// Whether no worker has anything.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.queue.is_empty())
    }

    /// The groups of a worker.
    #[must_use]
    pub fn queue(&self, worker: usize) -> &VecDeque<GroupSeq> {
        &self.slots[worker].queue
    }

    /// A worker is given this group.
    pub(super) fn push(&mut self, worker: usize, group: GroupSeq) {
        self.slots[worker].queue.push_back(group);
    }

    /// A worker is through with its first groups. Whether it is to go now.
    pub(super) fn answered(&mut self, worker: usize, groups: usize, now: Duration) -> bool {
        let slot = &mut self.slots[worker];
        slot.queue.drain(..groups);
        if slot.queue.is_empty() {
            slot.idle_since = now;
        }
        slot.is_done()
    }

    /// Tells whether there is more to do than the workers take: then another one may come, if `ask`
    /// gets a session for it.
    pub fn want(&mut self, short: bool, now: Duration, ask: impl FnOnce() -> bool) -> Want {
        if !self.vary {
            return Want::Nothing;
        }
        let short = short || self.eager;
        let long_enough = self.is_short_for_long(short, now);
        let there = |slot: &&WorkerSlot| matches!(slot.stage, Stage::Open | Stage::Opening);
        if !short || self.slots.iter().filter(there).count() >= self.limit {
            return if self.short_since.take().is_some() { Want::Content } else { Want::Nothing };
        }
        let opening = self.slots.iter().any(|slot| slot.stage == Stage::Opening);
        if now < self.paused_until || !self.eager && (!long_enough || opening) {
            return Want::Nothing;
        }
        let vacant = self.slots.iter().position(|slot| slot.stage == Stage::Vacant);
        match vacant {
            Some(worker) if ask() => {
                self.slots[worker].stage = Stage::Opening;
                Want::Open(worker)
            }
            _ => Want::Nothing,
        }
    }

    /// Counts how long there was more to do than the workers took. Groups that are short, but many, are
    /// waited for in many short times.
    fn is_short_for_long(&mut self, short: bool, now: Duration) -> bool {
        if now.saturating_sub(self.counted_from) >= self.pacing.want_within {
            (self.counted_from, self.short_for) = (now, Duration::ZERO);
        }
        match (self.short_since, short) {
            (None, true) => self.short_since = Some(now),
            (Some(since), false) => self.short_for += now.saturating_sub(since),
            _ => {}
        }
        let since = self.short_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        self.short_for + since >= self.pacing.want_after
    }

    /// A worker that was not used for long, and goes. Not worker `kept`.
    pub fn retire(&mut self, kept: Option<usize>, now: Duration) -> Option<Leaves> {
        if !self.vary {
            return None;
        }
        let unused = self.pacing.unused;
        let mut others = self.slots.iter_mut().enumerate().skip(1).rev();
        let (worker, slot) = others.find(|(number, slot)| {
            let idle = slot.queue.is_empty() && now.saturating_sub(slot.idle_since) >= unused;
            Some(*number) != kept && slot.stage == Stage::Open && idle
        })?;
        slot.stage = Stage::Leaving;
        Some(Leaves { worker, done: true })
    }

    /// The worker that gives its session to another subscription, if one is to have it: `gives` says so
    /// of an idle one, or of a busy one. Not worker `kept`.
    pub fn give_back(
        &mut self,
        kept: Option<usize>,
        now: Duration,
        gives: impl FnOnce(bool) -> bool,
    ) -> Option<Leaves> {
        let others = self.slots.iter_mut().enumerate().filter(|(number, slot)| {
            *number != 0 && Some(*number) != kept && slot.stage == Stage::Open
        });
        let (worker, slot) = others.min_by_key(|(_, slot)| (slot.queue.len(), slot.idle_since))?;
        let idle = slot.queue.is_empty() && now.saturating_sub(slot.idle_since) >= self.pacing.idle;
        let stayed = now.saturating_sub(slot.since) >= self.pacing.tenure;
        if !(idle || stayed) || !gives(idle) {
            return None;
        }
        slot.stage = Stage::Leaving;
        Some(Leaves { worker, done: slot.is_done() })
    }

    /// A worker's session is open.
    pub fn came(&mut self, worker: usize, now: Duration) {
        let slot = &mut self.slots[worker];
        slot.stage = Stage::Open;
        (slot.since, slot.idle_since) = (now, now);
    }

    /// A worker has gone, and its session is closed.
    pub fn left(&mut self, worker: usize) {
        self.slots[worker].stage = Stage::Vacant;
    }

    /// A worker's session could not be opened.
    pub fn not_opened(&mut self, worker: usize, now: Duration) {
        self.left(worker);
        self.paused_until = now + self.pacing.reopen_pause;
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, GroupSeq, Leaves, Pacing, Want, Workers};

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_fixed_number_of_workers_stays() {
        let mut workers = Workers::new(3, false, Pacing::MEASURED);
        assert_eq!(workers.open().count(), 3);
        assert_eq!(workers.want(true, at(900), || panic!("nobody is asked")), Want::Nothing);
        assert_eq!(workers.retire(None, at(9_000_000)), None);
    }

    #[test]
    fn only_so_many_get_groups_and_others_go_when_they_are_not_used() {
        let mut workers = Workers::new(4, true, Pacing::MEASURED);
        workers.limit(3, true);
        assert_eq!(workers.want(false, at(0), || true), Want::Open(1), "at once");
        assert_eq!(workers.want(false, at(0), || true), Want::Open(2), "both at a time");
        assert_eq!(workers.want(true, at(0), || true), Want::Content, "that is all");
        workers.came(1, at(10));
        workers.came(2, at(10));
        assert_eq!(workers.open().count(), 3);
        workers.push(1, GroupSeq(1));
        workers.limit(1, true);
        assert_eq!(workers.open().map(|(number, _)| number).collect::<Vec<_>>(), [0]);
        assert!(!workers.only_first_is_busy());
        assert!(!workers.answered(1, 1, at(20_000)));
        assert!(workers.only_first_is_busy());
        let unused = Pacing::MEASURED.unused;
        assert_eq!(workers.retire(Some(2), at(10) + unused), None, "it has a part of something");
        let leaves = |worker| Some(Leaves { worker, done: true });
        assert_eq!(workers.retire(None, at(10) + unused), leaves(2));
        assert_eq!(workers.retire(None, at(10) + unused), None, "it was used lately");
        assert_eq!(workers.retire(None, at(20_000) + unused), leaves(1));
        assert_eq!(workers.retire(None, at(90_000) + unused), None, "the first stays");
    }

    #[test]
    fn many_short_waits_count_like_a_long_one() {
        let mut workers = Workers::new(2, true, Pacing::MEASURED);
        let mut opened = None;
        for wait in 0..30 {
            for (at_millisecond, short) in [(10 * wait, true), (10 * wait + 5, false)] {
                if workers.want(short, at(at_millisecond), || true) == Want::Open(1) {
                    opened.get_or_insert(wait);
                }
            }
        }
        assert_eq!(opened, Some(10));
    }

    #[test]
    fn another_worker_comes_when_work_has_waited() {
        let mut workers = Workers::new(3, true, Pacing::MEASURED);
        assert_eq!(workers.open().count(), 1);
        assert_eq!(workers.want(true, at(100), || true), Want::Nothing);
        assert_eq!(workers.want(true, at(149), || true), Want::Nothing);
        assert_eq!(workers.want(true, at(150), || false), Want::Nothing);
        assert_eq!(workers.want(true, at(151), || true), Want::Open(1));
        assert_eq!(workers.open().count(), 1, "its session is being opened");
        assert_eq!(workers.want(true, at(160), || true), Want::Nothing, "one after the other");
        workers.came(1, at(170));
        assert_eq!(workers.open().count(), 2);
        assert_eq!(workers.want(false, at(180), || true), Want::Content);
        assert_eq!(workers.want(false, at(181), || true), Want::Nothing);
    }

    #[test]
    fn a_session_that_cannot_be_opened_is_not_asked_for_at_once() {
        let mut workers = Workers::new(2, true, Pacing::MEASURED);
        workers.want(true, at(0), || true);
        assert_eq!(workers.want(true, at(50), || true), Want::Open(1));
        workers.not_opened(1, at(60));
        assert_eq!(workers.want(true, at(10_059), || true), Want::Nothing);
        assert_eq!(workers.want(true, at(10_060), || true), Want::Open(1));
    }

    #[test]
    fn a_busy_worker_leaves_after_its_groups() {
        let mut workers = Workers::new(3, true, Pacing::MEASURED);
        workers.came(1, at(0));
        workers.came(2, at(0));
        workers.push(1, GroupSeq(1));
        workers.push(2, GroupSeq(2));
        workers.push(2, GroupSeq(3));
        assert_eq!(workers.give_back(None, at(499), |_| true), None, "it has just come");
        let leaves = workers.give_back(Some(2), at(500), |idle| !idle);
        assert_eq!(leaves, Some(Leaves { worker: 1, done: false }));
        assert_eq!(workers.open().map(|(number, _)| number).collect::<Vec<_>>(), [0, 2]);
        assert!(workers.answered(1, 1, at(510)));
        workers.left(1);
        // The first never leaves.
        let leaves = workers.give_back(None, at(600), |_| true);
        assert_eq!(leaves, Some(Leaves { worker: 2, done: false }));
        assert!(!workers.answered(2, 1, at(610)));
        assert!(workers.answered(2, 1, at(620)));
        workers.left(2);
        assert_eq!(workers.give_back(None, at(9999), |_| true), None);
    }
}
