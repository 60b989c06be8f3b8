//! The apply workers of a subscription. [`engine::dispatch`] decides when they start, end, and get work.

mod in_use;
mod slots;
mod span;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use engine::dispatch::{
    Attention, Dispatch, DispatchSettings, Leaves, Look, Pacing, SerializationChange, Step, Want,
};
use engine::group::{GroupLimits, GroupSeq};
use engine::writeset::WritesetLimits;
use pgoutput::Lsn;

use crate::apply::apply_session::Identity;
use crate::apply::blockers::{
    APPLY_WORKER, Blockers, CopyWatch, Detection, DetectionRequest, FromBlockers,
};
use crate::apply::prefetch::Prefetch;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{Answered, FromWorker, Moved};
use crate::error::{Failure, Result};
use crate::observe::figures::{BlockerNow, SlowGroup, WorkerNow};
use crate::observe::ledger::Counts;
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::subscriber::state::statistics::WaitTimes;
use crate::subscriber::state::workers_in_use::WorkersInUse;

use in_use::ReportedWorkers;
pub(crate) use slots::{Connector, OpenedWorkers, Slots, WorkerNumber};
pub(crate) use span::{ApplySpan, Elapsed};

/// After assigning this many bytes of groups, the leader looks at its other events. Taking their locks lasts less than a
/// tenth of a second.
const BYTES_AT_ONCE: usize = 8 << 20;

/// How groups are made and assigned.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolSettings {
    /// The limits of one group.
    pub(crate) group_limits: GroupLimits,
    /// Time after which the monitor looks for locks that block the oldest group.
    pub(crate) deadlock_timeout: Duration,
}

/// The result of assigning work to the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Assigned {
    /// All of it is assigned.
    All,
    /// More is to be assigned when this time has passed.
    Later(Duration),
    /// No worker takes more.
    Busy,
}

/// The workers of one subscription.
#[derive(Debug)]
pub(crate) struct Pool {
    dispatch: Dispatch<Work>,
    slots: Slots,
    prefetch: Option<Prefetch>,
    blockers: Blockers,
    /// Zero of the times that the dispatcher knows.
    started: Instant,
    /// How long the oldest groups have waited for locks.
    lock_waits: Stopwatch,
    reported: ReportedWorkers,
    span: Option<Arc<ApplySpan>>,
    attention: Attention,
    /// Whether a round trip takes less than the work of a small group. Far from the subscriber, groups follow
    /// each other on their way.
    near: bool,
}

impl Pool {
    pub(crate) fn new(
        slots: Slots,
        settings: PoolSettings,
        lock_table: usize,
        identity: Identity,
        blockers: Blockers,
    ) -> Self {
        let dispatch = Dispatch::new(DispatchSettings {
            workers: slots.number().most,
            vary: slots.come_and_go(),
            scaled: slots.number().auto,
            ordered: identity.ordered,
            round_trip: identity.round_trip,
            group: settings.group_limits,
            lock_table,
            writeset: WritesetLimits::default(),
            deadlock_timeout: settings.deadlock_timeout,
            pacing: Pacing::MEASURED,
        });
        Self {
            dispatch,
            slots,
            prefetch: None,
            blockers,
            started: Instant::now(),
            lock_waits: Stopwatch::default(),
            reported: ReportedWorkers::default(),
            span: None,
            attention: Attention::default(),
            near: !identity.is_far(),
        }
    }

    /// Measures how long changes are applied.
    pub(crate) fn with_span(mut self, span: Arc<ApplySpan>) -> Self {
        self.span = Some(span);
        self
    }

