//! The workers of a subscription, and which group goes to which of them.

mod slots;

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use engine::group::GroupSeq;
use engine::order;
use engine::transaction::Touched;
use engine::worker::{Contended, Mode};
use engine::writeset::{LockRules, Verdict, Writeset, WritesetLimits};

use crate::apply::blockers::{Blockers, Found, FromBlockers, Probe};
use crate::apply::demotions::{Demotions, Turned};
use crate::apply::prefetch::Prefetch;
use crate::apply::work::{Group, TwoPhase, Work};
use crate::apply::worker::{Answered, FromWorker, Identity, Moved};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::target::mapping::TableMap;
use crate::target::state::statistics::Waits;

pub(crate) use slots::{Connector, Slots};

/// Source transactions that are on their way to the target at once where groups are small: a
/// worker that is told to commit each of them alone must not wait for every answer.
const WINDOW: usize = 256;
/// Groups that a worker has at once: one that the target works on, and one behind it, so that the
/// target never waits for us.
const DEPTH: usize = 2;
/// While another worker is busy, a group that is not worth it is kept so long for more to come: the
/// workers share the target, and small groups cost it more for each change.
const PACE: Duration = Duration::from_millis(2);
/// The same while there is a backlog: then enough for a group will come soon.
const BACKLOG_PACE: Duration = Duration::from_millis(100);

/// Groups that a worker has at once where the target is far away: as many as a round trip takes. Their
/// answers are not waited for, so a small group goes to the session that has the one before it, where
/// nothing of it has to wait; and small groups follow each other in this part of a round trip.
const FAR_DEPTH: usize = 64;
const FAR_PACE: u32 = 8;

/// The longest time between two looks at one wait.
const LONGEST_PROBE: Duration = Duration::from_secs(1);

/// Where the next group could go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// To this worker.
    At(usize),
    /// To a worker that is free, but not before this time has passed.
    In(Duration),
    /// Nowhere until a worker has ended something, or another one comes.
    Busy,
    /// Nowhere until a worker has ended something.
    None,
}

/// The workers of one subscription.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Slots,
    /// What the groups in flight have locked; a single worker needs to know nothing of it.
    writeset: Option<Writeset>,
    demotions: Demotions,
    prefetch: Option<Prefetch>,
    depth: usize,
    /// Each transaction is a group, however small.
    one_by_one: bool,
    identity: Identity,
    /// The last group that was handed over.
    last: GroupSeq,
    /// The last of them that was not prepared at once.
    last_ordinary: GroupSeq,
    last_at: Instant,
    /// The worker that has the first parts of a transaction whose rest is still to come.
    pinned: Option<usize>,
    /// When the pool last became idle.
    idle_since: Instant,
    blockers: Blockers,
    stall: Stall,
}

/// How long the oldest group has been the oldest, and when to look what keeps it.
#[derive(Debug)]
struct Stall {
    /// Time after which a group that does not end is looked at first.
    probe: Duration,
    oldest: Option<GroupSeq>,
    since: Instant,
    /// When to look next, counted from `since`.
    next: Duration,
    /// A look is under way.
    asked: bool,
    /// How long the oldest groups have waited for locks.
    waits: Stopwatch,
}

impl Stall {
    fn new(probe: Duration) -> Self {
        let waits = Stopwatch::default();
        Self { probe, oldest: None, since: Instant::now(), next: probe, asked: false, waits }
    }

    /// Another group is the oldest.
    fn begin(&mut self, oldest: Option<GroupSeq>) {
        self.oldest = oldest;
        self.since = Instant::now();
        self.next = self.probe;
        self.waits.set(None);
    }
}

impl Pool {
    /// `group_transactions`: what a group may have at most; `lock_probe`: time after which it is
    /// looked what keeps the oldest group.
    pub(crate) fn new(
        slots: Slots,
        group_transactions: usize,
        identity: Identity,
        blockers: Blockers,
        lock_probe: Duration,
    ) -> Self {
        let most = slots.most();
        let now = Instant::now();
        Self {
            one_by_one: group_transactions == 1,
            depth: (WINDOW / group_transactions / most).max(DEPTH),
            writeset: (most > 1)
                .then(|| Writeset::new(WritesetLimits::default(), identity.ordered)),
            identity,
            demotions: Demotions::new(),
            prefetch: None,
            slots,
            last: GroupSeq::NONE,
            last_ordinary: GroupSeq::NONE,
            last_at: now,
            pinned: None,
            idle_since: now,
            blockers,
            stall: Stall::new(lock_probe),
        }
    }

    /// Has rows of the groups read ahead.
    pub(crate) fn with_prefetch(mut self, prefetch: Prefetch) -> Self {
        self.prefetch = Some(prefetch);
        self
    }

