//! The session of an apply worker, with the groups that it executes. It does the next step that
//! [`engine::worker`] decides.
//!
//! It belongs to the worker's thread, which lends it to the leader while the leader executes small groups
//! itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::dispatch::Pacing;
use engine::net::ChangeAt;
use engine::order::Prerequisites;
use engine::worker::{Next, WaitReason, WorkerGroups, WorkerTypes};
use wire::{Queued, Session};

use crate::apply::apply_session::{Connect, Identity};
use crate::apply::conflict_log::ConflictLog;
use crate::apply::encoder::ending::Ending;
use crate::apply::encoder::{Encoder, EncoderPosition};
use crate::apply::expected::Expected;
use crate::apply::replies::RowCount;
use crate::apply::shared_commit_order::SharedCommitOrder;
use crate::apply::thread::{SessionHandle, thread_time};
use crate::apply::work::{Group, Work};
use crate::apply::worker::tally::Tally;
use crate::apply::worker::{Answered, FromWorker, Reporter};
use crate::error::{Failure, Result};
use crate::observe::ledger::{Ledger, Meter};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::subscriber::origin;

/// The longest sleep. Other threads wake the worker when they have news.
pub(super) const SLEEP: Duration = Duration::from_secs(10);

/// Groups are encoded to queued statements.
pub(super) struct Statements;

impl WorkerTypes for Statements {
    type Member = Work;
    type Statements = Queued;
    type Expected = Expected;
    type Ending = Ending;
    type EncoderPosition = EncoderPosition;
}

/// The next thing to do after [`WorkerSession::step`].
#[derive(Debug)]
pub(super) enum AfterStep {
    /// Another step.
    Step,
    /// Wait for a reply, for mail, or until one of these is met.
    Wait(Vec<Prerequisites>),
}

pub(super) struct WorkerSession {
    pub(super) connect: Connect,
    pub(super) handle: SessionHandle,
    pub(super) reporter: Reporter,
    pub(super) session: Session,
    pub(super) encoder: Encoder,
    pub(super) commit_order: Arc<SharedCommitOrder>,
    pub(super) groups: WorkerGroups<Statements>,
    pub(super) rows: RowCount,
    pub(super) tally: Tally,
    /// The change that stops the run, when it is known which conflict that is.
    pub(super) offense: Option<(ChangeAt, wire::Error)>,
    /// See [`Answered::moved_values`].
    pub(super) moved_values: Vec<u32>,
    /// See [`Answered::in_doubt`].
    pub(super) in_doubt: bool,
    /// Commits of the session that may be on no synchronous standby, up to the last report.
    unreplicated: u64,
    pub(super) waits: Stopwatch,
    pub(super) ledger: Ledger,
    /// The leader executes a group on it, and hears nothing else meanwhile. Cleared where that may take long.
    pub(super) attended: bool,
    /// Processor time of the thread that has it, up to the last report.
    reported_time: Duration,
}

impl WorkerSession {
    pub(super) fn new(
        (connect, handle): (Connect, SessionHandle),
        (session, identity): (Session, Identity),
        reporter: Reporter,
        (log, commit_order, meter): (ConflictLog, Arc<SharedCommitOrder>, Meter),
    ) -> Self {
        Self {
            connect,
            handle,
            reporter,
            session,
            encoder: Encoder::new(identity),
            commit_order,
            groups: WorkerGroups::new(identity.ordered, identity.is_far(), &Pacing::MEASURED)
                .with_lone_commits(identity.citus),
            rows: RowCount::default(),
            tally: Tally::new(log, meter.ledger.clone()),
            offense: None,
            moved_values: Vec::new(),
            in_doubt: false,
            unreplicated: 0,
            waits: meter.waits,
            ledger: meter.ledger,
            attended: false,
            reported_time: Duration::ZERO,
        }
    }

    /// The worker goes while others go on: they may need its replication origin.
    pub(super) fn release_origin(&mut self, identity: Identity) {
        let Identity { tagged, drops_origin, database, id, .. } = identity;
        if tagged && drops_origin && !self.session.is_broken() {
            origin::release(&mut self.session, database, id, self.reporter.number);
        }
    }

    /// Closes the session, and waits until the server has ended it.
    pub(super) fn close(self, patience: Duration) -> Reporter {
        self.session.close(patience);
        self.reporter
    }

    /// It belongs to the calling thread from now on.
    pub(super) fn changes_hands(&mut self) {
        self.reported_time = thread_time();
        self.waits.set(None);
    }

    /// It waits for a group.
    pub(super) fn rests(&mut self) {
        self.ledger.rests();
        self.waits.set(Some(Reason::Idle));
    }

    /// Whether it has no group.
    pub(super) fn is_idle(&self) -> bool {
        self.groups.is_empty()
    }

