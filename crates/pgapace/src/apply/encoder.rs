//! Groups to queued statements: what is sent for a transaction, in both modes.

pub(crate) mod resolution;

use std::collections::VecDeque;
use std::sync::Arc;

use engine::history::Memory;
use engine::net::{ChangeAt, Folder, Step, TableRules};
use engine::transaction::Touched;
use pgoutput::{Lsn, Message, Timestamp};
use wire::Session;

use crate::apply::answers::{Committing, Pending};
use crate::apply::offender::offender;
use crate::apply::work::{Group, TwoPhase, Work};
use crate::apply::worker::Identity;
use crate::error::{Class, Failure, Result};
use crate::subscriber::format::MISREAD_HINT;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::prepared::PreparedHere;
use crate::subscriber::state::progress::{RECORD_TYPES, RecordParams, record_sql};
use crate::subscriber::state::statistics::Changes;
use crate::subscriber::statement::bind::{self, RowChange};
use crate::subscriber::statement::cache::StatementCache;
use crate::subscriber::statement::row::{
    Expect, Operation, PlanError, UpdatePlan, Values, plan_delete, plan_update, values,
};
use crate::subscriber::statement::set::{Expected, SetBuffers, SetError, queue_segment};
use crate::subscriber::statement::truncate;

/// Which changes of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// Those that no other group can be in the way of.
    Free,
    /// The others.
    Dependent,
}

/// Prepares what every transaction uses, on a session that is not in a transaction. It is answered when
/// this returns: statements that are parsed without a Sync behind them leave a transaction open, and
/// with it a lock on the progress, until the first group comes.
pub(crate) fn prepare_control(session: &mut Session, identity: Identity) -> Result<()> {
    session.queue_parse("begin", "BEGIN", &[]);
    session.queue_parse("commit", "COMMIT", &[]);
    session.queue_parse("nothing", "SELECT WHERE false", &[]);
    let Identity { progress_of, tagged, ordered, .. } = identity;
    let record = |ordered| record_sql(progress_of, tagged, ordered);
    session.queue_parse("progress", &record(ordered), &RECORD_TYPES);
    if !ordered {
        session.queue_parse("progress_behind", &record(true), &RECORD_TYPES);
    }
    session.finish_queued().map_err(|e| Failure::subscriber(&e, "preparing statements"))
}

/// Queues statements on one session, which has what [`prepare_control`] prepares. What it has
/// prepared there itself it remembers.
pub(crate) struct Encoder {
    identity: Identity,
    statements: StatementCache,
    plan: UpdatePlan,
    buffers: SetBuffers,
    /// Of the subscriber transaction that is being queued, which may have several parts.
    changes: Changes,
}

impl Encoder {
    pub(crate) fn new(identity: Identity) -> Self {
        Self {
            identity,
            statements: StatementCache::default(),
            plan: UpdatePlan::default(),
            buffers: SetBuffers::default(),
            changes: Changes::default(),
        }
    }

    /// How many statements were ever parsed: what [`Self::forget_after`] takes.
    pub(crate) fn parsed(&self) -> u64 {
        self.statements.parsed()
    }

    /// What was queued since then is not carried out. Statements that were parsed there may be on
    /// the server or not; they are closed and not used again.
    pub(crate) fn forget_after(&mut self, session: &mut Session, parsed: u64) {
        self.changes = Changes::default();
        for name in self.statements.forget_after(parsed) {
            session.queue_close_statement(&name);
        }
    }

    /// Queues a statement that does nothing but be answered.
    pub(crate) fn nothing(
        &mut self,
        session: &mut Session,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        queue_control(session, "nothing", Pending::Net { rows: 0 }, pending)?;
        session.queue_flush();
        Ok(())
    }

    /// What was counted of the subscriber transaction that is being queued.
    pub(crate) fn counted(&self) -> Changes {
        self.changes
    }

    /// What was queued since so much was counted is undone.
    pub(crate) fn set_counted(&mut self, changes: Changes) {
        self.changes = changes;
    }

