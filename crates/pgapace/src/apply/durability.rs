//! The durability session: makes committed transactions durable, many at a time.
//!
//! Apply sessions commit with `synchronous_commit = off`. This thread makes one small synchronous commit
//! whenever transactions are committed and not yet durable. When it returns, everything committed before
//! it is durable. That commit also removes old progress rows. The thread also writes the statistics, and
//! reads from time to time whether the subscriber's tables have changed.
//!
//! A publisher that waits until each commit is durable would wait for that second commit too. Where a
//! flush is quick, the apply sessions therefore commit synchronously themselves ([`is_quick`]).
//!
//! A synchronous standby of the subscriber may go away. Then a flush waits for it, and nothing more is acknowledged.
//! As natively, everything else goes on: no other commit waits for the standby, and a second thread, with a session
//! that it opens for this, does the other jobs meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, never, select, unbounded};
use engine::progress::FlushTicket;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::blockers::Pulse;
use crate::apply::requests::{self, Requests};
use crate::apply::standby_wait;
use crate::apply::thread::{self, SessionHandle, SessionThread};
use crate::error::{Failure, Result};
use crate::observe::board::Board;
use crate::observe::events::LogEvent;
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::observe::ledger::Counts;
use crate::subscriber::catalogue;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::conflicts::{self, Conflict};
use crate::subscriber::state::heartbeat::{self, OwnerStage};
use crate::subscriber::state::ownership::{self, OwnedEpoch};
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::progress;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::statistics::{self, Delta};
use crate::subscriber::state::verification::summary;
use crate::subscriber::state::{self, RelationMode, SubscriptionId};
use crate::subscriber::state::{events, figures};

/// How long the last jobs, such as statistics, may take before they are canceled.
const END_PATIENCE: Duration = Duration::from_secs(2);
/// A flush that takes no longer than this, without the round trip, is quick.
const QUICK_FLUSH: Duration = Duration::from_millis(1);
/// How often a flush is measured: the first one includes other work.
const LOOKS: usize = 4;
/// How often the second thread looks whether the first one waits.
const WATCH: Duration = Duration::from_millis(500);

/// A job from the leader.
#[derive(Debug)]
pub(crate) enum DurabilityJob {
    /// Make everything committed so far durable.
    Flush(FlushTicket),
    /// Remove progress rows before this one: every commit is durable by itself.
    Remove(Lsn),
    /// Add to the counters in `pgapace.stat_subscription`.
    Statistics(Box<Statistics>),
    /// Show on the board how many tables there are by state, and the summary of their verifications.
    TableStates(Board),
    /// Record conflicts.
    Conflicts(Vec<Conflict>),
    /// Remove some of the recorded conflicts that are older than this.
    RemoveConflicts(Duration),
    /// Record how tables are applied.
    Modes(Vec<RelationMode>),
    /// Remove the row of a transaction that was not prepared after all.
    Forget(PreparedHere),
    /// Read the fingerprints of these tables of the subscriber.
    Fingerprints(Vec<u32>),
    /// Look whether a verb has requested a barrier, or the subscription of this owner.
    LookForRequests(OwnedEpoch),
    /// Beat once for the leader. `applied`: it has committed something since its start.
    Beat { owner: OwnedEpoch, applied: bool },
}

/// Statistics that the durability session writes about once per second.
#[derive(Debug)]
pub(crate) struct Statistics {
    pub(crate) delta: Delta,
    pub(crate) figures: Figures,
    pub(crate) counts: Counts,
    /// A point of the curves, now and then.
    pub(crate) point: Option<Point>,
    /// Warnings and errors that are not written yet, and how long they are kept.
    pub(crate) events: Vec<LogEvent>,
    pub(crate) event_retention: Option<Duration>,
}

impl Statistics {
    fn write(&self, session: &mut Session, id: SubscriptionId) -> Result<()> {
        let Self { delta, figures: shown, counts, point, events, event_retention } = self;
        let mut script = vec![statistics::add_sql(id, delta), figures::set_sql(id, shown)?];
        script.extend(figures::count_sql(id, counts));
        if let Some(point) = point {
            script.push(figures::point_sql(id, point)?);
        }
        script.extend(events::write_sql(Repertoire::of(session), events, *event_retention));
        figures::execute(session, &script)
    }
}

