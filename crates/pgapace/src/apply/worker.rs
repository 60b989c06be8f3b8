//! The apply worker: one thread, one target session, groups to pipelined statements.
//!
//! A group is sent as BEGIN and the statements of its net changes; when every one of them is known
//! to have affected as many rows as it must, its progress row, COMMIT and Sync follow, and with them
//! the next group, which was put together meanwhile. So a group either does exactly what its
//! transactions would have done one by one, or it is rolled back and carried out again as the
//! publisher sent it: one target transaction for each source transaction, one statement for each
//! change in stream order, all in one pipeline. Then everything before the offender is committed,
//! and the offender is named. A lone small transaction is sent so from the start: that is one round
//! trip.
//!
//! After an error the server skips everything up to the Sync, and the progress row of a later
//! transaction refuses to be written without its predecessor's, so nothing after a failed
//! transaction can commit.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use pgoutput::Lsn;
use wire::{CancelHandle, Queued, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::answers::{Answers, Context, Pending};
use crate::apply::encoder::{Encoder, Ending};
use crate::apply::missing::MissingLog;
use crate::apply::thread::join_or_cancel;
use crate::apply::work::{Group, Mode};
use crate::error::{Class, Failure, Result, is_transient};
use crate::target::state::SubscriptionId;
use crate::target::state::statistics::Counters;

/// Bytes of statements that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// How long the worker looks at one of its two inputs, replies and work, before the other.
const REPLY_PATIENCE: Duration = Duration::from_millis(20);
/// A lone transaction up to this many changes is sent as it is: that is one round trip as well,
/// and a row that is missing on the target costs nothing more.
const LONE_CHANGES: usize = 16;

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
    /// Every transaction up to the one that ends here is committed.
    pub(crate) committed_through: Option<Lsn>,
    /// Of what was committed.
    pub(crate) counters: Counters,
    /// Groups that the worker is through with.
    pub(crate) groups: usize,
}

/// What the worker's session commits under.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) id: SubscriptionId,
    pub(crate) epoch: i64,
    /// Whether the session has a replication origin.
    pub(crate) tagged: bool,
}

/// A running worker thread.
#[derive(Debug)]
pub(crate) struct Worker {
    work: Option<Sender<Group>>,
    pub(crate) events: Receiver<FromWorker>,
    thread: Option<JoinHandle<()>>,
    cancel: CancelHandle,
}

impl Worker {
    pub(crate) fn spawn(session: Session, identity: Identity, subscription: &str) -> Result<Self> {
        let (work, inbox) = unbounded();
        let (sender, events) = unbounded();
        let cancel = session.cancel_handle();
        let log = MissingLog::new(subscription);
        let thread = std::thread::Builder::new()
            .name("apply".to_owned())
            .spawn(move || {
                let mut state = State::new(session, identity, sender, log);
                if let Err(failure) = state.run(&inbox) {
                    // What is committed before the failure counts.
                    state.report();
                    state.answers.abandon();
                    // The leader may be gone already.
                    let _ = state.sender.send(FromWorker::Failed(failure));
                }
            })
            .map_err(|e| Failure::internal(format!("cannot start the apply thread: {e}")))?;
        Ok(Self { work: Some(work), events, thread: Some(thread), cancel })
    }