    /// Goes on after a failure, on another session if this one is lost. Fails if that is not possible.
    pub(super) fn go_on_after(&mut self, failure: Failure) -> Result<()> {
        if !self.session.is_broken() {
            self.tally.abandon();
            return Err(failure);
        }
        self.reconnect(failure)?;
        self.report();
        Ok(())
    }

    /// Does the next step, and sends everything before it says to wait.
    pub(super) fn step(&mut self) -> Result<AfterStep> {
        self.advance()?;
        match self.groups.next(&*self.commit_order) {
            Next::RollBack => self.recover()?,
            Next::Start(start) => self.start(start)?,
            Next::Wait(prerequisites) => {
                self.send()?;
                return Ok(AfterStep::Wait(prerequisites));
            }
        }
        Ok(AfterStep::Step)
    }

    /// Executes a small group in the leader's thread, whose waits these are, for as long as replies come
    /// within `patience`. Returns whether the group has ended. Otherwise the worker's own thread goes on with
    /// it.
    pub(super) fn execute(
        &mut self,
        group: Group,
        patience: Duration,
        waits: &Stopwatch,
    ) -> Result<bool> {
        self.groups.push(group);
        self.attended = true;
        let ended = self.execute_until(Instant::now() + patience, waits);
        self.attended = false;
        if let Ok(true) = ended {
            self.rests();
        }
        ended
    }

    fn execute_until(&mut self, deadline: Instant, waits: &Stopwatch) -> Result<bool> {
        while self.attended && !self.groups.is_rolling_back() {
            match self.step()? {
                AfterStep::Step => {}
                AfterStep::Wait(_) if self.is_idle() => return Ok(true),
                AfterStep::Wait(_) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || !self.groups.expects_replies() {
                        return Ok(false);
                    }
                    waits.set(Some(Reason::Subscriber));
                    let waited = self.wait_for_replies(Reason::Subscriber, None, left);
                    waits.set(None);
                    waited?;
                }
            }
        }
        Ok(false)
    }

    /// Waits for a reply or a wake-up, and takes the replies.
    pub(super) fn wait_for_replies(
        &mut self,
        reason: Reason,
        wake: Option<std::os::fd::BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<()> {
        self.waits.set(Some(reason));
        let readable = self.session.wait_readable(wake, timeout);
        self.waits.set(None);
        let readable = readable.map_err(|e| Failure::subscriber(&e, "applying changes"))?;
        if readable { self.take_replies() } else { Ok(()) }
    }

    /// The reason for which it waits.
    pub(super) fn wait_reason(&self) -> Reason {
        match self.groups.wait_reason() {
            Some(WaitReason::Dependency) => Reason::Dependency,
            Some(WaitReason::CommitOrder) => Reason::CommitOrder,
            None if self.groups.first().is_some() => Reason::Subscriber,
            None => Reason::Idle,
        }
    }

    /// Sends what the socket accepts at once, and leaves the rest to [`Self::wait_for_replies`]. The
    /// subscriber reads nothing while it executes a statement. A worker that first wrote all of its next
    /// group would hear too late that its last group has committed, and other workers wait for that.
    pub(super) fn send(&mut self) -> Result<()> {
        self.session.send_queued().map_err(|e| Failure::subscriber(&e, "sending changes"))
    }

    /// Reports to the leader, and then wakes the workers that wait for this: so that the leader hears of
    /// commits in their order.
    pub(super) fn report(&mut self) {
        let (committed, counters) = self.tally.take_committed();
        let (groups, ended) = self.groups.take_answered();
        let prepared = self.tally.take_prepared();
        let moved_values = std::mem::take(&mut self.moved_values);
        if committed.is_empty() && prepared.is_empty() && groups == 0 && moved_values.is_empty() {
            return;
        }
        let time = thread_time();
        let processor = time.saturating_sub(std::mem::replace(&mut self.reported_time, time));
        let unreplicated = self.session.unreplicated_commits();
        // A session that replaced a lost one counts from zero.
        self.in_doubt |= unreplicated > self.unreplicated;
        self.unreplicated = unreplicated;
        let answered = Answered {
            committed,
            prepared,
            counters,
            groups,
            ended: ended.clone(),
            in_doubt: std::mem::take(&mut self.in_doubt),
            user_code: self.tally.take_user_code(),
            conflicts: self.tally.take_named(),
            moved_values,
            processor,
            preparing: self.encoder.prepared(),
        };
        self.reporter.report(FromWorker::Answered(Box::new(answered)));
        if !ended.is_empty() {
            self.commit_order.ended(&ended);
            self.groups.look(&*self.commit_order);
        }
    }
}

impl std::fmt::Debug for WorkerSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerSession")
            .field("worker", &self.reporter.number)
            .finish_non_exhaustive()
    }
}
