//! A thread with a session of its own, on which one streamed transaction at a time is applied while
//! it is still open on the publisher.
//!
//! It judges nothing: whatever a statement does that it should not, and whatever fails, the
//! transaction is rolled back and *abandoned* here. Its changes are kept, and whoever applies them
//! when it has committed says what is wrong, if anything still is.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use engine::group::GroupSeq;
use engine::progress::Range;
use engine::streaming::Ticket;
use engine::worker::{Dependent, GroupMode};
use wire::{CancelHandle, Reply, Session, TransactionStatus, Waker, affected_rows};

use crate::apply::answers::Pending;
use crate::apply::encoder::{Encoder, Which};
use crate::apply::thread::{LITTLE_PATIENCE, join_or_cancel};
use crate::apply::work::{Group, Work};
use crate::apply::worker::{Connect, Lost, owns};
use crate::error::{Failure, Result};
use crate::stopping::interrupt::cancel;
use crate::subscriber::state::statistics::{Changes, Counters};
use crate::subscriber::statement::row::Expect;

/// The longest sleep; whoever has news wakes the thread.
const SLEEP: Duration = Duration::from_secs(10);
/// How long a statement may take to end by itself when its stream is to be rolled back. Nearly all do,
/// and a cancel leaves an error in the server's log.
const BEFORE_CANCEL: Duration = Duration::from_millis(200);
/// Between two cancels of a session that is to roll back: at first, and at most.
const CANCEL_AGAIN: Duration = Duration::from_millis(50);
const CANCEL_AT_LEAST: Duration = Duration::from_secs(1);

/// What is to be done for a stream.
pub(super) type Order = engine::streaming::Order<Box<Work>>;

/// What became of it.
#[derive(Debug)]
pub(crate) enum Report {
    /// An order is carried out: all but the last two are answered so.
    Done,
    Committed {
        range: Range,
        counters: Counters,
    },
    /// It is rolled back, and the session is free.
    Abandoned,
    /// Whether it is committed is not known: the run must end.
    Failed(Failure),
}

/// The running thread.
#[derive(Debug)]
pub(super) struct StreamWorker {
    orders: Option<Sender<(Ticket, Order)>>,
    waker: Waker,
    /// Of its session, while there is one.
    handle: Arc<Mutex<Option<CancelHandle>>>,
    thread: Option<JoinHandle<()>>,
}

impl StreamWorker {
    /// Starts thread `number`, which reports under that number; it connects when it is needed.
    pub(super) fn spawn(
        number: usize,
        connect: Connect,
        reports: Sender<(usize, Ticket, Report)>,
    ) -> Result<Self> {
        let (orders, inbox) = unbounded();
        let waker = Waker::new()
            .map_err(|e| Failure::internal(format!("cannot create an eventfd: {e}")))?;
        let handle = Arc::new(Mutex::new(None));
        let mut state = State {
            connect,
            session: None,
            lost: None,
            handle: Arc::clone(&handle),
            waker: waker.clone(),
            report: Box::new(move |ticket, report| {
                // The leader may be gone; then nobody needs to know.
                let _ = reports.send((number, ticket, report));
            }),
        };
        let thread = std::thread::Builder::new()
            .name(format!("stream {number}"))
            .spawn(move || state.run(&inbox))
            .map_err(|e| Failure::internal(format!("cannot start a stream thread: {e}")))?;
        Ok(Self { orders: Some(orders), waker, handle, thread: Some(thread) })
    }

    pub(super) fn send(&self, ticket: Ticket, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send((ticket, order));
            self.waker.wake();
        }
    }

    /// The backend of its session, if it has one.
    pub(super) fn pid(&self) -> Option<i32> {
        self.handle().map(|handle| handle.pid())
    }

    fn handle(&self) -> Option<CancelHandle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends what the session is doing, if it does something.
    pub(super) fn cancel(&self) {
        if let Some(handle) = self.handle() {
            cancel(&handle);
        }
    }

    /// Lets the thread end, without waiting for it.
    pub(super) fn close(&mut self) {
        self.orders = None;
        self.waker.wake();
    }
}

impl Drop for StreamWorker {
    fn drop(&mut self) {
        self.close();
        match (self.handle(), self.thread.take()) {
            (Some(handle), thread) => join_or_cancel(thread, &handle, LITTLE_PATIENCE),
            // It connects, or does nothing.
            (None, Some(thread)) if thread.is_finished() => drop(thread.join()),
            (None, _) => {}
        }
    }
}