    /// Hands a group over, in commit order. A worker that is gone has reported why in `events`.
    pub(crate) fn submit(&self, group: Group) {
        if let Some(work) = &self.work {
            let _ = work.send(group);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.work = None;
        join_or_cancel(self.thread.take(), &self.cancel);
    }
}

/// A group that is sent and not completely answered.
struct InFlight {
    group: Group,
    /// Answers that are still to come.
    awaited: usize,
    /// What is sent when all statements are answered as they must be.
    ending: Option<Ending>,
    /// See [`Encoder::forget_after`].
    parsed: u64,
}

/// A group whose statements are ready and cannot be sent before the one in flight has ended.
struct Ready {
    group: InFlight,
    statements: Queued,
    pending: VecDeque<Pending>,
}

struct State {
    session: Session,
    sender: Sender<FromWorker>,
    encoder: Encoder,
    /// In the order in which they were sent: those of the first group in flight come first.
    pending: VecDeque<Pending>,
    /// Only the last of them may have an ending that is not sent.
    in_flight: VecDeque<InFlight>,
    ready: VecDeque<Ready>,
    /// Groups that were rolled back and come again, before any new one.
    again: VecDeque<Group>,
    answers: Answers,
    /// The first group in flight has failed: answers are only counted until all are there.
    recovering: bool,
    /// Groups answered and not yet reported.
    answered: usize,
}

impl State {
    fn new(
        session: Session,
        identity: Identity,
        sender: Sender<FromWorker>,
        log: MissingLog,
    ) -> Self {
        Self {
            session,
            sender,
            encoder: Encoder::new(identity),
            pending: VecDeque::new(),
            in_flight: VecDeque::new(),
            ready: VecDeque::new(),
            again: VecDeque::new(),
            answers: Answers::new(log),
            recovering: false,
            answered: 0,
        }
    }

    fn run(&mut self, inbox: &Receiver<Group>) -> Result<()> {
        self.encoder.prepare_control(&mut self.session);
        loop {
            if self.recovering {
                if self.pending.is_empty() {
                    self.recover()?;
                } else {
                    self.wait_for_replies()?;
                }
                continue;
            }
            if let Some(group) = self.again.pop_front() {
                self.start(group)?;
                continue;
            }
            if self.pending.is_empty() {
                match inbox.recv() {
                    Ok(group) => self.start(group)?,
                    Err(_) => return Ok(()),
                }
                continue;
            }
            if self.ready.len() > 1 {
                // One keeps the target busy; what is put together is memory beside the budget.
                self.send()?;
                self.wait_for_replies()?;
                continue;
            }
            match inbox.try_recv() {
                Ok(group) => self.start(group)?,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {
                    self.send()?;
                    self.wait_for_replies()?;
                }
            }
        }
    }

    /// Puts a group's statements together, and sends them if nothing unfinished is before them.
    fn start(&mut self, group: Group) -> Result<()> {
        let lone = group.works.len() == 1 && group.is_whole() && group.changes() <= LONE_CHANGES;
        let mode = if lone { Mode::Rows } else { group.mode };
        let group = Group { mode, ..group };
        let wait = self.ending_is_open() || !self.ready.is_empty();
        if wait {
            // What is queued now is that of others.
            self.send()?;
        }
        let before = self.session.pending_ready();
        let parsed = self.encoder.parsed();
        let mut pending = VecDeque::new();
        let encoded = self.encode(&group, &mut pending);
        let (ending, failure) = match encoded {
            Ok(ending) => (ending, None),
            Err(failure) => (None, Some(failure)),
        };
        if failure.is_none() && pending.is_empty() {
            // Whoever waits for its answers must get one.
            self.encoder.nothing(&mut self.session, &mut pending)?;
        }
        let awaited = pending.len();
        let group = InFlight { group, awaited, ending, parsed };
        if let Some(failure) = failure {
            return self.not_encoded(group, pending, before, failure);
        }
        if wait {
            let statements = self.session.set_aside(before);
            self.ready.push_back(Ready { group, statements, pending });
            return Ok(());
        }
        self.pending.append(&mut pending);
        self.in_flight.push_back(group);
        self.advance()?;
        if self.session.queued() >= SEND_BYTES {
            self.send()?;
            self.take_replies()?;
        }
        Ok(())
    }

