//! Conflicts that a rule of the user decides: one source transaction, change by change.
//!
//! Where rules exist, a group that does not do exactly what it must, as sets, comes here, one
//! transaction after the other (only of the oldest group: see `worker`). Each is tried as it was sent
//! first, in one round trip. If every change did what it must, it is committed. If not, it is rolled
//! back and carried out again with a savepoint before each change, and each is judged before the
//! next is sent: the rule acts on that change alone. What was decided is written to
//! `pgapace.conflict` in the same target transaction, as progress is: so it is there exactly if the
//! transaction is, and the same at every group size.

mod exchange;
mod record;
pub(crate) mod requirements;

use std::collections::VecDeque;

use engine::net::ChangeAt;
use engine::transaction::Touched;
use pgoutput::{Lsn, Message};
use wire::Session;

use crate::apply::answers::{Committing, Context, Pending, not_one_row};
use crate::apply::conflicts::exchange::{Awaited, Seen, exchange};
use crate::apply::encoder::Encoder;
use crate::apply::encoder::resolution::How;
use crate::apply::offender::offender;
use crate::apply::work::{Group, Work};
use crate::error::{Class, Failure, Offender, Result};
use crate::target::conflict::{Action, ConflictType, TablePolicy, action};
use crate::target::mapping::TableMap;
use crate::target::origin;
use crate::target::state::SubscriptionId;
use crate::target::state::statistics::{Changes, Counters};
use crate::target::statement::row::Expect;

/// Conflicts of one part that are kept to be named in the log; all are in `pgapace.conflict`.
const KEPT: usize = 100;

/// Whether rules may decide something for a transaction.
pub(crate) fn decides(work: &Work) -> bool {
    work.tables.iter().flatten().any(|map| map.conflicts.is_some())
}

/// What the user can do about a change that cannot be applied.
pub(crate) fn what_to_do(kind: Option<ConflictType>, commit_lsn: Lsn) -> String {
    let choose = kind.map_or(String::new(), |kind| {
        format!(", choose what is done about {} (--on-conflict)", kind.name())
    });
    format!(
        "Change the conflicting row or the constraint on the target{choose}, or leave the \
         transaction out (pgapace skip --lsn {commit_lsn}); then start pgapace again: it goes on \
         with this transaction."
    )
}

/// A conflict that a rule has decided.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) kind: ConflictType,
    pub(crate) action: Action,
    /// Whether the change was carried out, if not as it was sent.
    pub(crate) applied: bool,
    pub(crate) offender: Offender,
}

/// What has become of a transaction, or of a part of it.
#[derive(Debug)]
pub(crate) struct Judged {
    /// `None` in the middle of a transaction.
    pub(crate) committed: Option<Committing>,
    /// Conflicts only.
    pub(crate) counters: Counters,
    pub(crate) conflicts: Vec<Conflict>,
    /// How many more there were.
    pub(crate) more: u64,
}

/// Carries out part `index` of a group. The session must be idle, or inside the transaction whose
/// earlier parts were carried out here. `pending` is empty, unless the session was lost at a commit.
///
/// # Errors
/// What stops the subscription: a conflict whose rule is `error`, and every other error. The target
/// transaction is then open, and the session of no more use.
pub(crate) fn carry_out(
    session: &mut Session,
    encoder: &mut Encoder,
    group: &Group,
    index: usize,
    pending: &mut VecDeque<Pending>,
) -> Result<Judged> {
    let part = u32::try_from(index).map_err(|_| Failure::internal("a group is too large"))?;
    let id = encoder.subscription();
    let mut judge = Judge {
        session,
        encoder,
        id,
        pending,
        context: Context { group: Some(group) },
        work: &group.works[index],
        part,
        awaited: VecDeque::new(),
        savepoint: false,
        changes: Changes::default(),
        counters: Counters::default(),
        conflicts: Vec::new(),
        more: 0,
    };
    let at_once = if judge.work.is_whole() { judge.at_once()? } else { None };
    let committed = match at_once {
        Some(committed) => Some(committed),
        None => judge.one_by_one()?,
    };
    let Judge { counters, conflicts, more, .. } = judge;
    Ok(Judged { committed, counters, conflicts, more })
}