    /// Whether no worker has anything.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.is_idle()
    }

    /// For how long no worker has had anything.
    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }

    /// Where a group could go; `worth` says whether it is worth being put together while all are
    /// busy, `backlog` whether more will come soon.
    pub(crate) fn room(&self, worth: bool, backlog: bool) -> Room {
        if let Some(worker) = self.pinned {
            return if self.slots.queue(worker).len() < self.depth {
                Room::At(worker)
            } else {
                Room::None
            };
        }
        // Full means that groups are in flight, and the oldest always ends.
        if self.writeset.as_ref().is_some_and(Writeset::is_full) {
            return Room::None;
        }
        if let Some(room) = self.room_far_away(worth && !self.one_by_one || backlog) {
            return room;
        }
        // The first that is free: under a light load one session has all plans at hand.
        let free = self.slots.open().find(|(_, queue)| queue.is_empty());
        if let Some((free, _)) = free {
            let early = if worth || self.is_idle() {
                Duration::ZERO
            } else {
                let pace = if backlog { BACKLOG_PACE } else { PACE };
                pace.saturating_sub(self.last_at.elapsed())
            };
            return if early.is_zero() { Room::At(free) } else { Room::In(early) };
        }
        let least =
            self.slots.open().min_by_key(|(_, queue)| (queue.len(), queue.front().copied()));
        match least {
            Some((worker, queue)) if worth && queue.len() < self.depth => Room::At(worker),
            _ => Room::Busy,
        }
    }

    /// Behind the last group, where that saves the answers of a target that is far away, and there is
    /// not enough to do for others.
    fn room_far_away(&self, busy: bool) -> Option<Room> {
        if busy || !self.identity.ordered || !self.identity.is_far() {
            return None;
        }
        let last = self.slots.open().find(|(_, queue)| queue.back() == Some(&self.last));
        let (worker, queue) = last?;
        let pace = (self.identity.round_trip / FAR_PACE).min(PACE);
        let early = pace.saturating_sub(self.last_at.elapsed());
        Some(match queue.len() {
            FAR_DEPTH.. => Room::Busy,
            _ if early.is_zero() => Room::At(worker),
            _ => Room::In(early),
        })
    }

    /// Hands a group to a worker that has room for it.
    pub(crate) fn submit(&mut self, worker: usize, works: Vec<Work>, mode: Mode) -> Result<()> {
        let continued = self.pinned.is_some();
        let seq = if continued { self.last } else { self.last.next() };
        let ends = works.last().is_some_and(|work| work.part.end_lsn.is_some());
        let resolves = works.iter().any(|work| {
            matches!(work.two_phase, Some(TwoPhase::Commit(_) | TwoPhase::Rollback(_)))
        });
        let mut contended = match &mut self.writeset {
            None => Contended::default(),
            Some(writeset) => {
                if !continued {
                    self.demotions.settle(writeset);
                    writeset.open(seq, self.slots.queue(worker).back().copied());
                }
                if resolves {
                    // Its changes are on the target already. Nothing that was sent between its
                    // PREPARE and this touches a row of it, because on the publisher it held their
                    // locks all that time; so nothing before it waits for it, and it is never
                    // behind somebody who does. What comes after it waits until it has ended.
                    writeset.barrier();
                }
                if self.demotions.note(seq, &works) {
                    writeset.barrier();
                }
                let changes = lock(writeset, &works)?;
                if ends {
                    Contended { waits: writeset.close(), changes }
                } else {
                    // It runs only as the oldest.
                    Contended::default()
                }
            }
        };
        let busy = !self.is_idle();
        if let Some(prefetch) = &mut self.prefetch {
            prefetch.offer(seq, &works, mode, busy);
        }
        let group = Group { seq, works, mode, contended: Contended::default(), attempts: 0 };
        if group.is_prepared_at_once() {
            // Those of one run of them were all prepared on the publisher at the same time, so none
            // is in the way of another; and they need no turn, since nobody sees them. Together
            // they share the target's writes to disk.
            contended = Contended { waits: order::Waits::through(self.last_ordinary), ..contended };
        } else {
            self.last_ordinary = seq;
        }
        let group = Group { contended, ..group };
        self.last = seq;
        self.last_at = Instant::now();
        self.pinned = (!ends).then_some(worker);
        match self.slots.push(worker, seq) {
            Some(worker) => worker.submit(group),
            None => return Err(Failure::internal("a group for a worker that is not there")),
        }
        Ok(())
    }

    /// Has somebody look what keeps the oldest group, if it has not ended for a while. Returns when
    /// to call again. `next` is what is oldest when there is no group, `others` are sessions beside
    /// those of the workers, with numbers in the place of groups.
    pub(crate) fn look_at_stalls(
        &mut self,
        next: Option<GroupSeq>,
        others: impl FnOnce() -> Vec<(i32, GroupSeq)>,
    ) -> Duration {
        let oldest = self.slots.running().map(|(_, group)| group).min().or(next);
        let stall = &mut self.stall;
        if stall.oldest != oldest {
            stall.begin(oldest);
        }
        if oldest.is_none() || stall.asked {
            return LONGEST_PROBE;
        }
        let waited = stall.since.elapsed();
        if waited < stall.next {
            return stall.next - waited;
        }
        stall.asked = true;
        stall.next = waited + waited.min(LONGEST_PROBE);
        let running = self.slots.running();
        let mut groups: Vec<_> =
            running.filter_map(|(worker, group)| Some((worker.pid()?, group))).collect();
        groups.extend(others());
        groups.sort_by_key(|(_, group)| *group);
        self.blockers.probe(Probe(groups));
        LONGEST_PROBE
    }

    /// What workers say.
    pub(crate) fn events(&self) -> &Receiver<(usize, FromWorker)> {
        &self.slots.events
    }

    /// Whether groups wait and all workers are busy: then another one may come.
    pub(crate) fn want(&mut self, short: bool) {
        self.slots.want(short);
    }

    /// Gives a session to another subscription that is to have it.
    pub(crate) fn give_back(&mut self) {
        self.slots.give_back(self.pinned);
    }

    /// A worker that was to come is there or not, or one has gone.
    pub(crate) fn moved(&mut self, worker: usize, moved: Moved) {
        self.slots.moved(worker, moved);
    }

    pub(crate) fn found(&self) -> &Receiver<FromBlockers> {
        &self.blockers.events
    }

    /// What keeps the oldest group: later ones that hold its locks go back. Tables that are applied
    /// in stream order for it from now on.
    pub(crate) fn make_way(&mut self, found: &Found) -> Turned {
        self.stall.asked = false;
        if self.stall.oldest == Some(found.oldest) {
            self.stall.waits.set(found.waits.then_some(Reason::TargetLock));
        }
        let mut turned = Turned { roots: Vec::new(), demoted: true };
        for victim in &found.victims {
            if let Some((worker, _)) = self.slots.running().find(|(_, group)| group == victim) {
                worker.give_way(*victim);
                turned.roots.extend(self.demotions.gave_way(found.oldest, *victim).roots);
            }
        }
        turned
    }

    /// Tables that are not applied in stream order any more.
    pub(crate) fn promote(&mut self) -> Turned {
        self.demotions.promote()
    }

    /// How long workers, and the oldest groups, have waited since the last call.
    pub(crate) fn take_waits(&mut self) -> Waits {
        let mut waits = self.stall.waits.take();
        waits.add(&self.slots.take_waits());
        waits
    }

    /// Ends all workers; returns what they have answered and nobody has taken.
    pub(crate) fn end(&mut self) -> Vec<Answered> {
        self.slots.close();
        let answered = self.slots.events.try_iter().filter_map(|(_, event)| match event {
            FromWorker::Answered(answered) => Some(*answered),
            FromWorker::Failed(_) | FromWorker::Moved(_) => None,
        });
        answered.collect()
    }

    /// A worker is through with its first groups; these have ended.
    pub(crate) fn answered(&mut self, worker: usize, groups: usize, ended: &[GroupSeq]) {
        self.slots.answered(worker, groups);
        if let Some(writeset) = &mut self.writeset {
            for group in ended {
                writeset.committed(*group);
                self.demotions.ended(*group);
            }
        }
        let oldest = self.slots.running().map(|(_, group)| group).min();
        if let Some(prefetch) = &self.prefetch {
            prefetch.ended(oldest.map_or(self.last, |oldest| oldest.previous()));
        }
        if self.is_idle() {
            self.idle_since = Instant::now();
        }
    }
}