    /// Whether commits are tagged with a replication origin.
    pub(crate) fn is_tagged(&self) -> bool {
        self.identity.tagged
    }

    /// Has the next COMMIT PREPARED carry the origin, as every other commit.
    pub(crate) fn tag_commit_prepared(&self, session: &mut Session, time: Timestamp) -> Result<()> {
        if self.identity.tagged {
            let sql = "SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', \
                       '2000-01-01 00:00:00+00'::pg_catalog.timestamptz \
                         + $1::pg_catalog.int8 * '1 microsecond'::pg_catalog.interval)";
            session
                .query(sql, &[Some(&time.0.to_string())])
                .map_err(|e| Failure::subscriber(&e, "tagging a commit"))?;
        }
        Ok(())
    }

    /// Queues part `index` of a group by rows: a source transaction is a subscriber transaction, one
    /// statement for each change in stream order. The end of one whose first parts went before is
    /// given back, because those must be answered first; and that of one that is `early`, which
    /// has to wait for its turn.
    pub(crate) fn rows(
        &mut self,
        session: &mut Session,
        group: &Group,
        index: usize,
        early: bool,
        pending: &mut VecDeque<Pending>,
    ) -> Result<Option<Ending>> {
        let work = &group.works[index];
        let part = number(index)?;
        if work.part.first {
            queue_control(session, "begin", Pending::Begin, pending)?;
        }
        for change in 0..work.part.len() {
            let at = ChangeAt { part, change: number(change)? };
            self.change(session, work, at, pending)
                .map_err(|error| error.into_failure(work, at))?;
        }
        let prepares = matches!(work.two_phase, Some(TwoPhase::Prepare(_)));
        // It counts as one when it is committed.
        let transactions = u32::from(!work.part.is_idle() && !prepares);
        let ending = self.end_of(work, work, work.predecessor, part, transactions);
        match ending.map(|ending| Ending { behind: index > 0, ..ending }) {
            Some(ending) if work.part.first && !early => {
                ending.queue(session, self.identity, pending)?;
                Ok(None)
            }
            ending => {
                // Have the server answer, so that the memory of the part is given back.
                session.queue_flush();
                Ok(ending)
            }
        }
    }

    /// Queues changes of a group as one subscriber transaction (or a part of one), but for its
    /// [end](Self::ending). The dependent ones are queued after the free ones. True if their answers
    /// need not be looked at before the end is queued, because statements fail that find other rows
    /// than they must: where they can, they are `counted` for that.
    pub(crate) fn net(
        &mut self,
        session: &mut Session,
        group: &Group,
        which: Which,
        counted: bool,
        pending: &mut VecDeque<Pending>,
    ) -> Result<bool> {
        let mut sure = true;
        if which != Which::Dependent && group.works.first().is_some_and(|work| work.part.first) {
            queue_control(session, "begin", Pending::Begin, pending)?;
        }
        let (maps, rules, slots) = table_slots(group);
        let mut folder = Folder::new(&rules);
        let mut truncated = Vec::new();
        let mut dependent = group.dependent.changes.iter();
        for (index, work) in group.works.iter().enumerate() {
            for change in 0..work.part.len() {
                if which != Which::All {
                    let dependent = dependent.next().copied().unwrap_or_default();
                    if dependent != (which == Which::Dependent) {
                        continue;
                    }
                }
                let at = ChangeAt { part: number(index)?, change: number(change)? };
                let (message, touched) =
                    work.part.change(change).map_err(|e| Failure::internal(e.to_string()))?;
                match touched {
                    Touched::One(relation, _) => {
                        if let Some(slot) = slots[index][relation] {
                            self.count(&message);
                            folder.push(at, slot, &message);
                        }
                    }
                    Touched::Many(relations) => {
                        truncated.clear();
                        truncated
                            .extend(relations.iter().filter_map(|r| slots[index][*r as usize]));
                        if !truncated.is_empty() {
                            self.count(&message);
                            folder.push_truncate(at, &truncated);
                        }
                    }
                }
            }
        }
        for step in folder.finish() {
            match step {
                Step::Alone(at) => {
                    let work = &group.works[at.part as usize];
                    let changes = self.changes;
                    self.change(session, work, at, pending)
                        .map_err(|error| error.into_failure(work, at))?;
                    // It was counted above.
                    self.changes = changes;
                    sure &= matches!(pending.back(), Some(Pending::Truncate { .. }));
                }
                Step::Segment(segment) => {
                    let mut expect = |expected: Expected| {
                        sure &= expected.sure;
                        pending.push_back(Pending::Net { rows: expected.rows });
                    };
                    let (statements, buffers) = (&mut self.statements, &mut self.buffers);
                    let map = &maps[segment.table];
                    queue_segment(
                        session,
                        statements,
                        buffers,
                        map,
                        &segment,
                        counted,
                        &mut expect,
                    )
                    .map_err(not_queued)?;
                }
            }
        }
        session.queue_flush();
        Ok(sure)
    }

