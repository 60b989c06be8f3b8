//! Encodes groups in either mode: queues their statements on a session, and the expected replies.

pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod fold;
pub(crate) mod lacking;
pub(crate) mod resolution;
pub(crate) mod sought;
mod user_code;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use engine::net::{ChangeAt, Step};
use engine::transaction::Touched;
use pgoutput::{Lsn, Message, Timestamp};
use wire::{Param, Session};

use crate::apply::apply_session::Identity;
use crate::apply::expected::{Committing, Expected};
use crate::apply::offender::offender;
use crate::apply::work::{Group, TwoPhase, Work};
use crate::error::{Class, Failure, Recovery, Result};
use crate::subscriber::format::MISREAD_HINT;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::statistics::Changes;
use crate::subscriber::statement::bind::{self, RowChange};
use crate::subscriber::statement::cache::StatementCache;
use crate::subscriber::statement::copy::CopiedColumns;
use crate::subscriber::statement::row::{
    Expect, Operation, PlanError, UpdatePlan, Values, plan_delete, plan_update, values,
};
use crate::subscriber::statement::set::{self, SetBuffers, SetError, queue_segment};
use crate::subscriber::statement::truncate;
use control::queue_control;
use ending::{Ending, Then};
use fold::{GroupTables, Which, number};
use lacking::LackingTables;
use sought::{SoughtNumber, SoughtRows};
use user_code::SettingsInDoubt;

/// How far an [`Encoder`] has come.
#[derive(Debug, Clone)]
pub(crate) struct EncoderPosition {
    /// How many statements were parsed in all.
    parsed: u64,
    /// The changes of the subscriber transaction so far.
    changes: Changes,
    /// Its tables that lack values so far.
    lacking: LackingTables,
    /// The next statement that may miss rows.
    sought: SoughtNumber,
    /// Whether the subscriber transaction has run user code so far.
    user_code: bool,
}

/// Queues statements on one session, on which [`control::prepare_control`] has run. It keeps track of the
/// statements that it prepared there itself.
pub(crate) struct Encoder {
    identity: Identity,
    statements: StatementCache,
    plan: UpdatePlan,
    buffers: SetBuffers,
    /// The changes of the subscriber transaction that is being queued, which may have several parts.
    changes: Changes,
    /// The tables in which it inserts rows without a value that the publisher did not send.
    lacking: LackingTables,
    /// The end of the last transaction that the session is known to have committed.
    committed: Option<Lsn>,
    /// Whether a part of a transaction can be rolled back alone, to be executed by rows.
    savepoints: bool,
    /// The rows that statements in flight look for and that may be missing; `None` if statements do not
    /// say which are.
    sought: Option<SoughtRows>,
    in_doubt: SettingsInDoubt,
}

impl Encoder {
    pub(crate) fn new(identity: Identity) -> Self {
        Self {
            identity,
            statements: StatementCache::default(),
            plan: UpdatePlan::default(),
            buffers: SetBuffers::default(),
            changes: Changes::default(),
            lacking: LackingTables::default(),
            committed: None,
            savepoints: true,
            sought: Some(SoughtRows::default()),
            in_doubt: SettingsInDoubt::default(),
        }
    }

    /// The session has committed this.
    pub(crate) fn committed(&mut self, commits: &Committing) {
        // A prepared transaction has no progress row.
        if commits.prepared.is_none() {
            self.committed = Some(commits.end);
        }
    }

    /// Whether statements can say which rows are missing.
    pub(crate) fn says_which_are_missing(&self) -> bool {
        self.sought.is_some()
    }

    /// The rows that statements in flight look for and that may be missing.
    pub(crate) fn sought(&mut self) -> Option<&mut SoughtRows> {
        self.sought.as_mut()
    }

    /// The same for a session that sets savepoints of its own, and keeps the changes that it has sent.
    pub(crate) fn without_savepoints(self) -> Self {
        Self { savepoints: false, sought: None, ..self }
    }

    /// See [`StatementCache::prepared`].
    pub(crate) fn prepared(&self) -> Duration {
        self.statements.prepared()
    }