/// Why a change did not do what it must.
enum Trouble {
    Refused { kind: ConflictType, error: wire::Error },
    Missing { kind: ConflictType },
}

impl Trouble {
    fn kind(&self) -> ConflictType {
        match self {
            Self::Refused { kind, .. } | Self::Missing { kind } => *kind,
        }
    }
}

/// Who made the row that is about to be changed.
struct Made {
    /// Microseconds since 1970, as the commit timestamp on the target; `None` if it is not known,
    /// or not committed.
    at: Option<i64>,
    /// Whether this subscription did, when it applied changes or when it copied the table.
    by_us: bool,
}

struct Judge<'a> {
    session: &'a mut Session,
    encoder: &'a mut Encoder,
    id: SubscriptionId,
    context: Context<'a>,
    work: &'a Work,
    part: u32,
    awaited: VecDeque<Awaited>,
    /// Has the commit while it is not known whether it has taken effect.
    pending: &'a mut VecDeque<Pending>,
    /// Whether there is a savepoint, the change after which stays.
    savepoint: bool,
    /// Of the target transaction so far.
    changes: Changes,
    counters: Counters,
    conflicts: Vec<Conflict>,
    more: u64,
}

impl<'a> Judge<'a> {
    /// The transaction as it was sent; `None` if it must be looked at more closely.
    fn at_once(&mut self) -> Result<Option<Committing>> {
        let parsed = self.encoder.parsed();
        self.begin()?;
        for change in 0..self.work.part.len() {
            let at = self.at(change)?;
            if self.looks_before(at).is_some() {
                self.queue(at, How::Look)?;
            }
            self.queue(at, How::AsSent)?;
        }
        let seen = self.exchange()?;
        if seen.error.is_none() && self.is_as_expected(&seen) {
            return self.end();
        }
        self.control("ROLLBACK")?;
        self.exchange_control()?;
        self.encoder.forget_after(self.session, parsed);
        Ok(None)
    }

    fn one_by_one(&mut self) -> Result<Option<Committing>> {
        if self.work.part.first {
            self.begin()?;
        }
        // Those of earlier parts.
        self.changes = self.encoder.take_changes();
        for change in 0..self.work.part.len() {
            let at = self.at(change)?;
            if self.may_be_changed(at)?
                && let Some(trouble) = self.attempt(at, How::AsSent)?
            {
                self.decide(at, &trouble)?;
            }
        }
        self.release()?;
        self.encoder.put_changes(self.changes);
        self.exchange_control()?;
        self.end()
    }

    /// What the rule about other people's rows says, where there is one. False skips the change.
    fn may_be_changed(&mut self, at: ChangeAt) -> Result<bool> {
        let Some((kind, policy)) = self.looks_before(at) else { return Ok(true) };
        let made = self.look(at)?;
        let Some(Made { at: Some(time), by_us: false }) = made else { return Ok(true) };
        let action = policy.action(kind);
        let applied = match action {
            Action::Error => {
                let message = "the row to be changed was made by somebody else";
                return Err(self.refuse(at, kind, Failure::new(Class::Apply, message)));
            }
            Action::Skip => false,
            Action::Apply => true,
            Action::LastUpdateWins => self.is_later_than(time),
        };
        self.record(at, kind, action, applied, None)?;
        Ok(applied)
    }