    /// Reads rows of the groups ahead.
    pub(crate) fn with_prefetch(mut self, prefetch: Prefetch) -> Self {
        self.prefetch = Some(prefetch);
        self
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The work that waits for a worker, and the groups of each worker.
    pub(crate) fn dispatch(&self) -> &Dispatch<Work> {
        &self.dispatch
    }

    /// The same, to add work.
    pub(crate) fn dispatch_mut(&mut self) -> &mut Dispatch<Work> {
        &mut self.dispatch
    }

    /// Assigns work that may be assigned now. `reading`: whether more is being received.
    /// `attends`: the calling thread may execute small groups itself, and these are its waits.
    /// `oldest_prepare`: see [`Work::needs_prepares_from`](engine::work::Work::needs_prepares_from).
    pub(crate) fn assign(
        &mut self,
        reading: bool,
        attends: Option<&Stopwatch>,
        oldest_prepare: Option<Lsn>,
    ) -> Result<Assigned> {
        let (mut short, mut bytes) = (false, 0);
        let assigned = loop {
            if bytes >= BYTES_AT_ONCE {
                return Ok(Assigned::Later(Duration::ZERO));
            }
            let step = self.dispatch.next(self.now(), reading);
            match step.map_err(|e| Failure::internal(e.to_string()))? {
                Step::Nothing => break Assigned::All,
                Step::Wait(time) => break Assigned::Later(time),
                Step::Busy { short: more } => {
                    short = more;
                    break Assigned::Busy;
                }
                Step::Assign { worker, beside_others, mut group } => {
                    group
                        .works
                        .iter_mut()
                        .for_each(|work| work.needs_prepares_from(oldest_prepare));
                    bytes += group.works.iter().map(|work| work.part.bytes()).sum::<usize>();
                    self.submit(worker, (beside_others, attends), group)?;
                }
            }
        };
        self.want(short);
        Ok(assigned)
    }

    fn submit(
        &mut self,
        worker: usize,
        (beside_others, attends): (bool, Option<&Stopwatch>),
        group: Group,
    ) -> Result<()> {
        if let Some(prefetch) = &mut self.prefetch {
            prefetch.offer(group.seq, &group.works, group.mode, beside_others);
        }
        if let Some(span) = &self.span {
            span.begins();
        }
        let (now, pacing) = (self.now(), &Pacing::MEASURED);
        let worker = self.slots.worker_mut(worker);
        let worker =
            worker.ok_or_else(|| Failure::internal("a group for a worker that is not there"))?;
        let is_small = self.near && group.is_plain() && group.changes() <= pacing.attended_changes;
        let Some(waits) = attends
            .filter(|_| is_small && !beside_others && self.attention.small_group(pacing, now))
        else {
            worker.submit(group);
            return Ok(());
        };
        match worker.execute(group, pacing.attended_wait, waits) {
            Ok(in_time) => {
                let now = self.now();
                self.attention.executed(in_time, pacing, now);
            }
            Err(group) => {
                worker.submit(group);
                worker.ask_for_session();
            }
        }
        Ok(())
    }

    /// Whether the calling thread executes small groups itself, and nothing is in flight.
    pub(crate) fn attends(&self) -> bool {
        self.attention.is_on() && self.dispatch.is_idle()
    }

    /// Gives the sessions back that workers have lent, if the calling thread does not execute groups itself
    /// any more. To be called a few times in a second.
    pub(crate) fn look_at_attention(&mut self) {
        if !self.attention.look() {
            self.slots.give_back();
        }
    }

    /// Asks the monitor for locks that block the oldest group, if the group has not ended for a while.
    /// Returns when to call again. `next` is the oldest when there is no group. `others` are sessions
    /// beside those of the workers, with numbers in place of groups.
    pub(crate) fn look_at_stalls(
        &mut self,
        next: Option<GroupSeq>,
        others: impl FnOnce() -> Vec<(i32, GroupSeq)>,
    ) -> Duration {
        let (now, before) = (self.now(), self.dispatch.stalled());
        let look = self.dispatch.look_at_stalls(next, now);
        if self.dispatch.stalled() != before {
            self.lock_waits.set(None);
            self.blockers.forget();
        }
        match look {
            Look::In(time) => time,
            Look::Now => {
                let running = self.dispatch.workers().running();
                let pid = |worker| self.slots.worker(worker)?.pid();
                let groups = running.filter_map(|(worker, group)| Some((pid(worker)?, group)));
                let mut groups: Vec<_> = groups.collect();
                groups.extend(others());
                groups.sort_by_key(|(_, group)| *group);
                self.blockers.request(DetectionRequest(groups));
                Pacing::MEASURED.longest_deadlock_check
            }
        }
    }

    /// Reports of workers.
    pub(crate) fn events(&self) -> &Receiver<(usize, FromWorker)> {
        &self.slots.events
    }

    /// Asks for more workers while groups wait and all workers are busy.
    fn want(&mut self, short: bool) {
        while self.want_one(short) {}
    }

    /// Whether another worker was started.
    fn want_one(&mut self, short: bool) -> bool {
        let (now, slots) = (self.now(), &self.slots);
        let mut lease = None;
        let want = self.dispatch.want(short, now, || {
            lease = slots.ask();
            lease.is_some()
        });
        match (want, lease) {
            (Want::Open(worker), Some(lease)) => {
                let opened = self.slots.open(worker, lease);
                if let Err(failure) = &opened {
                    self.not_opened(worker, failure);
                }
                return opened.is_ok();
            }
            (Want::Content, _) => self.slots.content(),
            (Want::Nothing | Want::Open(_), _) => {}
        }
        false
    }

    /// Gives a session to another subscription, if its share wants that, or closes one that was not
    /// used for long.
    pub(crate) fn give_back(&mut self) {
        let (now, slots) = (self.now(), &self.slots);
        let leaves = self.dispatch.give_back(now, |idle| slots.gives(idle));
        let leaves = leaves.or_else(|| self.dispatch.retire(now));
        if let Some(Leaves { worker, done }) = leaves {
            self.slots.give(worker);
            if done {
                self.slots.dismiss(worker);
            }
        }
    }

    /// A worker has started, could not start, or has ended.
    pub(crate) fn moved(&mut self, worker: usize, moved: Moved) {
        let (now, subscription) = (self.now(), self.slots.subscription());
        match moved {
            Moved::Came => {
                tracing::debug!(subscription, worker, "a worker came");
                self.dispatch.came(worker, now);
            }
            Moved::Left => {
                tracing::debug!(subscription, worker, "a worker went");
                self.slots.vacate(worker);
                self.dispatch.left(worker);
            }
            Moved::NotOpened(failure) => self.not_opened(worker, &failure),
            Moved::Lent => {
                let has_groups = !self.dispatch.workers().queue(worker).is_empty();
                if let Some(worker) = self.slots.worker_mut(worker) {
                    worker.take_session();
                    if has_groups {
                        worker.give_back();
                    }
                }
            }
        }
    }

    fn not_opened(&mut self, worker: usize, failure: &Failure) {
        let (now, subscription) = (self.now(), self.slots.subscription());
        tracing::warn!(
            event = "apply_worker_not_started",
            subscription,
            error = %failure,
            "could not start another apply worker; continuing with fewer"
        );
        self.slots.vacate(worker);
        self.dispatch.not_opened(worker, now);
        self.slots.content();
    }

    pub(crate) fn found(&self) -> &Receiver<FromBlockers> {
        &self.blockers.events
    }

    /// Whether this group is the oldest still.
    pub(crate) fn is_stalled(&self, group: GroupSeq) -> bool {
        self.dispatch.stalled() == Some(group)
    }

    /// Rolls back later groups that hold locks for which the oldest group waits. Returns the tables that
    /// are serialized from now on because of it.
    pub(crate) fn resolve_deadlock(&mut self, found: &Detection) -> SerializationChange {
        if self.is_stalled(found.oldest) {
            self.lock_waits.set(found.waits.then_some(Reason::SubscriberLock));
        }
        let now = self.now();
        let seen = (found.waits, &found.victims[..]);
        let (victims, change) = self.dispatch.resolve_deadlock(found.oldest, seen, now);
        for (worker, group) in victims {
            if let Some(worker) = self.slots.worker(worker) {
                worker.give_way(group);
            }
        }
        change
    }

    /// Returns the tables whose serialization has ended.
    pub(crate) fn release(&mut self) -> SerializationChange {
        let now = self.now();
        self.dispatch.release(now)
    }

    /// A unique value was found to move between rows. Returns the tables that are serialized for it.
    pub(crate) fn unique_value_moved(&mut self, root: u32) -> SerializationChange {
        let now = self.now();
        self.dispatch.unique_value_moved(root, now)
    }

    /// How many workers are in use, for the statistics.
    pub(crate) fn workers_in_use(&self) -> WorkersInUse {
        WorkersInUse {
            decision: self.dispatch.decision(),
            most: self.slots.number().most,
            limited_by_origins: self.slots.number().limited_by_origins,
        }
    }

    /// How long the oldest groups, and sessions beside those of the workers, have waited for locks since
    /// the last call.
    pub(crate) fn take_lock_waits(&mut self) -> WaitTimes {
        let mut waits = self.lock_waits.take();
        waits.add(&self.blockers.take_waits());
        waits
    }

    /// How long each worker has waited since the last call.
    pub(crate) fn take_waits(&mut self) -> Vec<(usize, WaitTimes)> {
        self.slots.take_waits()
    }

    /// The counts of all workers since the last call.
    pub(crate) fn take_counts(&self) -> Counts {
        self.slots.take_counts()
    }

    /// The slowest groups since the last call.
    pub(crate) fn take_slowest(&self) -> Vec<SlowGroup> {
        self.slots.take_slowest()
    }

    /// The present activity of each worker, for `status`.
    pub(crate) fn workers_now(&self) -> Vec<WorkerNow> {
        let mut workers = self.slots.now();
        // A worker only knows that the subscriber does not answer. The monitor knows why.
        if let (Some(reason), Some(oldest)) = (self.lock_waits.reason(), self.dispatch.stalled()) {
            let running = self.dispatch.workers().running();
            let has_it = running.filter(|(_, group)| *group == oldest).map(|(worker, _)| worker);
            for number in has_it {
                let worker = workers.iter_mut().find(|now| now.worker == number);
                worker.into_iter().for_each(|now| now.waits_for = Some(reason.name().to_owned()));
            }
        }
        workers
    }

    /// Where sessions that copy tables are announced, so that their waits for locks are seen.
    pub(crate) fn copy_watch(&self) -> CopyWatch {
        self.blockers.copies()
    }

    /// Sessions of others that the oldest group, or a copy, waits for.
    pub(crate) fn blockers_now(&self) -> Vec<BlockerNow> {
        let mut blockers = self.blockers.now();
        // The monitor may have answered after the group went on.
        if self.lock_waits.reason().is_none() {
            blockers.retain(|blocker| blocker.waiting != APPLY_WORKER);
        }
        blockers
    }

    /// Ends all workers. Returns their answers that the leader has not taken.
    pub(crate) fn end(&mut self) -> Vec<Answered> {
        self.slots.close();
        let answered = self.slots.events.try_iter().filter_map(|(_, event)| match event {
            FromWorker::Answered(answered) => Some(*answered),
            FromWorker::Failed(_) | FromWorker::Moved(_) => None,
        });
        answered.collect()
    }

    /// A worker has answered its first groups, and some of them have ended.
    pub(crate) fn answered(&mut self, worker: usize, answered: &Answered) {
        let (now, Answered { groups, ended, processor, preparing, .. }) = (self.now(), answered);
        if let Some(span) = &self.span {
            span.answered(*processor, !ended.is_empty());
        }
        self.dispatch.prepared(worker, *preparing);
        if self.dispatch.answered(worker, *groups, ended, now) {
            self.slots.dismiss(worker);
        }
        self.reported.look(self.dispatch.decision(), self.slots.subscription());
        if let Some(prefetch) = &self.prefetch {
            prefetch.ended(self.dispatch.ended_through());
        }
    }
}
