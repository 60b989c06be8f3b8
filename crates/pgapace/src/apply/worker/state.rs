//! What a worker does with its groups.
//!
//! A group is sent as BEGIN and the statements of its net changes: those that no group in flight
//! can be in the way of at once, the contended ones when the groups they wait for have ended. When
//! every statement is known to have affected as many rows as it must, and it is the group's turn,
//! its progress row, COMMIT and Sync follow, and with them the next group, which was put together
//! meanwhile. So a group either does exactly what its transactions would have done one by one, or
//! it is rolled back. If others were in flight before it, that may be why: it is carried out again
//! when it is the oldest. If not, it is carried out as the publisher sent it: one target transaction
//! for each source transaction, one statement for each change in stream order, all in one pipeline.
//! Then everything before the offender is committed, and the offender is named. A lone small
//! transaction with nothing in flight before it is sent so from the start: that is one round trip.
//! Where the target is far away, the statements of a small group count themselves what they find and
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
use engine::group::GroupSeq;
use engine::net::ChangeAt;
use engine::order::Waits;
use engine::worker::{Contended, Mode, Task};
use pgoutput::Lsn;
use wire::{Queued, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::answers::{Answers, Pending};
use crate::apply::context::Context;
use crate::apply::encoder::{Encoder, Ending, Which};
use crate::apply::missing::MissingLog;
use crate::apply::turns::Turns;
use crate::apply::work::{Group, Work};
use crate::apply::worker::{Answered, Connect, FromWorker, Handle, Identity, ToWorker};
use crate::error::{Class, Failure, Result, is_transient};
use crate::observe::stopwatch::{Reason, Stopwatch};

/// Bytes of statements that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// A lone transaction up to this many changes is sent as it is: that is one round trip as well,
/// and a row that is missing on the target costs nothing more.
const LONE_CHANGES: usize = 16;
/// Where the target is far away, statements of a group up to this many changes count themselves what
/// they find, so that its COMMIT goes with them; for larger ones it costs more than it saves.
const COUNTED_CHANGES: usize = 1000;
/// How often the oldest group is tried again after an error that may pass by itself (a deadlock
/// with a user of the target), before the run ends and another begins.
pub(super) const ATTEMPTS: u32 = 8;
/// Groups that are put together behind the one in flight: one keeps the target busy, more is memory
/// beside the budget.
const READY: usize = 2;
/// The longest sleep; whoever has news wakes the worker.
const SLEEP: Duration = Duration::from_secs(10);

/// A group that is sent and not completely answered.
pub(super) struct InFlight {
    pub(super) group: Group,
    /// Answers that are still to come.
    pub(super) awaited: usize,
    /// Statements of the contended changes, until what they wait for has ended.
    contended: Option<(Queued, VecDeque<Pending>)>,
    /// What is sent when all statements are answered as they must be, in the group's turn.
    ending: Option<Ending>,
    /// See [`Encoder::forget_after`].
    parsed: u64,
    /// It was begun while others before it were in flight on other sessions: what goes wrong may
    /// be due to that.
    early: bool,
    /// Of its transactions, those that are committed already (by rows).
    committed: usize,
}

impl InFlight {
    /// Whether something of it is still to be sent.
    fn is_open(&self) -> bool {
        self.contended.is_some() || self.ending.is_some()
    }

    /// Everything that ends up to here is committed.
    pub(super) fn count_committed(&mut self, through: Option<Lsn>) {
        let is_committed =
            |work: &Work| work.part.end_lsn.is_some() && work.part.end_lsn <= through;
        self.committed = self.committed.max(self.group.works.partition_point(is_committed));
    }

    /// Whether rules may decide about conflicts of what is sent as net changes.
    fn has_rules(&self) -> bool {
        self.group.mode == Mode::Net && self.group.works.iter().any(Task::is_under_rules)
    }

    pub(super) fn is_committed(&self) -> bool {
        self.committed == self.group.works.len()
    }
}

/// A group whose statements are ready and cannot be sent before the one in flight has ended.
pub(super) struct Ready {
    pub(super) group: InFlight,
    statements: Queued,
    pending: VecDeque<Pending>,
}

/// How the first group in flight is carried out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    /// As it was, when it is the oldest.
    Later,
    /// The same, because an earlier group needs its locks.
    GivenWay,
    /// By rows.
    ByRows,
    /// Not at all: see [`State::offence`].
    Never,
}

