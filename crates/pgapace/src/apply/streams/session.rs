//! The session of a stream worker: one open transaction of the publisher.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use engine::group::GroupSeq;
use engine::progress::Range;
use engine::relation::RemoteRelation;
use engine::transaction::ChangeCounts;
use engine::worker::{Dependent, ExpectedReply, GroupMode, Outcome};
use wire::{Reply, Session};

use super::worker::{Order, Stop, StreamReport};
use crate::apply::apply_session::roll_back;
use crate::apply::encoder::fold::Which;
use crate::apply::encoder::{Encoder, EncoderPosition};
use crate::apply::expected::Expected;
use crate::apply::replies::{Interpreted, RowCount, interpret};
use crate::apply::work::{Group, Work, counts_by_table};
use crate::error::{Failure, Result};
use crate::observe::ledger::Ledger;
use crate::stopping::interrupt::cancel;
use crate::subscriber::state::statistics::{Changes, Counters};

/// How long a statement may take to end by itself when its stream is rolled back. Nearly all do, and a
/// cancel request leaves an error in the server's log.
const BEFORE_CANCEL: Duration = Duration::from_millis(200);
/// The pause between two cancel requests for a session that rolls back: the first one, and the longest.
const CANCEL_AGAIN: Duration = Duration::from_millis(50);
const CANCEL_AT_LEAST: Duration = Duration::from_secs(1);

/// A session, and the stream and replies that it works on.
pub(super) struct StreamSession {
    pub(super) session: Session,
    pub(super) encoder: Encoder,
    pub(super) expected: VecDeque<Expected>,
    /// How many replies are still to come to each order.
    pub(super) orders: VecDeque<usize>,
    /// Commits of which the wait for a synchronous standby was canceled.
    pub(super) unreplicated: u64,
    pub(super) rows: RowCount,
    /// The changes counted up to each savepoint.
    pub(super) savepoints: Vec<(Changes, usize)>,
    /// The changes of the stream by table.
    pub(super) tables: Vec<(Arc<RemoteRelation>, ChangeCounts)>,
    /// Where the encoder stood before the stream: see [`Encoder::forget_after`].
    pub(super) position: EncoderPosition,
    pub(super) committing: bool,
    pub(super) ledger: Ledger,
}

impl StreamSession {
    /// The consequence of a failure for the session. A COMMIT that was sent is in doubt, unless the
    /// server reports an error.
    pub(super) fn stop(&self, failure: Failure) -> Stop {
        let doubt = self.committing && failure.sqlstate.is_none();
        if doubt || self.session.is_broken() {
            Stop::Session(failure)
        } else {
            Stop::Stream(failure)
        }
    }

    pub(super) fn execute(&mut self, order: Order) -> Result<()> {
        let before = self.expected.len();
        match order {
            Order::Part { work, savepoint } => self.part(*work, savepoint)?,
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
                let group = group_of(*work);
                let ending = self.encoder.ending(&group)?;
                let ending = ending.ok_or_else(|| Failure::internal("a stream without an end"))?;
                self.encoder.queue_ending(&mut self.session, ending, &mut self.expected)?;
                self.committing = true;
            }
            Order::Abandon => {}
        }
        self.orders.push_back(self.expected.len() - before);
        // The rest is written while the thread waits, so it sees an order to abandon the stream even while the
        // subscriber waits for a lock and reads nothing.
        self.session.send_queued().map_err(|e| Failure::subscriber(&e, "sending changes"))
    }

    fn part(&mut self, work: Work, savepoint: Option<usize>) -> Result<()> {
        if savepoint.is_some() {
            debug_assert_eq!(savepoint, Some(self.savepoints.len()), "in order");
            let number = self.savepoints.len();
            self.savepoints.push((self.encoder.counted(), self.tables.len()));
            self.command(&format!("SAVEPOINT s{number}"))?;
        }
        self.count(&work);
        let group = group_of(work);
        let before = self.expected.len();
        let session = &mut self.session;
        self.encoder.net(session, &group, Which::All, false, &mut self.expected)?;
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

    pub(super) fn command(&mut self, sql: &str) -> Result<()> {
        self.session
            .queue_statement(sql, &[], [].into_iter())
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
        self.expected.push_back(Expected::Control);
        Ok(())
    }

    /// Takes the next reply, if there is one. The inner value is the report of an order, if the reply is
    /// the last one to it.
    pub(super) fn take_reply(&mut self) -> Result<Option<Option<StreamReport>>> {
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
                self.encoder.executed(&self.encoder.position());
                self.ledger.committed(self.tables.drain(..));
                let mut counters = Box::new(Counters::default());
                counters.add_changes(&commits.changes);
                let range = Range { after: commits.after, through: commits.end };
                let unreplicated = self.session.unreplicated_commits();
                let in_doubt =
                    std::mem::replace(&mut self.unreplicated, unreplicated) < unreplicated;
                let user_code = commits.user_code;
                StreamReport::Committed { range, counters, in_doubt, user_code }
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
    pub(super) fn roll_back(&mut self) -> Result<()> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "rolling a stream back");
        let busy = !self.expected.is_empty();
        if !self.expected.back().is_some_and(Expected::is_sync) {
            // After an error the server skips everything up to here.
            self.session.queue_sync();
        }
        // The rest is written while replies are awaited: a server that waits for a lock reads nothing until its
        // statement is canceled.
        self.session.send_queued().map_err(|e| failed(&e))?;
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
        self.encoder.forget_after(&mut self.session, self.position.clone());
        Ok(())
    }
}

/// A group of one part, for the encoder.
fn group_of(work: Work) -> Group {
    Group {
        seq: GroupSeq::NONE,
        works: vec![work],
        mode: GroupMode::Net,
        dependent: Dependent::default(),
        attempts: 0,
        more: false,
        shares_commits: false,
    }
}