/// Takes the locks of all changes; tells by change whether it is contended, nothing if none is.
fn lock(writeset: &mut Writeset, works: &[Work]) -> Result<Vec<bool>> {
    let mut contended = Vec::with_capacity(works.iter().map(|work| work.part.len()).sum());
    let mut truncated = Vec::new();
    for work in works {
        for change in 0..work.part.len() {
            let (message, touched) =
                work.part.change(change).map_err(|e| Failure::internal(e.to_string()))?;
            let verdict = match touched {
                Touched::One(relation, _) => match work.tables[relation].as_ref() {
                    Some(map) => writeset.change(locks(map)?, &message),
                    None => Verdict::Free,
                },
                Touched::Many(relations) => {
                    truncated.clear();
                    let maps = relations.iter().filter_map(|r| work.tables[*r as usize].as_ref());
                    for map in maps {
                        truncated.push(locks(map)?);
                    }
                    if truncated.is_empty() { Verdict::Free } else { writeset.truncate(&truncated) }
                }
            };
            contended.push(verdict == Verdict::Contended);
        }
    }
    if !contended.contains(&true) {
        contended.clear();
    }
    Ok(contended)
}

fn locks(map: &TableMap) -> Result<&LockRules> {
    map.locks.as_ref().ok_or_else(|| Failure::internal("a table was mapped for one worker"))
}
