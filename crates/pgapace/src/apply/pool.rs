//! The workers of a subscription, and what each of them has.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::group::GroupSeq;
use engine::transaction::Touched;
use engine::writeset::{LockRules, Verdict, Writeset, WritesetLimits};

use crate::apply::blockers::{Blockers, Found, FromBlockers, Probe};
use crate::apply::turns::Turns;
use crate::apply::work::{Contended, Group, Mode, Work};
use crate::apply::worker::{Answered, Connect, FromWorker, Worker};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::target::mapping::TableMap;
use crate::target::state::statistics::Waits;

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

/// The longest time between two looks at one wait.
const LONGEST_PROBE: Duration = Duration::from_secs(1);

/// Where the next group could go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// To this worker.
    At(usize),
    /// To a worker that is free, but not before this time has passed.
    In(Duration),
    /// Nowhere until a worker has ended something.
    None,
}

/// The workers of one subscription.
#[derive(Debug)]
pub(crate) struct Pool {
    workers: Vec<Worker>,
    pub(crate) events: Receiver<(usize, FromWorker)>,
    /// What the groups in flight have locked; a single worker needs to know nothing of it.
    writeset: Option<Writeset>,
    /// By worker, the groups that it has not answered, a part of a large transaction each for itself.
    queues: Vec<VecDeque<GroupSeq>>,
    depth: usize,
    /// The last group that was handed over.
    last: GroupSeq,
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
    /// Opens a session for each of `connects`. `group_transactions`: what a group may have at most;
    /// `lock_probe`: time after which it is looked what keeps the oldest group.
    pub(crate) fn spawn(
        connects: Vec<Connect>,
        subscription: &str,
        group_transactions: usize,
        ordered: bool,
        blockers: Blockers,
        lock_probe: Duration,
    ) -> Result<Self> {
        let turns = Turns::new(connects.len())?;
        let (sender, events): (Sender<_>, _) = unbounded();
        let spawn = |(number, connect)| {
            Worker::spawn(number, connect, &turns, sender.clone(), subscription)
        };
        // All at once: each connects first.
        let workers: Vec<_> = std::thread::scope(|scope| {
            let spawn = &spawn;
            let starting: Vec<_> = connects
                .into_iter()
                .enumerate()
                .map(|connect| scope.spawn(move || spawn(connect)))
                .collect();
            starting
                .into_iter()
                .map(|thread| {
                    let panicked = |_| Err(Failure::internal("starting a worker panicked"));
                    thread.join().unwrap_or_else(panicked)
                })
                .collect::<Result<_>>()
        })?;
        let now = Instant::now();
        Ok(Self {
            queues: workers.iter().map(|_| VecDeque::new()).collect(),
            depth: (WINDOW / group_transactions / workers.len()).max(DEPTH),
            writeset: (workers.len() > 1)
                .then(|| Writeset::new(WritesetLimits::default(), ordered)),
            workers,
            events,
            last: GroupSeq::NONE,
            last_at: now,
            pinned: None,
            idle_since: now,
            blockers,
            stall: Stall::new(lock_probe),
        })
    }

    /// Whether no worker has anything.
    pub(crate) fn is_idle(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// For how long no worker has had anything.
    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }

    /// Where a group could go; `worth` says whether it is worth being put together while all are
    /// busy, `backlog` whether more will come soon.
    pub(crate) fn room(&self, worth: bool, backlog: bool) -> Room {
        if let Some(worker) = self.pinned {
            return if self.queues[worker].len() < self.depth {
                Room::At(worker)
            } else {
                Room::None
            };
        }
        // Full means that groups are in flight, and the oldest always ends.
        if self.writeset.as_ref().is_some_and(Writeset::is_full) {
            return Room::None;
        }
        // The first that is free: under a light load one session has all plans at hand.
        if let Some(free) = self.queues.iter().position(VecDeque::is_empty) {
            let early = if worth || self.is_idle() {
                Duration::ZERO
            } else {
                let pace = if backlog { BACKLOG_PACE } else { PACE };
                pace.saturating_sub(self.last_at.elapsed())
            };
            return if early.is_zero() { Room::At(free) } else { Room::In(early) };
        }
        let least =
            (0..self.queues.len()).min_by_key(|w| (self.queues[*w].len(), self.queues[*w][0]));
        match least {
            Some(worker) if worth && self.queues[worker].len() < self.depth => Room::At(worker),
            _ => Room::None,
        }
    }

