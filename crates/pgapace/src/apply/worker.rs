//! The apply worker: one thread, one target session, transactions to pipelined statements.
//!
//! A transaction is sent as BEGIN, one Bind and Execute per change in stream order, its progress
//! row, COMMIT, Sync. Several transactions are on their way at once; after an error the server
//! skips everything up to the Sync and refuses the rest as "transaction is aborted", so nothing
//! after a failed transaction can commit, and the progress rows would refuse it too.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};
use engine::transaction::{Touched, TransactionPart};
use pgoutput::{Column, Lsn, Message};
use wire::{CancelHandle, Reply, Session, TransactionStatus, affected_rows};

use crate::apply::missing::MissingLog;
use crate::apply::statement_cache::StatementCache;
use crate::error::{Class, Failure, Offender, Result};
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
/// How long a thread may take to end after its session was cancelled.
const JOIN_PATIENCE: Duration = Duration::from_secs(10);

/// A part of a transaction, with the target tables of its relations.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) part: TransactionPart,
    /// By index of `part.relations()`; `None` where the changes are not to be applied (already in
    /// the initial copy, or a table of ours).
    pub(crate) tables: Vec<Option<Arc<TableMap>>>,
    /// The progress that must be committed before this transaction.
    pub(crate) predecessor: Lsn,
}

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

