//! Apply workers: each is one thread with one subscriber session, and executes apply groups.
//!
//! [`engine::worker`] decides the steps, and the modules here take them. A worker sends BEGIN and the
//! independent changes of a group at once, as statements of net changes. It sends the dependent changes
//! when the groups that they wait for have ended. Every statement must affect a known number of rows. When
//! all of them did, and it is the group's turn to commit, the progress row, COMMIT and Sync follow. The
//! next group is encoded meanwhile and goes with them. So a group either has exactly the effect of its
//! transactions one by one, or it is rolled back:
//!
//! * If earlier groups were in flight on other sessions, they may be the reason. The group is executed
//!   again in the same way when it is the oldest.
//! * If a statement met a unique value that another row has, values may have moved between rows. The group
//!   is executed again with updates that delete before they insert (`subscriber::unique`).
//! * Otherwise it is halved, and in the end executed by rows: one subscriber transaction for each source
//!   transaction, one statement for each change in stream order, all in one pipeline with one Sync. Then
//!   everything before the offending transaction is committed, and the error names the change. Of a large
//!   transaction that is executed in parts, the part that failed is executed by rows, behind a savepoint.
//!   The next part is encoded meanwhile, and sent when this one has found its rows, because its own
//!   savepoint replaces that.
//!
//! A lone small transaction is executed by rows from the start if nothing before it is in flight: that
//! takes one round trip. So do a few changes of several transactions, which are executed change by change in
//! one subscriber transaction. Far from the subscriber, the statements of a small group count their rows
//! themselves and fail if there are others. So its progress row and COMMIT go with them, and the next
//! small group behind them.
//!
//! After an error the server skips everything up to the Sync. The progress row of a later transaction
//! cannot be written without its predecessor's. So nothing after a failed transaction can commit.
//!
//! | file | job |
//! |---|---|
//! | `apply_thread` | takes mail, sleeps, lends the session to the leader |
//! | `session` | does the next step, reports |
//! | `encode` | encodes a group and sends what may be sent of it |
//! | `judge` | takes replies and judges the first group in flight |
//! | `rollback` | rolls groups back that are executed again |
//! | `rules` | executes groups under conflict rules |
//! | `two_phase` | COMMIT PREPARED and ROLLBACK PREPARED |
//! | `lost_session` | opens another session after one was lost |
//! | `tally` | counts what transactions did, and reports it when they commit |

mod apply_thread;
mod encode;
mod judge;
mod lost_session;
mod rollback;
mod rules;
mod session;
mod tally;
mod two_phase;

use std::sync::Arc;
use std::time::Duration;

use apply_thread::{ApplyThread, Ended, GivenBack, Lender};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use engine::group::GroupSeq;
use engine::progress::Range;
use pgoutput::Xid;
use session::WorkerSession;
pub(crate) use tally::TableConflicts;
use wire::Session;

use crate::apply::apply_session::{Connect, Identity};
use crate::apply::conflict_log::ConflictLog;
use crate::apply::session_leases::SessionLease;
use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::thread::{LITTLE_PATIENCE, SessionHandle, SessionThread};
use crate::apply::work::Group;
use crate::error::{Class, Failure, Result};
use crate::observe::ledger::Meter;
use crate::observe::stopwatch::Stopwatch;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;

/// How long the server may take to end a session that is closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// A report of a worker.
#[derive(Debug)]
pub(crate) enum FromWorker {
    Answered(Box<Answered>),
    /// The worker has ended. Groups that it had not reported are not committed, or in doubt.
    Failed(Failure),
    Moved(Moved),
}

/// A worker starts or ends while others go on.
#[derive(Debug)]
pub(crate) enum Moved {
    /// The worker's session is open.
    Came,
    /// The worker's session could not be opened, and the thread has ended.
    NotOpened(Failure),
    /// The worker was told to end; its session is closed.
    Left,
    /// The worker has lent its session, for the leader to execute groups itself.
    Lent,
}