    /// What ends a group that was queued as one subscriber transaction. It may be queued when every
    /// statement is known to have affected as many rows as it must.
    pub(crate) fn ending(&mut self, group: &Group) -> Result<Option<Ending>> {
        let (Some(first), Some(last)) = (group.works.first(), group.works.last()) else {
            return Ok(None);
        };
        let last_part = number(group.works.len() - 1)?;
        let mut real = group.works.iter().filter(|work| !work.part.is_idle());
        let timed = real.next_back().unwrap_or(last);
        let transactions = real.count() + usize::from(!timed.part.is_idle());
        Ok(self.end_of(last, timed, first.predecessor, last_part, number(transactions)?))
    }

    /// What ends the subscriber transaction after `work`, `None` in the middle of a large one. Its time
    /// is that of `timed`, its last one that is not idle.
    fn end_of(
        &mut self,
        work: &Work,
        timed: &Work,
        predecessor: Lsn,
        part: u32,
        transactions: u32,
    ) -> Option<Ending> {
        let end = work.part.end_lsn?;
        let mut changes = std::mem::take(&mut self.changes);
        let mut time = None;
        if transactions > 0 {
            changes.transactions = transactions.into();
            changes.groups = 1;
            time = Some(timed.part.head.commit_time);
        }
        let prepared = match &work.two_phase {
            Some(TwoPhase::Prepare(prepared)) => Some(prepared.xid),
            _ => None,
        };
        Some(Ending {
            part,
            behind: false,
            time,
            memory: work.memory,
            commits: Committing { after: predecessor, end, changes, prepared },
            two_phase: work.two_phase.clone(),
        })
    }

    pub(crate) fn queue_ending(
        &self,
        session: &mut Session,
        ending: Ending,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        ending.queue(session, self.identity, pending)
    }

    fn count(&mut self, message: &Message<'_>) {
        match message {
            Message::Insert(_) => self.changes.inserts += 1,
            Message::Update(_) => self.changes.updates += 1,
            Message::Delete(_) => self.changes.deletes += 1,
            _ => self.changes.truncates += 1,
        }
    }