pub(super) struct State {
    number: usize,
    pub(super) session: Session,
    pub(super) encoder: Encoder,
    turns: Arc<Turns>,
    /// All groups up to this one are known to have ended.
    ended_through: GroupSeq,
    /// Groups that are not begun, those that were rolled back before any new one.
    pub(super) queue: VecDeque<Group>,
    /// In the order in which they were sent: those of the first group in flight come first.
    pub(super) pending: VecDeque<Pending>,
    /// Only the last of them may be open.
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) ready: VecDeque<Ready>,
    pub(super) answers: Answers,
    /// The first group in flight has failed: answers are only counted until all are there.
    recovering: Option<Again>,
    /// The change for which the run ends, when it is known which conflict that is.
    pub(super) offence: Option<(ChangeAt, wire::Error)>,
    /// Groups answered, and ended, and not yet reported.
    pub(super) answered: usize,
    pub(super) ended: Vec<GroupSeq>,
    closing: bool,
    /// The parts of a large transaction that are answered are not committed: they would be lost
    /// with the session.
    pub(super) in_parts: bool,
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
            ended_through: GroupSeq::NONE,
            queue: VecDeque::new(),
            pending: VecDeque::new(),
            in_flight: VecDeque::new(),
            ready: VecDeque::new(),
            answers: Answers::new(log),
            recovering: None,
            offence: None,
            answered: 0,
            ended: Vec::new(),
            closing: false,
            in_parts: false,
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
        if let Some(again) = self.recovering {
            if self.pending.is_empty() {
                return self.recover(again);
            }
            return self.sleep(inbox, &[], report);
        }
        self.advance()?;
        let mut waits = Vec::new();
        if self.has_room()
            && let Some(next) = self.queue.front()
        {
            let to_start = next.waits_to_start();
            if self.is_met(&to_start) {
                return match self.queue.pop_front() {
                    Some(group) => self.start(group, report),
                    None => Ok(()),
                };
            }
            waits.push(to_start);
        }
        waits.extend(self.waits_to_advance());
        self.send()?;
        self.sleep(inbox, &waits, report)
    }

    fn take_mail(&mut self, inbox: &Receiver<ToWorker>) -> Result<()> {
        loop {
            match inbox.try_recv() {
                Ok(ToWorker::Group(group)) => self.queue.push_back(group),
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
        let reason = self.waits_for();
        if reason.is_some() {
            self.waits.set(reason);
        }
        let readable = self.session.wait_readable(Some(waker.descriptor()), SLEEP);
        if reason.is_some() {
            self.waits.set(None);
        }
        let readable = readable.map_err(|e| Failure::target(&e, "applying changes"))?;
        if readable { self.take_replies(report) } else { Ok(()) }
    }

    /// What keeps it from going on, if it is not the target, and it has something to do.
    fn waits_for(&self) -> Option<Reason> {
        if !self.pending.is_empty() {
            return None;
        }
        match self.in_flight.back() {
            Some(last) if last.contended.is_some() => Some(Reason::Dependency),
            Some(last) if last.ending.is_some() => Some(Reason::CommitOrder),
            Some(_) => None,
            None => (!self.queue.is_empty()).then_some(Reason::Dependency),
        }
    }

    /// Whether another group may be begun, or put together behind the one in flight.
    fn has_room(&self) -> bool {
        match self.queue.front() {
            Some(next)
                if next.attempts > 0
                    || next.is_by_rules()
                    || next.is_step()
                    || next.mode == Mode::Rows && !self.encoder.commits_behind_others() =>
            {
                self.in_flight.is_empty() && self.ready.is_empty()
            }
            _ => self.ready.len() < READY,
        }
    }

    /// Whether all of this has ended. What this session was told to commit comes before anything
    /// that it is sent now, and counts.
    fn is_met(&mut self, waits: &Waits) -> bool {
        let sent = self.in_flight.iter().take_while(|group| !group.is_open());
        let through = follow(self.ended_through, sent);
        if waits.through <= through && waits.groups.is_empty() {
            return true;
        }
        self.ended_through = self.turns.ended_through();
        self.turns.is_met(waits)
    }

    /// Whether everything before this group has ended, or comes before it on this session.
    fn is_next(&self, group: GroupSeq) -> bool {
        let before = self.in_flight.iter().chain(self.ready.iter().map(|ready| &ready.group));
        group.previous() <= follow(self.ended_through, before)
    }

    /// What the group in flight waits for before more of it can be sent.
    fn waits_to_advance(&self) -> Option<Waits> {
        let last = self.in_flight.back()?;
        if last.contended.is_some() {
            return Some(last.group.contended.waits.clone());
        }
        (last.ending.is_some() && last.awaited == 0 && self.in_flight.len() == 1)
            .then(|| self.encoder.waits_to_commit(last.group.seq))
    }

    /// Puts a group's statements together, and sends them if nothing unfinished is before them.
    fn start(&mut self, group: Group, report: Report<'_>) -> Result<()> {
        self.ended_through = self.ended_through.max(self.turns.ended_through());
        // One that is prepared at once has nothing in its way, so what goes wrong is its own.
        let early = !group.is_prepared_at_once() && !self.is_next(group.seq);
        let lone = group.works.len() == 1 && group.is_whole() && group.changes() <= LONE_CHANGES;
        let wait = self.in_flight.back().is_some_and(InFlight::is_open) || !self.ready.is_empty();
        let alone = self.in_flight.is_empty() && self.ready.is_empty();
        let at_once = !early && (alone || self.encoder.commits_behind_others());
        let ruled = lone && group.works[0].is_under_rules();
        let mode = if lone && at_once && !ruled { Mode::Rows } else { group.mode };
        let group = Group { mode, ..group };
        if group.is_by_rules() {
            return self.by_rules(group);
        }
        if let Err(failure) = self.resolve_prepared(&group) {
            // It is not carried out again by this run.
            self.queue.push_front(group);
            return Err(failure);
        }
        if wait || early {
            // What is queued now is that of others.
            if let Err(failure) = self.send() {
                // It comes again on another session.
                self.queue.push_front(group);
                return Err(failure);
            }
        }
        let split = early && mode == Mode::Net && !group.contended.is_empty() && {
            let waits = group.contended.waits.clone();
            !self.is_met(&waits)
        };
        let before = self.session.pending_ready();
        let parsed = self.encoder.parsed();
        let mut pending = VecDeque::new();
        let mut behind = VecDeque::new();
        let encoded = if split {
            self.encode_split(&group, before, &mut pending, &mut behind)
        } else {
            // It need not be looked at before it commits, if that saves more than counting costs.
            let counted = at_once && !wait && self.encoder.is_far() && group.is_whole();
            let counted = counted && group.changes() <= COUNTED_CHANGES;
            self.encode(&group, early, counted, &mut pending).map(|ending| (None, None, ending))
        };
        let (first, contended, ending) = match encoded {
            Ok(encoded) => encoded,
            Err(failure) => {
                let in_flight = InFlight::new(group, parsed, early);
                return self.not_encoded(in_flight, wait, pending, before, failure, report);
            }
        };
        if pending.is_empty() {
            // Whoever waits for its answers must get one.
            self.encoder.nothing(&mut self.session, &mut pending)?;
        }
        let in_flight = InFlight {
            awaited: pending.len(),
            contended: contended.map(|statements| (statements, behind)),
            ending,
            ..InFlight::new(group, parsed, early)
        };
        if wait {
            let statements = first.unwrap_or_else(|| self.session.set_aside(before));
            self.ready.push_back(Ready { group: in_flight, statements, pending });
            return Ok(());
        }
        if let Some(first) = first {
            self.session.queue_set_aside(first);
        }
        self.pending.append(&mut pending);
        self.in_flight.push_back(in_flight);
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
            Mode::Net => {
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
            Mode::Rows => {
                let mut ending = None;
                for index in 0..group.works.len() {
                    ending = self.encoder.rows(&mut self.session, group, index, early, pending)?;
                }
                Ok(ending)
            }
        }
    }

    /// The statements of the free changes, those of the contended ones, and the ending.
    fn encode_split(
        &mut self,
        group: &Group,
        before: usize,
        pending: &mut VecDeque<Pending>,
        behind: &mut VecDeque<Pending>,
    ) -> Result<(Option<Queued>, Option<Queued>, Option<Ending>)> {
        self.encoder.net(&mut self.session, group, Which::Free, false, pending)?;
        let free = self.session.set_aside(before);
        self.encoder.net(&mut self.session, group, Which::Contended, false, behind)?;
        if behind.is_empty() {
            // Folded to nothing; they wait all the same, for what they read.
            self.encoder.nothing(&mut self.session, behind)?;
        }
        let contended = self.session.set_aside(before);
        Ok((Some(free), Some(contended), self.encoder.ending(group)?))
    }

    /// Sends what the group in flight may send now, and then those behind it.
    fn advance(&mut self) -> Result<()> {
        loop {
            let Some(waits) = self.waits_to_advance() else {
                if self.in_flight.back().is_some_and(InFlight::is_open) {
                    return Ok(());
                }
                let Some(mut ready) = self.ready.pop_front() else { return Ok(()) };
                self.session.queue_set_aside(ready.statements);
                self.pending.append(&mut ready.pending);
                self.in_flight.push_back(ready.group);
                continue;
            };
            if !self.is_met(&waits) {
                return Ok(());
            }
            let Some(last) = self.in_flight.back_mut() else { return Ok(()) };
            if let Some((statements, mut pending)) = last.contended.take() {
                self.session.queue_set_aside(statements);
                last.awaited += pending.len();
                self.pending.append(&mut pending);
            } else if let Some(ending) = last.ending.take() {
                let before = self.pending.len();
                self.encoder.queue_ending(&mut self.session, ending, &mut self.pending)?;
                last.awaited = self.pending.len() - before;
            }
        }
    }

    /// A change cannot be expressed as a statement. If nothing is in flight before it, what was
    /// queued before it counts: everything before the offender is committed.
    fn not_encoded(
        &mut self,
        group: InFlight,
        wait: bool,
        mut pending: VecDeque<Pending>,
        ready_before: usize,
        failure: Failure,
        report: Report<'_>,
    ) -> Result<()> {
        if wait || group.early {
            // Nothing of it is sent. It is tried again when it is the oldest.
            drop(self.session.set_aside(ready_before));
            self.encoder.forget_after(&mut self.session, group.parsed);
            let attempts = group.group.attempts + 1;
            self.queue.push_front(Group { attempts, ..group.group });
            return Ok(());
        }
        let again = group.group.mode == Mode::Net && group.group.is_whole();
        self.session.queue_sync();
        pending.push_back(Pending::Sync { commits: None });
        self.pending.append(&mut pending);
        // More than will come, so that the group stays.
        self.in_flight.push_back(InFlight { awaited: usize::MAX, ..group });
        self.send()?;
        while !self.pending.is_empty() {
            let readable = self
                .session
                .wait_readable(None, SLEEP)
                .map_err(|e| Failure::target(&e, "applying changes"))?;
            if readable {
                self.take_replies(report)?;
            }
        }
        // An earlier group may have failed meanwhile; then that comes first.
        if self.recovering.is_some() {
            return Ok(());
        }
        if again {
            return self.start_recovery(Again::ByRows);
        }
        match self.in_flight.back() {
            // Its first parts are gone: the publisher has to send it again.
            Some(InFlight { group, .. }) if group.mode == Mode::Net => {
                Err(Failure { rows_through: Some(group.last_commit()), ..failure })
            }
            _ => Err(failure),
        }
    }

    /// An earlier group waits for locks of this one, which waits for its turn.
    fn give_way(&mut self, group: GroupSeq) -> Result<()> {
        match self.in_flight.front() {
            Some(first) if first.group.seq == group && first.early && first.is_open() => {
                tracing::debug!(group = group.0, "gives way to an earlier group");
                let busy = !self.pending.is_empty();
                self.start_recovery(Again::GivenWay)?;
                if busy && let Err(error) = self.session.cancel_handle().cancel() {
                    // Then its statement ends by itself, or the oldest is looked at again.
                    tracing::debug!(%error, "cannot cancel");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The first group in flight has failed.
    pub(super) fn start_recovery(&mut self, again: Again) -> Result<()> {
        if self.recovering.is_some() {
            return Ok(());
        }
        self.recovering = Some(again);
        self.answers.roll_back();
        self.answers.count(|counters| match again {
            Again::Later => counters.retries += 1,
            Again::GivenWay => counters.victims += 1,
            Again::ByRows => counters.fallbacks += 1,
            Again::Never => {}
        });
        if !matches!(self.pending.back(), Some(Pending::Sync { .. })) {
            // Without a Sync the server skips whatever comes, for ever.
            self.session.queue_sync();
            self.pending.push_back(Pending::Sync { commits: None });
        }
        self.send()
    }

    /// All answers are there after a failure: the failed group is carried out again, and what came
    /// after it as it was.
    fn recover(&mut self, again: Again) -> Result<()> {
        self.recovering = None;
        if self.session.transaction_status() != TransactionStatus::Idle {
            self.roll_back()?;
        }
        if let Some(first) = self.in_flight.front() {
            self.encoder.forget_after(&mut self.session, first.parsed);
        }
        if let Some((at, error)) = self.offence.take() {
            return Err(self.name_conflict(at, &error)?);
        }
        self.requeue(again);
        Ok(())
    }

    fn roll_back(&mut self) -> Result<()> {
        loop {
            match self.session.simple("ROLLBACK") {
                Ok(_) => return Ok(()),
                // A cancel that was meant for what went before.
                Err(error) if error.sqlstate() == Some("57014") => {}
                Err(error) => return Err(Failure::target(&error, "going back to before a group")),
            }
        }
    }

    /// Puts everything in flight back into the queue.
    fn requeue(&mut self, again: Again) {
        let ready = self.ready.drain(..).map(|ready| ready.group);
        let mut groups: VecDeque<_> = self
            .in_flight
            .drain(..)
            .chain(ready)
            .map(|in_flight| {
                let mut group = in_flight.group;
                if in_flight.committed > 0 {
                    group.works.drain(..in_flight.committed);
                    group.contended = Contended::default();
                }
                group
            })
            .collect();
        if let Some(first) = groups.front_mut() {
            first.attempts += 1;
            if again == Again::ByRows {
                first.mode = Mode::Rows;
            }
        }
        groups.append(&mut self.queue);
        self.queue = groups;
    }

    /// The session is gone, and with it everything in flight that was not committed.
    pub(super) fn requeue_lost(&mut self) {
        (self.recovering, self.offence) = (None, None);
        self.pending.clear();
        self.answers.roll_back();
        self.requeue(Again::Later);
    }

    pub(super) fn send(&mut self) -> Result<()> {
        self.session.flush().map_err(|e| Failure::target(&e, "sending changes"))
    }

    /// Takes every answer that is there, then reports what it committed.
    fn take_replies(&mut self, report: Report<'_>) -> Result<()> {
        loop {
            let reply =
                self.session.try_reply().map_err(|e| Failure::target(&e, "applying changes"))?;
            match reply {
                None => break,
                Some(Reply::CommandComplete(tag)) => {
                    let affected = affected_rows(tag);
                    let rolled_back = tag == "ROLLBACK";
                    let pending = self.pending.pop_front();
                    if self.recovering.is_some() {
                        continue;
                    }
                    self.completed(pending, affected, rolled_back)?;
                }
                Some(Reply::Error(error)) => {
                    self.failed(wire::Error::Server(error))?;
                }
                Some(Reply::Ready(status)) => {
                    let Some(Pending::Sync { commits }) = self.pending.pop_front() else {
                        return Err(Failure::internal("the target answered a Sync nobody sent"));
                    };
                    if self.recovering.is_some() {
                        continue;
                    }
                    if let Some(commits) = commits {
                        if status != TransactionStatus::Idle {
                            return Err(Failure::internal(
                                "a transaction is open after its COMMIT",
                            ));
                        }
                        self.answers.transaction_committed(&commits);
                        if let Some(first) = self.in_flight.front_mut() {
                            first.count_committed(Some(commits.end));
                        }
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
        let first = self.in_flight.front();
        let early = first.is_some_and(|first| first.early);
        if let Some(Pending::Net { rows }) = pending
            && rows != affected
        {
            tracing::debug!(rows, affected, early, "a group found other rows than expected");
            return if early { self.start_recovery(Again::Later) } else { self.by_rows(None) };
        }
        let context = Context { group: first.map(|first| &first.group) };
        let judged = self.answers.completed(pending, affected, rolled_back, &context);
        if early && (judged.is_err() || self.answers.is_missing()) {
            return self.start_recovery(Again::Later);
        }
        judged?;
        if self.answers.is_missing() && first.is_some_and(InFlight::has_rules) {
            // A single change among sets; rules may say something about it.
            return self.by_rows(None);
        }
        self.account()
    }

    /// Counts an answer of the first group in flight, and lets it go when all are there.
    fn account(&mut self) -> Result<()> {
        let Some(first) = self.in_flight.front_mut() else { return Ok(()) };
        first.awaited -= 1;
        if first.awaited > 0 {
            return Ok(());
        }
        if first.is_open() {
            self.advance()?;
            return self.send();
        }
        self.in_parts = first.group.works.last().is_some_and(|work| work.part.end_lsn.is_none());
        if first.is_committed() {
            self.ended.push(first.group.seq);
            let (parallel, dependent) = (first.early, !first.group.contended.is_empty());
            self.answers.count(|counters| {
                counters.groups_parallel += u64::from(parallel);
                counters.groups_dependent += u64::from(dependent);
            });
        }
        self.in_flight.pop_front();
        self.answered += 1;
        Ok(())
    }

    /// A statement has failed: judges what to do with its group, and skips to the Sync.
    fn failed(&mut self, error: wire::Error) -> Result<()> {
        if error.is_connection_loss() || self.session.is_broken() {
            // What was sent stays known: a COMMIT among it may have taken effect.
            let context = Context { group: self.in_flight.front().map(|first| &first.group) };
            return Err(context.explain(&error, self.pending.front().copied()));
        }
        let pending = self.pending.pop_front();
        if self.recovering.is_none() {
            let Some(first) = self.in_flight.front() else {
                return Err(Failure::target(&error, "waiting for changes"));
            };
            let group = &first.group;
            let context = Context { group: Some(group) };
            let sqlstate = error.sqlstate();
            if first.early {
                tracing::debug!(%error, "a group failed while others were in flight before it");
                self.start_recovery(Again::Later)?;
            } else if sqlstate.is_some_and(passes_soon)
                && group.is_whole()
                && group.attempts < ATTEMPTS
            {
                tracing::debug!(%error, "a group is tried again");
                std::thread::sleep(Duration::from_millis(5 << group.attempts));
                self.start_recovery(Again::Later)?;
            } else if sqlstate.is_some_and(is_transient) || group.mode == Mode::Rows {
                match pending {
                    Some(Pending::Change { at, .. }) if context.kind(&error, at).is_some() => {
                        self.offence = Some((at, error));
                        self.start_recovery(Again::Never)?;
                    }
                    _ => return Err(context.explain(&error, pending)),
                }
            } else {
                tracing::debug!(%error, "a group failed");
                self.by_rows(Some(&error))?;
            }
        }
        while self.pending.front().is_some_and(|next| !matches!(next, Pending::Sync { .. })) {
            self.pending.pop_front();
        }
        Ok(())
    }

    /// The first group in flight did not do what its transactions would have done: rows can tell
    /// what they do.
    fn by_rows(&mut self, error: Option<&wire::Error>) -> Result<()> {
        let Some(InFlight { group, .. }) = self.in_flight.front() else { return Ok(()) };
        if group.is_whole() {
            return self.start_recovery(Again::ByRows);
        }
        // Its first parts are gone: the publisher has to send it again.
        let message = "a large transaction cannot be applied as sets; it is applied change by \
                       change";
        let failure = error.map_or_else(
            || Failure::new(Class::Apply, message),
            |error| Failure::target(error, "applying a large transaction as sets"),
        );
        Err(Failure { rows_through: Some(group.last_commit()), ..failure })
    }

    /// Tells the leader, and then those who wait for this: so that the leader hears of commits in
    /// their order.
    fn report(&mut self, report: Report<'_>) {
        let (committed, counters) = self.answers.take_committed();
        let groups = std::mem::take(&mut self.answered);
        let prepared = self.answers.take_prepared();
        if committed.is_empty() && prepared.is_empty() && groups == 0 {
            return;
        }
        let ended = std::mem::take(&mut self.ended);
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
            self.ended_through = self.turns.ended_through();
        }
    }
}

impl InFlight {
    pub(super) fn new(group: Group, parsed: u64, early: bool) -> Self {
        let (contended, ending) = (None, None);
        Self { group, awaited: 0, contended, ending, parsed, early, committed: 0 }
    }
}

/// How far groups that come one after the other lead on from `through`.
fn follow<'g>(through: GroupSeq, groups: impl Iterator<Item = &'g InFlight>) -> GroupSeq {
    groups.fold(
        through,
        |through, group| {
            if group.group.seq == through.next() { group.group.seq } else { through }
        },
    )
}

/// Errors that another attempt soon may not meet: serialization failures and deadlocks, a lock that
/// was not to be had, a statement that was cancelled.
pub(crate) fn passes_soon(sqlstate: &str) -> bool {
    sqlstate.starts_with("40") || matches!(sqlstate, "55P03" | "57014")
}