/// The results of a worker since its last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    /// The committed ranges.
    pub(crate) committed: Vec<Range>,
    /// Transactions of the publisher that are prepared on the subscriber, durably.
    pub(crate) prepared: Vec<Xid>,
    /// The counters of the committed transactions.
    pub(crate) counters: Counters,
    /// How many groups are completely answered. A part of a large transaction counts as one.
    pub(crate) groups: usize,
    /// The groups that are committed.
    pub(crate) ended: Vec<GroupSeq>,
    /// Whether a commit may not be durable: it was found after its session was lost, or a user has canceled its wait
    /// for a synchronous standby.
    pub(crate) in_doubt: bool,
    /// Whether one of the transactions has run user code: see [`Committing::user_code`].
    ///
    /// [`Committing::user_code`]: crate::apply::expected::Committing::user_code
    pub(crate) user_code: bool,
    /// Conflicts that are to be written to `pgapace.conflict`.
    pub(crate) conflicts: Vec<Conflict>,
    /// The topmost relations of tables in which a unique value was found to move between rows.
    pub(crate) moved_values: Vec<u32>,
    /// Processor time of the worker's thread.
    pub(crate) processor: Duration,
    /// How long the backend took to prepare the session's statements, roughly.
    pub(crate) preparing: Duration,
}

#[derive(Debug)]
enum ToWorker {
    Group(Group),
    /// An earlier group waits for locks that this one holds.
    GiveWay(GroupSeq),
    /// The leader wants the session when it has no group any more.
    Lend,
}

/// A running worker thread.
#[derive(Debug)]
pub(crate) struct Worker {
    number: usize,
    commit_order: Arc<SharedCommitOrder>,
    mail: Option<Sender<ToWorker>>,
    session: Lending,
    lent: Receiver<Box<WorkerSession>>,
    giving_back: Sender<GivenBack>,
    /// Dropped last, because that waits for the thread.
    thread: SessionThread,
}

/// Whether the worker's session is lent to the leader.
#[derive(Debug)]
enum Lending {
    No,
    AskedFor,
    Lent(Box<WorkerSession>),
}

/// The context that all workers of a subscription share.
#[derive(Debug)]
pub(crate) struct WorkerContext {
    pub(crate) commit_order: Arc<SharedCommitOrder>,
    /// Workers report here, each under its number.
    pub(crate) sender: Sender<(usize, FromWorker)>,
    pub(crate) subscription: String,
}

impl Worker {
    /// Starts the thread of worker `number` on a session that `connect` has opened. `meter` measures its
    /// work and its waits.
    pub(crate) fn spawn(
        number: usize,
        connect: Connect,
        opened: (Session, Identity),
        context: &WorkerContext,
        meter: Meter,
    ) -> Result<Self> {
        Self::start(number, connect, Some(opened), context, meter, None)
    }

    /// Starts the thread, which opens the session and reports that. It keeps the lease, if it needs one, until
    /// the server has ended the session.
    pub(crate) fn spawn_unopened(
        number: usize,
        connect: Connect,
        context: &WorkerContext,
        meter: Meter,
        lease: Option<&Arc<SessionLease>>,
    ) -> Result<Self> {
        Self::start(number, connect, None, context, meter, lease.map(Arc::clone))
    }

    fn start(
        number: usize,
        connect: Connect,
        opened: Option<(Session, Identity)>,
        context: &WorkerContext,
        meter: Meter,
        lease: Option<Arc<SessionLease>>,
    ) -> Result<Self> {
        let (mail, inbox) = unbounded();
        let ((lending, lent), (giving_back, given_back)) = (bounded(1), bounded(1));
        let lender = Lender { lending, lent: lent.clone(), given_back };
        let handle = SessionHandle::default();
        handle.set(opened.as_ref().map(|(session, _)| session));
        let log = ConflictLog::new(&context.subscription);
        let (commit_order, handle_of_thread) = (Arc::clone(&context.commit_order), handle.clone());
        let reporter = Reporter { number, sender: context.sender.clone() };
        let opens = opened.is_none();
        let work = move || {
            let opened = match opened.map_or_else(|| open(&connect), Ok) {
                Ok(opened) => opened,
                Err(failure) => {
                    drop(lease);
                    return reporter.report(FromWorker::Moved(Moved::NotOpened(failure)));
                }
            };
            if opens {
                handle_of_thread.set(Some(&opened.0));
                reporter.report(FromWorker::Moved(Moved::Came));
            }
            let (identity, sessions) = (opened.1, (connect, handle_of_thread));
            let context = (log, Arc::clone(&commit_order), meter);
            let session = WorkerSession::new(sessions, opened, reporter, context);
            let (lends, closing) = (false, false);
            let thread = ApplyThread { inbox, lender, commit_order, number, lends, closing };
            match thread.run(Box::new(session)) {
                Ended::Failed(reporter, failure) => reporter.report(FromWorker::Failed(failure)),
                Ended::Closed(mut session) => {
                    if let Some(lease) = lease {
                        session.release_origin(identity);
                        let reporter = session.close(CLOSE_PATIENCE);
                        drop(lease);
                        reporter.report(FromWorker::Moved(Moved::Left));
                    }
                }
                Ended::Deserted => {}
            }
        };
        let name = format!("apply {number}");
        let thread = SessionThread::spawn(name, handle, LITTLE_PATIENCE, work)?;
        let commit_order = Arc::clone(&context.commit_order);
        let session = Lending::No;
        Ok(Self { number, commit_order, mail: Some(mail), session, lent, giving_back, thread })
    }