    /// What the rule says about a change that did not do what it must.
    fn decide(&mut self, at: ChangeAt, trouble: &Trouble) -> Result<()> {
        let kind = trouble.kind();
        let action = self.action(at, kind);
        let (error, failure) = match trouble {
            Trouble::Refused { error, .. } => (Some(error), self.explain(error, at)),
            Trouble::Missing { .. } => {
                (None, Failure::new(Class::Apply, "the row to be changed is not on the target"))
            }
        };
        if action == Action::Error {
            return Err(self.refuse(at, kind, failure));
        }
        if error.is_some() {
            self.undo()?;
        }
        let apply = match action {
            Action::LastUpdateWins => match self.look(at)? {
                Some(Made { at: Some(time), .. }) => self.is_later_than(time),
                _ => true,
            },
            action => action == Action::Apply,
        };
        if !apply {
            return self.record(at, kind, action, false, error);
        }
        let how = match kind {
            ConflictType::UpdateMissing => How::UpdateAsInsert,
            _ => How::InsertAsUpdate,
        };
        match self.attempt(at, how)? {
            None => self.record(at, kind, action, true, error),
            // The row of its key could be changed but for another row.
            Some(Trouble::Refused { kind: ConflictType::InsertExists, error })
                if kind == ConflictType::InsertExists =>
            {
                let kind = ConflictType::MultipleUniqueConflicts;
                let action = self.action(at, kind);
                if action == Action::Error {
                    let failure = self.explain(&error, at);
                    return Err(self.refuse(at, kind, failure));
                }
                self.undo()?;
                self.record(at, kind, action, false, Some(&error))
            }
            Some(Trouble::Refused { kind, error }) => {
                let failure = self.explain(&error, at);
                Err(self.refuse(at, kind, failure))
            }
            // The row in the way has another key: which of the two rows is meant nobody knows.
            Some(Trouble::Missing { .. }) => Err(self.refuse(at, kind, failure)),
        }
    }

    /// Carries out one change after a savepoint.
    fn attempt(&mut self, at: ChangeAt, how: How) -> Result<Option<Trouble>> {
        self.release()?;
        self.control("SAVEPOINT pgapace")?;
        self.savepoint = true;
        let parsed = self.encoder.parsed();
        self.queue(at, how)?;
        let seen = self.exchange()?;
        if let Some((error, awaited)) = seen.error {
            if !matches!(awaited.pending, Pending::Change { .. }) {
                return Err(self.context.explain(&error, Some(awaited.pending)));
            }
            let Some(kind) = self.kind(&error, at) else {
                return Err(self.context.explain(&error, Some(awaited.pending)));
            };
            self.encoder.forget_after(self.session, parsed);
            return Ok(Some(Trouble::Refused { kind, error }));
        }
        self.changes.add(&self.encoder.take_changes());
        match seen.rows_changed() {
            None | Some(1) => Ok(None),
            Some(0) => {
                let kind = match self.change(at) {
                    Some(Message::Delete(_)) => ConflictType::DeleteMissing,
                    _ => ConflictType::UpdateMissing,
                };
                Ok(Some(Trouble::Missing { kind }))
            }
            Some(rows) => Err(not_one_row(rows, self.offender(at))),
        }
    }

    /// Locks the row of a change and tells who made it; `None` if it is not there.
    fn look(&mut self, at: ChangeAt) -> Result<Option<Made>> {
        self.queue(at, How::Look)?;
        let seen = self.exchange()?;
        if let Some((error, awaited)) = seen.error {
            return Err(self.context.explain(&error, Some(awaited.pending)));
        }
        let row = seen.statements.into_iter().rev().find_map(|statement| statement.row);
        Ok(row.map(|row| self.made(at, &row)))
    }

    fn made(&self, change: ChangeAt, row: &[Option<String>]) -> Made {
        let cell = |index: usize| row.get(index).and_then(Option::as_deref);
        let ours = origin::prefix_in(cell(2).unwrap_or_default(), self.id);
        let at = cell(0).and_then(|time| time.parse().ok());
        let copied_at = self.map(change).and_then(|map| map.conflicts.as_ref()?.copied_at);
        let copied = at.is_some_and(|at| copied_at.is_some_and(|copied| at <= copied));
        Made { at, by_us: copied || cell(1).is_some_and(|origin| origin.starts_with(&ours)) }
    }

