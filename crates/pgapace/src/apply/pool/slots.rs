//! The threads of the apply workers of one subscription, as they come and go.
//!
//! [`engine::dispatch::Workers`] decides which of them start and end, and when. Here are their threads,
//! their sessions, and the session leases.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use wire::Session;

use crate::apply::apply_session::{Connect, Identity};
use crate::apply::session_leases::{Leaseholder, SessionLease};
use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::worker::{FromWorker, Worker, WorkerContext};
use crate::error::{Failure, Result};
use crate::observe::figures::{SlowGroup, WorkerNow};
use crate::observe::ledger::{Counts, Meter};
use crate::scoped_thread;
use crate::subscriber::state::statistics::WaitTimes;

/// How a worker opens its session, by its number.
pub(crate) type Connector = Box<dyn Fn(usize) -> Connect + Send + Sync>;

/// How many workers there may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerNumber {
    /// As configured, or less if the server has not enough replication origins.
    pub(crate) most: usize,
    /// Whether it is less.
    pub(crate) limited_by_origins: bool,
    /// Whether the number in use follows from what they gain.
    pub(crate) auto: bool,
    /// Whether they come and go although their number is fixed: the subscriber had no connections for all at once.
    pub(crate) one_by_one: bool,
}

/// A place for a worker.
#[derive(Debug, Default)]
struct WorkerSlot {
    worker: Option<Worker>,
    /// None for the first, and for those that are not there.
    lease: Option<Arc<SessionLease>>,
    meter: Meter,
}

/// The places.
pub(crate) struct Slots {
    slots: Vec<WorkerSlot>,
    leaseholder: Arc<Leaseholder>,
    number: WorkerNumber,
    connector: Connector,
    context: WorkerContext,
    pub(super) events: Receiver<(usize, FromWorker)>,
}

/// The sessions of the workers with which a run starts.
pub(crate) struct OpenedWorkers(Vec<OpenedWorker>);

struct OpenedWorker {
    number: usize,
    /// None for the first.
    lease: Option<Arc<SessionLease>>,
    session: Session,
    identity: Identity,
}

impl OpenedWorkers {
    /// Opens the subscription's own session, and all others if their number is fixed, no other
    /// subscription shares them, and the subscriber has the connections.
    pub(crate) fn open(
        leaseholder: &Arc<Leaseholder>,
        number: WorkerNumber,
        connector: &Connector,
    ) -> Result<Self> {
        let all = leaseholder.is_alone() && !number.auto && !number.one_by_one;
        let more = if all { number.most } else { 1 };
        let leases = (1..more).filter_map(|number| Some((number, Some(leaseholder.ask()?))));
        let leases: Vec<_> = std::iter::once((0, None)).chain(leases).collect();
        let panicked = |_| Err(Failure::internal("connecting panicked"));
        // All at once.
        std::thread::scope(|scope| {
            let connecting = leases.into_iter().map(|(number, lease)| {
                let connect = connector(number);
                let thread = scoped_thread::spawn(scope, "connect", move || connect(None))?;
                Ok((number, lease, thread))
            });
            let connecting = connecting.collect::<Result<Vec<_>>>()?;
            let opened = connecting.into_iter().map(|(number, lease, thread)| {
                let (session, identity) = thread.join().unwrap_or_else(panicked)?;
                Ok(OpenedWorker { number, lease, session, identity })
            });
            Ok(Self(opened.collect::<Result<_>>()?))
        })
    }
}

impl Slots {
    /// Starts workers on these sessions. `round_trip` was measured while they were opened.
    pub(crate) fn new(
        leaseholder: &Arc<Leaseholder>,
        number: WorkerNumber,
        connector: Connector,
        subscription: &str,
        OpenedWorkers(opened): OpenedWorkers,
        round_trip: Duration,
    ) -> Result<Self> {
        let commit_order = SharedCommitOrder::new(number.most)?;
        let (sender, events) = unbounded();
        let context = WorkerContext { commit_order, sender, subscription: subscription.to_owned() };
        let mut slots: Vec<_> = (0..number.most).map(|_| WorkerSlot::default()).collect();
        for OpenedWorker { number, lease, session, identity } in opened {
            let slot = &mut slots[number];
            let (connect, meter) = (connector(number), slot.meter.clone());
            let opened = (session, Identity { round_trip, ..identity });
            slot.worker = Some(Worker::spawn(number, connect, opened, &context, meter)?);
            slot.lease = lease;
        }
        Ok(Self { slots, leaseholder: Arc::clone(leaseholder), number, connector, context, events })
    }

