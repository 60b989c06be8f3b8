//! The apply workers: each one thread, one subscriber session, groups to pipelined statements.

mod lost;
mod rules;
mod state;
mod two_phase;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use engine::dispatch::Pacing;
use engine::group::GroupSeq;
use engine::progress::Range;
use pgoutput::Xid;
use wire::{CancelHandle, Session};

use crate::apply::conflict_log::MissingLog;
use crate::apply::sessions::SessionLease;
use crate::apply::thread::{LITTLE_PATIENCE, join_or_cancel};
use crate::apply::turns::Turns;
use crate::apply::work::Group;
use crate::error::{Class, Failure, Result};
use crate::observe::stopwatch::Stopwatch;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;
pub(crate) use lost::owns;
use state::State;
pub(crate) use state::passes_soon;

/// How long the server may take to end a session that is closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// What a worker reports.
#[derive(Debug)]
pub(crate) enum FromWorker {
    Answered(Box<Answered>),
    /// The worker has given up; what it had not reported is not committed, or not known to be.
    Failed(Failure),
    Moved(Moved),
}

/// A worker comes or goes while others are at work.
#[derive(Debug)]
pub(crate) enum Moved {
    /// Its session is open.
    Came,
    /// It is not, and the thread has ended.
    NotOpened(Failure),
    /// It has ended as it was told, and its session is closed.
    Left,
}

/// What the subscriber has answered since the last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    /// What is committed.
    pub(crate) committed: Vec<Range>,
    /// Transactions of the publisher that are prepared on the subscriber, durably.
    pub(crate) prepared: Vec<Xid>,
    /// Of what was committed.
    pub(crate) counters: Counters,
    /// How many groups the worker is through with; a part of a large transaction is one.
    pub(crate) groups: usize,
    /// Those that are committed.
    pub(crate) ended: Vec<GroupSeq>,
    /// Whether some were found committed after their session was lost.
    pub(crate) in_doubt: bool,
    /// To be written to `pgapace.conflict`.
    pub(crate) conflicts: Vec<Conflict>,
}

/// What a worker's session commits under.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) id: SubscriptionId,
    /// Whose progress its commits record: the subscription's, or that of a table that joins.
    pub(crate) progress_of: SubscriptionId,
    pub(crate) epoch: i64,
    /// Whether the session has a replication origin.
    pub(crate) tagged: bool,
    /// Whether the subscriber refuses a commit before its predecessor's.
    pub(crate) ordered: bool,
    /// The oid of the subscriber database.
    pub(crate) database: u32,
    /// The backend of the control session, which owns the subscription.
    pub(crate) owner: i32,
    /// What a round trip to the subscriber takes at most.
    pub(crate) round_trip: Duration,
}

impl Identity {
    /// Whether answers of the subscriber take long, whatever it does: longer than the work of a small group.
    /// Then nobody waits for one who need not.
    pub(crate) fn is_far(&self) -> bool {
        Pacing::MEASURED.is_far(self.round_trip)
    }
}

/// A session that a worker has lost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    /// Its backend.
    pub(crate) backend: i32,
    /// Whether it had a replication origin.
    pub(crate) tagged: bool,
}

/// Opens the session of a worker, with what every transaction uses prepared on it: the first time, and
/// whenever it was lost; the lost one is gone when this returns.
pub(crate) type Connect = Box<dyn Fn(Option<Lost>) -> Result<(Session, Identity)> + Send>;

#[derive(Debug)]
enum ToWorker {
    Group(Group),
    /// An earlier group waits for locks that this one holds.
    GiveWay(GroupSeq),
}

/// Of a worker's session, for others: none until it is open, and another one after it was lost.
type Handle = Mutex<Option<CancelHandle>>;

fn set_handle(handle: &Handle, session: &Session) {
    *handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(session.cancel_handle());
}

/// A running worker thread.
#[derive(Debug)]
pub(crate) struct Worker {
    number: usize,
    turns: Arc<Turns>,
    mail: Option<Sender<ToWorker>>,
    thread: Option<JoinHandle<()>>,
    handle: Arc<Handle>,
}

/// What the workers of a subscription have in common.
#[derive(Debug)]
pub(crate) struct WorkerContext {
    pub(crate) turns: Arc<Turns>,
    /// They report here, each under its number.
    pub(crate) sender: Sender<(usize, FromWorker)>,
    pub(crate) subscription: String,
}