    fn is_later_than(&self, microseconds: i64) -> bool {
        self.work.part.head.commit_time.to_unix_micros() >= microseconds
    }

    fn is_as_expected(&self, seen: &Seen) -> bool {
        let ours = seen.statements.iter().all(|statement| {
            match (statement.awaited.how, statement.awaited.pending, &statement.row) {
                (How::Look, Pending::Change { at, .. }, Some(row)) => {
                    let made = self.made(at, row);
                    made.at.is_none() || made.by_us
                }
                _ => true,
            }
        });
        ours && seen.every_row_was_there()
    }

    /// The type of conflict that an error is; `None` if no rule can decide it.
    fn kind(&self, error: &wire::Error, at: ChangeAt) -> Option<ConflictType> {
        let said = error.server_error()?;
        let map = self.map(at)?;
        let kind = ConflictType::of(&said.code, self.offender(at).operation)?;
        // A trigger may have changed another table. Of a foreign key either table is named.
        let own = kind == ConflictType::ForeignKeyViolation
            || map.table.partitioned
            || said.table.as_ref() == Some(&map.table.name)
                && said.schema.as_ref() == Some(&map.table.schema);
        own.then_some(kind)
    }

    fn looks_before(&self, at: ChangeAt) -> Option<(ConflictType, &'a TablePolicy)> {
        let policy = self.map(at)?.conflicts.as_ref()?;
        let kind = match self.change(at)? {
            Message::Update(_) => ConflictType::UpdateOriginDiffers,
            Message::Delete(_) => ConflictType::DeleteOriginDiffers,
            _ => return None,
        };
        policy.looks_before(kind).then_some((kind, policy))
    }

    fn action(&self, at: ChangeAt, kind: ConflictType) -> Action {
        action(self.map(at).and_then(|map| map.conflicts.as_ref()), kind)
    }

