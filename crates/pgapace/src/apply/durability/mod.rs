//! The durability session: makes committed transactions durable, many at a time.
//!
//! Apply sessions commit with `synchronous_commit = off`. This thread makes one small synchronous commit
//! whenever transactions are committed and not yet durable. When it returns, everything committed before
//! it is durable. That commit also removes old progress rows. Between flushes, the session does the
//! bookkeeping of the leader ([`crate::apply::bookkeeping`]), in steps: a flush that comes meanwhile waits for
//! one step only.
//!
//! A publisher that waits until each commit is durable would wait for that second commit too. Where a
//! flush is quick, the apply sessions therefore commit synchronously themselves ([`is_quick`]). If the subscriber gets
//! synchronous standbys then, waits of these sessions are canceled, and the next run has sessions that commit
//! asynchronously.
//!
//! A synchronous standby of the subscriber may go away. Then a flush waits for it, and nothing more is acknowledged.
//! As natively, everything else goes on: no other commit waits for the standby, and a second thread, with a session
//! that it opens for this, does the bookkeeping meanwhile ([`relief`]). A flush does not wait for a subscription in the
//! opposite direction ([`opposite_standbys`](crate::apply::opposite_standbys)).

mod relief;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use engine::progress::FlushTicket;
use pgoutput::Lsn;
use wire::Session;