impl Worker {
    /// Opens the session of worker `number`, and starts the thread. `waits`: how long it waits for
    /// other groups.
    pub(crate) fn spawn(
        number: usize,
        connect: Connect,
        context: &WorkerContext,
        waits: Stopwatch,
    ) -> Result<Self> {
        let opened = connect(None)?;
        Self::start(number, connect, Some(opened), context, waits, None)
    }

    /// Starts the thread, which opens the session and says so. The lease is kept until the session
    /// is closed, and that is when the server has ended it.
    pub(crate) fn spawn_unopened(
        number: usize,
        connect: Connect,
        context: &WorkerContext,
        waits: Stopwatch,
        lease: &Arc<SessionLease>,
    ) -> Result<Self> {
        Self::start(number, connect, None, context, waits, Some(Arc::clone(lease)))
    }

    fn start(
        number: usize,
        connect: Connect,
        opened: Option<(Session, Identity)>,
        context: &WorkerContext,
        waits: Stopwatch,
        lease: Option<Arc<SessionLease>>,
    ) -> Result<Self> {
        let (mail, inbox) = unbounded();
        let handle: Arc<Handle> = Arc::default();
        if let Some((session, _)) = &opened {
            set_handle(&handle, session);
        }
        let log = MissingLog::new(&context.subscription);
        let (turns, handle_of_thread) = (Arc::clone(&context.turns), Arc::clone(&handle));
        let reporter = Reporter { number, sender: context.sender.clone() };
        let work = move || {
            let report = |event| reporter.report(event);
            let (session, identity) = match opened.map_or_else(|| open(&connect), Ok) {
                Ok(opened) => opened,
                Err(failure) => {
                    drop(lease);
                    return report(FromWorker::Moved(Moved::NotOpened(failure)));
                }
            };
            if lease.is_some() {
                set_handle(&handle_of_thread, &session);
                report(FromWorker::Moved(Moved::Came));
            }
            let mut state = State::new(number, session, identity, log, turns, waits);
            if let Err(failure) = state.run(&inbox, &connect, &handle_of_thread, &report) {
                return report(FromWorker::Failed(failure));
            }
            if let Some(lease) = lease {
                state.close(CLOSE_PATIENCE);
                drop(lease);
                report(FromWorker::Moved(Moved::Left));
            }
        };
        let thread = std::thread::Builder::new()
            .name(format!("apply {number}"))
            .spawn(work)
            .map_err(|e| Failure::internal(format!("cannot start an apply thread: {e}")))?;
        let turns = Arc::clone(&context.turns);
        Ok(Self { number, turns, mail: Some(mail), thread: Some(thread), handle })
    }

    /// Hands a group over, in commit order. A worker that is gone has reported why.
    pub(crate) fn submit(&self, group: Group) {
        self.send(ToWorker::Group(group));
    }

    /// Has the worker roll back this group, unless it is committing it, and carry it out again
    /// when it is the oldest.
    pub(crate) fn give_way(&self, group: GroupSeq) {
        self.send(ToWorker::GiveWay(group));
    }

    /// The backend of its session, when that is open.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.handle().map(|handle| handle.pid())
    }

    fn handle(&self) -> Option<CancelHandle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn send(&self, message: ToWorker) {
        if let Some(mail) = &self.mail {
            let _ = mail.send(message);
            self.turns.waker(self.number).wake();
        }
    }

    /// Lets the thread end, without waiting for it.
    pub(crate) fn close(&mut self) {
        self.mail = None;
        self.turns.waker(self.number).wake();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
        // One that still opens its session is left behind: it finds that it is to end before it has
        // done anything.
        if let Some(handle) = self.handle() {
            join_or_cancel(self.thread.take(), &handle, LITTLE_PATIENCE);
        }
    }
}

/// Tells the leader what becomes of a worker, whatever it is.
struct Reporter {
    number: usize,
    sender: Sender<(usize, FromWorker)>,
}

impl Reporter {
    fn report(&self, event: FromWorker) {
        // The leader may be gone; then nobody needs to know.
        let _ = self.sender.send((self.number, event));
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report(FromWorker::Failed(Failure::internal("an apply thread panicked")));
        }
    }
}

/// Opens the session of a worker that comes while others are at work.
fn open(connect: &Connect) -> Result<(Session, Identity)> {
    let (mut session, identity) = connect(None)?;
    if owns(&mut session, identity)? {
        Ok((session, identity))
    } else {
        Err(Failure::new(Class::Busy, "another process has taken the subscription over"))
    }
}
