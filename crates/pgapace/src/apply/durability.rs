//! The durability session: makes committed transactions durable, many at a time.
//!
//! Apply sessions commit with `synchronous_commit = off`. This thread makes one small synchronous commit
//! whenever transactions are committed and not yet durable. When it returns, everything committed before
//! it is durable. That commit also removes old progress rows. The thread also writes the statistics, and
//! reads from time to time whether the subscriber's tables have changed.
//!
//! A publisher that waits until each commit is durable would wait for that second commit too. Where a
//! flush is quick, the apply sessions therefore commit synchronously themselves ([`is_quick`]).

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::progress::FlushTicket;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::blockers::Pulse;
use crate::apply::requests::{self, Requests};
use crate::apply::thread::{SessionHandle, SessionThread};
use crate::error::{Failure, Result};
use crate::observe::board::Board;
use crate::observe::events::LogEvent;
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::observe::ledger::Counts;
use crate::subscriber::catalogue;
use crate::subscriber::state::conflicts::{self, Conflict};
use crate::subscriber::state::heartbeat::{self, OwnerStage};
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::progress;
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::statistics::{self, Delta};
use crate::subscriber::state::verification::summary;
use crate::subscriber::state::{self, RelationMode, SubscriptionId};
use crate::subscriber::state::{events, figures};
use crate::tablesync::table_state::Owner;

/// How long the last jobs, such as statistics, may take before they are canceled.
const END_PATIENCE: Duration = Duration::from_secs(2);
/// A flush that takes no longer than this, without the round trip, is quick.
const QUICK_FLUSH: Duration = Duration::from_millis(1);
/// How often a flush is measured: the first one includes other work.
const LOOKS: usize = 4;

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
    LookForRequests(Owner),
    /// Beat once for the leader. `applied`: it has committed something since its start.
    Beat { owner: Owner, applied: bool },
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
    jobs: Sender<DurabilityJob>,
    /// Dropped after `jobs`, because that waits for the thread; and before `events`, which the thread uses.
    _thread: SessionThread,
    pub(crate) events: Receiver<FromDurability>,
}

impl Durability {
    /// Starts the thread. `pulse` is its sign of life.
    pub(crate) fn spawn(session: Session, id: SubscriptionId, pulse: Pulse) -> Result<Self> {
        let (jobs, inbox) = unbounded();
        let (sender, events) = unbounded();
        let handle = SessionHandle::of(&session);
        let work = move || run(session, id, &pulse, &inbox, &sender);
        let thread = SessionThread::spawn("durability".to_owned(), handle, END_PATIENCE, work)?;
        Ok(Self { jobs, _thread: thread, events })
    }

    /// Queues a job. A thread that has ended has reported why in `events`.
    pub(crate) fn submit(&self, job: DurabilityJob) {
        let _ = self.jobs.send(job);
    }
}

/// Whether a flush on the subscriber is so quick that each apply session commits synchronously.
pub(crate) fn is_quick(session: &mut Session, id: SubscriptionId) -> Result<bool> {
    for _ in 0..LOOKS {
        let started = Instant::now();
        progress::flush(session, id, Lsn::INVALID, Lsn::INVALID)?;
        if started.elapsed().saturating_sub(session.round_trip()) < QUICK_FLUSH {
            return Ok(true);
        }
    }
    Ok(false)
}

fn run(
    mut session: Session,
    id: SubscriptionId,
    pulse: &Pulse,
    inbox: &Receiver<DurabilityJob>,
    sender: &Sender<FromDurability>,
) {
    let mut removed_before = Lsn::INVALID;
    for job in inbox {
        pulse.beat();
        let done = match job {
            DurabilityJob::Flush(ticket) => {
                let flushed = progress::flush(&mut session, id, removed_before, ticket.lsn());
                removed_before = ticket.lsn();
                flushed.map(|()| Some(FromDurability::Flushed(ticket)))
            }
            DurabilityJob::Remove(before) => {
                let removed = progress::flush(&mut session, id, removed_before, before);
                removed_before = before;
                removed.map(|()| None)
            }
            DurabilityJob::Statistics(statistics) => {
                statistics.write(&mut session, id).map(|()| Some(FromDurability::Written))
            }
            DurabilityJob::TableStates(board) => {
                figures::table_states(&mut session, id).and_then(|states| {
                    board.set_tables(states);
                    board.set_verified(summary::read(&mut session, id)?);
                    Ok(None)
                })
            }
            DurabilityJob::Conflicts(found) => {
                conflicts::write(&mut session, id, &found).map(|()| None)
            }
            DurabilityJob::RemoveConflicts(age) => conflicts::remove_old(&mut session, id, age)
                .map(|more| Some(FromDurability::RemovedConflicts(more))),
            DurabilityJob::Modes(modes) => {
                state::set_modes(&mut session, id, &modes).map(|()| None)
            }
            DurabilityJob::Forget(prepared) => prepared.forget(&mut session).map(|()| None),
            DurabilityJob::Fingerprints(tables) => catalogue::fingerprints(&mut session, &tables)
                .map(|found| Some(FromDurability::Fingerprints(found))),
            DurabilityJob::LookForRequests(owner) => requests::find(&mut session, owner)
                .map(|found| Some(FromDurability::Requests(found))),
            DurabilityJob::Beat { owner, applied } => {
                heartbeat::beat(&mut session, owner, OwnerStage::Streaming, applied)
                    .map(|()| Some(FromDurability::Beaten))
            }
        };
        pulse.rest();
        let (event, failed) = match done {
            Ok(event) => (event, false),
            Err(failure) => (Some(FromDurability::Failed(failure)), true),
        };
        if let Some(event) = event
            && sender.send(event).is_err()
        {
            return;
        }
        if failed {
            return;
        }
    }
}
