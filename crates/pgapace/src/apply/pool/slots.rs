//! The workers of one subscription, as they come and go, and what each of them has.
//!
//! The first is the subscription's own. The others share their sessions with other subscriptions of
//! the process: one comes when there is more to do than those that are here take, and goes when
//! another subscription asks for it, after what it has is done. Nobody waits for either.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use engine::group::GroupSeq;

use crate::apply::sessions::{Permit, Share};
use crate::apply::turns::Turns;
use crate::apply::worker::{Connect, FromWorker, Moved, Office, Worker};
use crate::error::{Failure, Result};
use crate::observe::stopwatch::Stopwatch;
use crate::target::state::statistics::Waits;

/// Work that waits for so long is more than the workers that are here take.
const WANT_AFTER: Duration = Duration::from_millis(50);
/// A worker that has had nothing for so long is idle.
const IDLE: Duration = Duration::from_millis(100);
/// A busy worker stays for so long at least: opening its session took some time.
const TENURE: Duration = Duration::from_millis(500);
/// The pause after a session could not be opened.
const PAUSE: Duration = Duration::from_secs(10);

/// How worker number so-and-so opens its session.
pub(crate) type Connector = Box<dyn Fn(usize) -> Connect + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Vacant,
    /// Its thread opens the session.
    Opening,
    Open,
    /// It gets no more groups, and goes when those that it has have ended.
    Leaving,
}

/// A place for a worker.
#[derive(Debug)]
struct Slot {
    worker: Option<Worker>,
    stage: Stage,
    /// The groups that it has not answered, a part of a large transaction each for itself.
    queue: VecDeque<GroupSeq>,
    /// When it came.
    since: Instant,
    /// When it last had nothing more to do.
    idle_since: Instant,
    /// None for the first, and for those that are not there.
    permit: Option<Arc<Permit>>,
    waits: Stopwatch,
}

/// The places.
pub(crate) struct Slots {
    slots: Vec<Slot>,
    share: Arc<Share>,
    connector: Connector,
    office: Office,
    pub(super) events: Receiver<(usize, FromWorker)>,
    /// Since when there is more to do than the workers take.
    short_since: Option<Instant>,
    /// No session is opened before.
    paused_until: Instant,
}

impl Slots {
    /// Opens the subscription's own session, and all others if nobody shares them.
    pub(crate) fn new(
        share: &Arc<Share>,
        connector: Connector,
        subscription: &str,
    ) -> Result<Self> {
        let turns = Turns::new(share.most())?;
        let (sender, events) = unbounded();
        let office = Office { turns, sender, subscription: subscription.to_owned() };
        let now = Instant::now();
        let vacant = |_| Slot {
            worker: None,
            stage: Stage::Vacant,
            queue: VecDeque::new(),
            since: now,
            idle_since: now,
            permit: None,
            waits: Stopwatch::default(),
        };
        let mut slots: Vec<_> = (0..share.most()).map(vacant).collect();
        for slot in &mut slots[1..] {
            slot.permit = if share.is_alone() { share.ask() } else { None };
        }
        // All at once: each connects first.
        std::thread::scope(|scope| {
            let (connector, office) = (&connector, &office);
            let here = slots.iter_mut().enumerate();
            let here = here.filter(|(number, slot)| *number == 0 || slot.permit.is_some());
            let starting: Vec<_> = here
                .map(|(number, slot)| {
                    slot.stage = Stage::Open;
                    let waits = slot.waits.clone();
                    let connect = connector(number);
                    let spawn = move || Worker::spawn(number, connect, office, waits);
                    (slot, scope.spawn(spawn))
                })
                .collect();
            for (slot, thread) in starting {
                let panicked = |_| Err(Failure::internal("starting a worker panicked"));
                slot.worker = Some(thread.join().unwrap_or_else(panicked)?);
            }
            Ok::<_, Failure>(())
        })?;
        let share = Arc::clone(share);
        let (short_since, paused_until) = (None, now);
        Ok(Self { slots, share, connector, office, events, short_since, paused_until })
    }

    /// The most workers that there can be.
    pub(super) fn most(&self) -> usize {
        self.share.most()
    }

    /// Those that may be given groups, by number; the first is always among them.
    pub(super) fn open(&self) -> impl Iterator<Item = (usize, &VecDeque<GroupSeq>)> {
        let open = self.slots.iter().enumerate().filter(|(_, slot)| slot.stage == Stage::Open);
        open.map(|(number, slot)| (number, &slot.queue))
    }

