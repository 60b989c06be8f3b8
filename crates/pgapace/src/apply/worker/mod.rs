//! The apply workers: each one thread, one target session, groups to pipelined statements.

mod lost;
mod rules;
mod state;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use engine::group::GroupSeq;
use engine::progress::Range;
use wire::{CancelHandle, Session};

use crate::apply::missing::MissingLog;
use crate::apply::thread::join_or_cancel;
use crate::apply::turns::Turns;
use crate::apply::work::Group;
use crate::error::{Failure, Result};
use crate::observe::stopwatch::Stopwatch;
use crate::target::state::SubscriptionId;
use crate::target::state::statistics::Counters;
use state::State;

/// What a worker reports.
#[derive(Debug)]
pub(crate) enum FromWorker {
    Answered(Answered),
    /// The worker has given up; what it had not reported is not committed, or not known to be.
    Failed(Failure),
}

/// What the target has answered since the last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    /// What is committed.
    pub(crate) committed: Vec<Range>,
    /// Of what was committed.
    pub(crate) counters: Counters,
    /// How many groups the worker is through with; a part of a large transaction is one.
    pub(crate) groups: usize,
    /// Those that are committed.
    pub(crate) ended: Vec<GroupSeq>,
    /// Whether some were found committed after their session was lost.
    pub(crate) in_doubt: bool,
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
    /// Whether the target refuses a commit before its predecessor's.
    pub(crate) ordered: bool,
    /// The backend of the control session, which owns the subscription.
    pub(crate) owner: i32,
}

/// A session that a worker has lost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    /// Its backend.
    pub(crate) backend: i32,
    /// Whether it had a replication origin.
    pub(crate) tagged: bool,
}

/// Opens the session of a worker: the first time, and whenever it was lost; the lost one is gone
/// when this returns.
pub(crate) type Connect = Box<dyn Fn(Option<Lost>) -> Result<(Session, Identity)> + Send>;

#[derive(Debug)]
enum ToWorker {
    Group(Group),
    /// An earlier group waits for locks that this one holds.
    GiveWay(GroupSeq),
}

/// A running worker thread.
#[derive(Debug)]
pub(crate) struct Worker {
    number: usize,
    turns: Arc<Turns>,
    mail: Option<Sender<ToWorker>>,
    thread: Option<JoinHandle<()>>,
    /// Of its session, which is another one after it was lost.
    handle: Arc<Mutex<CancelHandle>>,
    /// How long it has waited for other groups.
    pub(crate) waits: Stopwatch,
}

impl Worker {
    /// Starts worker `number` of those that share `turns`; it reports to `sender` under its number.
    pub(crate) fn spawn(
        number: usize,
        connect: Connect,
        turns: &Arc<Turns>,
        sender: Sender<(usize, FromWorker)>,
        subscription: &str,
    ) -> Result<Self> {
        let (mail, inbox) = unbounded();
        let (session, identity) = connect(None)?;
        let handle = Arc::new(Mutex::new(session.cancel_handle()));
        let log = MissingLog::new(subscription);
        let (turns_of_thread, handle_of_thread) = (Arc::clone(turns), Arc::clone(&handle));
        let waits = Stopwatch::default();
        let waits_of_thread = waits.clone();
        let thread = std::thread::Builder::new()
            .name(format!("apply {number}"))
            .spawn(move || {
                let (turns, waits) = (turns_of_thread, waits_of_thread);
                let mut state = State::new(number, session, identity, log, turns, waits);
                let failure = state.run(&inbox, &connect, &handle_of_thread, &|event| {
                    // The leader may be gone; then nobody needs to know.
                    let _ = sender.send((number, event));
                });
                if let Err(failure) = failure {
                    let _ = sender.send((number, FromWorker::Failed(failure)));
                }
            })
            .map_err(|e| Failure::internal(format!("cannot start an apply thread: {e}")))?;
        let turns = Arc::clone(turns);
        Ok(Self { number, turns, mail: Some(mail), thread: Some(thread), handle, waits })
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

    /// The backend of its session.
    pub(crate) fn pid(&self) -> i32 {
        self.handle().pid()
    }

    fn handle(&self) -> CancelHandle {
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
        let handle = self.handle();
        join_or_cancel(self.thread.take(), &handle);
    }
}
