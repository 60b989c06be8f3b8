//! A thread with its own session, which applies one streamed transaction at a time while that is still
//! open on the publisher.
//!
//! It decides nothing about conflicts and errors. When a statement does something else than it must, or
//! anything fails, the transaction is rolled back and the stream is *abandoned*. Its changes are spooled
//! too: they are applied from there after the commit, and then an error that is still there is reported.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use engine::group::GroupSeq;
use engine::progress::Range;
use engine::relation::RemoteRelation;
use engine::streaming::Ticket;
use engine::transaction::ChangeCounts;
use engine::worker::{Dependent, ExpectedReply, GroupMode, Outcome};
use wire::{Reply, Session, Waker};

use crate::apply::encoder::{Encoder, EncoderPosition, Which};
use crate::apply::expected::Expected;
use crate::apply::replies::{Interpreted, RowCount, interpret};
use crate::apply::session::{Connect, Lost, roll_back};
use crate::apply::thread::{LITTLE_PATIENCE, SessionHandle, SessionThread};
use crate::apply::work::{Group, Work, counts_by_table};
use crate::error::{Failure, Result};
use crate::observe::ledger::Ledger;
use crate::stopping::interrupt::cancel;
use crate::subscriber::state::statistics::{Changes, Counters};

/// The longest sleep. Other threads wake the thread when they have news.
const SLEEP: Duration = Duration::from_secs(10);
/// How long a statement may take to end by itself when its stream is rolled back. Nearly all do, and a
/// cancel request leaves an error in the server's log.
const BEFORE_CANCEL: Duration = Duration::from_millis(200);
/// The pause between two cancel requests for a session that rolls back: the first one, and the longest.
const CANCEL_AGAIN: Duration = Duration::from_millis(50);
const CANCEL_AT_LEAST: Duration = Duration::from_secs(1);

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