/// A report of the durability thread.
#[derive(Debug)]
pub(crate) enum FromDurability {
    Flushed(FlushTicket),
    /// Whether there may be more to remove.
    RemovedConflicts(bool),
    /// By oid; `None` for a table that does not exist any more.
    Fingerprints(FxHashMap<u32, Option<String>>),
    /// The requests of verbs that are recorded now.
    Requests(Requests),
    /// The statistics are written.
    Written,
    /// The heartbeat job has ended. It writes only if a process waits for the subscription, or if the stage
    /// has changed.
    Beaten,
    Failed(Failure),
}

/// A running durability thread.
#[derive(Debug)]
pub(crate) struct Durability {
    flushes: Sender<DurabilityJob>,
    others: Sender<DurabilityJob>,
    /// Dropped before the thread, which waits for no standby any more.
    _ending: Ending,
    /// Dropped after the senders, because that waits for the thread; and before `events`, which the thread uses.
    _thread: SessionThread,
    pub(crate) events: Receiver<FromDurability>,
}

/// Set when it is dropped.
#[derive(Debug)]
struct Ending(Arc<AtomicBool>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Durability {
    /// Starts the thread. `pulse` is its sign of life.
    pub(crate) fn spawn(
        session: Session,
        (subscriber, subscription): (&Subscriber, &str),
        id: SubscriptionId,
        pulse: Pulse,
    ) -> Result<Self> {
        let ((flushes, to_flush), (others, to_do)) = (unbounded(), unbounded());
        let (sender, events) = unbounded();
        let (alive, ended) = bounded(0);
        let relief = Relief {
            subscriber: subscriber.clone(),
            subscription: subscription.to_owned(),
            id,
            relieved: session.backend_pid(),
            pulse: pulse.clone(),
        };
        let (stolen, answers) = (to_do.clone(), sender.clone());
        thread::spawn("relief".to_owned(), move || relief.run(&stolen, &answers, &ended))?;
        let handle = SessionHandle::of(&session);
        let ending = Arc::<AtomicBool>::default();
        let mut work =
            Work { session, id, pulse, removed_before: Lsn::INVALID, ending: Arc::clone(&ending) };
        let work = move || {
            work.run(to_flush, to_do, &sender);
            drop(alive);
        };
        let thread = SessionThread::spawn("durability".to_owned(), handle, END_PATIENCE, work)?;
        Ok(Self { flushes, others, _ending: Ending(ending), _thread: thread, events })
    }

    /// Queues a job. A thread that has ended has reported why in `events`.
    pub(crate) fn submit(&self, job: DurabilityJob) {
        let jobs = match job {
            DurabilityJob::Flush(_) | DurabilityJob::Remove(_) => &self.flushes,
            _ => &self.others,
        };
        let _ = jobs.send(job);
    }
}

/// Whether a flush on the subscriber is so quick that each apply session commits synchronously. Not where commits wait
/// for a standby: apply would stop when that goes away.
pub(crate) fn is_quick(session: &mut Session, id: SubscriptionId) -> Result<bool> {
    let sql = "SELECT pg_catalog.current_setting('synchronous_standby_names') = ''";
    let alone = session
        .simple(sql)
        .map_err(|e| Failure::subscriber(&e, "reading synchronous_standby_names"))?;
    if !catalogue::boolean(&catalogue::first_row(&alone, sql)?, 0)? {
        return Ok(false);
    }
    for _ in 0..LOOKS {
        let started = Instant::now();
        progress::flush(session, id, Lsn::INVALID, Lsn::INVALID)?;
        if started.elapsed().saturating_sub(session.round_trip()) < QUICK_FLUSH {
            return Ok(true);
        }
    }
    Ok(false)
}

struct Work {
    session: Session,
    id: SubscriptionId,
    pulse: Pulse,
    removed_before: Lsn,
    ending: Arc<AtomicBool>,
}

impl Work {
    /// Does jobs until there can be no more, or one fails.
    fn run(
        &mut self,
        mut flushes: Receiver<DurabilityJob>,
        mut others: Receiver<DurabilityJob>,
        sender: &Sender<FromDurability>,
    ) {
        let mut open = 2;
        while open > 0 {
            let job = select! {
                recv(flushes) -> job => job.inspect_err(|_| flushes = never()),
                recv(others) -> job => job.inspect_err(|_| others = never()),
            };
            let Ok(job) = job else {
                open -= 1;
                continue;
            };
            self.pulse.beat();
            let done = self.work(job);
            self.pulse.rest();
            if !report(done, sender) {
                return;
            }
        }
    }

    fn work(&mut self, job: DurabilityJob) -> Result<Option<FromDurability>> {
        match job {
            DurabilityJob::Flush(ticket) => {
                self.flush(ticket.lsn())?;
                Ok(Some(FromDurability::Flushed(ticket)))
            }
            DurabilityJob::Remove(before) => self.flush(before).map(|()| None),
            other => do_other(&mut self.session, self.id, other),
        }
    }

    fn flush(&mut self, lsn: Lsn) -> Result<()> {
        let ending = &self.ending;
        let before = std::mem::replace(&mut self.removed_before, lsn);
        let gives_up = || ending.load(Ordering::Relaxed);
        progress::flush_unless(&mut self.session, self.id, (before, lsn), &gives_up)
    }
}

/// Returns whether to go on.
fn report(done: Result<Option<FromDurability>>, sender: &Sender<FromDurability>) -> bool {
    match done {
        Ok(None) => true,
        Ok(Some(event)) => sender.send(event).is_ok(),
        Err(failure) => {
            // The leader may have ended.
            let _ = sender.send(FromDurability::Failed(failure));
            false
        }
    }
}

/// Does a job that makes nothing durable.
fn do_other(
    session: &mut Session,
    id: SubscriptionId,
    job: DurabilityJob,
) -> Result<Option<FromDurability>> {
    match job {
        DurabilityJob::Flush(_) | DurabilityJob::Remove(_) => {
            Err(Failure::internal("a flush is none of the other jobs"))
        }
        DurabilityJob::Statistics(statistics) => {
            statistics.write(session, id).map(|()| Some(FromDurability::Written))
        }
        DurabilityJob::TableStates(board) => {
            board.set_tables(figures::table_states(session, id)?);
            board.set_verified(summary::read(session, id)?);
            Ok(None)
        }
        DurabilityJob::Conflicts(found) => conflicts::write(session, id, &found).map(|()| None),
        DurabilityJob::RemoveConflicts(age) => conflicts::remove_old(session, id, age)
            .map(|more| Some(FromDurability::RemovedConflicts(more))),
        DurabilityJob::Modes(modes) => state::set_modes(session, id, &modes).map(|()| None),
        DurabilityJob::Forget(prepared) => prepared.forget(session).map(|()| None),
        DurabilityJob::Fingerprints(tables) => catalogue::fingerprints(session, &tables)
            .map(|found| Some(FromDurability::Fingerprints(found))),
        DurabilityJob::LookForRequests(owner) => {
            requests::find(session, owner).map(|found| Some(FromDurability::Requests(found)))
        }
        DurabilityJob::Beat { owner, applied } => {
            heartbeat::beat(session, owner, OwnerStage::Streaming, applied)
                .map(|()| Some(FromDurability::Beaten))
        }
    }
}

/// The second thread: while the first one waits, it does the jobs that need no flush.
struct Relief {
    subscriber: Subscriber,
    subscription: String,
    id: SubscriptionId,
    /// The backend of the durability session.
    relieved: i32,
    pulse: Pulse,
}

impl Relief {
    /// Ends with the durability thread.
    fn run(
        &self,
        others: &Receiver<DurabilityJob>,
        sender: &Sender<FromDurability>,
        ended: &Receiver<()>,
    ) {
        let (mut session, mut told) = (None, false);
        while ended.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout) {
            if !self.pulse.is_silent_for(standby_wait::TELL_AFTER) {
                (session, told) = (None, false);
                continue;
            }
            let open = match self.open(&mut session, &mut told) {
                Ok(open) => open,
                Err(failure) => {
                    tracing::debug!(%failure, "cannot do the jobs of the durability session");
                    session = None;
                    continue;
                }
            };
            while self.pulse.is_silent_for(standby_wait::TELL_AFTER)
                && let Ok(job) = others.try_recv()
            {
                if !report(do_other(open, self.id, job), sender) {
                    return;
                }
            }
        }
    }

    /// The session. Logs once what the other one waits for.
    fn open<'s>(
        &self,
        session: &'s mut Option<Session>,
        told: &mut bool,
    ) -> Result<&'s mut Session> {
        let session = match session {
            Some(session) => session,
            None => {
                let mut opened = self.subscriber.connect(Purpose::Relief)?;
                ownership::join(&mut opened, self.id)?;
                session.insert(opened)
            }
        };
        if !*told && standby_wait::is_waiting(session, self.relieved)? {
            *told = true;
            standby_wait::tell(&self.subscription, "durability session", self.relieved);
        }
        Ok(session)
    }
}