    fn change(&self, at: ChangeAt) -> Option<Message<'a>> {
        self.work.part.change(at.change as usize).ok().map(|(message, _)| message)
    }

    /// The target table of a change of one row.
    fn map(&self, at: ChangeAt) -> Option<&'a TableMap> {
        match self.work.part.change(at.change as usize).ok()?.1 {
            Touched::One(relation, _) => self.work.tables[relation].as_deref(),
            Touched::Many(_) => None,
        }
    }

    fn at(&self, change: usize) -> Result<ChangeAt> {
        let change = u32::try_from(change).map_err(|_| Failure::internal("a part is too large"))?;
        Ok(ChangeAt { part: self.part, change })
    }

    fn offender(&self, at: ChangeAt) -> Offender {
        offender(self.work, Some(at.change as usize))
    }

    fn explain(&self, error: &wire::Error, at: ChangeAt) -> Failure {
        self.context.explain(error, Some(Pending::Change { at, expect: Expect::Any }))
    }

    /// The failure of a conflict whose rule is to stop.
    fn refuse(&self, at: ChangeAt, kind: ConflictType, failure: Failure) -> Failure {
        let Failure { offender, detail, .. } = &failure;
        let offender = offender.clone().or_else(|| Some(Box::new(self.offender(at))));
        let named = format!("conflict={}", kind.name());
        let detail = match detail {
            Some(detail) => format!("{named}: {detail}"),
            None => named,
        };
        let hint = what_to_do(Some(kind), self.work.part.head.commit_lsn);
        Failure { class: Class::Apply, offender, ..failure }.detail(detail).hint(hint)
    }

    /// Queues the record of a conflict, and counts it.
    fn record(
        &mut self,
        at: ChangeAt,
        kind: ConflictType,
        action: Action,
        applied: bool,
        error: Option<&wire::Error>,
    ) -> Result<()> {
        let conflict = Conflict { kind, action, applied, offender: self.offender(at) };
        if let Some(map) = self.map(at) {
            let commit_time = self.work.part.head.commit_time;
            record::queue(self.session, self.id, map, commit_time, &conflict, error)
                .map_err(|e| Failure::target(&e, "recording a conflict"))?;
            self.awaited.push_back(Awaited { pending: Pending::Begin, how: How::AsSent });
        }
        self.counters.count_conflict(kind);
        if self.conflicts.len() < KEPT {
            self.conflicts.push(conflict);
        } else {
            self.more += 1;
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        let mut pending = VecDeque::new();
        self.encoder.begin(self.session, &mut pending)?;
        self.await_answers(pending, How::AsSent);
        Ok(())
    }

    /// Queues the change, if it is applied at all.
    fn queue(&mut self, at: ChangeAt, how: How) -> Result<()> {
        let mut pending = VecDeque::new();
        self.encoder.one(self.session, self.work, at, how, &mut pending)?;
        self.await_answers(pending, how);
        Ok(())
    }

    /// Queues a statement that must succeed.
    fn control(&mut self, sql: &str) -> Result<()> {
        self.session.queue_parse("", sql, &[]);
        self.session
            .queue_bind("", std::iter::empty())
            .map_err(|e| Failure::target(&e, "queueing a statement"))?;
        self.session.queue_execute();
        self.awaited.push_back(Awaited { pending: Pending::Begin, how: How::AsSent });
        Ok(())
    }

    /// Keeps what was done since the savepoint.
    fn release(&mut self) -> Result<()> {
        if std::mem::take(&mut self.savepoint) {
            self.control("RELEASE SAVEPOINT pgapace")?;
        }
        Ok(())
    }

    /// Goes back to the savepoint.
    fn undo(&mut self) -> Result<()> {
        self.control("ROLLBACK TO SAVEPOINT pgapace")?;
        self.release()
    }

    fn await_answers(&mut self, pending: VecDeque<Pending>, how: How) {
        let statements = pending.into_iter().filter(|p| !matches!(p, Pending::Sync { .. }));
        self.awaited.extend(statements.map(|pending| Awaited { pending, how }));
    }

    fn exchange(&mut self) -> Result<Seen> {
        self.session.queue_sync();
        exchange(self.session, &mut self.awaited)
    }

    /// Sends what must succeed.
    fn exchange_control(&mut self) -> Result<Seen> {
        let seen = self.exchange()?;
        match seen.error {
            None => Ok(seen),
            Some((error, awaited)) => Err(self.context.explain(&error, Some(awaited.pending))),
        }
    }

    /// Progress row and COMMIT, if the transaction ends here.
    fn end(&mut self) -> Result<Option<Committing>> {
        let Some(ending) = self.encoder.end(self.work, self.part) else { return Ok(None) };
        let mut pending = VecDeque::new();
        self.encoder.queue_ending(self.session, ending, &mut pending)?;
        let committing = pending.iter().find_map(|pending| match pending {
            Pending::Sync { commits } => *commits,
            _ => None,
        });
        self.await_answers(pending, How::AsSent);
        self.pending.push_back(Pending::Sync { commits: committing });
        let seen = self.exchange()?;
        self.pending.clear();
        if let Some((error, awaited)) = seen.error {
            return Err(self.context.explain(&error, Some(awaited.pending)));
        }
        for statement in seen.statements {
            match statement.awaited.pending {
                Pending::Progress { .. } if statement.rows != 1 => {
                    return Err(Failure::internal("the target recorded no progress"));
                }
                Pending::Commit { .. } if statement.rolled_back => {
                    return Err(Failure::internal(
                        "the target rolled a transaction back at COMMIT",
                    ));
                }
                _ => {}
            }
        }
        Ok(committing)
    }
}
