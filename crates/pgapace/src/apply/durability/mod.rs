//! The durability session: makes committed transactions durable, many at a time.
//!
//! Apply sessions commit with `synchronous_commit = off`. This thread makes one small synchronous commit
//! whenever transactions are committed and not yet durable. When it returns, everything committed before
//! it is durable. That commit also removes old progress rows. Between flushes, the session does the
//! bookkeeping of the leader ([`crate::apply::bookkeeping`]).
//!
//! A publisher that waits until each commit is durable would wait for that second commit too. Where a
//! flush is quick, the apply sessions therefore commit synchronously themselves ([`is_quick`]).
//!
//! A synchronous standby of the subscriber may go away. Then a flush waits for it, and nothing more is acknowledged.
//! As natively, everything else goes on: no other commit waits for the standby, and a second thread, with a session
//! that it opens for this, does the bookkeeping meanwhile ([`relief`]).

mod relief;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use engine::progress::FlushTicket;
use pgoutput::Lsn;
use wire::Session;

use crate::apply::blockers::Pulse;
use crate::apply::bookkeeping::{BookkeepingJob, BookkeepingResult};
use crate::apply::thread::{self, SessionHandle, SessionThread};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::progress;
use relief::Relief;

/// How long the last jobs, such as statistics, may take before they are canceled.
const END_PATIENCE: Duration = Duration::from_secs(2);
/// A flush that takes no longer than this, without the round trip, is quick.
const QUICK_FLUSH: Duration = Duration::from_millis(1);
/// How often a flush is measured: the first one includes other work.
const LOOKS: usize = 4;

/// A job that makes commits durable.
#[derive(Debug)]
enum FlushJob {
    /// Make everything committed so far durable.
    Flush(FlushTicket),
    /// Remove progress rows before this one: every commit is durable by itself.
    Remove(Lsn),
}

/// A report of the durability thread, or of the relief thread.
#[derive(Debug)]
pub(crate) enum FromDurability {
    Flushed(FlushTicket),
    Bookkeeping(BookkeepingResult),
    Failed(Failure),
}

/// A running durability thread.
#[derive(Debug)]
pub(crate) struct Durability {
    flushes: Sender<FlushJob>,
    bookkeeping: Sender<BookkeepingJob>,
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
        let ((flushes, to_flush), (bookkeeping, to_do)) = (unbounded(), unbounded());
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
        Ok(Self { flushes, bookkeeping, _ending: Ending(ending), _thread: thread, events })
    }

    /// Has everything made durable that is committed so far. Like the other jobs, it is only queued: a
    /// thread that has ended has reported why in `events`.
    pub(crate) fn flush(&self, ticket: FlushTicket) {
        let _ = self.flushes.send(FlushJob::Flush(ticket));
    }

    /// Has progress rows before this one removed: every commit is durable by itself.
    pub(crate) fn remove_progress(&self, before: Lsn) {
        let _ = self.flushes.send(FlushJob::Remove(before));
    }

    pub(crate) fn bookkeep(&self, job: BookkeepingJob) {
        let _ = self.bookkeeping.send(job);
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

/// The jobs of the durability session.
enum Job {
    Flush(FlushJob),
    Bookkeeping(BookkeepingJob),
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
        mut flushes: Receiver<FlushJob>,
        mut bookkeeping: Receiver<BookkeepingJob>,
        sender: &Sender<FromDurability>,
    ) {
        let mut open = 2;
        while open > 0 {
            let job = select! {
                recv(flushes) -> job => job.map(Job::Flush).inspect_err(|_| flushes = never()),
                recv(bookkeeping) -> job => {
                    job.map(Job::Bookkeeping).inspect_err(|_| bookkeeping = never())
                }
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

    fn work(&mut self, job: Job) -> Result<Option<FromDurability>> {
        match job {
            Job::Flush(FlushJob::Flush(ticket)) => {
                self.flush(ticket.lsn())?;
                Ok(Some(FromDurability::Flushed(ticket)))
            }
            Job::Flush(FlushJob::Remove(before)) => self.flush(before).map(|()| None),
            Job::Bookkeeping(job) => bookkeep(&mut self.session, self.id, job),
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

fn bookkeep(
    session: &mut Session,
    id: SubscriptionId,
    job: BookkeepingJob,
) -> Result<Option<FromDurability>> {
    Ok(job.execute(session, id)?.map(FromDurability::Bookkeeping))
}
