//! The apply worker: one thread, one target session, groups to pipelined statements.
//!
//! A group is sent as one packet: BEGIN, the statements of its net changes, its progress row,
//! COMMIT, Sync. Every set statement checks on the target how many rows it affected, so a group
//! either does exactly what its transactions would have done one by one, or fails there. A group
//! that fails is rolled back and carried out again as the publisher sent it: one target transaction
//! for each source transaction, one statement for each change in stream order, so that everything
//! before the offender is committed and the offender is named.
//!
//! Several groups are on their way at once. After an error the server skips everything up to the
//! Sync, and the progress row of a later group refuses to be written without its predecessor's, so
//! nothing after a failed transaction can commit.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};
use pgoutput::Lsn;
use wire::{CancelHandle, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::answers::{Answers, Context, Pending};
use crate::apply::encoder::Encoder;
use crate::apply::missing::MissingLog;
use crate::apply::thread::join_or_cancel;
use crate::apply::work::{Group, Mode};
use crate::error::{Failure, Result, is_transient};
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
}

struct State {
    session: Session,
    sender: Sender<FromWorker>,
    encoder: Encoder,
    /// In the order in which they were sent: those of the first group in flight come first.
    pending: VecDeque<Pending>,
    in_flight: VecDeque<InFlight>,
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
            answers: Answers::new(log),
            recovering: false,
            answered: 0,
        }
    }

    fn run(&mut self, inbox: &Receiver<Group>) -> Result<()> {
        self.encoder.prepare_control(&mut self.session);
        loop {
            let group = if self.recovering {
                None
            } else if self.pending.is_empty() {
                match inbox.recv_timeout(Duration::from_secs(3600)) {
                    Ok(group) => Some(group),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            } else {
                match inbox.try_recv() {
                    Ok(group) => Some(group),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            };
            match group {
                Some(group) => self.start(group)?,
                None => {
                    if self.recovering
                        && self
                            .pending
                            .back()
                            .is_some_and(|last| !matches!(last, Pending::Sync { .. }))
                    {
                        // The last thing sent is an open part: without a Sync the server skips
                        // whatever comes, for ever.
                        self.session.queue_sync();
                        self.pending.push_back(Pending::Sync { commits: None });
                    }
                    self.send()?;
                    self.wait_for_replies()?;
                }
            }
            if self.recovering && self.pending.is_empty() {
                self.recover()?;
            }
        }
    }

    /// Sends a group, as the mode says that fits it.
    fn start(&mut self, group: Group) -> Result<()> {
        let lone = group.works.len() == 1 && group.is_whole() && group.changes() <= LONE_CHANGES;
        let mode = if lone { Mode::Rows } else { group.mode };
        self.in_flight.push_back(InFlight { group: Group { mode, ..group }, awaited: 0 });
        self.encode_last()
    }

    /// Queues the statements of the last group in flight, and sends when enough came together.
    fn encode_last(&mut self) -> Result<()> {
        let Some(InFlight { group, awaited }) = self.in_flight.back_mut() else { return Ok(()) };
        let before = self.pending.len();
        let (session, pending) = (&mut self.session, &mut self.pending);
        let encoded = match group.mode {
            Mode::Net => self.encoder.net(session, group, pending),
            Mode::Rows => (0..group.works.len())
                .try_for_each(|index| self.encoder.rows(session, group, index, pending)),
        };
        *awaited += self.pending.len() - before;
        if let Err(failure) = encoded {
            let again = group.mode == Mode::Net && group.is_whole();
            // One more than will come, so that the group stays.
            *awaited += 1;
            return self.not_encoded(failure, again);
        }
        if self.session.queued() >= SEND_BYTES {
            self.send()?;
            self.take_replies()?;
        }
        Ok(())
    }

    /// A change cannot be expressed as a statement. What was queued before it counts: everything
    /// before the offender is committed.
    fn not_encoded(&mut self, failure: Failure, by_rows: bool) -> Result<()> {
        self.session.queue_sync();
        self.pending.push_back(Pending::Sync { commits: None });
        if let Some(last) = self.in_flight.back_mut() {
            last.awaited += 1;
        }
        self.send()?;
        while !self.pending.is_empty() {
            self.wait_for_replies()?;
        }
        // An earlier group may have failed meanwhile; then that comes first.
        self.recovering |= by_rows;
        if self.recovering { Ok(()) } else { Err(failure) }
    }

    /// All answers are there after a failure: the failed group is carried out again by rows, what
    /// was sent after it again as it was.
    fn recover(&mut self) -> Result<()> {
        self.recovering = false;
        // Statements that the server skipped were never prepared: forget all of them.
        let sql = match self.session.transaction_status() {
            TransactionStatus::Idle => "DEALLOCATE ALL",
            _ => "ROLLBACK; DEALLOCATE ALL",
        };
        self.session
            .simple(sql)
            .map_err(|e| Failure::target(&e, "going back to before a group"))?;
        self.encoder.forget(&mut self.session);
        let mut groups = std::mem::take(&mut self.in_flight);
        if let Some(first) = groups.front_mut() {
            first.group.mode = Mode::Rows;
        }
        for InFlight { group, .. } in groups {
            self.in_flight.push_back(InFlight { group, awaited: 0 });
            // If one fails meanwhile, all from there on come again.
            if !self.recovering {
                self.encode_last()?;
            }
        }
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
                    let pending = self.next_pending();
                    if !self.recovering {
                        let context = Context { group: self.in_flight.front().map(|f| &f.group) };
                        self.answers.completed(pending, affected, rolled_back, &context)?;
                    }
                    self.account(1);
                }
                Some(Reply::Error(error)) => {
                    let error = wire::Error::Server(error);
                    self.failed(&error)?;
                }
                Some(Reply::Ready(status)) => {
                    let Some(Pending::Sync { commits }) = self.next_pending() else {
                        return Err(Failure::internal("the target answered a Sync nobody sent"));
                    };
                    if let (Some(commits), false) = (commits, self.recovering) {
                        if status != TransactionStatus::Idle {
                            return Err(Failure::internal(
                                "a transaction is open after its COMMIT",
                            ));
                        }
                        self.answers.transaction_committed(&commits);
                    }
                    self.account(1);
                }
                Some(_) => {}
            }
        }
        self.report();
        Ok(())
    }

    /// The statement that is answered next.
    fn next_pending(&mut self) -> Option<Pending> {
        self.pending.pop_front()
    }

    /// Counts answers of the first group in flight, and lets it go when all are there.
    fn account(&mut self, answers: usize) {
        if self.recovering {
            return;
        }
        if let Some(first) = self.in_flight.front_mut() {
            first.awaited -= answers;
            if first.awaited == 0 {
                self.in_flight.pop_front();
                self.answered += 1;
            }
        }
    }

    /// A statement has failed: judges whether rows can say more, and skips to the Sync.
    fn failed(&mut self, error: &wire::Error) -> Result<()> {
        let pending = self.next_pending();
        if !self.recovering {
            let Some(InFlight { group, .. }) = self.in_flight.front() else {
                return Err(Failure::internal("the target answered a statement nobody sent"));
            };
            let by_rows = group.mode == Mode::Net
                && !error.sqlstate().is_some_and(is_transient)
                && !error.is_connection_loss();
            if !by_rows {
                let context = Context { group: Some(group) };
                return Err(context.explain(error, pending));
            }
            tracing::debug!(%error, "a group failed, its changes are applied one by one");
            if !group.is_whole() {
                // Its first parts are gone: the publisher has to send it again.
                return Err(Failure {
                    rows_through: Some(group.last_commit()),
                    ..Failure::target(error, "applying a large transaction as sets")
                });
            }
            self.answers.roll_back();
            self.recovering = true;
        }
        while self.pending.front().is_some_and(|next| !matches!(next, Pending::Sync { .. })) {
            self.pending.pop_front();
        }
        Ok(())
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
