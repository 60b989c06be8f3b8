//! Streaming apply (`--streaming parallel`): the sessions on which open transactions are applied, as
//! [`engine::streaming`] decides.

mod session;
mod worker;

use crossbeam_channel::{Receiver, Sender, unbounded};
use engine::group::GroupSeq;
use engine::streaming::{Streams, Ticket};

use crate::apply::apply_session::Connect;
use crate::apply::work::Work;
use crate::error::{Failure, Result};
use crate::observe::ledger::Ledger;
use crate::scoped_thread;
use worker::{NoWorker, StreamWorker};

pub(crate) use worker::StreamReport;

/// A report of a session about a stream: the number of the session, the stream, the report.
pub(crate) type Event = (usize, Ticket, StreamReport);

/// The sessions on which open streams are executed.
pub(crate) struct StreamSessions {
    workers: Vec<std::result::Result<StreamWorker, NoWorker>>,
    connects: Vec<Option<Connect>>,
    reports: Sender<Event>,
    ledger: Ledger,
    pub(crate) events: Receiver<Event>,
}

impl StreamSessions {
    /// As many sessions as there are `connects`, each opened when it is needed.
    pub(crate) fn new(connects: Vec<Connect>, ledger: Ledger) -> Self {
        let (reports, events) = unbounded();
        let connects = connects.into_iter().map(Some).collect();
        Self { workers: Vec::new(), connects, reports, ledger, events }
    }

    /// Sends the orders that wait, and opens the sessions that they need.
    pub(crate) fn send_orders(&mut self, streams: &mut Streams<Box<Work>>) -> Result<()> {
        while self.workers.len() < streams.sessions_in_use() {
            let number = self.workers.len();
            let connect = self.connects[number].take();
            let connect = connect.ok_or_else(|| Failure::internal("a session opened twice"))?;
            let (reports, ledger) = (self.reports.clone(), self.ledger.clone());
            let worker = StreamWorker::spawn(number, connect, reports.clone(), ledger);
            self.workers.push(worker.map_err(|failure| NoWorker::new(number, reports, &failure)));
        }
        while let Some((worker, ticket, order)) = streams.next_order() {
            match &mut self.workers[worker] {
                Ok(worker) => worker.send(ticket, order),
                Err(none) => none.send(ticket),
            }
        }
        Ok(())
    }

    /// The backends of the streams that are being executed, with numbers behind those of all groups.
    /// The stream that has committed comes first.
    pub(crate) fn backends(&self, streams: &Streams<Box<Work>>) -> Vec<(i32, GroupSeq)> {
        let sessions = streams.sessions().into_iter();
        // A session that has no order yet is not open.
        let backend =
            |(worker, number): (usize, GroupSeq)| Some((self.started(worker)?.pid()?, number));
        sessions.filter_map(backend).collect()
    }

    /// Cancels the statements that these sessions execute.
    pub(crate) fn cancel(&self, sessions: &[usize]) {
        sessions.iter().filter_map(|session| self.started(*session)).for_each(StreamWorker::cancel);
    }

    fn started(&self, worker: usize) -> Option<&StreamWorker> {
        self.workers.get(worker)?.as_ref().ok()
    }

    /// Ends all sessions.
    pub(crate) fn close(&mut self) {
        // All are closed before the first wait, because one may wait for another.
        self.workers.iter_mut().flatten().for_each(StreamWorker::close);
        std::thread::scope(|scope| {
            for worker in self.workers.drain(..).flatten() {
                scoped_thread::drop_beside(scope, worker);
            }
        });
    }
}

impl Drop for StreamSessions {
    fn drop(&mut self) {
        self.close();
    }
}