    /// Queues one change as the publisher sent it.
    fn change(
        &mut self,
        session: &mut Session,
        work: &Work,
        at: ChangeAt,
        pending: &mut VecDeque<Pending>,
    ) -> std::result::Result<(), ChangeError> {
        let change = work
            .part
            .change(at.change as usize)
            .map_err(|e| ChangeError::Internal(e.to_string()))?;
        let map = match change.1 {
            Touched::One(relation, _) => match &work.tables[relation] {
                Some(map) => map,
                None => return Ok(()),
            },
            Touched::Many(relations) => {
                let Message::Truncate(sent) = &change.0 else {
                    return Err(ChangeError::Internal("not a truncate".to_owned()));
                };
                let tables: Vec<_> =
                    relations.iter().filter_map(|r| work.tables[*r as usize].as_ref()).collect();
                if tables.is_empty() {
                    return Ok(());
                }
                self.count(&change.0);
                let sql = truncate::sql(&tables, sent, tables.len() == relations.len());
                queue_unnamed(session, &sql).map_err(ChangeError::Wire)?;
                pending.push_back(Pending::Truncate { at });
                return Ok(());
            }
        };
        self.count(&change.0);
        let mut plan = std::mem::take(&mut self.plan);
        let result = match &change.0 {
            Message::Insert(insert) => {
                values(map, &insert.new).map_err(ChangeError::Plan).and_then(|new| {
                    plan.set.reset(0);
                    plan.nulls.reset(0);
                    let step = &[(Operation::Insert, Expect::Any)][..];
                    self.steps(session, map, step, &plan, &new, &new, at, pending)
                })
            }
            Message::Update(update) => values(map, &update.new)
                .and_then(|new| {
                    let old =
                        update.old.as_ref().map(|old| values(map, old.tuple())).transpose()?;
                    let steps = plan_update(map, old.as_deref(), &new, &mut plan)?;
                    Ok((steps, old, new))
                })
                .map_err(ChangeError::Plan)
                .and_then(|(steps, old, new)| {
                    let search = old.as_ref().unwrap_or(&new);
                    self.steps(session, map, steps, &plan, &new, search, at, pending)
                }),
            Message::Delete(delete) => values(map, delete.old.tuple())
                .and_then(|old| Ok((plan_delete(map, &old, &mut plan)?, old)))
                .map_err(ChangeError::Plan)
                .and_then(|(steps, old)| {
                    self.steps(session, map, steps, &plan, &old, &old, at, pending)
                }),
            other => Err(ChangeError::Internal(format!("{other:?} is not a change"))),
        };
        self.plan = plan;
        result
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one change, used only here")]
    fn steps(
        &mut self,
        session: &mut Session,
        map: &TableMap,
        steps: &[(Operation, Expect)],
        plan: &UpdatePlan,
        new: &Values<'_>,
        search: &Values<'_>,
        at: ChangeAt,
        pending: &mut VecDeque<Pending>,
    ) -> std::result::Result<(), ChangeError> {
        for (operation, expect) in steps.iter().copied() {
            let change = RowChange { operation, plan, new, search, counted: None };
            bind::queue_row(session, &mut self.statements, map, &change)
                .map_err(ChangeError::Wire)?;
            pending.push_back(Pending::Change { at, expect });
        }
        Ok(())
    }
}

/// Progress row, COMMIT and Sync of a subscriber transaction; or PREPARE TRANSACTION and Sync.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    /// The last part, for messages.
    part: u32,
    /// Its predecessor is sent right before it, and not known to be committed: whatever the order
    /// of commits, it must not commit without it.
    behind: bool,
    /// When the publisher committed it.
    time: Option<Timestamp>,
    /// What is remembered of the publisher's history up to its end.
    memory: Option<Memory>,
    commits: Committing,
    two_phase: Option<TwoPhase>,
}

impl Ending {
    fn queue(
        self,
        session: &mut Session,
        identity: Identity,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        let Self { part, behind, time, memory, commits, two_phase } = self;
        match two_phase {
            None => {}
            Some(TwoPhase::Prepare(prepared)) => {
                queue_prepare(session, identity, &prepared, part, pending)
                    .map_err(|e| Failure::subscriber(&e, "preparing a transaction"))?;
                session.queue_sync();
                pending.push_back(Pending::Sync { commits: Some(commits) });
                return Ok(());
            }
            Some(TwoPhase::Commit(prepared) | TwoPhase::Rollback(prepared)) => {
                prepared
                    .queue_forget(session)
                    .map_err(|e| Failure::subscriber(&e, "recording progress"))?;
                pending.push_back(Pending::State);
            }
        }
        let Committing { after, end, .. } = commits;
        let statement = if behind && !identity.ordered { "progress_behind" } else { "progress" };
        let record = RecordParams::new(identity.id, (end, after), identity.epoch, time, memory);
        session
            .queue_bind(statement, record.params().into_iter())
            .map_err(|e| Failure::subscriber(&e, "recording progress"))?;
        session.queue_execute();
        pending.push_back(Pending::Progress { part });
        queue_control(session, "commit", Pending::Commit { part }, pending)?;
        session.queue_sync();
        pending.push_back(Pending::Sync { commits: Some(commits) });
        Ok(())
    }
}

