//! The durability session: turns committed into durable, many transactions at a time.
//!
//! Apply sessions commit with `synchronous_commit = off`. This thread makes one small synchronous
//! commit whenever something is committed and not yet durable; its return covers everything before
//! it. It also removes old progress rows (that is the small commit), writes the statistics, and looks
//! from time to time whether the subscriber's tables are still what they were.
//!
//! A publisher that waits for each commit to be durable waits for that second commit too, which
//! costs more than it saves where a flush is quick: then apply sessions commit synchronously
//! themselves ([`is_quick`]).

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::progress::FlushTicket;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::apply::blockers::Pulse;
use crate::apply::thread::join_or_cancel;
use crate::error::{Failure, Result};
use crate::subscriber::catalogue;
use crate::subscriber::state::conflicts::{self, Conflict};
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::progress;
use crate::subscriber::state::statistics::{self, Delta};
use crate::subscriber::state::{self, RelationMode, SubscriptionId};

/// How long the last jobs may take, statistics among them, before they are cancelled.
const END_PATIENCE: Duration = Duration::from_secs(2);
/// A flush that takes no longer than this is quick; the way there and back is the same for both.
const QUICK_FLUSH: Duration = Duration::from_millis(1);
/// How often it is looked: the first time pays for more than the flush.
const LOOKS: usize = 4;

/// What the leader asks for.
#[derive(Debug)]
pub(crate) enum DurabilityJob {
    /// Make everything committed so far durable.
    Flush(FlushTicket),
    /// Remove progress rows before this one: every commit is durable by itself.
    Remove(Lsn),
    /// Add to the counters in `pgapace.stat_subscription`.
    Statistics(Box<Delta>),
    /// Record conflicts.
    Conflicts(Vec<Conflict>),
    /// Remove some of the conflicts that are older than this.
    RemoveConflicts(Duration),
    /// Record how tables are applied.
    Modes(Vec<RelationMode>),
    /// Remove the note of a transaction that was not prepared after all.
    Forget(PreparedHere),
    /// Look whether these tables of the subscriber have changed.
    Fingerprints(Vec<u32>),
}

/// What comes back.
#[derive(Debug)]
pub(crate) enum FromDurability {
    Flushed(FlushTicket),
    /// Whether there may be more of them.
    RemovedConflicts(bool),
    /// By oid, `None` for a table that is gone.
    Fingerprints(FxHashMap<u32, Option<String>>),
    Failed(Failure),
}

/// A running durability thread.
#[derive(Debug)]
pub(crate) struct Durability {
    jobs: Option<Sender<DurabilityJob>>,
    pub(crate) events: Receiver<FromDurability>,
    thread: Option<JoinHandle<()>>,
    cancel: wire::CancelHandle,
}

impl Durability {
    /// `pulse` tells whether it is stuck.
    pub(crate) fn spawn(session: Session, id: SubscriptionId, pulse: Pulse) -> Result<Self> {
        let (jobs, inbox) = unbounded();
        let (sender, events) = unbounded();
        let cancel = session.cancel_handle();
        let thread = std::thread::Builder::new()
            .name("durability".to_owned())
            .spawn(move || run(session, id, &pulse, &inbox, &sender))
            .map_err(|e| Failure::internal(format!("cannot start the durability thread: {e}")))?;
        Ok(Self { jobs: Some(jobs), events, thread: Some(thread), cancel })
    }

    /// Queues a job. A thread that is gone has reported why in `events`.
    pub(crate) fn submit(&self, job: DurabilityJob) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }
}

impl Drop for Durability {
    fn drop(&mut self) {
        self.jobs = None;
        join_or_cancel(self.thread.take(), &self.cancel, END_PATIENCE);
    }
}

/// Whether a flush on the subscriber takes so little that commits need not be made durable by others.
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
            DurabilityJob::Statistics(delta) => {
                statistics::add(&mut session, id, &delta).map(|()| None)
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