    /// What each of them has to do first.
    pub(super) fn running(&self) -> impl Iterator<Item = (&Worker, GroupSeq)> {
        self.slots.iter().filter_map(|slot| Some((slot.worker.as_ref()?, *slot.queue.front()?)))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.queue.is_empty())
    }

    pub(super) fn queue(&self, number: usize) -> &VecDeque<GroupSeq> {
        &self.slots[number].queue
    }

    /// Notes that a worker is given this group.
    pub(super) fn push(&mut self, number: usize, group: GroupSeq) -> Option<&Worker> {
        let slot = &mut self.slots[number];
        slot.queue.push_back(group);
        slot.worker.as_ref()
    }

    /// A worker is through with its first groups.
    pub(super) fn answered(&mut self, number: usize, groups: usize) {
        let slot = &mut self.slots[number];
        slot.queue.drain(..groups);
        if slot.queue.is_empty() {
            slot.idle_since = Instant::now();
            slot.go_if_done();
        }
    }

    /// Whether there is more to do than the workers take: then another one may come.
    pub(super) fn want(&mut self, short: bool) {
        if self.share.is_alone() {
            return;
        }
        if !short {
            if self.short_since.take().is_some() {
                self.share.content();
            }
            return;
        }
        let now = Instant::now();
        let since = *self.short_since.get_or_insert(now);
        if now < (since + WANT_AFTER).max(self.paused_until)
            || self.slots.iter().any(|slot| slot.stage == Stage::Opening)
        {
            return;
        }
        let vacant = self.slots.iter().position(|slot| slot.stage == Stage::Vacant);
        if let Some(number) = vacant
            && let Some(permit) = self.share.ask()
        {
            let slot = &mut self.slots[number];
            let (connect, waits) = ((self.connector)(number), slot.waits.clone());
            match Worker::spawn_unopened(number, connect, &self.office, waits, &permit) {
                Ok(worker) => {
                    slot.worker = Some(worker);
                    slot.permit = Some(permit);
                    slot.stage = Stage::Opening;
                }
                Err(failure) => self.not_opened(&failure),
            }
        }
    }

    /// Gives a session back if another subscription is to have it; not that of worker `kept`.
    pub(super) fn give_back(&mut self, kept: Option<usize>) {
        let others = self.slots.iter_mut().enumerate().filter_map(|(number, slot)| {
            let may_go = number != 0 && Some(number) != kept && slot.stage == Stage::Open;
            may_go.then_some(slot)
        });
        let Some(slot) = others.min_by_key(|slot| (slot.queue.len(), slot.idle_since)) else {
            return;
        };
        let idle = slot.queue.is_empty() && slot.idle_since.elapsed() >= IDLE;
        if (idle || slot.since.elapsed() >= TENURE) && self.share.gives(idle) {
            if let Some(permit) = &slot.permit {
                permit.give();
            }
            slot.stage = Stage::Leaving;
            slot.go_if_done();
        }
    }

    /// A worker that was to come is there or not, or one has gone.
    pub(super) fn moved(&mut self, number: usize, moved: Moved) {
        let subscription = &self.office.subscription;
        let slot = &mut self.slots[number];
        match moved {
            Moved::Came => {
                tracing::debug!(subscription, number, "a worker came");
                slot.stage = Stage::Open;
                slot.since = Instant::now();
                slot.idle_since = slot.since;
            }
            Moved::Left => {
                tracing::debug!(subscription, number, "a worker went");
                slot.vacate();
            }
            Moved::NotOpened(failure) => {
                slot.vacate();
                self.not_opened(&failure);
            }
        }
    }

    fn not_opened(&mut self, failure: &Failure) {
        let subscription = &self.office.subscription;
        tracing::warn!(subscription, "going on without another session: {failure}");
        self.paused_until = Instant::now() + PAUSE;
        self.share.content();
    }

    /// How long workers have waited since the last call.
    pub(super) fn take_waits(&self) -> Waits {
        let mut waits = Waits::default();
        self.slots.iter().for_each(|slot| waits.add(&slot.waits.take()));
        waits
    }

    /// Ends all workers.
    pub(super) fn close(&mut self) {
        // All of them first: one may wait for the turn of another. And at once, if one does not
        // find its way out.
        let workers = self.slots.iter_mut().filter_map(|slot| slot.worker.as_mut());
        workers.for_each(Worker::close);
        std::thread::scope(|scope| {
            for slot in &mut self.slots {
                let worker = slot.worker.take();
                scope.spawn(move || drop(worker));
            }
        });
        self.slots.iter_mut().for_each(|slot| slot.permit = None);
        self.want(false);
    }
}

impl Slot {
    /// Its worker is gone.
    fn vacate(&mut self) {
        self.stage = Stage::Vacant;
        self.worker = None;
        self.permit = None;
    }

    fn go_if_done(&mut self) {
        if self.stage == Stage::Leaving
            && self.queue.is_empty()
            && let Some(worker) = &mut self.worker
        {
            worker.close();
        }
    }
}

impl std::fmt::Debug for Slots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slots").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.close();
    }
}