/// What a prepared transaction ends with. It records no progress: its own row of progress would be in
/// the way of everything after it.
fn queue_prepare(
    session: &mut Session,
    identity: Identity,
    prepared: &PreparedHere,
    part: u32,
    pending: &mut VecDeque<Pending>,
) -> wire::Result<()> {
    // The server writes it to disk whatever this says, but waits for its standbys only so.
    session.queue_parse("", "SET LOCAL synchronous_commit TO on", &[]);
    session.queue_bind("", std::iter::empty())?;
    session.queue_execute();
    pending.push_back(Pending::State);
    prepared.queue_row(session, identity.epoch, identity.tagged)?;
    pending.push_back(Pending::Progress { part });
    prepared.queue_prepare(session)?;
    pending.push_back(Pending::Commit { part });
    Ok(())
}

/// The changes of a segment cannot be sent; by rows, the one that is to blame is named.
fn not_queued(error: SetError) -> Failure {
    match error {
        SetError::Plan(_) | SetError::Apart => {
            Failure::new(Class::Mismatch, format!("cannot apply net changes: {error}"))
        }
        SetError::Wire(error) => Failure::subscriber(&error, "sending net changes"),
    }
}

/// The distinct table versions of a group, their rules, and for each part and relation which of
/// them it is.
type Slots = (Vec<Arc<TableMap>>, Vec<TableRules>, Vec<Vec<Option<usize>>>);

fn table_slots(group: &Group) -> Slots {
    let (mut maps, mut rules) = (Vec::<Arc<TableMap>>::new(), Vec::new());
    let slots = group.works.iter().map(|work| {
        let of_work = work.tables.iter().map(|table| {
            let table = table.as_ref()?;
            // A group touches few tables, and mostly the same ones again: search backwards.
            let known = maps.iter().rposition(|map| Arc::ptr_eq(map, table));
            Some(known.unwrap_or_else(|| {
                maps.push(Arc::clone(table));
                rules.push(table.rules.clone());
                maps.len() - 1
            }))
        });
        of_work.collect()
    });
    let slots = slots.collect();
    (maps, rules, slots)
}

fn queue_control(
    session: &mut Session,
    statement: &str,
    awaited: Pending,
    pending: &mut VecDeque<Pending>,
) -> Result<()> {
    session
        .queue_bind(statement, std::iter::empty())
        .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
    session.queue_execute();
    pending.push_back(awaited);
    Ok(())
}

fn queue_unnamed(session: &mut Session, sql: &str) -> wire::Result<()> {
    session.queue_parse("", sql, &[]);
    session.queue_bind("", std::iter::empty())?;
    session.queue_execute();
    Ok(())
}

/// Groups have far fewer than 2^32 parts, parts far fewer changes.
fn number(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|_| Failure::internal("a group is too large"))
}

/// Why a change could not be turned into statements.
#[derive(Debug)]
enum ChangeError {
    Plan(PlanError),
    Wire(wire::Error),
    Internal(String),
}

impl ChangeError {
    fn into_failure(self, work: &Work, at: ChangeAt) -> Failure {
        let mut failure = match self {
            Self::Plan(error) => {
                let class = match error {
                    PlanError::Misread { .. } => Class::Apply,
                    _ => Class::Mismatch,
                };
                let failure = Failure::new(class, format!("cannot apply a change: {error}"));
                match error {
                    PlanError::NoSearch { hint, .. } => failure.hint(hint),
                    PlanError::Misread { .. } => failure.hint(MISREAD_HINT),
                    _ => failure,
                }
            }
            Self::Wire(error) => Failure::subscriber(&error, "sending a change"),
            Self::Internal(message) => Failure::internal(message),
        };
        failure.offender = Some(Box::new(offender(work, Some(at.change as usize))));
        failure
    }
}