/// What the subscriber works on.
struct Running {
    session: Session,
    encoder: Encoder,
    pending: VecDeque<Pending>,
    /// For each order that is not answered: how many answers are still to come.
    awaited: VecDeque<usize>,
    /// Of a statement that is judged together with its next.
    carried: u64,
    /// What was counted up to each savepoint.
    savepoints: Vec<Changes>,
    /// See [`Encoder::forget_after`]: at the beginning of the stream.
    parsed: u64,
    committing: bool,
}

struct State {
    connect: Connect,
    session: Option<Running>,
    lost: Option<Lost>,
    handle: Arc<Mutex<Option<CancelHandle>>>,
    waker: Waker,
    report: Box<dyn Fn(Ticket, Report) + Send>,
}

/// Takes all orders that are there; an error if nobody gives any.
fn take_orders(
    inbox: &Receiver<(Ticket, Order)>,
    orders: &mut VecDeque<(Ticket, Order)>,
) -> std::result::Result<(), TryRecvError> {
    loop {
        match inbox.try_recv() {
            Ok(next) => orders.push_back(next),
            Err(TryRecvError::Empty) => return Ok(()),
            Err(gone @ TryRecvError::Disconnected) => return Err(gone),
        }
    }
}

/// Why the stream cannot go on here.
enum Stop {
    /// The session lives.
    Stream(Failure),
    Session(Failure),
}

impl State {
    fn run(&mut self, inbox: &Receiver<(Ticket, Order)>) {
        // The stream at hand, and the last one that was abandoned.
        let (mut current, mut dead): (Option<Ticket>, Option<Ticket>) = (None, None);
        let mut orders = VecDeque::new();
        loop {
            self.waker.take();
            let mut stop = None;
            loop {
                if take_orders(inbox, &mut orders).is_err() {
                    return;
                }
                let Some((ticket, order)) = orders.pop_front() else { break };
                if dead == Some(ticket) {
                    continue;
                }
                if current != Some(ticket) {
                    current = Some(ticket);
                    if let Some(running) = &mut self.session {
                        running.parsed = running.encoder.parsed();
                    }
                }
                if !matches!(order, Order::Abandon) {
                    // That takes a while, in which the stream may be given up.
                    if let Err(found) = self.open_session() {
                        stop = Some(found);
                        break;
                    }
                    if take_orders(inbox, &mut orders).is_err() {
                        return;
                    }
                    // What would be rolled back at once may meet what was applied in its place.
                    let is_abandoned = |(other, order): &(Ticket, Order)| {
                        *other == ticket && matches!(order, Order::Abandon)
                    };
                    if orders.iter().any(is_abandoned) {
                        continue;
                    }
                }
                if let Err(found) = self.carry_out(order) {
                    stop = Some(found);
                    break;
                }
            }
            if stop.is_none() {
                let ended = self.wait(inbox).and_then(|()| self.answers(current));
                match ended {
                    Ok(true) => current = None,
                    Ok(false) => {}
                    Err(found) => stop = Some(found),
                }
            }
            if let Some(found) = stop {
                let report = self.stopped(found);
                // Nobody waits for a session that is lost between two streams.
                if let Some(ticket) = current.take() {
                    dead = Some(ticket);
                    (self.report)(ticket, report);
                }
            }
        }
    }

    /// Sleeps until there is an answer or an order.
    fn wait(&mut self, inbox: &Receiver<(Ticket, Order)>) -> std::result::Result<(), Stop> {
        if !inbox.is_empty() {
            return Ok(());
        }
        match &mut self.session {
            Some(running) => running
                .session
                .wait_readable(Some(self.waker.descriptor()), SLEEP)
                .map(drop)
                .map_err(|e| Stop::Session(Failure::subscriber(&e, "applying a stream"))),
            None => {
                // The waker is of no use without a session: an order, or the end, is awaited.
                let mut select = crossbeam_channel::Select::new();
                select.recv(inbox);
                select.ready();
                Ok(())
            }
        }
    }

    fn carry_out(&mut self, order: Order) -> std::result::Result<(), Stop> {
        if matches!(order, Order::Abandon) {
            if self.session.as_ref().is_some_and(|running| running.committing) {
                // Whoever waits for it does not wait for long.
                return Ok(());
            }
            return Err(Stop::Stream(Failure::internal("it gives way")));
        }
        let Some(running) = &mut self.session else { return Ok(()) };
        running.carry_out(order).map_err(|failure| running.stop(failure))
    }

    /// Opens the session, unless there is one.
    fn open_session(&mut self) -> std::result::Result<(), Stop> {
        if self.session.is_none() {
            let opened = self.open();
            if let Err(failure) = &opened {
                tracing::warn!(
                    event = "stream_session_failed",
                    error = %failure,
                    "could not open a session for a streamed transaction; it is applied after its commit"
                );
            }
            self.session = Some(opened.map_err(Stop::Session)?);
        }
        Ok(())
    }

