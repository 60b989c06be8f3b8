//! A thread with its own session, which applies one streamed transaction at a time while that is still
//! open on the publisher.
//!
//! It decides nothing about conflicts and errors. When a statement does something else than it must, or
//! anything fails, the transaction is rolled back and the stream is *abandoned*. Its changes are spooled
//! too: they are applied from there after the commit, and then an error that is still there is reported.

use std::collections::VecDeque;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use engine::progress::Range;
use engine::streaming::Ticket;
use wire::Waker;

use super::session::StreamSession;
use crate::apply::apply_session::{Connect, Lost};
use crate::apply::encoder::Encoder;
use crate::apply::replies::RowCount;
use crate::apply::thread::{LITTLE_PATIENCE, SessionHandle, SessionThread};
use crate::apply::work::Work;
use crate::error::{Failure, Result};
use crate::observe::ledger::Ledger;
use crate::subscriber::state::statistics::Counters;

/// The longest sleep. Other threads wake the thread when they have news.
const SLEEP: Duration = Duration::from_secs(10);

/// An order of the leader to the session of a stream.
pub(super) type Order = engine::streaming::Order<Box<Work>>;

/// The report of a session about a stream.
#[derive(Debug)]
pub(crate) enum StreamReport {
    /// An order is executed. All orders but Commit and Abandon are answered so.
    Done,
    Committed {
        range: Range,
        counters: Box<Counters>,
        /// A user has canceled its wait for a synchronous standby: it may be on none.
        in_doubt: bool,
        /// It has run user code.
        user_code: bool,
    },
    /// The stream is rolled back, and the session is free.
    Abandoned,
    /// The commit of the stream is in doubt: the run must end.
    Failed(Failure),
}

/// The running thread.
#[derive(Debug)]
pub(super) struct StreamWorker {
    orders: Option<Sender<(Ticket, Order)>>,
    waker: Waker,
    /// Dropped last, because that waits for the thread.
    thread: SessionThread,
}

/// Takes the place of a worker whose thread could not be started, until the run ends. It abandons each stream.
#[derive(Debug)]
pub(super) struct NoWorker {
    number: usize,
    reports: Sender<(usize, Ticket, StreamReport)>,
    /// The last stream that was abandoned.
    dead: Option<Ticket>,
}

impl NoWorker {
    pub(super) fn new(
        number: usize,
        reports: Sender<(usize, Ticket, StreamReport)>,
        failure: &Failure,
    ) -> Self {
        tracing::warn!(
            event = "stream_session_failed",
            error = %failure,
            "could not open a session for a streamed transaction; it is applied after its commit"
        );
        Self { number, reports, dead: None }
    }

    /// A stream is abandoned at its first order; the others are not answered.
    pub(super) fn send(&mut self, ticket: Ticket) {
        if self.dead.replace(ticket) != Some(ticket) {
            let _ = self.reports.send((self.number, ticket, StreamReport::Abandoned));
        }
    }
}

impl StreamWorker {
    /// Starts thread `number`, which reports under that number. It connects when it is needed.
    pub(super) fn spawn(
        number: usize,
        connect: Connect,
        reports: Sender<(usize, Ticket, StreamReport)>,
        ledger: Ledger,
    ) -> Result<Self> {
        let (orders, inbox) = unbounded();
        let waker =
            Waker::new().map_err(|e| Failure::refused_by_system("create an eventfd", &e))?;
        let handle = SessionHandle::default();
        let mut thread = StreamThread {
            connect,
            session: None,
            lost: None,
            handle: handle.clone(),
            waker: waker.clone(),
            ledger,
            report: Box::new(move |ticket, report| {
                // If the leader is gone, the report is not needed.
                let _ = reports.send((number, ticket, report));
            }),
        };
        let work = move || thread.run(&inbox);
        let name = format!("stream {number}");
        let thread = SessionThread::spawn(name, handle, LITTLE_PATIENCE, work)?;
        Ok(Self { orders: Some(orders), waker, thread })
    }

