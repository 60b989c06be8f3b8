//! The apply worker: one thread, one target session, transactions to pipelined statements.
//!
//! A transaction is sent as BEGIN, one Bind and Execute per change in stream order, its progress
//! row, COMMIT, Sync. Several transactions are on their way at once; after an error the server
//! skips everything up to the Sync and refuses the rest as "transaction is aborted", so nothing
//! after a failed transaction can commit, and the progress rows would refuse it too.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};
use engine::transaction::Touched;
use pgoutput::{Lsn, Message};
use wire::{CancelHandle, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::answers::{Answers, Context, Pending};
use crate::apply::missing::MissingLog;
use crate::apply::offender::offender;
use crate::apply::statement_cache::StatementCache;
use crate::apply::thread::join_or_cancel;
use crate::apply::work::Work;
use crate::error::{Class, Failure, Result};
use crate::target::mapping::TableMap;
use crate::target::state::SubscriptionId;
use crate::target::state::progress::{RECORD_TYPES, RecordParams, record_sql};
use crate::target::state::statistics::Counters;
use crate::target::statement::column_set::ColumnSet;
use crate::target::statement::row::{
    Expect, Operation, PlanError, Source, UpdatePlan, Values, param, plan_delete, plan_update,
    values,
};

/// Transactions on their way to the target at once.
const WINDOW: usize = 256;
/// Bytes of statements that are collected before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// How long the worker looks at one of its two inputs, replies and work, before the other.
const REPLY_PATIENCE: Duration = Duration::from_millis(20);

/// What a worker reports.
#[derive(Debug)]
pub(crate) enum FromWorker {
    /// Every transaction up to the one that ends here is committed.
    Committed { through: Lsn, counters: Counters },
    /// The worker has given up; what it had not reported is not committed, or not known to be.
    Failed(Failure),
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
    work: Option<Sender<Vec<Work>>>,
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

    /// Hands work over, in commit order. A worker that is gone has reported why in `events`.
    pub(crate) fn submit(&self, batch: Vec<Work>) {
        if let Some(work) = &self.work {
            let _ = work.send(batch);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.work = None;
        join_or_cancel(self.thread.take(), &self.cancel);
    }
}

struct State {
    session: Session,
    sender: Sender<FromWorker>,
    identity: Identity,
    statements: StatementCache,
    plan: UpdatePlan,
    no_columns: ColumnSet,
    pending: VecDeque<Pending>,
    /// Work whose statements are not all answered, and the number of the first.
    works: VecDeque<Work>,
    first_work: u64,
    transactions: usize,
    answers: Answers,
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
            identity,
            statements: StatementCache::default(),
            plan: UpdatePlan::default(),
            no_columns: ColumnSet::default(),
            pending: VecDeque::new(),
            works: VecDeque::new(),
            first_work: 0,
            transactions: 0,
            answers: Answers::new(log),
        }
    }

    fn run(&mut self, inbox: &Receiver<Vec<Work>>) -> Result<()> {
        self.prepare_control()?;
        loop {
            let batch = if self.pending.is_empty() {
                match inbox.recv_timeout(Duration::from_secs(3600)) {
                    Ok(batch) => Some(batch),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            } else {
                match inbox.try_recv() {
                    Ok(batch) => Some(batch),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            };
            let Some(batch) = batch else {
                self.send()?;
                self.wait_for_replies()?;
                continue;
            };
            for work in batch {
                self.encode(work)?;
                if self.session.queued() >= SEND_BYTES {
                    self.send()?;
                    self.take_replies()?;
                }
                while self.transactions >= WINDOW {
                    self.send()?;
                    self.wait_for_replies()?;
                }
            }
        }
    }

    fn prepare_control(&mut self) -> Result<()> {
        self.session.queue_parse("begin", "BEGIN", &[]);
        self.session.queue_parse("commit", "COMMIT", &[]);
        self.session.queue_parse("progress", &record_sql(self.identity.tagged), &RECORD_TYPES);
        Ok(())
    }

    fn encode(&mut self, work: Work) -> Result<()> {
        let number = self.first_work + self.works.len() as u64;
        if work.part.first {
            self.queue("begin", Pending::Begin)?;
        }
        for index in 0..work.part.len() {
            if let Err(error) = self.encode_change(&work, number, index) {
                return Err(error.into_failure(&work, index));
            }
        }
        if let Some(end) = work.part.end_lsn {
            let Identity { id, epoch, .. } = self.identity;
            let time = (!work.part.is_idle()).then_some(work.part.head.commit_time);
            let record = RecordParams::new(id, end, work.predecessor, epoch, time);
            self.session
                .queue_bind("progress", record.params().into_iter())
                .map_err(|e| Failure::target(&e, "recording progress"))?;
            self.session.queue_execute();
            self.pending.push_back(Pending::Progress { work: number });
            self.queue("commit", Pending::Commit { work: number })?;
            self.session.queue_sync();
            let idle = work.part.is_idle();
            self.pending.push_back(Pending::Sync { work: number, end, idle });
            self.transactions += 1;
        } else {
            // More parts follow: have the server answer what it has done, so that the memory of
            // this part is given back while the transaction goes on.
            self.session.queue_flush();
        }
        self.works.push_back(work);
        Ok(())
    }

    fn queue(&mut self, statement: &str, pending: Pending) -> Result<()> {
        self.session
            .queue_bind(statement, std::iter::empty())
            .map_err(|e| Failure::target(&e, "queueing a statement"))?;
        self.session.queue_execute();
        self.pending.push_back(pending);
        Ok(())
    }

    fn encode_change(
        &mut self,
        work: &Work,
        number: u64,
        index: usize,
    ) -> std::result::Result<(), ChangeError> {
        let change = work.part.change(index).map_err(|e| ChangeError::Internal(e.to_string()))?;
        let map = match change.1 {
            Touched::One(relation, _) => match &work.tables[relation] {
                Some(map) => Arc::clone(map),
                None => return Ok(()),
            },
            Touched::Many(relations) => {
                let Message::Truncate(truncate) = change.0 else {
                    return Err(ChangeError::Internal("not a truncate".to_owned()));
                };
                let tables: Vec<_> =
                    relations.iter().filter_map(|r| work.tables[*r as usize].as_ref()).collect();
                return self.encode_truncate(&tables, truncate.restart_identity, number, index);
            }
        };
        let mut plan = std::mem::take(&mut self.plan);
        let result = match &change.0 {
            Message::Insert(insert) => {
                values(&map, &insert.new).map_err(ChangeError::Plan).and_then(|new| {
                    plan.set.reset(0);
                    plan.nulls.reset(0);
                    let step = &[(Operation::Insert, Expect::Any)][..];
                    self.encode_steps(&map, step, &plan, &new, &new, number, index)
                })
            }
            Message::Update(update) => values(&map, &update.new)
                .and_then(|new| {
                    let old =
                        update.old.as_ref().map(|old| values(&map, old.tuple())).transpose()?;
                    let steps = plan_update(&map, old.as_deref(), &new, &mut plan)?;
                    Ok((steps, old, new))
                })
                .map_err(ChangeError::Plan)
                .and_then(|(steps, old, new)| {
                    let search = old.as_ref().unwrap_or(&new);
                    self.encode_steps(&map, steps, &plan, &new, search, number, index)
                }),
            Message::Delete(delete) => values(&map, delete.old.tuple())
                .and_then(|old| Ok((plan_delete(&map, &old, &mut plan)?, old)))
                .map_err(ChangeError::Plan)
                .and_then(|(steps, old)| {
                    self.encode_steps(&map, steps, &plan, &old, &old, number, index)
                }),
            other => Err(ChangeError::Internal(format!("{other:?} is not a change"))),
        };
        self.plan = plan;
        result
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one change, used only here")]
    fn encode_steps(
        &mut self,
        map: &TableMap,
        steps: &[(Operation, Expect)],
        plan: &UpdatePlan,
        new: &Values<'_>,
        search: &Values<'_>,
        work: u64,
        index: usize,
    ) -> std::result::Result<(), ChangeError> {
        for (operation, expect) in steps.iter().copied() {
            let set = match operation {
                Operation::Probe | Operation::Delete | Operation::Insert => &self.no_columns,
                _ => &plan.set,
            };
            let (prepared, first) = self.statements.get(map, operation, set, &plan.nulls);
            for name in &first.close {
                self.session.queue_close_statement(name);
            }
            if let Some((sql, types)) = &first.parse {
                tracing::debug!(statement = prepared.name, sql, "preparing");
                self.session.queue_parse(&prepared.name, sql, types);
            }
            let params = prepared.sources.iter().map(|source| match source {
                Source::New(column) => param(&new[*column]),
                Source::Search(column) => param(&search[*column]),
            });
            self.session.queue_bind(&prepared.name, params).map_err(ChangeError::Wire)?;
            self.session.queue_execute();
            let index = u32::try_from(index)
                .map_err(|_| ChangeError::Internal("a part is too large".to_owned()))?;
            self.pending.push_back(Pending::Change { work, index, operation, expect });
        }
        Ok(())
    }

    /// All relations in one statement, so that foreign keys between them allow it. CASCADE is not
    /// passed on: the publisher lists the tables that its own cascade reached (reference 4).
    fn encode_truncate(
        &mut self,
        tables: &[&Arc<TableMap>],
        restart_identity: bool,
        work: u64,
        index: usize,
    ) -> std::result::Result<(), ChangeError> {
        if tables.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = tables.iter().map(|map| map.table.sql_only()).collect();
        let sql = format!(
            "TRUNCATE TABLE {}{}",
            names.join(", "),
            if restart_identity { " RESTART IDENTITY" } else { "" }
        );
        self.session.queue_parse("", &sql, &[]);
        self.session.queue_bind("", std::iter::empty()).map_err(ChangeError::Wire)?;
        self.session.queue_execute();
        let index = u32::try_from(index)
            .map_err(|_| ChangeError::Internal("a part is too large".to_owned()))?;
        self.pending.push_back(Pending::Truncate { work, index });
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.session.flush().map_err(|e| Failure::target(&e, "sending changes"))
    }

    fn wait_for_replies(&mut self) -> Result<()> {
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
            let Some(reply) = reply else { break };
            match reply {
                Reply::CommandComplete(tag) => {
                    let affected = affected_rows(tag);
                    let rolled_back = tag == "ROLLBACK";
                    let pending = self.pending.pop_front();
                    let context = Context { works: &self.works, first: self.first_work };
                    self.answers.completed(pending, affected, rolled_back, &context)?;
                }
                Reply::Error(error) => {
                    let error = wire::Error::Server(error);
                    let pending = self.pending.pop_front();
                    let context = Context { works: &self.works, first: self.first_work };
                    return Err(context.explain(&error, pending));
                }
                Reply::Ready(status) => {
                    let Some(Pending::Sync { work, end, idle }) = self.pending.pop_front() else {
                        return Err(Failure::internal("the target answered a Sync nobody sent"));
                    };
                    if status != TransactionStatus::Idle {
                        return Err(Failure::internal("a transaction is open after its COMMIT"));
                    }
                    self.transactions -= 1;
                    self.release(work + 1);
                    self.answers.transaction_committed(end, idle);
                }
                _ => {}
            }
        }
        if let Some(Pending::Change { work, .. } | Pending::Truncate { work, .. }) =
            self.pending.front()
        {
            self.release(*work);
        } else if self.pending.is_empty() {
            self.release(self.first_work + self.works.len() as u64);
        }
        if let Some((through, counters)) = self.answers.take_committed() {
            // The leader may be gone; then nobody needs to know.
            let _ = self.sender.send(FromWorker::Committed { through, counters });
        }
        Ok(())
    }

    /// Gives back the memory of all work before this number: its statements are answered.
    fn release(&mut self, before: u64) {
        while self.first_work < before && self.works.pop_front().is_some() {
            self.first_work += 1;
        }
    }
}

/// Why a change could not be turned into statements.
#[derive(Debug)]
enum ChangeError {
    Plan(PlanError),
    Wire(wire::Error),
    Internal(String),
}

impl ChangeError {
    fn into_failure(self, work: &Work, index: usize) -> Failure {
        let mut failure = match self {
            Self::Plan(error) => {
                let failure =
                    Failure::new(Class::Mismatch, format!("cannot apply a change: {error}"));
                match error {
                    PlanError::NoSearch { hint, .. } => failure.hint(hint),
                    _ => failure,
                }
            }
            Self::Wire(error) => Failure::target(&error, "sending a change"),
            Self::Internal(message) => Failure::internal(message),
        };
        failure.offender = Some(Box::new(offender(work, Some(index))));
        failure
    }
}