    fn encode(&mut self, group: &Group, pending: &mut VecDeque<Pending>) -> Result<Option<Ending>> {
        match group.mode {
            Mode::Net => self.encoder.net(&mut self.session, group, pending),
            Mode::Rows => {
                let mut ending = None;
                for index in 0..group.works.len() {
                    ending = self.encoder.rows(&mut self.session, group, index, pending)?;
                }
                Ok(ending)
            }
        }
    }

    fn ending_is_open(&self) -> bool {
        self.in_flight.back().is_some_and(|last| last.ending.is_some())
    }

    /// Ends the group in flight if all statements of its transaction are answered, those of the
    /// parts before it too, and sends those behind it.
    fn advance(&mut self) -> Result<()> {
        if self.in_flight.len() == 1
            && let Some(last) = self.in_flight.back_mut()
            && last.awaited == 0
            && let Some(ending) = last.ending.take()
        {
            let before = self.pending.len();
            self.encoder.queue_ending(&mut self.session, ending, &mut self.pending)?;
            last.awaited = self.pending.len() - before;
        }
        while !self.ending_is_open()
            && let Some(mut ready) = self.ready.pop_front()
        {
            self.session.queue_set_aside(ready.statements);
            self.pending.append(&mut ready.pending);
            self.in_flight.push_back(ready.group);
        }
        Ok(())
    }

    /// A change cannot be expressed as a statement. What was queued before it counts: everything
    /// before the offender is committed.
    fn not_encoded(
        &mut self,
        group: InFlight,
        mut pending: VecDeque<Pending>,
        ready_before: usize,
        failure: Failure,
    ) -> Result<()> {
        let again = group.group.mode == Mode::Net && group.group.is_whole();
        if self.ending_is_open() || !self.ready.is_empty() {
            // Nothing of it is sent. Once those before it have ended, it is tried again.
            drop(self.session.set_aside(ready_before));
            self.encoder.forget_after(&mut self.session, group.parsed);
            while !self.pending.is_empty() && !self.recovering {
                self.send()?;
                self.wait_for_replies()?;
            }
            self.again.push_back(group.group);
            return Ok(());
        }
        self.session.queue_sync();
        pending.push_back(Pending::Sync { commits: None });
        self.pending.append(&mut pending);
        // More than will come, so that the group stays.
        self.in_flight.push_back(InFlight { awaited: usize::MAX, ..group });
        self.send()?;
        while !self.pending.is_empty() {
            self.wait_for_replies()?;
        }
        // An earlier group may have failed meanwhile; then that comes first.
        if again && !self.recovering {
            self.recovering = true;
            self.answers.roll_back();
            self.answers.fell_back();
        }
        match (self.recovering, self.in_flight.back()) {
            (true, _) => Ok(()),
            // Its first parts are gone: the publisher has to send it again.
            (false, Some(InFlight { group, .. })) if group.mode == Mode::Net => {
                Err(Failure { rows_through: Some(group.last_commit()), ..failure })
            }
            (false, _) => Err(failure),
        }
    }

    /// The first group in flight has failed.
    fn start_recovery(&mut self) -> Result<()> {
        self.recovering = true;
        self.answers.roll_back();
        self.answers.fell_back();
        if !matches!(self.pending.back(), Some(Pending::Sync { .. })) {
            // Without a Sync the server skips whatever comes, for ever.
            self.session.queue_sync();
            self.pending.push_back(Pending::Sync { commits: None });
        }
        self.send()
    }

    /// All answers are there after a failure: the failed group is carried out again by rows, what
    /// came after it again as it was.
    fn recover(&mut self) -> Result<()> {
        self.recovering = false;
        if self.session.transaction_status() != TransactionStatus::Idle {
            self.session
                .simple("ROLLBACK")
                .map_err(|e| Failure::target(&e, "going back to before a group"))?;
        }
        if let Some(first) = self.in_flight.front() {
            self.encoder.forget_after(&mut self.session, first.parsed);
        }
        let in_flight = self.in_flight.drain(..).map(|in_flight| in_flight.group);
        let ready = self.ready.drain(..).map(|ready| ready.group.group);
        let mut groups: VecDeque<_> = in_flight.chain(ready).collect();
        if let Some(first) = groups.front_mut() {
            first.mode = Mode::Rows;
        }
        groups.append(&mut self.again);
        self.again = groups;
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.session.flush().map_err(|e| Failure::target(&e, "sending changes"))
    }

