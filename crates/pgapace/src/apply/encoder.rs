//! Groups to queued statements: what is sent for a transaction, in both modes.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::net::{ChangeAt, Folder, Step, TableRules};
use engine::transaction::Touched;
use pgoutput::{Lsn, Message, Truncate};
use wire::Session;

use crate::apply::answers::{Committing, Pending};
use crate::apply::offender::offender;
use crate::apply::statement_cache::StatementCache;
use crate::apply::work::{Group, Work};
use crate::apply::worker::Identity;
use crate::error::{Class, Failure, Result};
use crate::target::mapping::TableMap;
use crate::target::state::progress::{RECORD_TYPES, RecordParams, record_sql};
use crate::target::state::statistics::Counters;
use crate::target::statement::column_set::ColumnSet;
use crate::target::statement::row::{
    Expect, Operation, PlanError, Source, UpdatePlan, Values, param, plan_delete, plan_update,
    values,
};

/// Queues statements on one session. What it has prepared there it remembers.
pub(crate) struct Encoder {
    identity: Identity,
    statements: StatementCache,
    plan: UpdatePlan,
    no_columns: ColumnSet,
    /// Of the target transaction that is being queued, which may have several parts.
    counters: Counters,
}

impl Encoder {
    pub(crate) fn new(identity: Identity) -> Self {
        Self {
            identity,
            statements: StatementCache::default(),
            plan: UpdatePlan::default(),
            no_columns: ColumnSet::default(),
            counters: Counters::default(),
        }
    }

    /// Queues what every transaction uses; the server answers without being waited for.
    pub(crate) fn prepare_control(&mut self, session: &mut Session) {
        session.queue_parse("begin", "BEGIN", &[]);
        session.queue_parse("commit", "COMMIT", &[]);
        session.queue_parse("progress", &record_sql(self.identity.tagged), &RECORD_TYPES);
    }

    /// The session's statements are deallocated, and the transaction in hand rolled back.
    pub(crate) fn forget(&mut self, session: &mut Session) {
        self.statements.forget();
        self.counters = Counters::default();
        self.prepare_control(session);
    }

    /// Queues part `index` of a group by rows: a source transaction is a target transaction, one
    /// statement for each change in stream order.
    pub(crate) fn rows(
        &mut self,
        session: &mut Session,
        group: &Group,
        index: usize,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
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
        self.end(session, work, work.predecessor, part, 1, pending)
    }

    /// Queues a group as one target transaction (or a part of one): its net changes.
    pub(crate) fn net(
        &mut self,
        session: &mut Session,
        group: &Group,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (group.works.first(), group.works.last()) else {
            return Ok(());
        };
        if first.part.first {
            queue_control(session, "begin", Pending::Begin, pending)?;
        }
        let (maps, rules, slots) = table_slots(group);
        let mut folder = Folder::new(&rules);
        let mut truncated = Vec::new();
        for (index, work) in group.works.iter().enumerate() {
            for change in 0..work.part.len() {
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
                    let counters = self.counters;
                    self.change(session, work, at, pending)
                        .map_err(|error| error.into_failure(work, at))?;
                    // It was counted above.
                    self.counters = counters;
                }
                Step::Segment(segment) => {
                    let map = &maps[segment.table];
                    let _ = map;
                    return Err(Failure::internal("no set statements yet"));
                }
            }
        }
        let transactions = number(group.works.len())?;
        self.end(session, last, first.predecessor, transactions - 1, transactions, pending)
    }

    /// Queues the end of a target transaction after its last part, or, in the middle of a large
    /// one, asks the server for its answers, so that the memory of the part is given back.
    fn end(
        &mut self,
        session: &mut Session,
        work: &Work,
        predecessor: Lsn,
        part: u32,
        transactions: u32,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        let Some(end) = work.part.end_lsn else {
            session.queue_flush();
            return Ok(());
        };
        let Identity { id, epoch, .. } = self.identity;
        let time = (!work.part.is_idle()).then_some(work.part.head.commit_time);
        let record = RecordParams::new(id, end, predecessor, epoch, time);
        session
            .queue_bind("progress", record.params().into_iter())
            .map_err(|e| Failure::target(&e, "recording progress"))?;
        session.queue_execute();
        pending.push_back(Pending::Progress { part });
        queue_control(session, "commit", Pending::Commit { part }, pending)?;
        session.queue_sync();
        let mut counters = std::mem::take(&mut self.counters);
        if !work.part.is_idle() {
            counters.transactions = transactions.into();
        }
        pending.push_back(Pending::Sync { commits: Some(Committing { end, counters }) });
        Ok(())
    }

    fn count(&mut self, message: &Message<'_>) {
        match message {
            Message::Insert(_) => self.counters.inserts += 1,
            Message::Update(_) => self.counters.updates += 1,
            Message::Delete(_) => self.counters.deletes += 1,
            _ => self.counters.truncates += 1,
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
                let Message::Truncate(truncate) = &change.0 else {
                    return Err(ChangeError::Internal("not a truncate".to_owned()));
                };
                let tables: Vec<_> =
                    relations.iter().filter_map(|r| work.tables[*r as usize].as_ref()).collect();
                if tables.is_empty() {
                    return Ok(());
                }
                self.count(&change.0);
                queue_truncate(session, &tables, truncate).map_err(ChangeError::Wire)?;
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
            let set = match operation {
                Operation::Probe | Operation::Delete | Operation::Insert => &self.no_columns,
                _ => &plan.set,
            };
            let (prepared, first) = self.statements.get(map, operation, set, &plan.nulls);
            for name in &first.close {
                session.queue_close_statement(name);
            }
            if let Some((sql, types)) = &first.parse {
                tracing::debug!(statement = prepared.name, sql, "preparing");
                session.queue_parse(&prepared.name, sql, types);
            }
            let params = prepared.sources.iter().map(|source| match source {
                Source::New(column) => param(&new[*column]),
                Source::Search(column) => param(&search[*column]),
            });
            session.queue_bind(&prepared.name, params).map_err(ChangeError::Wire)?;
            session.queue_execute();
            pending.push_back(Pending::Change { at, expect });
        }
        Ok(())
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
        .map_err(|e| Failure::target(&e, "queueing a statement"))?;
    session.queue_execute();
    pending.push_back(awaited);
    Ok(())
}

/// All relations in one statement, so that foreign keys between them allow it. CASCADE is not
/// passed on: the publisher lists the tables that its own cascade reached (reference 4).
fn queue_truncate(
    session: &mut Session,
    tables: &[&Arc<TableMap>],
    truncate: &Truncate<'_>,
) -> wire::Result<()> {
    let names: Vec<_> = tables.iter().map(|map| map.table.sql_only()).collect();
    let sql = format!(
        "TRUNCATE TABLE {}{}",
        names.join(", "),
        if truncate.restart_identity { " RESTART IDENTITY" } else { "" }
    );
    session.queue_parse("", &sql, &[]);
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
        failure.offender = Some(Box::new(offender(work, Some(at.change as usize))));
        failure
    }
}