    /// Where it stands now: see [`Self::forget_after`].
    pub(crate) fn position(&self) -> EncoderPosition {
        let sought = self.sought.as_ref().map(SoughtRows::position).unwrap_or_default();
        let (parsed, lacking) = (self.statements.parsed(), self.lacking.clone());
        let user_code = self.in_doubt.ran_user_code();
        EncoderPosition { parsed, changes: self.changes, lacking, sought, user_code }
    }

    /// Everything that was queued after this position is rolled back or not sent. The server may have
    /// the statements that were parsed there or not, so they are closed and not used again.
    pub(crate) fn forget_after(&mut self, session: &mut Session, position: EncoderPosition) {
        (self.changes, self.lacking) = (position.changes, position.lacking);
        self.in_doubt.undone();
        self.in_doubt.set_ran_user_code(position.user_code);
        if let Some(sought) = &mut self.sought {
            sought.forget_from(position.sought);
        }
        for name in self.statements.forget_after(position.parsed) {
            session.queue_close_statement(&name);
        }
    }

    /// The session has executed everything that was queued before this position.
    pub(crate) fn executed(&mut self, position: &EncoderPosition) {
        self.statements.executed(position.parsed);
    }

    /// The changes counted so far of the subscriber transaction that is being queued.
    pub(crate) fn counted(&self) -> Changes {
        self.changes
    }

    /// Everything that was queued since then is undone: sets the count back, and doubts the settings. A table that may
    /// lack values stays one.
    pub(crate) fn set_counted(&mut self, changes: Changes) {
        self.in_doubt.undone();
        self.changes = changes;
    }

    /// Whether commits are tagged with a replication origin.
    pub(crate) fn is_tagged(&self) -> bool {
        self.identity.tagged
    }

    /// SQL that tags the next COMMIT PREPARED with the origin, like every other commit, if commits are tagged.
    pub(crate) fn tag_sql(&self, time: Timestamp) -> Option<String> {
        self.identity.tagged.then(|| {
            format!(
                "SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', \
                 '2000-01-01 00:00:00+00'::pg_catalog.timestamptz \
                   + '{}'::pg_catalog.int8 * '1 microsecond'::pg_catalog.interval)",
                time.0
            )
        })
    }

    /// Queues these members of a group by rows: one subscriber transaction, and one statement for each
    /// change in stream order. The COMMIT of a transaction begins the next one of the group. Returns the
    /// end of a transaction whose first parts were sent before, because those must be answered first;
    /// and of one that is `ahead` of its turn.
    pub(crate) fn rows(
        &mut self,
        session: &mut Session,
        group: &Group,
        members: Range<usize>,
        ahead: bool,
        expected: &mut VecDeque<Expected>,
    ) -> Result<Option<Ending>> {
        let begins = group.works[members.start].part.first;
        // Citus was not tried with chains.
        let chains = !self.identity.citus;
        if begins && (members.start == 0 || !chains) {
            self.begin(session, &group.works[members.start], expected)?;
        } else if begins {
            self.ensure_all_settings(session, expected)?;
        }
        for index in members.clone() {
            self.changes_of(session, &group.works[index], number(index)?, expected)?;
        }
        // A prepared transaction counts when it is committed.
        let counts = |work: &Work| !matches!(work.two_phase, Some(TwoPhase::Prepare(_)));
        match self.ending_of(group, members.clone(), counts)? {
            Some(ending) if begins && !ahead => {
                // The subscriber answers at the Sync. After an error it skips everything up to there.
                let last = members.end == group.works.len();
                let then = match (last, chains) {
                    (true, _) => Then::Sync,
                    (false, true) => Then::Chained,
                    (false, false) => Then::Begin,
                };
                // The predecessor is sent right before, in the same pipeline, or has committed.
                let follows = members.start > 0 || self.has_committed(ending.commits.after);
                ending.queue(session, self.identity, (follows, then), expected)?;
                Ok(None)
            }
            ending => {
                // The server answers at once, so that the part's memory becomes free.
                session.queue_flush();
                Ok(ending)
            }
        }
    }

