//! Streaming apply (`--streaming parallel`): the sessions on which open transactions are applied, as
//! [`engine::streaming`] decides.

mod worker;

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::assemble::Subtransactions;
use engine::dispatch::Pacing;
use engine::group::GroupSeq;
use engine::streaming::{self, NextPart, Said, Ticket};
use engine::worker::GroupMode;
use pgoutput::{Lsn, Message, Xid};

use crate::apply::session::Connect;
use crate::apply::work::Work;
use crate::error::{Failure, Result};
use worker::StreamWorker;

pub(crate) use worker::StreamReport;

/// What a session reported about a stream: its number, the stream, the report.
pub(crate) type Event = (usize, Ticket, StreamReport);

/// The open streams, and the sessions for some of them.
pub(crate) struct Streams {
    streams: streaming::Streams<Box<Work>>,
    workers: Vec<StreamWorker>,
    connects: Vec<Option<Connect>>,
    reports: Sender<Event>,
    pub(crate) events: Receiver<Event>,
    started: Instant,
}

impl Streams {
    /// There are as many sessions as `connects`. Streaming apply begins when the publisher has come beyond
    /// `from`.
    pub(crate) fn new(connects: Vec<Connect>, from: Lsn) -> Self {
        let (reports, events) = unbounded();
        Self {
            streams: streaming::Streams::new(connects.len(), from, Pacing::MEASURED),
            workers: Vec::new(),
            connects: connects.into_iter().map(Some).collect(),
            reports,
            events,
            started: Instant::now(),
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether nothing is on its way to the subscriber.
    pub(crate) fn is_idle(&self) -> bool {
        self.streams.is_idle()
    }

    /// The publisher has sent something at this position.
    pub(crate) fn passed(&mut self, position: Lsn) {
        self.streams.passed(position);
    }

    /// See [`streaming::Streams::saw`].
    pub(crate) fn saw(
        &mut self,
        message: &Message<'_>,
        length: impl Fn(Xid) -> Option<u64>,
        dispatched: Lsn,
    ) {
        let now = self.now();
        self.streams.saw(message, length, dispatched, now);
        self.send_orders();
    }

    /// See [`streaming::Streams::received`].
    pub(crate) fn received(&mut self, length: impl Fn(Xid) -> Option<u64>, dispatched: Lsn) {
        self.streams.received(length, dispatched);
    }

    /// Abandons a stream: it is applied from the spool.
    pub(crate) fn abandon(&mut self, xid: Xid) {
        self.streams.abandon(xid);
        self.send_orders();
    }

    /// Abandons all streams.
    pub(crate) fn abandon_all(&mut self) {
        self.streams.abandon_all();
        self.send_orders();
    }

    /// A stream has ended, or is applied in another way now.
    pub(crate) fn forget(&mut self, xid: Xid) {
        self.streams.forget(xid);
        self.send_orders();
    }

    /// See [`streaming::Streams::begin_commit`].
    pub(crate) fn begin_commit(&mut self, xid: Xid) -> bool {
        let begun = self.streams.begin_commit(xid);
        self.send_orders();
        begun
    }

    /// The stream that has committed on the publisher and is being committed here.
    pub(crate) fn committing(&self) -> Option<Xid> {
        self.streams.committing()
    }

    /// Whether all of a stream, which is `length` long, is executed on the subscriber, and not committed.
    pub(crate) fn is_through(&self, xid: Xid, length: u64) -> bool {
        self.streams.is_through(xid, length)
    }

    /// Commits a stream; `end` says where it ends.
    pub(crate) fn commit(&mut self, xid: Xid, end: Work) {
        self.streams.commit(xid, Box::new(end));
        self.send_orders();
    }

    /// The part that is to be handed over now, when everything that ends up to here is `committed`.
    pub(crate) fn next<'a>(
        &mut self,
        committed: Lsn,
        subtransactions: impl Fn(Xid) -> Option<&'a Subtransactions>,
    ) -> Result<Option<NextPart>> {
        let next = self.streams.next(committed, subtransactions, self.now());
        while self.workers.len() < self.streams.sessions_in_use() {
            self.open_worker()?;
        }
        Ok(next)
    }

    fn open_worker(&mut self) -> Result<()> {
        let number = self.workers.len();
        let connect = self.connects[number].take();
        let connect = connect.ok_or_else(|| Failure::internal("a session opened twice"))?;
        self.workers.push(StreamWorker::spawn(number, connect, self.reports.clone())?);
        Ok(())
    }

    /// When to ask again for the next part, if nothing happens until then.
    pub(crate) fn look_again(&self) -> Option<Duration> {
        self.streams.look_again(self.now())
    }

    /// Hands over the changes that were read, up to `through`.
    pub(crate) fn hand_over(&mut self, next: &NextPart, through: u64, work: Work, mode: GroupMode) {
        let now = self.now();
        self.streams.hand_over(next, through, Box::new(work), mode, now);
        self.send_orders();
    }

    fn send_orders(&mut self) {
        while let Some((worker, ticket, order)) = self.streams.next_order() {
            self.workers[worker].send(ticket, order);
        }
    }

    /// Takes a report of a session. Returns the stream that has ended with it, if one has.
    pub(crate) fn reported(&mut self, event: Event) -> Option<(Xid, StreamReport)> {
        let (worker, ticket, report) = event;
        let said = match &report {
            StreamReport::Done => Said::Done,
            StreamReport::Committed { .. } => Said::Committed,
            StreamReport::Abandoned => Said::Abandoned,
            StreamReport::Failed(_) => Said::Failed,
        };
        self.streams.said(worker, ticket, said).map(|xid| (xid, report))
    }

    /// The backends on which streams are applied, with numbers behind those of all groups. The stream that
    /// has committed on the publisher comes first.
    pub(crate) fn sessions(&self) -> Vec<(i32, GroupSeq)> {
        let sessions = self.streams.sessions().into_iter();
        sessions
            .filter_map(|(worker, number)| Some((self.workers[worker].pid()?, number)))
            .collect()
    }

    /// The number of the stream that has committed on the publisher.
    pub(crate) fn first(&self) -> Option<GroupSeq> {
        self.streams.first()
    }

    /// Abandons the streams among the victims: they hold locks that a committed transaction needs. Returns
    /// how many there were.
    pub(crate) fn resolve_deadlock(&mut self, victims: &[GroupSeq]) -> u64 {
        let (workers, abandoned) = self.streams.resolve_deadlock(victims);
        workers.iter().for_each(|worker| self.workers[*worker].cancel());
        self.send_orders();
        abandoned as u64
    }

    /// Ends all sessions.
    pub(crate) fn close(&mut self) {
        // All are closed before one is waited for, because one may wait for another.
        self.workers.iter_mut().for_each(StreamWorker::close);
        std::thread::scope(|scope| {
            for worker in self.workers.drain(..) {
                scope.spawn(move || drop(worker));
            }
        });
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.close();
    }
}