use crate::apply::blockers::Pulse;
use crate::apply::bookkeeping::{AfterStep, BookkeepingJob, BookkeepingResult};
use crate::apply::opposite_standbys::OppositeStandbys;
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
    /// Starts the thread. `pulse` is its sign of life, `leader` that of the leader.
    pub(crate) fn spawn(
        session: Session,
        (subscriber, subscription): (&Subscriber, &str),
        id: SubscriptionId,
        (pulse, leader): (Pulse, Pulse),
        opposites: &Arc<OppositeStandbys>,
    ) -> Result<Self> {
        let ((flushes, to_flush), (bookkeeping, to_do)) = (unbounded(), unbounded());
        let ((sender, events), begun) = (unbounded(), BegunJobs::default());
        let (alive, ended) = bounded(0);
        let relief = Relief {
            subscriber: subscriber.clone(),
            subscription: subscription.to_owned(),
            id,
            relieved: session.backend_pid(),
            pulse: pulse.clone(),
            leader,
            opposites: Arc::clone(opposites),
        };
        let (stolen, answers) = ((to_do.clone(), begun.clone()), sender.clone());
        thread::spawn("relief".to_owned(), move || relief.run(&stolen, &answers, &ended))?;
        let handle = SessionHandle::of(&session);
        let ending = Arc::<AtomicBool>::default();
        let mut work = Work {
            session,
            id,
            pulse,
            removed_before: Lsn::INVALID,
            ending: Arc::clone(&ending),
            opposites: Arc::clone(opposites),
        };
        let work = move || {
            work.run(&mut Jobs { flushes: to_flush, bookkeeping: to_do, begun, open: 2 }, &sender);
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

/// A job of the durability session.
#[derive(Debug)]
enum Job {
    Flush(FlushJob),
    Bookkeeping(BookkeepingJob),
}

/// The rests of bookkeeping jobs of which a step is done. Either thread goes on with them.
#[derive(Debug, Clone)]
struct BegunJobs {
    sender: Sender<BookkeepingJob>,
    receiver: Receiver<BookkeepingJob>,
}

impl Default for BegunJobs {
    fn default() -> Self {
        let (sender, receiver) = unbounded();
        Self { sender, receiver }
    }
}

/// Where the jobs of the durability session come from.
#[derive(Debug)]
struct Jobs {
    flushes: Receiver<FlushJob>,
    bookkeeping: Receiver<BookkeepingJob>,
    begun: BegunJobs,
    /// How many of the two senders are left.
    open: usize,
}

impl Jobs {
    /// The next job, `None` if there can be no more. Commits of the publisher may wait for flushes, and a heartbeat
    /// must not wait for a job of very many tables.
    fn next(&mut self) -> Option<Job> {
        loop {
            let Self { flushes, bookkeeping, begun, open } = self;
            if let Ok(job) = flushes.try_recv() {
                return Some(Job::Flush(job));
            }
            if let Ok(job) = bookkeeping.try_recv().or_else(|_| begun.receiver.try_recv()) {
                return Some(Job::Bookkeeping(job));
            }
            if *open == 0 {
                return None;
            }
            let job = select! {
                recv(flushes) -> job => job.map(Job::Flush).inspect_err(|_| *flushes = never()),
                recv(bookkeeping) -> job => {
                    job.map(Job::Bookkeeping).inspect_err(|_| *bookkeeping = never())
                }
                recv(begun.receiver) -> job => job.map(Job::Bookkeeping),
            };
            match job {
                Ok(job) => return Some(job),
                Err(_) => *open -= 1,
            }
        }
    }
}

struct Work {
    session: Session,
    id: SubscriptionId,
    pulse: Pulse,
    removed_before: Lsn,
    ending: Arc<AtomicBool>,
    opposites: Arc<OppositeStandbys>,
}

impl Work {
    /// Does jobs until there can be no more, or one fails.
    fn run(&mut self, jobs: &mut Jobs, sender: &Sender<FromDurability>) {
        while let Some(job) = jobs.next() {
            self.pulse.beat();
            let done = self.work(job, &jobs.begun);
            self.pulse.rest();
            if !report(done, sender) {
                return;
            }
        }
    }

    fn work(&mut self, job: Job, begun: &BegunJobs) -> Result<Option<FromDurability>> {
        match job {
            Job::Flush(FlushJob::Flush(ticket)) => {
                self.flush(ticket.lsn())?;
                Ok(Some(FromDurability::Flushed(ticket)))
            }
            Job::Flush(FlushJob::Remove(before)) => self.flush(before).map(|()| None),
            Job::Bookkeeping(job) => bookkeep(&mut self.session, self.id, job, begun),
        }
    }

    fn flush(&mut self, lsn: Lsn) -> Result<()> {
        let (ending, opposites) = (&self.ending, &self.opposites);
        let before = std::mem::replace(&mut self.removed_before, lsn);
        let gives_up = || ending.load(Ordering::Relaxed);
        let passed = || opposites.passed();
        progress::flush_unless(&mut self.session, self.id, (before, lsn), &passed, &gives_up)
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

/// Does a step of a job.
fn bookkeep(
    session: &mut Session,
    id: SubscriptionId,
    job: BookkeepingJob,
    begun: &BegunJobs,
) -> Result<Option<FromDurability>> {
    match job.step(session, id)? {
        AfterStep::Done(result) => Ok(result.map(FromDurability::Bookkeeping)),
        AfterStep::More(rest) => {
            // The receiver is beside it.
            let _ = begun.sender.send(rest);
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BegunJobs, BookkeepingJob, FlushJob, Job, Jobs, Lsn, unbounded};
    use crate::apply::bookkeeping::Fingerprints;

    #[test]
    fn flushes_come_before_bookkeeping_and_what_is_begun_comes_last() {
        let ((flushes, to_flush), (bookkeeping, to_do)) = (unbounded(), unbounded());
        let begun = BegunJobs::default();
        let mut jobs = Jobs { flushes: to_flush, bookkeeping: to_do, begun, open: 2 };
        let rest = || BookkeepingJob::Fingerprints(Fingerprints::of(vec![1]));
        jobs.begun.sender.send(rest()).unwrap();
        bookkeeping.send(BookkeepingJob::Modes(Vec::new())).unwrap();
        flushes.send(FlushJob::Remove(Lsn(1))).unwrap();
        assert!(matches!(jobs.next(), Some(Job::Flush(_))));
        assert!(matches!(jobs.next(), Some(Job::Bookkeeping(BookkeepingJob::Modes(_)))));
        jobs.begun.sender.send(rest()).unwrap();
        drop((flushes, bookkeeping));
        for _ in 0..2 {
            let next = jobs.next();
            assert!(matches!(next, Some(Job::Bookkeeping(BookkeepingJob::Fingerprints(_)))));
        }
        assert!(jobs.next().is_none());
    }
}