    /// Hands a group to a worker that has room for it.
    pub(crate) fn submit(&mut self, worker: usize, works: Vec<Work>, mode: Mode) -> Result<()> {
        let continued = self.pinned.is_some();
        let seq = if continued { self.last } else { self.last.next() };
        let ends = works.last().is_some_and(|work| work.part.end_lsn.is_some());
        let contended = match &mut self.writeset {
            None => Contended::default(),
            Some(writeset) => {
                if !continued {
                    writeset.open(seq, self.queues[worker].back().copied());
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
        self.last = seq;
        self.last_at = Instant::now();
        self.pinned = (!ends).then_some(worker);
        self.queues[worker].push_back(seq);
        self.workers[worker].submit(Group { seq, works, mode, contended, attempts: 0 });
        Ok(())
    }

    /// Has somebody look what keeps the oldest group, if it has not ended for a while. Returns when
    /// to call again.
    pub(crate) fn look_at_stalls(&mut self) -> Duration {
        let oldest = self.queues.iter().filter_map(VecDeque::front).min().copied();
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
        let running = self.workers.iter().zip(&self.queues);
        let mut groups: Vec<_> =
            running.filter_map(|(worker, queue)| Some((worker.pid(), *queue.front()?))).collect();
        groups.sort_by_key(|(_, group)| *group);
        self.blockers.probe(Probe(groups));
        LONGEST_PROBE
    }

    pub(crate) fn found(&self) -> &Receiver<FromBlockers> {
        &self.blockers.events
    }

    /// What keeps the oldest group: later ones that hold its locks go back.
    pub(crate) fn make_way(&mut self, found: &Found) {
        self.stall.asked = false;
        if self.stall.oldest == Some(found.oldest) {
            self.stall.waits.set(found.waits.then_some(Reason::TargetLock));
        }
        for victim in &found.victims {
            let holder = self.queues.iter().position(|queue| queue.front() == Some(victim));
            if let Some(worker) = holder {
                self.workers[worker].give_way(*victim);
            }
        }
    }

    /// How long workers, and the oldest groups, have waited since the last call.
    pub(crate) fn take_waits(&mut self) -> Waits {
        let mut waits = self.stall.waits.take();
        self.workers.iter().for_each(|worker| waits.add(&worker.waits.take()));
        waits
    }

    /// Ends all workers; returns what they have answered and nobody has taken.
    pub(crate) fn end(&mut self) -> Vec<Answered> {
        self.close();
        let answered = self.events.try_iter().filter_map(|(_, event)| match event {
            FromWorker::Answered(answered) => Some(answered),
            FromWorker::Failed(_) => None,
        });
        answered.collect()
    }

    fn close(&mut self) {
        // All of them first: one may wait for the turn of another. And at once, if one does not
        // find its way out.
        self.workers.iter_mut().for_each(Worker::close);
        std::thread::scope(|scope| {
            for worker in self.workers.drain(..) {
                scope.spawn(move || drop(worker));
            }
        });
    }

    /// A worker is through with its first groups; these have ended.
    pub(crate) fn answered(&mut self, worker: usize, groups: usize, ended: &[GroupSeq]) {
        self.queues[worker].drain(..groups);
        if let Some(writeset) = &mut self.writeset {
            ended.iter().for_each(|group| writeset.committed(*group));
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

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}