    /// Queues a whole group as one subscriber transaction: one statement for each change in stream order,
    /// and its end.
    pub(crate) fn in_order(
        &mut self,
        session: &mut Session,
        group: &Group,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        let Some(first) = group.works.first() else { return Ok(()) };
        self.begin(session, first, expected)?;
        for (index, work) in group.works.iter().enumerate() {
            self.changes_of(session, work, number(index)?, expected)?;
        }
        match self.ending(group)? {
            Some(ending) => self.queue_ending(session, ending, expected),
            None => Err(Failure::internal("a group in stream order is incomplete")),
        }
    }

    /// Queues changes of a group as one subscriber transaction, or a part of one, without its
    /// [end](Self::ending). The dependent changes come after the independent ones. True if every
    /// statement fails by itself when it finds other rows than it must: then the end can follow at once.
    /// Where statements can count their rows for that, `counted` has them do it.
    pub(crate) fn net(
        &mut self,
        session: &mut Session,
        group: &Group,
        which: Which,
        counted: bool,
        expected: &mut VecDeque<Expected>,
    ) -> Result<bool> {
        let mut sure = true;
        match group.works.first() {
            Some(work) if which != Which::Dependent && work.part.first => {
                self.begin(session, work, expected)?;
            }
            Some(_) if which != Which::Dependent && self.savepoints => {
                // If this part fails as sets, it alone is rolled back.
                queue_control(session, "release", Expected::Control, expected)?;
                queue_control(session, "savepoint", Expected::Control, expected)?;
            }
            _ => {}
        }
        let mut tables = GroupTables::of(group);
        for (map, rules) in tables.maps.iter().zip(&mut tables.rules) {
            let expected = map.missing.runs() && map.can_miss_rows();
            rules.seeks = expected && self.sought.is_some();
        }
        let mut copied = Vec::new();
        for step in tables.fold(group, which, |message, map| self.count(message, map))? {
            match step {
                Step::Alone(at) => {
                    let work = &group.works[at.part as usize];
                    let changes = self.changes;
                    self.change(session, work, at, expected)
                        .map_err(|error| error.into_failure(work, at))?;
                    // It is counted already.
                    self.changes = changes;
                    sure &= matches!(expected.back(), Some(Expected::Truncate { .. }));
                }
                Step::Segment(segment) => {
                    let map = &tables.maps[segment.table];
                    self.in_doubt.heed(map);
                    self.ensure_all_settings(session, expected)?;
                    let table = number(segment.table)?;
                    let sought = &mut self.sought;
                    let mut expect = |set: set::Expected<'_>| {
                        sure &= set.sure;
                        if set.misreads && copied.last() != Some(&segment.table) {
                            copied.push(segment.table);
                        }
                        let number = set
                            .sought
                            .zip(sought.as_mut())
                            .map(|(rows, sought)| sought.queued(rows, &segment.seeks, map));
                        expected.push_back(match number {
                            Some(number) => Expected::Sought { number, table },
                            None => Expected::Net { rows: set.rows, table },
                        });
                    };
                    let (statements, buffers) = (&mut self.statements, &mut self.buffers);
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
        if !copied.is_empty() {
            queue_types(session, copied.iter().map(|table| &*tables.maps[*table]))
                .map_err(|e| Failure::subscriber(&e, "sending net changes"))?;
            expected.push_back(Expected::Control);
        }
        session.queue_flush();
        Ok(sure)
    }

    /// Counts a change of this table, or a TRUNCATE.
    fn count(&mut self, message: &Message<'_>, map: Option<&TableMap>) {
        match message {
            Message::Insert(insert) => {
                self.changes.inserts += 1;
                if let Some(map) = map {
                    self.lacking.add_if_lacks(map, &insert.new);
                }
            }
            Message::Update(_) => self.changes.updates += 1,
            Message::Delete(_) => self.changes.deletes += 1,
            _ => self.changes.truncates += 1,
        }
    }

    /// Queues all changes of part `part` of a group as the publisher sent them.
    fn changes_of(
        &mut self,
        session: &mut Session,
        work: &Work,
        part: u32,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        for change in 0..work.part.len() {
            let at = ChangeAt { part, change: number(change)? };
            self.change(session, work, at, expected)
                .map_err(|error| error.into_failure(work, at))?;
        }
        Ok(())
    }

    /// Queues one change as the publisher sent it.
    fn change(
        &mut self,
        session: &mut Session,
        work: &Work,
        at: ChangeAt,
        expected: &mut VecDeque<Expected>,
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
                self.count(&change.0, None);
                tables.iter().for_each(|map| self.in_doubt.heed(map));
                self.ensure_settings(session, None, expected).map_err(ChangeError::Wire)?;
                tables.iter().for_each(|map| self.in_doubt.changes(map));
                for statement in truncate::statements(&tables, sent, relations.len()) {
                    let (sql, awaited) = match statement {
                        truncate::Statement::Truncate(sql) => (sql, Expected::Truncate { at }),
                        truncate::Statement::Role(sql) => (sql.to_owned(), Expected::Control),
                    };
                    session
                        .queue_statement(&sql, &[], [].into_iter())
                        .map_err(ChangeError::Wire)?;
                    expected.push_back(awaited);
                }
                return Ok(());
            }
        };
        self.count(&change.0, Some(map));
        self.ensure_settings(session, Some(map), expected).map_err(ChangeError::Wire)?;
        let mut plan = std::mem::take(&mut self.plan);
        let result = match &change.0 {
            Message::Insert(insert) => {
                values(map, &insert.new).map_err(ChangeError::Plan).and_then(|new| {
                    plan.set.reset(0);
                    plan.nulls.reset(0);
                    let step = &[(Operation::Insert, Expect::Any)][..];
                    self.steps(session, map, step, &plan, &new, &new, at, expected)
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
                    self.steps(session, map, steps, &plan, &new, search, at, expected)
                }),
            Message::Delete(delete) => values(map, delete.old.tuple())
                .and_then(|old| Ok((plan_delete(map, &old, &mut plan)?, old)))
                .map_err(ChangeError::Plan)
                .and_then(|(steps, old)| {
                    self.steps(session, map, steps, &plan, &old, &old, at, expected)
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
        expected: &mut VecDeque<Expected>,
    ) -> std::result::Result<(), ChangeError> {
        for (operation, expect) in steps.iter().copied() {
            let change = RowChange { operation, plan, new, search, counted: None };
            self.ensure_encoding(session, expected).map_err(ChangeError::Wire)?;
            self.in_doubt.changes(map);
            bind::queue_row(session, &mut self.statements, map, &change)
                .map_err(ChangeError::Wire)?;
            expected.push_back(match operation {
                Operation::Look => Expected::Look { at },
                _ => Expected::Change { at, expect },
            });
        }
        Ok(())
    }
}

/// Queues the look at the types of columns that were copied in binary format.
fn queue_types<'m>(
    session: &mut Session,
    maps: impl Iterator<Item = &'m TableMap>,
) -> wire::Result<()> {
    let mut columns = CopiedColumns::default();
    maps.for_each(|map| columns.add(map));
    let params = columns.params();
    session.queue_bind("column_types", params.iter().map(|param| Param::Text(param.as_bytes())))?;
    session.queue_execute();
    Ok(())
}

/// The changes of a segment cannot be encoded. Applied by rows, the offending one is named.
fn not_queued(error: SetError) -> Failure {
    match error {
        SetError::Plan(_) | SetError::Apart => {
            Failure::new(Class::Mismatch, format!("cannot apply net changes: {error}"))
        }
        SetError::Wire(error) => Failure::subscriber(&error, "sending net changes"),
    }
}

/// Why a change cannot be encoded.
/// The next step if a missing row cannot be inserted.
const UNCHANGED_HINT: &str = "Insert the row on the subscriber, or leave the change out: --on-conflict \
    TABLE:update_missing=skip, and afterwards pgapace verify and pgapace repair. With REPLICA IDENTITY FULL of the table \
    on the publisher, later changes have all values.";

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
                    PlanError::NoSearch { hint, .. } => {
                        Failure { recovery: Recovery::ReadCatalogue, ..failure }.hint(hint)
                    }
                    PlanError::UnknownPlacement { .. } => {
                        Failure { recovery: Recovery::ReadCatalogue, ..failure }
                    }
                    PlanError::UnchangedValue { .. } => failure.hint(UNCHANGED_HINT),
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
