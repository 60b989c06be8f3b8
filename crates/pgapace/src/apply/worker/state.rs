//! What a worker does with its groups: as `engine::worker` decides.
//!
//! A group is sent as BEGIN and the statements of its net changes: those that no group in flight
//! can be in the way of at once, the dependent ones when the groups they wait for have ended. When
//! every statement is known to have affected as many rows as it must, and it is the group's turn,
//! its progress row, COMMIT and Sync follow, and with them the next group, which was put together
//! meanwhile. So a group either does exactly what its transactions would have done one by one, or
//! it is rolled back. If others were in flight before it, that may be why: it is carried out again
//! when it is the oldest. If not, it is carried out as the publisher sent it: one subscriber transaction
//! for each source transaction, one statement for each change in stream order, all in one pipeline.
//! Then everything before the offender is committed, and the offender is named. A lone small
//! transaction with nothing in flight before it is sent so from the start: that is one round trip.
//! Where the subscriber is far away, the statements of a small group count themselves what they find and
//! fail if it is not what it must be, so that its progress row and COMMIT go with them, and the next
//! small group behind them.
//!
//! After an error the server skips everything up to the Sync, and the progress row of a later
//! transaction refuses to be written without its predecessor's, so nothing after a failed
//! transaction can commit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};
use engine::dispatch::Pacing;
use engine::group::GroupSeq;
use engine::net::ChangeAt;
use engine::order::Waits;
use engine::worker::{
    AfterReply, Awaited, ErrorKind, Further, GroupMode, Next, Outcome, Retry, Start, Verdict,
    WaitReason, WorkerGroups, WorkerTypes,
};
use wire::{Queued, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::answers::{Answers, Pending};
use crate::apply::conflict_log::MissingLog;
use crate::apply::context::Context;
use crate::apply::encoder::{Encoder, Ending, Which};
use crate::apply::turns::Turns;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{Answered, Connect, FromWorker, Handle, Identity, ToWorker};
use crate::error::{Class, Failure, LOCK_NOT_AVAILABLE, Result, is_transient};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::stopping::interrupt::cancel;

/// Bytes of statements that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// The longest sleep; whoever has news wakes the worker.
const SLEEP: Duration = Duration::from_secs(10);

/// Groups as queued statements.
pub(super) struct Encoded;

impl WorkerTypes for Encoded {
    type Member = Work;
    type Statements = Queued;
    type Awaited = Pending;
    type Ending = Ending;
    /// See [`Encoder::forget_after`].
    type EncoderPosition = u64;
}

pub(super) type InFlight = engine::worker::InFlight<Encoded>;

/// What a group becomes: the statements that are sent first, if they were set aside; those of the
/// dependent changes, if they are apart; and the end.
type Parts = (Option<Queued>, Option<(Queued, VecDeque<Pending>)>, Option<Ending>);

pub(super) struct State {
    number: usize,
    pub(super) session: Session,
    pub(super) encoder: Encoder,
    turns: Arc<Turns>,
    pub(super) desk: WorkerGroups<Encoded>,
    pub(super) answers: Answers,
    /// The change for which the run ends, when it is known which conflict that is.
    pub(super) offence: Option<(ChangeAt, wire::Error)>,
    closing: bool,
    /// See [`Answered::in_doubt`].
    pub(super) in_doubt: bool,
    waits: Stopwatch,
}

type Report<'a> = &'a dyn Fn(FromWorker);

impl State {
    pub(super) fn new(
        number: usize,
        session: Session,
        identity: Identity,
        log: MissingLog,
        turns: Arc<Turns>,
        waits: Stopwatch,
    ) -> Self {
        Self {
            number,
            session,
            encoder: Encoder::new(identity),
            turns,
            desk: WorkerGroups::new(identity.ordered, identity.is_far(), &Pacing::MEASURED),
            answers: Answers::new(log),
            offence: None,
            closing: false,
            in_doubt: false,
            waits,
        }
    }

    pub(super) fn run(
        &mut self,
        inbox: &Receiver<ToWorker>,
        connect: &Connect,
        handle: &Handle,
        report: Report<'_>,
    ) -> Result<()> {
        loop {
            let step = self.step(inbox, report);
            // What is committed before a failure counts.
            self.report(report);
            match step {
                Ok(()) if self.closing => return Ok(()),
                Ok(()) => {}
                Err(failure) if self.session.is_broken() && !self.closing => {
                    self.reconnect(failure, connect, handle)?;
                    self.report(report);
                }
                Err(failure) => {
                    self.answers.abandon();
                    return Err(failure);
                }
            }
        }
    }

    /// Closes the session, and waits until the server has ended it.
    pub(super) fn close(self, patience: Duration) {
        self.session.close(patience);
    }

    /// Does one thing, or waits until there is one to do.
    fn step(&mut self, inbox: &Receiver<ToWorker>, report: Report<'_>) -> Result<()> {
        self.take_mail(inbox)?;
        if self.closing {
            return Ok(());
        }
        self.advance()?;
        match self.desk.next(&*self.turns) {
            Next::RollBack => self.recover(),
            Next::Start(start) => self.start(start, report),
            Next::Wait(waits) => {
                self.send()?;
                self.sleep(inbox, &waits, report)
            }
        }
    }

    fn take_mail(&mut self, inbox: &Receiver<ToWorker>) -> Result<()> {
        loop {
            match inbox.try_recv() {
                Ok(ToWorker::Group(group)) => self.desk.push(group),
                Ok(ToWorker::GiveWay(group)) => self.give_way(group)?,
                Err(TryRecvError::Disconnected) => {
                    self.closing = true;
                    return Ok(());
                }
                Err(TryRecvError::Empty) => return Ok(()),
            }
        }
    }

    /// Waits for an answer, for mail, or until one of `waits` is met.
    fn sleep(
        &mut self,
        inbox: &Receiver<ToWorker>,
        waits: &[Waits],
        report: Report<'_>,
    ) -> Result<()> {
        let turns = Arc::clone(&self.turns);
        let waker = turns.waker(self.number);
        // Before looking for news, so that what comes after the look is not missed.
        waker.take();
        if !inbox.is_empty() {
            return Ok(());
        }
        // The leader's end of the channel may be gone, which `is_empty` does not say.
        self.take_mail(inbox)?;
        if self.closing || !turns.wait(self.number, waits) {
            return Ok(());
        }
        let reason = self.desk.kept().map(|kept| match kept {
            WaitReason::Dependency => Reason::Dependency,
            WaitReason::CommitOrder => Reason::CommitOrder,
        });
        if reason.is_some() {
            self.waits.set(reason);
        }
        let readable = self.session.wait_readable(Some(waker.descriptor()), SLEEP);
        if reason.is_some() {
            self.waits.set(None);
        }
        let readable = readable.map_err(|e| Failure::subscriber(&e, "applying changes"))?;
        if readable { self.take_replies(report) } else { Ok(()) }
    }

    /// Puts a group's statements together, and sends them if nothing unfinished is before them.
    fn start(&mut self, start: Start<Work>, report: Report<'_>) -> Result<()> {
        if start.group.is_by_rules() {
            return self.by_rules(start.group);
        }
        if let Err(failure) = self.resolve_prepared(&start.group) {
            // It is not carried out again by this run.
            self.desk.put_back(start.group);
            return Err(failure);
        }
        if start.behind || start.early {
            // What is queued now is that of others.
            if let Err(failure) = self.send() {
                // It comes again on another session.
                self.desk.put_back(start.group);
                return Err(failure);
            }
        }
        let split = self.desk.is_split(&start, &*self.turns);
        let Start { group, early, behind, counted } = start;
        let before = self.session.pending_ready();
        let parsed = self.encoder.parsed();
        let mut pending = VecDeque::new();
        let encoded = if split {
            self.encode_split(&group, before, &mut pending)
        } else {
            self.encode(&group, early, counted, &mut pending).map(|ending| (None, None, ending))
        };
        let (first, dependent, ending) = match encoded {
            Ok(encoded) => encoded,
            Err(failure) => {
                if behind || early {
                    // Nothing of it is sent. It is tried again when it is the oldest.
                    drop(self.session.set_aside(before));
                    self.encoder.forget_after(&mut self.session, parsed);
                    self.desk.put_back(Group { attempts: group.attempts + 1, ..group });
                    return Ok(());
                }
                return self.not_encoded(group, parsed, pending, failure, report);
            }
        };
        if pending.is_empty() {
            // Whoever waits for its answers must get one.
            self.encoder.nothing(&mut self.session, &mut pending)?;
        }
        let in_flight =
            InFlight::new(group, parsed, early, pending.len()).with_rest(dependent, ending);
        if behind {
            let statements = first.unwrap_or_else(|| self.session.set_aside(before));
            self.desk.set_aside(in_flight, statements, pending);
            return Ok(());
        }
        if let Some(first) = first {
            self.session.queue_set_aside(first);
        }
        self.desk.sent(in_flight, pending);
        self.advance()?;
        if self.session.queued() >= SEND_BYTES {
            self.send()?;
            self.take_replies(report)?;
        }
        Ok(())
    }

    fn encode(
        &mut self,
        group: &Group,
        early: bool,
        counted: bool,
        pending: &mut VecDeque<Pending>,
    ) -> Result<Option<Ending>> {
        match group.mode {
            GroupMode::Net => {
                let session = &mut self.session;
                let sure = self.encoder.net(session, group, Which::All, counted, pending)?;
                match self.encoder.ending(group)? {
                    Some(ending) if counted && sure => {
                        self.encoder.queue_ending(&mut self.session, ending, pending)?;
                        Ok(None)
                    }
                    ending => Ok(ending),
                }
            }
            GroupMode::Rows => {
                let mut ending = None;
                for index in 0..group.works.len() {
                    ending = self.encoder.rows(&mut self.session, group, index, early, pending)?;
                }
                Ok(ending)
            }
        }
    }

    /// The statements of the free changes, those of the dependent ones, and the ending.
    fn encode_split(
        &mut self,
        group: &Group,
        before: usize,
        pending: &mut VecDeque<Pending>,
    ) -> Result<Parts> {
        self.encoder.net(&mut self.session, group, Which::Free, false, pending)?;
        let free = self.session.set_aside(before);
        let mut behind = VecDeque::new();
        self.encoder.net(&mut self.session, group, Which::Dependent, false, &mut behind)?;
        if behind.is_empty() {
            // Folded to nothing; they wait all the same, for what they read.
            self.encoder.nothing(&mut self.session, &mut behind)?;
        }
        let dependent = self.session.set_aside(before);
        Ok((Some(free), Some((dependent, behind)), self.encoder.ending(group)?))
    }

    /// Sends what the group in flight may send now, and then those behind it.
    fn advance(&mut self) -> Result<()> {
        while let Some(further) = self.desk.further(&*self.turns) {
            match further {
                Further::Statements(statements) => self.session.queue_set_aside(statements),
                Further::Ending(ending) => {
                    let Self { desk, encoder, session, .. } = self;
                    desk.await_ending(|pending| encoder.queue_ending(session, ending, pending))?;
                }
            }
        }
        Ok(())
    }

    /// A change cannot be expressed as a statement. Nothing is in flight before it that is not sent,
    /// so what was queued before it counts: everything before the offender is committed.
    fn not_encoded(
        &mut self,
        group: Group,
        parsed: u64,
        mut pending: VecDeque<Pending>,
        failure: Failure,
        report: Report<'_>,
    ) -> Result<()> {
        self.session.queue_sync();
        pending.push_back(Pending::sync());
        // More than will come, so that the group stays.
        self.desk.sent(InFlight::new(group, parsed, false, usize::MAX), pending);
        self.send()?;
        while self.desk.is_awaiting() {
            let readable = self
                .session
                .wait_readable(None, SLEEP)
                .map_err(|e| Failure::subscriber(&e, "applying changes"))?;
            if readable {
                self.take_replies(report)?;
            }
        }
        // An earlier group may have failed meanwhile; then that comes first.
        if self.desk.is_recovering() {
            return Ok(());
        }
        self.carry_on(self.desk.judge_incomplete(), || failure)
    }

    /// An earlier group waits for locks of this one, which waits for its turn.
    fn give_way(&mut self, group: GroupSeq) -> Result<()> {
        if !self.desk.can_give_way(group) {
            return Ok(());
        }
        tracing::debug!(group = group.0, "gives way to an earlier group");
        let busy = self.desk.is_awaiting();
        self.start_recovery(Retry::GivenWay)?;
        if busy {
            cancel(&self.session.cancel_handle());
        }
        Ok(())
    }

    /// The first group in flight has failed.
    pub(super) fn start_recovery(&mut self, again: Retry) -> Result<()> {
        let Some(needs_sync) = self.desk.start_recovery(again) else { return Ok(()) };
        self.answers.roll_back();
        self.answers.count(|counters| match again {
            Retry::Later => counters.retries += 1,
            Retry::GivenWay => counters.victims += 1,
            Retry::ByRows => counters.fallbacks += 1,
            Retry::Never => {}
        });
        if needs_sync {
            self.session.queue_sync();
        }
        self.send()
    }

    /// All answers are there after a failure: the failed group is carried out again, and what came
    /// after it as it was.
    fn recover(&mut self) -> Result<()> {
        if self.session.transaction_status() != TransactionStatus::Idle {
            self.roll_back()?;
        }
        if let Some(first) = self.desk.first() {
            self.encoder.forget_after(&mut self.session, first.mark);
        }
        if let Some((at, error)) = self.offence.take() {
            return Err(self.name_conflict(at, &error)?);
        }
        self.desk.rolled_back();
        Ok(())
    }

    fn roll_back(&mut self) -> Result<()> {
        loop {
            match self.session.simple("ROLLBACK") {
                Ok(_) => return Ok(()),
                // A cancel that was meant for what went before.
                Err(error) if error.sqlstate() == Some("57014") => {}
                Err(error) => {
                    return Err(Failure::subscriber(&error, "going back to before a group"));
                }
            }
        }
    }

    pub(super) fn send(&mut self) -> Result<()> {
        self.session.flush().map_err(|e| Failure::subscriber(&e, "sending changes"))
    }

    /// Takes every answer that is there, then reports what it committed.
    fn take_replies(&mut self, report: Report<'_>) -> Result<()> {
        loop {
            let reply = self
                .session
                .try_reply()
                .map_err(|e| Failure::subscriber(&e, "applying changes"))?;
            match reply {
                None => break,
                Some(Reply::CommandComplete(tag)) => {
                    let affected = affected_rows(tag);
                    let rolled_back = tag == "ROLLBACK";
                    let pending = self.desk.take_awaited();
                    if self.desk.is_recovering() {
                        continue;
                    }
                    self.completed(pending, affected, rolled_back)?;
                }
                Some(Reply::Error(error)) => {
                    self.failed(wire::Error::Server(error))?;
                }
                Some(Reply::Ready(status)) => {
                    let Some(Pending::Sync { commits }) = self.desk.take_awaited() else {
                        return Err(Failure::internal(
                            "the subscriber answered a Sync nobody sent",
                        ));
                    };
                    if self.desk.is_recovering() {
                        continue;
                    }
                    if let Some(commits) = commits {
                        if status != TransactionStatus::Idle {
                            return Err(Failure::internal(
                                "a transaction is open after its COMMIT",
                            ));
                        }
                        self.answers.transaction_committed(&commits);
                        self.desk.committed(commits.end);
                    }
                    self.account()?;
                }
                Some(_) => {}
            }
        }
        self.report(report);
        Ok(())
    }

    /// A statement of the first group in flight is completed.
    fn completed(
        &mut self,
        pending: Option<Pending>,
        affected: u64,
        rolled_back: bool,
    ) -> Result<()> {
        let first = self.desk.first();
        let context = Context { group: first.map(|first| &first.group) };
        let mut judged = Ok(());
        let found = match pending {
            Some(Pending::Net { rows }) if rows != affected => {
                let early = first.is_some_and(|first| first.early);
                tracing::debug!(rows, affected, early, "a group found other rows than expected");
                Outcome::OtherRows
            }
            _ => {
                judged = self.answers.completed(pending, affected, rolled_back, &context);
                match &judged {
                    Err(_) => Outcome::Refused,
                    Ok(()) if self.answers.is_missing() => Outcome::Missing,
                    Ok(()) => Outcome::AsExpected,
                }
            }
        };
        match self.desk.judge(found) {
            Verdict::Counts => self.account(),
            verdict => self.carry_on(verdict, || match judged {
                Err(failure) => failure,
                Ok(()) => Failure::new(Class::Apply, LARGE),
            }),
        }
    }

    /// Does what a verdict about the first group in flight says. `failure`: why it does not go on.
    pub(super) fn carry_on(
        &mut self,
        verdict: Verdict,
        failure: impl FnOnce() -> Failure,
    ) -> Result<()> {
        match verdict {
            Verdict::Counts => Ok(()),
            Verdict::Retry(again) => self.start_recovery(again),
            Verdict::After(pause) => {
                std::thread::sleep(pause);
                self.start_recovery(Retry::Later)
            }
            Verdict::SentAgain(through) => {
                Err(Failure { rows_through: Some(through), ..failure() })
            }
            Verdict::Stops => Err(failure()),
        }
    }

    /// Counts an answer of the first group in flight, and lets it go when all are there.
    fn account(&mut self) -> Result<()> {
        match self.desk.account() {
            AfterReply::More => {}
            AfterReply::Open => {
                self.advance()?;
                self.send()?;
            }
            AfterReply::Through(group) => {
                if group.is_committed() {
                    let (parallel, dependent) = (group.early, !group.group.dependent.is_empty());
                    self.answers.count(|counters| {
                        counters.groups_parallel += u64::from(parallel);
                        counters.groups_dependent += u64::from(dependent);
                    });
                }
            }
        }
        Ok(())
    }

    /// A statement has failed: judges what to do with its group, and skips to the Sync.
    fn failed(&mut self, error: wire::Error) -> Result<()> {
        if error.is_connection_loss() || self.session.is_broken() {
            // What was sent stays known: a COMMIT among it may have taken effect.
            let context = Context { group: self.desk.first().map(|first| &first.group) };
            return Err(context.explain(&error, self.desk.awaits().copied()));
        }
        let pending = self.desk.take_awaited();
        if !self.desk.is_recovering() {
            let Some(first) = self.desk.first() else {
                return Err(Failure::subscriber(&error, "waiting for changes"));
            };
            let (seq, early) = (first.group.seq.0, first.early);
            match self.desk.judge_error(kind(error.sqlstate())) {
                Verdict::Stops => self.stop(error, pending)?,
                verdict => {
                    tracing::debug!(%error, group = seq, early, ?verdict, "a group failed");
                    self.carry_on(verdict, || {
                        Failure::subscriber(&error, "applying a large transaction as sets")
                    })?;
                }
            }
        }
        self.desk.skip_to_sync();
        Ok(())
    }

    /// The first group in flight cannot go on. If that is a conflict, it is named when its transaction
    /// is rolled back.
    fn stop(&mut self, error: wire::Error, pending: Option<Pending>) -> Result<()> {
        let context = Context { group: self.desk.first().map(|first| &first.group) };
        match pending {
            Some(Pending::Change { at, .. }) if context.kind(&error, at).is_some() => {
                self.offence = Some((at, error));
                self.start_recovery(Retry::Never)
            }
            _ => Err(context.explain(&error, pending)),
        }
    }

    /// Tells the leader, and then those who wait for this: so that the leader hears of commits in
    /// their order.
    fn report(&mut self, report: Report<'_>) {
        let (committed, counters) = self.answers.take_committed();
        let (groups, ended) = self.desk.take_answered();
        let prepared = self.answers.take_prepared();
        if committed.is_empty() && prepared.is_empty() && groups == 0 {
            return;
        }
        let in_doubt = std::mem::take(&mut self.in_doubt);
        let ended_now = ended.clone();
        let conflicts = self.answers.take_named();
        let answered = Answered {
            committed,
            prepared,
            counters,
            groups,
            ended: ended_now,
            in_doubt,
            conflicts,
        };
        report(FromWorker::Answered(Box::new(answered)));
        if !ended.is_empty() {
            self.turns.ended(&ended);
            self.desk.look(&*self.turns);
        }
    }
}

/// Why a large transaction cannot go on that did other things as sets than it must.
const LARGE: &str = "a large transaction cannot be applied as sets; it is applied change by change";

/// Of which kind an error with this SQLSTATE is.
pub(super) fn kind(sqlstate: Option<&str>) -> ErrorKind {
    match sqlstate {
        Some(sqlstate) if passes_soon(sqlstate) => ErrorKind::Soon,
        Some(sqlstate) if is_transient(sqlstate) => ErrorKind::Transient,
        _ => ErrorKind::Lasting,
    }
}

/// Errors that another attempt soon may not meet: serialization failures and deadlocks, a lock that
/// was not to be had, a statement that was cancelled.
pub(crate) fn passes_soon(sqlstate: &str) -> bool {
    sqlstate.starts_with("40") || matches!(sqlstate, LOCK_NOT_AVAILABLE | "57014")
}