    /// How many there may be.
    pub(super) fn number(&self) -> WorkerNumber {
        self.number
    }

    /// Whether they come and go although their number is fixed.
    pub(super) fn come_and_go(&self) -> bool {
        !self.leaseholder.is_alone() || self.number.one_by_one
    }

    /// The subscription that they work for.
    pub(super) fn subscription(&self) -> &str {
        &self.context.subscription
    }

    /// A worker that has started.
    pub(super) fn worker(&self, number: usize) -> Option<&Worker> {
        self.slots[number].worker.as_ref()
    }

    pub(super) fn worker_mut(&mut self, number: usize) -> Option<&mut Worker> {
        self.slots[number].worker.as_mut()
    }

    /// Gives the sessions back that workers have lent.
    pub(super) fn give_back(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.worker.as_mut()).for_each(Worker::give_back);
    }

    /// Asks for another session lease. The next worker that starts gets it.
    pub(super) fn ask(&self) -> Option<Arc<SessionLease>> {
        self.leaseholder.ask()
    }

    /// No other session is wanted.
    pub(super) fn content(&self) {
        self.leaseholder.content();
    }

    /// Whether a session must be given back, an idle or a busy one.
    pub(super) fn gives(&self, idle: bool) -> bool {
        self.leaseholder.gives(idle)
    }

    /// Starts a worker under this lease.
    pub(super) fn open(&mut self, number: usize, lease: Arc<SessionLease>) -> Result<()> {
        let slot = &mut self.slots[number];
        let (connect, meter) = ((self.connector)(number), slot.meter.clone());
        let worker = Worker::spawn_unopened(number, connect, &self.context, meter, Some(&lease))?;
        (slot.worker, slot.lease) = (Some(worker), Some(lease));
        Ok(())
    }

    /// Another subscription gets the session lease of a worker when that session is closed.
    pub(super) fn give(&self, number: usize) {
        if let Some(lease) = &self.slots[number].lease {
            lease.give();
        }
    }

    /// Ends a worker that has nothing left to do.
    pub(super) fn dismiss(&mut self, number: usize) {
        if let Some(worker) = &mut self.slots[number].worker {
            worker.close();
        }
    }

    /// A worker has ended.
    pub(super) fn vacate(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        (slot.worker, slot.lease) = (None, None);
    }

    /// How long each worker that is there has waited since the last call.
    pub(super) fn take_waits(&self) -> Vec<(usize, WaitTimes)> {
        let there = self.slots.iter().enumerate().filter(|(_, slot)| slot.worker.is_some());
        there.map(|(number, slot)| (number, slot.meter.waits.take())).collect()
    }

    /// The counts of all workers since the last call.
    pub(super) fn take_counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.slots.iter().for_each(|slot| counts.add(slot.meter.ledger.take()));
        counts
    }

    /// The slowest groups since the last call.
    pub(super) fn take_slowest(&self) -> Vec<SlowGroup> {
        self.slots.iter().flat_map(|slot| slot.meter.ledger.take_slowest()).collect()
    }

    /// The present activity of each worker, for `status`.
    pub(super) fn now(&self) -> Vec<WorkerNow> {
        let there = self.slots.iter().enumerate();
        let there = there.filter_map(|(number, slot)| Some((number, slot, slot.worker.as_ref()?)));
        there
            .map(|(number, slot, worker)| {
                let group = slot.meter.ledger.current();
                let group = group.as_ref();
                WorkerNow {
                    worker: number,
                    pid: worker.pid(),
                    waits_for: slot.meter.waits.reason().map(|reason| reason.name().to_owned()),
                    xid: group.map(|group| group.xid.0),
                    commit_lsn: group.map(|group| group.commit_lsn.to_string()),
                    table: group
                        .and_then(|group| group.table.as_ref())
                        .map(|table| table.name.to_string()),
                    transactions: group.map_or(0, |group| group.transactions),
                    changes: group.map_or(0, |group| group.changes),
                    age_seconds: group.map(|group| group.since.elapsed().as_secs_f64()),
                }
            })
            .collect()
    }

    /// Ends all workers.
    pub(super) fn close(&mut self) {
        // Close all before waiting for one: a worker may wait for the turn of another.
        let workers = self.slots.iter_mut().filter_map(|slot| slot.worker.as_mut());
        workers.for_each(Worker::close);
        std::thread::scope(|scope| {
            for slot in &mut self.slots {
                let worker = slot.worker.take();
                scoped_thread::drop_beside(scope, worker);
            }
        });
        self.slots.iter_mut().for_each(|slot| slot.lease = None);
        self.content();
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