/// Waits for a thread that blocks in its session, cancelling what the session does: it may wait
/// for a lock. A thread that does not end even so is left behind; the fence keeps its session from
/// ever committing.
pub(crate) fn join_or_cancel(thread: Option<JoinHandle<()>>, cancel: &CancelHandle) {
    let Some(thread) = thread else { return };
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    while !thread.is_finished() && started.elapsed() < JOIN_PATIENCE {
        if pause > Duration::from_millis(20)
            && let Err(error) = cancel.cancel()
        {
            tracing::debug!(%error, "cannot cancel");
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
    if thread.is_finished() && thread.join().is_err() {
        tracing::error!("a thread panicked");
    }
}

/// A statement whose result is awaited.
#[derive(Debug, Clone, Copy)]
enum Pending {
    Begin,
    /// Change `index` of the work with this number.
    Change {
        work: u64,
        index: u32,
        operation: Operation,
        expect: Expect,
    },
    Truncate {
        work: u64,
        index: u32,
    },
    Progress {
        work: u64,
    },
    Commit {
        work: u64,
    },
    /// The end of the transaction that ends at this LSN.
    Sync {
        work: u64,
        end: Lsn,
        idle: bool,
    },
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
    outcome: Outcome,
}

/// What the answers have said so far.
struct Outcome {
    log: MissingLog,
    /// Counters of the transaction being answered, and of those committed and not reported.
    current: Counters,
    committed: Counters,
    committed_through: Option<Lsn>,
    missing: Vec<Offender>,
    /// Rows affected by a statement that is judged together with its next.
    carried: u64,
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
            outcome: Outcome {
                log,
                current: Counters::default(),
                committed: Counters::default(),
                committed_through: None,
                missing: Vec::new(),
                carried: 0,
            },
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
                    self.outcome.completed(pending, affected, rolled_back, &context)?;
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
                    self.outcome.transaction_committed(end, idle);
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
        if let Some(through) = self.outcome.committed_through.take() {
            let counters = std::mem::take(&mut self.outcome.committed);
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

impl Outcome {
    fn completed(
        &mut self,
        pending: Option<Pending>,
        affected: u64,
        rolled_back: bool,
        context: &Context<'_>,
    ) -> Result<()> {
        match pending {
            Some(Pending::Begin) => Ok(()),
            Some(Pending::Progress { .. }) if affected == 1 => Ok(()),
            Some(Pending::Progress { .. }) => {
                Err(Failure::internal("the target recorded no progress"))
            }
            Some(Pending::Truncate { .. }) => {
                self.current.truncates += 1;
                Ok(())
            }
            Some(Pending::Commit { .. }) if rolled_back => {
                Err(Failure::internal("the target rolled a transaction back at COMMIT"))
            }
            Some(Pending::Commit { .. }) => Ok(()),
            Some(Pending::Change { work, index, operation, expect }) => {
                match operation {
                    Operation::Insert => self.current.inserts += 1,
                    Operation::Delete => self.current.deletes += 1,
                    Operation::Update | Operation::Replace | Operation::ReplaceChangedIdentity => {
                        self.current.updates += 1;
                    }
                    Operation::Probe | Operation::UpdateSameIdentity => {}
                }
                let rows = affected + std::mem::take(&mut self.carried);
                match expect {
                    Expect::Any => Ok(()),
                    Expect::OneWithNext => {
                        self.carried = rows;
                        Ok(())
                    }
                    Expect::One if rows == 1 => Ok(()),
                    Expect::One if rows == 0 => {
                        let offender = context.offender(work, index as usize);
                        if offender.operation == "UPDATE" {
                            self.current.update_missing += 1;
                        } else {
                            self.current.delete_missing += 1;
                        }
                        self.missing.push(offender);
                        Ok(())
                    }
                    Expect::One => {
                        let mut failure = Failure::new(
                            Class::Apply,
                            format!("a change of one row affected {rows} rows of the target"),
                        )
                        .hint("The columns by which rows are found are not unique on the target.");
                        failure.offender = Some(Box::new(context.offender(work, index as usize)));
                        Err(failure)
                    }
                }
            }
            Some(Pending::Sync { .. }) | None => {
                Err(Failure::internal("the target completed a statement nobody sent"))
            }
        }
    }

    fn transaction_committed(&mut self, end: Lsn, idle: bool) {
        for offender in self.missing.drain(..) {
            self.log.log(&offender);
        }
        if !idle {
            self.current.transactions += 1;
        }
        self.committed.add(&std::mem::take(&mut self.current));
        self.committed_through = Some(end);
    }
}

/// What is needed to name a change in a message.
struct Context<'a> {
    works: &'a VecDeque<Work>,
    first: u64,
}

impl Context<'_> {
    fn work(&self, number: u64) -> Option<&Work> {
        number.checked_sub(self.first).and_then(|at| self.works.get(usize::try_from(at).ok()?))
    }

    fn offender(&self, work: u64, index: usize) -> Offender {
        self.work(work).map_or_else(unknown_offender, |work| offender(work, Some(index)))
    }

    /// Turns an error of the target into a failure that names the change.
    fn explain(&self, error: &wire::Error, pending: Option<Pending>) -> Failure {
        let (doing, offender, progress) = match pending {
            Some(Pending::Change { work, index, .. } | Pending::Truncate { work, index }) => {
                ("applying a change", Some(self.offender(work, index as usize)), false)
            }
            Some(Pending::Progress { work }) => {
                ("recording progress", self.work(work).map(|work| self::offender(work, None)), true)
            }
            Some(Pending::Commit { work } | Pending::Sync { work, .. }) => {
                ("committing", self.work(work).map(|work| self::offender(work, None)), false)
            }
            Some(Pending::Begin) | None => ("applying changes", None, false),
        };
        let mut failure = Failure::target(error, doing);
        failure.offender = offender.map(Box::new);
        match failure.sqlstate.as_deref() {
            // The progress statement refuses a commit whose epoch or predecessor is not there.
            Some("23502" | "23505") if progress => Failure {
                class: Class::Busy,
                hint: Some(
                    "Another process has taken this subscription over. Run it only once."
                        .to_owned(),
                ),
                ..failure
            },
            Some(state) if state.starts_with("23") || state.starts_with("22") => Failure {
                class: Class::Apply,
                hint: failure.hint.or_else(|| {
                    Some(
                        "Change the conflicting row or the constraint on the target, then start \
                         pgapace again: it goes on with this transaction."
                            .to_owned(),
                    )
                }),
                ..failure
            },
            _ if !failure.transient => Failure { class: Class::Apply, ..failure },
            _ => failure,
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

fn unknown_offender() -> Offender {
    Offender {
        commit_lsn: Lsn::INVALID,
        xid: pgoutput::Xid(0),
        table: None,
        operation: "change",
        key: None,
    }
}

/// Names a change: transaction, table, operation, key.
fn offender(work: &Work, index: Option<usize>) -> Offender {
    let head = work.part.head;
    let mut offender = Offender {
        commit_lsn: head.commit_lsn,
        xid: head.xid,
        operation: "commit",
        ..unknown_offender()
    };
    let Some(index) = index else { return offender };
    let Ok((message, touched)) = work.part.change(index) else { return offender };
    let map = match touched {
        Touched::One(relation, version) => {
            offender.table = Some(version.display_name());
            work.tables[relation].as_deref()
        }
        Touched::Many(relations) => {
            let names: Vec<_> = relations
                .iter()
                .map(|r| work.part.relations()[*r as usize].display_name())
                .collect();
            offender.table = Some(names.join(", "));
            None
        }
    };
    let tuple = match message {
        Message::Insert(insert) => {
            offender.operation = "INSERT";
            Some(insert.new)
        }
        Message::Update(update) => {
            offender.operation = "UPDATE";
            Some(update.old.map_or(update.new, |old| *old.tuple()))
        }
        Message::Delete(delete) => {
            offender.operation = "DELETE";
            Some(*delete.old.tuple())
        }
        _ => {
            offender.operation = "TRUNCATE";
            None
        }
    };
    if let (Some(map), Some(tuple)) = (map, tuple)
        && !map.search_columns().is_empty()
    {
        offender.key = Some(describe_key(map, &tuple));
    }
    offender
}

/// `(a)=(1)`, of the columns that find the row; values cut at 64 bytes, as natively.
fn describe_key(map: &TableMap, tuple: &pgoutput::Tuple<'_>) -> String {
    let columns: Vec<_> = tuple.columns().collect();
    let (mut names, mut texts) = (Vec::new(), Vec::new());
    for search in map.search_columns() {
        let Some(value) = columns.get(search.remote) else { continue };
        names.push(map.remote.columns[search.remote].name.as_str());
        texts.push(match value {
            Column::Null => "null".to_owned(),
            Column::Unchanged => "unchanged".to_owned(),
            Column::Text(bytes) => {
                let cut = &bytes[..bytes.len().min(64)];
                let dots = if bytes.len() > 64 { "..." } else { "" };
                format!("{}{dots}", String::from_utf8_lossy(cut))
            }
            Column::Binary(bytes) => format!("{} bytes in binary", bytes.len()),
        });
    }
    format!("({})=({})", names.join(", "), texts.join(", "))
}
