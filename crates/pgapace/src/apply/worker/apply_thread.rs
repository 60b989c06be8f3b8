//! The thread of an apply worker: takes mail, does the next step that [`engine::worker`] decides, and
//! sleeps when there is none.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};
use engine::dispatch::Pacing;
use engine::net::ChangeAt;
use engine::order::Waits;
use engine::worker::{Next, WaitReason, WorkerGroups, WorkerTypes};
use wire::{Queued, Session};

use crate::apply::conflict_log::ConflictLog;
use crate::apply::encoder::{Encoder, EncoderPosition, Ending};
use crate::apply::expected::Expected;
use crate::apply::replies::RowCount;
use crate::apply::session::{Connect, Identity};
use crate::apply::thread::{SessionHandle, thread_time};
use crate::apply::turns::Turns;
use crate::apply::work::Work;
use crate::apply::worker::tally::Tally;
use crate::apply::worker::{Answered, FromWorker, Reporter, ToWorker};
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

pub(super) struct ApplyThread {
    number: usize,
    inbox: Receiver<ToWorker>,
    pub(super) connect: Connect,
    pub(super) handle: SessionHandle,
    pub(super) reporter: Reporter,
    pub(super) session: Session,
    pub(super) encoder: Encoder,
    pub(super) turns: Arc<Turns>,
    pub(super) groups: WorkerGroups<Statements>,
    pub(super) rows: RowCount,
    pub(super) tally: Tally,
    /// The change that stops the run, when it is known which conflict that is.
    pub(super) offense: Option<(ChangeAt, wire::Error)>,
    /// See [`Answered::moved_values`].
    pub(super) moved_values: Vec<u32>,
    closing: bool,
    /// See [`Answered::in_doubt`].
    pub(super) in_doubt: bool,
    waits: Stopwatch,
    pub(super) ledger: Ledger,
    /// Processor time of the thread up to its last report.
    reported_time: Duration,
}

impl ApplyThread {
    pub(super) fn new(
        inbox: Receiver<ToWorker>,
        (connect, handle): (Connect, SessionHandle),
        (session, identity): (Session, Identity),
        reporter: Reporter,
        (log, turns, meter): (ConflictLog, Arc<Turns>, Meter),
    ) -> Self {
        Self {
            number: reporter.number,
            inbox,
            connect,
            handle,
            reporter,
            session,
            encoder: Encoder::new(identity),
            turns,
            groups: WorkerGroups::new(identity.ordered, identity.is_far(), &Pacing::MEASURED),
            rows: RowCount::default(),
            tally: Tally::new(log, meter.ledger.clone()),
            offense: None,
            moved_values: Vec::new(),
            closing: false,
            in_doubt: false,
            waits: meter.waits,
            ledger: meter.ledger,
            reported_time: Duration::ZERO,
        }
    }

    /// Runs until the leader closes the channel, or the worker fails.
    pub(super) fn run(&mut self) -> Result<()> {
        while !self.closing {
            let step = self.step();
            // Commits before a failure count.
            self.report();
            match step {
                Ok(()) => {}
                Err(failure) if self.session.is_broken() && !self.closing => {
                    self.reconnect(failure)?;
                    self.report();
                }
                Err(failure) => {
                    self.tally.abandon();
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// The worker goes while others go on: they may need its replication origin.
    pub(super) fn release_origin(&mut self, identity: Identity, number: usize) {
        let Identity { tagged, drops_origin, database, id, .. } = identity;
        if tagged && drops_origin && !self.session.is_broken() {
            origin::release(&mut self.session, database, id, number);
        }
    }

    /// Closes the session, and waits until the server has ended it.
    pub(super) fn close(self, patience: Duration) -> Reporter {
        self.session.close(patience);
        self.reporter
    }

    /// Does the next step, or waits until there is one.
    fn step(&mut self) -> Result<()> {
        self.take_mail()?;
        if self.closing {
            return Ok(());
        }
        self.advance()?;
        match self.groups.next(&*self.turns) {
            Next::RollBack => self.recover(),
            Next::Start(start) => self.start(start),
            Next::Wait(waits) => {
                self.send()?;
                self.sleep(&waits)
            }
        }
    }

    fn take_mail(&mut self) -> Result<()> {
        loop {
            match self.inbox.try_recv() {
                Ok(ToWorker::Group(group)) => self.groups.push(group),
                Ok(ToWorker::GiveWay(group)) => self.give_way(group)?,
                Err(TryRecvError::Disconnected) => {
                    self.closing = true;
                    return Ok(());
                }
                Err(TryRecvError::Empty) => return Ok(()),
            }
        }
    }

    /// Waits for a reply, for mail, or until one of `waits` is met.
    fn sleep(&mut self, waits: &[Waits]) -> Result<()> {
        let turns = Arc::clone(&self.turns);
        let waker = turns.waker(self.number);
        // Cleared before the look for news, so that news after the look wakes the worker.
        waker.take();
        if !self.inbox.is_empty() {
            return Ok(());
        }
        // The leader's end of the channel may be gone, which `is_empty` does not say.
        self.take_mail()?;
        if self.closing || !turns.wait(self.number, waits) {
            return Ok(());
        }
        let reason = match self.groups.wait_reason() {
            Some(WaitReason::Dependency) => Reason::Dependency,
            Some(WaitReason::CommitOrder) => Reason::CommitOrder,
            None if self.groups.first().is_some() => Reason::Subscriber,
            None => {
                self.ledger.rests();
                Reason::Idle
            }
        };
        self.waits.set(Some(reason));
        let readable = self.session.wait_readable(Some(waker.descriptor()), SLEEP);
        self.waits.set(None);
        let readable = readable.map_err(|e| Failure::subscriber(&e, "applying changes"))?;
        if readable { self.take_replies() } else { Ok(()) }
    }

    /// Sends what the socket accepts at once, and leaves the rest to [`Self::sleep`]. The subscriber reads
    /// nothing while it executes a statement. A worker that first wrote all of its next group would hear
    /// too late that its last group has committed, and other workers wait for that.
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
        let answered = Answered {
            committed,
            prepared,
            counters,
            groups,
            ended: ended.clone(),
            in_doubt: std::mem::take(&mut self.in_doubt),
            conflicts: self.tally.take_named(),
            moved_values,
            processor,
        };
        self.reporter.report(FromWorker::Answered(Box::new(answered)));
        if !ended.is_empty() {
            self.turns.ended(&ended);
            self.groups.look(&*self.turns);
        }
    }
}