    /// Opens a session; one that was lost is gone when this returns.
    fn open(&mut self) -> Result<Running> {
        let (mut session, identity) = (self.connect)(self.lost)?;
        if !owns(&mut session, identity)? {
            return Err(Failure::internal("another process owns the subscription"));
        }
        self.lost = None;
        let encoder = Encoder::new(identity);
        let handle = Some(session.cancel_handle());
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = handle;
        Ok(Running {
            session,
            parsed: encoder.parsed(),
            encoder,
            pending: VecDeque::new(),
            awaited: VecDeque::new(),
            carried: 0,
            savepoints: Vec::new(),
            committing: false,
        })
    }

    /// Takes what answers there are. Whether the stream has ended.
    fn answers(&mut self, current: Option<Ticket>) -> std::result::Result<bool, Stop> {
        let Some(running) = &mut self.session else { return Ok(false) };
        loop {
            let done = running.answer().map_err(|failure| running.stop(failure))?;
            let Some(done) = done else { return Ok(false) };
            let (Some(report), Some(ticket)) = (done, current) else { continue };
            let ends = matches!(report, Report::Committed { .. });
            (self.report)(ticket, report);
            if ends {
                return Ok(true);
            }
        }
    }

    /// What becomes of the stream.
    fn stopped(&mut self, found: Stop) -> Report {
        let failure = match found {
            Stop::Stream(failure) => {
                tracing::debug!(%failure, "a stream is rolled back");
                let Some(running) = &mut self.session else { return Report::Abandoned };
                match running.go_back() {
                    Ok(()) => return Report::Abandoned,
                    Err(failure) => failure,
                }
            }
            Stop::Session(failure) => failure,
        };
        tracing::debug!(%failure, "a stream's session is lost");
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let Some(running) = self.session.take() else { return Report::Abandoned };
        let backend = running.session.backend_pid();
        self.lost = Some(Lost { backend, tagged: running.encoder.is_tagged() });
        if running.committing { Report::Failed(failure) } else { Report::Abandoned }
    }
}

impl Running {
    /// What a failure means for the session. Of a COMMIT that is sent, only an error of the server
    /// says that it did not happen.
    fn stop(&self, failure: Failure) -> Stop {
        let doubt = self.committing && failure.sqlstate.is_none();
        if doubt || self.session.is_broken() {
            Stop::Session(failure)
        } else {
            Stop::Stream(failure)
        }
    }

    fn carry_out(&mut self, order: Order) -> Result<()> {
        let before = self.pending.len();
        match order {
            Order::Part { work, mode, savepoint } => self.part(*work, mode, savepoint)?,
            Order::RollBackTo(savepoint) => {
                let changes = self.savepoints.get(savepoint).copied();
                let changes = changes.ok_or_else(|| Failure::internal("no such savepoint"))?;
                self.savepoints.truncate(savepoint + 1);
                self.encoder.set_counted(changes);
                self.command(&format!("ROLLBACK TO SAVEPOINT s{savepoint}"))?;
                self.session.queue_flush();
            }
            Order::RollBack => {
                self.savepoints.clear();
                self.encoder.set_counted(Changes::default());
                self.command("ROLLBACK")?;
                self.session.queue_flush();
            }
            Order::Commit(work) => {
                let group = group_of(*work, GroupMode::Net);
                let ending = self.encoder.ending(&group)?;
                let ending = ending.ok_or_else(|| Failure::internal("a stream without an end"))?;
                self.encoder.queue_ending(&mut self.session, ending, &mut self.pending)?;
                self.committing = true;
            }
            Order::Abandon => {}
        }
        self.awaited.push_back(self.pending.len() - before);
        self.session.flush().map_err(|e| Failure::subscriber(&e, "sending changes"))
    }

    fn part(&mut self, work: Work, mode: GroupMode, savepoint: Option<usize>) -> Result<()> {
        if savepoint.is_some() {
            debug_assert_eq!(savepoint, Some(self.savepoints.len()), "in order");
            let number = self.savepoints.len();
            self.savepoints.push(self.encoder.counted());
            self.command(&format!("SAVEPOINT s{number}"))?;
        }
        let group = group_of(work, mode);
        let before = self.pending.len();
        match mode {
            GroupMode::Net => {
                let session = &mut self.session;
                self.encoder.net(session, &group, Which::All, false, &mut self.pending)?;
            }
            GroupMode::Rows => {
                self.encoder.rows(&mut self.session, &group, 0, true, &mut self.pending)?;
            }
        }
        if self.pending.len() == before {
            self.encoder.nothing(&mut self.session, &mut self.pending)?;
        }
        Ok(())
    }