    /// Hands a group over, in commit order. A worker that has ended has reported why.
    pub(crate) fn submit(&mut self, group: Group) {
        self.give_back();
        self.send(ToWorker::Group(group));
    }

    /// Asks the thread for its session, which comes as [`Moved::Lent`] when it has no group any more.
    pub(crate) fn ask_for_session(&mut self) {
        if matches!(self.session, Lending::No) {
            self.session = Lending::AskedFor;
            self.send(ToWorker::Lend);
        }
    }

    /// Takes the session that it has lent.
    pub(crate) fn take_session(&mut self) {
        if let Ok(session) = self.lent.try_recv() {
            self.session = Lending::Lent(session);
        }
        if self.mail.is_none() {
            self.give_back();
        }
    }

    /// Executes a group on the session that it has lent, in the calling thread, whose waits these are. If it
    /// has not ended within `patience`, the worker's own thread goes on with it. Returns whether it has
    /// ended; gives the group back if the session is not here.
    pub(crate) fn execute(
        &mut self,
        group: Group,
        patience: Duration,
        waits: &Stopwatch,
    ) -> std::result::Result<bool, Group> {
        let mut session = match std::mem::replace(&mut self.session, Lending::No) {
            Lending::Lent(session) => session,
            other => {
                self.session = other;
                return Err(group);
            }
        };
        session.changes_hands();
        let (ended, stepped) = match session.execute(group, patience, waits) {
            Ok(ended) => (ended, Ok(())),
            Err(failure) => (false, Err(failure)),
        };
        self.session = Lending::Lent(session);
        if !ended {
            self.give_back_after(stepped);
        }
        Ok(ended)
    }

    /// Gives the session back to the thread, if that has lent it.
    pub(crate) fn give_back(&mut self) {
        self.give_back_after(Ok(()));
    }

    fn give_back_after(&mut self, stepped: Result<()>) {
        match std::mem::replace(&mut self.session, Lending::No) {
            Lending::Lent(session) => {
                // Fails only if the thread has ended, which then has reported why.
                let _ = self.giving_back.send(GivenBack { session, stepped });
            }
            other => self.session = other,
        }
    }

    /// Has the worker roll back this group, unless it is committing it, and execute it again when it is
    /// the oldest.
    pub(crate) fn give_way(&self, group: GroupSeq) {
        self.send(ToWorker::GiveWay(group));
    }

    /// The backend of its session, if that is open.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.thread.session().pid()
    }

    fn send(&self, message: ToWorker) {
        if let Some(mail) = &self.mail {
            let _ = mail.send(message);
            self.commit_order.waker(self.number).wake();
        }
    }

    /// Lets the thread end, without waiting for it.
    pub(crate) fn close(&mut self) {
        self.give_back();
        self.mail = None;
        self.commit_order.waker(self.number).wake();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

/// Reports to the leader how a worker ends, even by a panic.
struct Reporter {
    number: usize,
    sender: Sender<(usize, FromWorker)>,
}

impl Reporter {
    fn report(&self, event: FromWorker) {
        // If the leader is gone, the report is not needed.
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

/// Opens the session of a worker that starts while others go on.
fn open(connect: &Connect) -> Result<(Session, Identity)> {
    let (mut session, identity) = connect(None)?;
    if identity.still_owns(&mut session)? {
        Ok((session, identity))
    } else {
        Err(Failure::new(Class::Busy, "another process has taken the subscription over"))
    }
}