    pub(super) fn send(&self, ticket: Ticket, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send((ticket, order));
            self.waker.wake();
        }
    }

    /// The backend of its session, if it has one.
    pub(super) fn pid(&self) -> Option<i32> {
        self.thread.session().pid()
    }

    /// Cancels the statement that the session executes.
    pub(super) fn cancel(&self) {
        self.thread.session().cancel();
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
    }
}

struct StreamThread {
    connect: Connect,
    session: Option<StreamSession>,
    lost: Option<Lost>,
    handle: SessionHandle,
    waker: Waker,
    ledger: Ledger,
    report: Box<dyn Fn(Ticket, StreamReport) + Send>,
}

/// Takes all orders that are there. An error if there will be no more.
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
pub(super) enum Stop {
    /// The session lives.
    Stream(Failure),
    Session(Failure),
}

impl StreamThread {
    fn run(&mut self, inbox: &Receiver<(Ticket, Order)>) {
        // The present stream, and the last one that was abandoned.
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
                        running.position = running.encoder.position();
                    }
                }
                if !matches!(order, Order::Abandon) {
                    // That takes a while, in which the stream may be abandoned.
                    if let Err(failure) = self.open_session() {
                        // After the end of the run, the next one may own the subscription.
                        if take_orders(inbox, &mut orders).is_err() {
                            return;
                        }
                        tracing::warn!(
                            event = "stream_session_failed",
                            error = %failure,
                            "could not open a session for a streamed transaction; it is applied after its commit"
                        );
                        stop = Some(Stop::Session(failure));
                        break;
                    }
                    if take_orders(inbox, &mut orders).is_err() {
                        return;
                    }
                    // Its changes may have been applied from the spool by now, and would conflict.
                    let is_abandoned = |(other, order): &(Ticket, Order)| {
                        *other == ticket && matches!(order, Order::Abandon)
                    };
                    if orders.iter().any(is_abandoned) {
                        continue;
                    }
                }
                if let Err(found) = self.execute(order) {
                    stop = Some(found);
                    break;
                }
            }
            if stop.is_none() {
                let ended = self.wait(inbox).and_then(|()| self.take_replies(current));
                match ended {
                    Ok(true) => current = None,
                    Ok(false) => {}
                    Err(found) => stop = Some(found),
                }
            }
            if let Some(found) = stop {
                let report = self.stopped(found);
                // Between two streams, the loss of a session concerns no stream.
                if let Some(ticket) = current.take() {
                    dead = Some(ticket);
                    (self.report)(ticket, report);
                }
                // The server may not know that the connection is lost. Until the next session ends the
                // backend, it keeps the locks of the stream, which is now applied by another session.
                if self.lost.is_some() {
                    self.session = self.open().ok();
                }
            }
        }
    }

    /// Sleeps until there is a reply or an order.
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
                // Without a session there are no replies, so the channel is all there is to wait for.
                let mut select = crossbeam_channel::Select::new();
                select.recv(inbox);
                select.ready();
                Ok(())
            }
        }
    }

    fn execute(&mut self, order: Order) -> std::result::Result<(), Stop> {
        if matches!(order, Order::Abandon) {
            if self.session.as_ref().is_some_and(|running| running.committing) {
                // The commit releases its locks soon.
                return Ok(());
            }
            return Err(Stop::Stream(Failure::internal("the stream is abandoned")));
        }
        let Some(running) = &mut self.session else { return Ok(()) };
        running.execute(order).map_err(|failure| running.stop(failure))
    }

    /// Opens the session, unless there is one.
    fn open_session(&mut self) -> Result<()> {
        if self.session.is_none() {
            self.session = Some(self.open()?);
        }
        Ok(())
    }

    /// Opens a session. The backend of a lost one has ended when this returns.
    fn open(&mut self) -> Result<StreamSession> {
        let (mut session, identity) = (self.connect)(self.lost)?;
        if !identity.still_owns(&mut session)? {
            return Err(Failure::internal("another process owns the subscription"));
        }
        self.lost = None;
        let encoder = Encoder::new(identity).without_savepoints();
        self.handle.set(Some(&session));
        Ok(StreamSession {
            session,
            position: encoder.position(),
            encoder,
            expected: VecDeque::new(),
            orders: VecDeque::new(),
            unreplicated: 0,
            rows: RowCount::default(),
            savepoints: Vec::new(),
            tables: Vec::new(),
            committing: false,
            ledger: self.ledger.clone(),
        })
    }

    /// Takes the replies that are there. Whether the stream has ended.
    fn take_replies(&mut self, current: Option<Ticket>) -> std::result::Result<bool, Stop> {
        let Some(running) = &mut self.session else { return Ok(false) };
        loop {
            let done = running.take_reply().map_err(|failure| running.stop(failure))?;
            let Some(done) = done else { return Ok(false) };
            let (Some(report), Some(ticket)) = (done, current) else { continue };
            let ends = matches!(report, StreamReport::Committed { .. });
            (self.report)(ticket, report);
            if ends {
                return Ok(true);
            }
        }
    }

    /// Rolls the stream back, or gives the session up. Returns the report.
    fn stopped(&mut self, found: Stop) -> StreamReport {
        let failure = match found {
            Stop::Stream(failure) => {
                tracing::debug!(%failure, "a stream is rolled back");
                let Some(running) = &mut self.session else { return StreamReport::Abandoned };
                match running.roll_back() {
                    Ok(()) => return StreamReport::Abandoned,
                    Err(failure) => failure,
                }
            }
            Stop::Session(failure) => failure,
        };
        tracing::debug!(%failure, "a stream's session is lost");
        self.handle.set(None);
        let Some(running) = self.session.take() else { return StreamReport::Abandoned };
        let backend = running.session.backend_pid();
        self.lost = Some(Lost { backend, tagged: running.encoder.is_tagged() });
        if running.committing { StreamReport::Failed(failure) } else { StreamReport::Abandoned }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{
        Failure, Ledger, NoWorker, Order, SessionHandle, StreamReport, StreamThread, Waker,
        unbounded,
    };

    #[test]
    fn streams_of_a_thread_that_could_not_be_started_are_abandoned_once() {
        let (reports, events) = unbounded();
        let refused = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        let failure = Failure::refused_by_system("start thread \"stream 3\"", &refused);
        assert!(
            failure.is_transient()
                && failure.hint.as_ref().is_some_and(|it| it.contains("TasksMax"))
        );
        let mut worker = NoWorker::new(3, reports, &failure);
        [7, 7, 8].into_iter().for_each(|ticket| worker.send(ticket));
        let abandoned = |report: &StreamReport| matches!(report, StreamReport::Abandoned);
        let seen: Vec<_> = events.try_iter().map(|(n, t, r)| (n, t, abandoned(&r))).collect();
        assert_eq!(seen, [(3, 7, true), (3, 8, true)]);
    }

    #[test]
    fn a_thread_whose_run_has_ended_meanwhile_says_nothing() {
        let (orders, inbox) = unbounded();
        let (reports, events) = unbounded();
        orders.send((7, Order::RollBack)).expect("the thread's inbox");
        let run = Mutex::new(Some(orders));
        let mut thread = StreamThread {
            connect: Box::new(move |_| {
                drop(run.lock().expect("the run").take());
                Err(Failure::internal("another process owns the subscription"))
            }),
            session: None,
            lost: None,
            handle: SessionHandle::default(),
            waker: Waker::new().expect("an eventfd"),
            ledger: Ledger::default(),
            report: Box::new(move |ticket, _| reports.send(ticket).expect("the leader's inbox")),
        };
        thread.run(&inbox);
        assert_eq!(events.try_iter().count(), 0);
    }
}