impl StreamWorker {
    /// Starts thread `number`, which reports under that number. It connects when it is needed.
    pub(super) fn spawn(
        number: usize,
        connect: Connect,
        reports: Sender<(usize, Ticket, StreamReport)>,
        ledger: Ledger,
    ) -> Result<Self> {
        let (orders, inbox) = unbounded();
        let waker = Waker::new()
            .map_err(|e| Failure::internal(format!("cannot create an eventfd: {e}")))?;
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

/// A session, and the stream and replies that it works on.
struct StreamSession {
    session: Session,
    encoder: Encoder,
    expected: VecDeque<Expected>,
    /// How many replies are still to come to each order.
    orders: VecDeque<usize>,
    rows: RowCount,
    /// The changes counted up to each savepoint.
    savepoints: Vec<(Changes, usize)>,
    /// The changes of the stream by table.
    tables: Vec<(Arc<RemoteRelation>, ChangeCounts)>,
    /// Where the encoder stood before the stream: see [`Encoder::forget_after`].
    position: EncoderPosition,
    committing: bool,
    ledger: Ledger,
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
enum Stop {
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
                    if let Err(found) = self.open_session() {
                        stop = Some(found);
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

impl StreamSession {
    /// The consequence of a failure for the session. A COMMIT that was sent is in doubt, unless the
    /// server reports an error.
    fn stop(&self, failure: Failure) -> Stop {
        let doubt = self.committing && failure.sqlstate.is_none();
        if doubt || self.session.is_broken() {
            Stop::Session(failure)
        } else {
            Stop::Stream(failure)
        }
    }

    fn execute(&mut self, order: Order) -> Result<()> {
        let before = self.expected.len();
        match order {
            Order::Part { work, mode, savepoint } => self.part(*work, mode, savepoint)?,
            Order::RollBackTo(savepoint) => {
                let changes = self.savepoints.get(savepoint).copied();
                let (changes, tables) =
                    changes.ok_or_else(|| Failure::internal("no such savepoint"))?;
                self.tables.truncate(tables);
                self.savepoints.truncate(savepoint + 1);
                self.encoder.set_counted(changes);
                self.command(&format!("ROLLBACK TO SAVEPOINT s{savepoint}"))?;
                self.session.queue_flush();
            }
            Order::RollBack => {
                self.savepoints.clear();
                self.tables.clear();
                self.encoder.set_counted(Changes::default());
                self.command("ROLLBACK")?;
                self.session.queue_flush();
            }
            Order::Commit(work) => {
                let group = group_of(*work, GroupMode::Net);
                let ending = self.encoder.ending(&group)?;
                let ending = ending.ok_or_else(|| Failure::internal("a stream without an end"))?;
                self.encoder.queue_ending(&mut self.session, ending, &mut self.expected)?;
                self.committing = true;
            }
            Order::Abandon => {}
        }
        self.orders.push_back(self.expected.len() - before);
        self.session.flush().map_err(|e| Failure::subscriber(&e, "sending changes"))
    }

    fn part(&mut self, work: Work, mode: GroupMode, savepoint: Option<usize>) -> Result<()> {
        if savepoint.is_some() {
            debug_assert_eq!(savepoint, Some(self.savepoints.len()), "in order");
            let number = self.savepoints.len();
            self.savepoints.push((self.encoder.counted(), self.tables.len()));
            self.command(&format!("SAVEPOINT s{number}"))?;
        }
        self.count(&work);
        let group = group_of(work, mode);
        let before = self.expected.len();
        match mode {
            GroupMode::Net => {
                let session = &mut self.session;
                self.encoder.net(session, &group, Which::All, false, &mut self.expected)?;
            }
            GroupMode::Rows => {
                self.encoder.rows(&mut self.session, &group, 0, true, &mut self.expected)?;
            }
        }
        if self.expected.len() == before {
            self.encoder.nothing(&mut self.session, &mut self.expected)?;
        }
        Ok(())
    }

    /// Adds the changes of a part to those of the last one, unless a savepoint lies between them.
    fn count(&mut self, work: &Work) {
        let first = self.savepoints.last().map_or(0, |(_, tables)| *tables);
        for (relation, counts) in counts_by_table(work) {
            let mut known = self.tables[first..].iter_mut();
            match known.find(|(known, _)| Arc::ptr_eq(known, &relation)) {
                Some((_, known)) => known.add(&counts),
                None => self.tables.push((relation, counts)),
            }
        }
    }

    fn command(&mut self, sql: &str) -> Result<()> {
        self.session
            .queue_statement(sql, &[], [].into_iter())
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
        self.expected.push_back(Expected::Control);
        Ok(())
    }

    /// Takes the next reply, if there is one. The inner value is the report of an order, if the reply is
    /// the last one to it.
    fn take_reply(&mut self) -> Result<Option<Option<StreamReport>>> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "applying a stream");
        let Some(reply) = self.session.try_reply().map_err(|e| failed(&e))? else {
            return Ok(None);
        };
        let report = match interpret(reply, || self.expected.pop_front())? {
            None => return Ok(Some(None)),
            Some(Interpreted::Completed(completed)) => {
                if self.rows.total(completed).outcome() != Outcome::AsExpected {
                    return Err(Failure::internal("a statement affected other rows than expected"));
                }
                StreamReport::Done
            }
            Some(Interpreted::Failed(error)) => {
                self.expected.pop_front();
                return Err(failed(&error));
            }
            Some(Interpreted::Synced { commits: Some(commits), idle: true }) => {
                self.committing = false;
                self.savepoints.clear();
                self.ledger.committed(self.tables.drain(..));
                let mut counters = Box::new(Counters::default());
                counters.add_changes(&commits.changes);
                let range = Range { after: commits.after, through: commits.end };
                StreamReport::Committed { range, counters }
            }
            Some(Interpreted::Synced { .. }) => {
                return Err(Failure::internal("a Sync of a stream committed nothing"));
            }
        };
        let Some(first) = self.orders.front_mut() else { return Ok(Some(None)) };
        *first -= 1;
        if *first > 0 {
            return Ok(Some(None));
        }
        self.orders.pop_front();
        Ok(Some(Some(report)))
    }

    /// Rolls everything back, whatever the session executes.
    fn roll_back(&mut self) -> Result<()> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "rolling a stream back");
        let busy = !self.expected.is_empty();
        if !self.expected.back().is_some_and(Expected::is_sync) {
            // After an error the server skips everything up to here.
            self.session.queue_sync();
        }
        self.session.flush().map_err(|e| failed(&e))?;
        let handle = self.session.cancel_handle();
        let mut patience = BEFORE_CANCEL;
        let mut pause = CANCEL_AGAIN;
        loop {
            // A cancel request between two statements has no effect, and the next statement may wait for
            // a lock of a prepared transaction.
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
        self.expected.clear();
        self.orders.clear();
        self.savepoints.clear();
        self.tables.clear();
        (self.rows, self.committing) = (RowCount::default(), false);
        roll_back(&mut self.session).map_err(|e| failed(&e))?;
        self.encoder.forget_after(&mut self.session, self.position);
        Ok(())
    }
}

/// A group of one part, for the encoder.
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