    fn command(&mut self, sql: &str) -> Result<()> {
        self.session.queue_parse("", sql, &[]);
        self.session
            .queue_bind("", std::iter::empty())
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
        self.session.queue_execute();
        self.pending.push_back(Pending::Begin);
        Ok(())
    }

    /// The next answer, if there is one: what it means for an order, if it is the last of it.
    fn answer(&mut self) -> Result<Option<Option<Report>>> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "applying a stream");
        let report = match self.session.try_reply().map_err(|e| failed(&e))? {
            None => return Ok(None),
            Some(Reply::CommandComplete(tag)) => {
                let affected = affected_rows(tag);
                let undone = tag == "ROLLBACK";
                let pending = self.pending.pop_front();
                self.judge(pending, affected, undone)?;
                Report::Done
            }
            Some(Reply::Error(error)) => {
                let error = wire::Error::Server(error);
                self.pending.pop_front();
                return Err(failed(&error));
            }
            Some(Reply::Ready(status)) => match self.pending.pop_front() {
                Some(Pending::Sync { commits: Some(commits) })
                    if status == TransactionStatus::Idle =>
                {
                    self.committing = false;
                    self.savepoints.clear();
                    let mut counters = Counters::default();
                    counters.add_changes(&commits.changes);
                    let range = Range { after: commits.after, through: commits.end };
                    Report::Committed { range, counters }
                }
                _ => return Err(Failure::internal("an answer to a Sync that nobody sent")),
            },
            Some(_) => return Ok(Some(None)),
        };
        let Some(first) = self.awaited.front_mut() else { return Ok(Some(None)) };
        *first -= 1;
        if *first > 0 {
            return Ok(Some(None));
        }
        self.awaited.pop_front();
        Ok(Some(Some(report)))
    }

    /// Whether a statement did exactly what it should.
    fn judge(&mut self, pending: Option<Pending>, affected: u64, undone: bool) -> Result<()> {
        let fits = match pending {
            Some(Pending::Begin | Pending::State | Pending::Truncate { .. }) => true,
            Some(Pending::Net { rows }) => rows == affected,
            Some(Pending::Progress { .. }) => affected == 1,
            Some(Pending::Commit { .. }) => !undone,
            Some(Pending::Change { expect, .. }) => {
                let rows = affected + std::mem::take(&mut self.carried);
                match expect {
                    Expect::Any => true,
                    Expect::OneWithNext => {
                        self.carried = rows;
                        true
                    }
                    Expect::One => rows == 1,
                }
            }
            Some(Pending::Sync { .. }) | None => false,
        };
        if fits {
            return Ok(());
        }
        Err(Failure::internal("a statement of a stream found other rows than expected"))
    }

    /// Rolls everything back, whatever the session is doing.
    fn go_back(&mut self) -> Result<()> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "rolling a stream back");
        let busy = !self.pending.is_empty();
        if !matches!(self.pending.back(), Some(Pending::Sync { .. })) {
            // After an error the server skips everything up to here.
            self.session.queue_sync();
            self.pending.push_back(Pending::Sync { commits: None });
        }
        self.session.flush().map_err(|e| failed(&e))?;
        let handle = self.session.cancel_handle();
        let mut patience = BEFORE_CANCEL;
        let mut pause = CANCEL_AGAIN;
        loop {
            // A cancel between two statements is lost, and the next one may wait for a lock of a
            // transaction that stays prepared.
            while busy && !self.session.poll_reply(patience).map_err(|e| failed(&e))? {
                cancel(&handle);
                patience = pause;
                pause = (pause * 2).min(CANCEL_AT_LEAST);
            }
            let reply = self.session.next_reply().map_err(|e| failed(&e))?;
            if matches!(reply, Reply::Ready(_)) && self.session.pending_ready() == 0 {
                break;
            }
        }
        self.pending.clear();
        self.awaited.clear();
        self.savepoints.clear();
        (self.carried, self.committing) = (0, false);
        while self.session.transaction_status() != TransactionStatus::Idle {
            match self.session.simple("ROLLBACK") {
                Ok(_) => {}
                // A cancel that was meant for what went before.
                Err(error) if error.sqlstate() == Some("57014") => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        self.encoder.forget_after(&mut self.session, self.parsed);
        Ok(())
    }
}

/// A part, as the encoder takes it.
fn group_of(work: Work, mode: GroupMode) -> Group {
    Group {
        seq: GroupSeq::NONE,
        works: vec![work],
        mode,
        dependent: Dependent::default(),
        attempts: 0,
        more: false,
    }
}