    fn wait_for_replies(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let ready = self
            .session
            .poll_reply(REPLY_PATIENCE)
            .map_err(|e| Failure::target(&e, "applying changes"))?;
        if ready { self.take_replies() } else { Ok(()) }
    }

    /// Takes every answer that is there, then reports what it committed.
    fn take_replies(&mut self) -> Result<()> {
        loop {
            let reply =
                self.session.try_reply().map_err(|e| Failure::target(&e, "applying changes"))?;
            match reply {
                None => break,
                Some(Reply::CommandComplete(tag)) => {
                    let affected = affected_rows(tag);
                    let rolled_back = tag == "ROLLBACK";
                    let pending = self.pending.pop_front();
                    if self.recovering {
                        continue;
                    }
                    if let Some(Pending::Net { rows }) = pending
                        && rows != affected
                    {
                        tracing::debug!(rows, affected, "a group found other rows than expected");
                        self.by_rows(None)?;
                        continue;
                    }
                    let context = Context { group: self.in_flight.front().map(|f| &f.group) };
                    self.answers.completed(pending, affected, rolled_back, &context)?;
                    self.account()?;
                }
                Some(Reply::Error(error)) => {
                    let error = wire::Error::Server(error);
                    self.failed(&error)?;
                }
                Some(Reply::Ready(status)) => {
                    let Some(Pending::Sync { commits }) = self.pending.pop_front() else {
                        return Err(Failure::internal("the target answered a Sync nobody sent"));
                    };
                    if self.recovering {
                        continue;
                    }
                    if let Some(commits) = commits {
                        if status != TransactionStatus::Idle {
                            return Err(Failure::internal(
                                "a transaction is open after its COMMIT",
                            ));
                        }
                        self.answers.transaction_committed(&commits);
                    }
                    self.account()?;
                }
                Some(_) => {}
            }
        }
        self.report();
        Ok(())
    }

    /// Counts an answer of the first group in flight, and lets it go when all are there.
    fn account(&mut self) -> Result<()> {
        let Some(first) = self.in_flight.front_mut() else { return Ok(()) };
        first.awaited -= 1;
        if first.awaited > 0 {
            return Ok(());
        }
        if first.ending.is_some() {
            self.advance()?;
            return self.send();
        }
        self.in_flight.pop_front();
        self.answered += 1;
        Ok(())
    }

    /// A statement has failed: judges whether rows can say more, and skips to the Sync.
    fn failed(&mut self, error: &wire::Error) -> Result<()> {
        let pending = self.pending.pop_front();
        if !self.recovering {
            let Some(InFlight { group, .. }) = self.in_flight.front() else {
                return Err(Failure::internal("the target answered a statement nobody sent"));
            };
            let may_pass = error.sqlstate().is_some_and(is_transient) || error.is_connection_loss();
            if may_pass || group.mode == Mode::Rows {
                let context = Context { group: Some(group) };
                return Err(context.explain(error, pending));
            }
            tracing::debug!(%error, "a group failed");
            self.by_rows(Some(error))?;
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
            return self.start_recovery();
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

    fn report(&mut self) {
        let committed = self.answers.take_committed();
        let groups = std::mem::take(&mut self.answered);
        if committed.is_none() && groups == 0 {
            return;
        }
        let (committed_through, counters) = committed.unzip();
        let answered =
            Answered { committed_through, counters: counters.unwrap_or_default(), groups };
        // The leader may be gone; then nobody needs to know.
        let _ = self.sender.send(FromWorker::Answered(answered));
    }
}
