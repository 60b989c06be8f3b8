//! Decides about each change: whether it is applied, skipped, or stops the subscription.

use std::ops::Range;

use engine::net::ChangeAt;
use engine::worker::Outcome;
use pgoutput::Message;

use crate::apply::conflicts::exchange::{Exchange, TextRow};
use crate::apply::conflicts::judge::Judge;
use crate::apply::conflicts::pieces::{Piece, Pieces};
use crate::apply::encoder::resolution::How;
use crate::apply::expected::{Committing, Expected};
use crate::error::{Result, is_transient};
use crate::subscriber::conflict::{Action, ConflictType, TablePolicy, action};
use crate::subscriber::origin;
use crate::subscriber::state::statistics::Changes;

/// How often a change is executed at most until a conflict of its rule's action counts.
const ATTEMPTS: usize = 5;

/// Why a change did something else than it must.
enum ChangeConflict {
    Refused {
        kind: ConflictType,
        error: wire::Error,
    },
    /// It counts as this all the same.
    Missing {
        kind: ConflictType,
        changes: Changes,
    },
}

impl ChangeConflict {
    fn kind(&self) -> ConflictType {
        let (Self::Refused { kind, .. } | Self::Missing { kind, .. }) = self;
        *kind
    }

    fn error(&self) -> Option<&wire::Error> {
        match self {
            Self::Refused { error, .. } => Some(error),
            Self::Missing { .. } => None,
        }
    }
}

/// The end of one change that was executed.
enum Attempt {
    /// It has had the expected effect, and counts as this.
    Done(Changes),
    Conflict(ChangeConflict),
}

/// Whether the rule about rows of another origin has a change executed.
enum LookBefore {
    /// The change is not executed.
    Skip,
    /// The change is executed. `found`: its row was found, or nobody has looked.
    Change { found: bool },
}

/// The origin of the row that is about to be changed.
struct RowOrigin {
    /// The commit timestamp on the subscriber, in microseconds since 1970; `None` if it is not known or
    /// the row is not committed.
    at: Option<i64>,
    /// Whether this subscription wrote it, by applying changes or by copying the table.
    by_us: bool,
}

impl<'a> Judge<'a> {
    /// Executes the transaction as it was sent; `None` if not all of its changes had the expected effect.
    pub(super) fn at_once(&mut self) -> Result<Option<Committing>> {
        let position = self.encoder.position();
        self.begin()?;
        self.queue_as_sent(0..self.work.part.len())?;
        let exchange = self.exchange()?;
        if exchange.error.is_none() && self.is_as_expected(&exchange) {
            return self.end();
        }
        self.roll_back(position)?;
        Ok(None)
    }

    /// Executes the part, and looks for the changes that conflict. `failed`: executed as it was sent, it has failed.
    pub(super) fn search(&mut self, failed: bool) -> Result<Option<Committing>> {
        if self.work.part.first {
            self.begin()?;
        }
        // The changes of earlier parts.
        self.changes = self.encoder.take_changes();
        let mut pieces = Pieces::new(self.work.part.len(), failed);
        while let Some(piece) = pieces.next() {
            let without_conflict = match piece.clone() {
                Piece::AtOnce(changes) => self.piece_at_once(changes)?,
                Piece::OneByOne(changes) => self.one_by_one(changes)?,
            };
            pieces.executed(&piece, without_conflict);
        }
        self.release()?;
        self.encoder.put_changes(self.changes);
        self.exchange_control()?;
        self.end()
    }

    /// Executes changes as they were sent, after a savepoint. False if not all of them had the expected effect: then
    /// they are undone.
    fn piece_at_once(&mut self, changes: Range<usize>) -> Result<bool> {
        self.set_savepoint()?;
        let position = self.encoder.position();
        self.queue_as_sent(changes)?;
        let exchange = self.exchange()?;
        if exchange.error.is_none() && self.is_as_expected(&exchange) {
            self.changes.add(&self.encoder.take_changes());
            return Ok(true);
        }
        if let Some((error, statement)) = exchange.error {
            let is_of_change = matches!(statement, Expected::Change { .. } | Expected::Look { .. });
            // A shorter piece would meet the same deadlock or cancellation. The statements before the changes record an
            // earlier conflict: if one fails, the run must stop.
            if !is_of_change || error.sqlstate().is_some_and(is_transient) {
                return Err(self.context.explain(&error, Some(statement)));
            }
        }
        self.undo()?;
        self.exchange_control()?;
        self.encoder.forget_after(self.session, position);
        Ok(false)
    }

    /// Executes changes one by one. True if none of them conflicts.
    fn one_by_one(&mut self, changes: Range<usize>) -> Result<bool> {
        let conflicts = self.judged.conflicts();
        for change in changes {
            let at = self.at(change)?;
            let mut more = 1..ATTEMPTS;
            while !self.one(at, more.next().is_none())? {}
        }
        Ok(self.judged.conflicts() == conflicts)
    }

    /// Executes one change, or decides about it. False if it was undone, because another session has or may have changed
    /// its row meanwhile. `last`: see [`Self::decide`].
    fn one(&mut self, at: ChangeAt, last: bool) -> Result<bool> {
        let found = match self.look_before(at)? {
            LookBefore::Skip => return Ok(true),
            LookBefore::Change { found } => found,
        };
        match self.attempt(at, How::AsSent)? {
            // A transaction that ended meanwhile has inserted the row, so the look before did not find it.
            Attempt::Done(_) if !found => {
                self.undo()?;
                Ok(false)
            }
            Attempt::Done(changes) => {
                self.changes.add(&changes);
                Ok(true)
            }
            Attempt::Conflict(conflict) => {
                let decided = self.decide(at, &conflict, last)?;
                if let (ChangeConflict::Missing { changes, .. }, true) = (&conflict, decided) {
                    self.changes.add(changes);
                }
                Ok(decided)
            }
        }
    }

    /// Queues changes, and before each the look at its row that a rule needs.
    fn queue_as_sent(&mut self, changes: Range<usize>) -> Result<()> {
        for change in changes {
            let at = self.at(change)?;
            if self.looks_before(at).is_some() {
                self.queue(at, How::Look)?;
            }
            self.queue(at, How::AsSent)?;
        }
        Ok(())
    }

    /// Applies the rule about rows of another origin, if there is one.
    fn look_before(&mut self, at: ChangeAt) -> Result<LookBefore> {
        let found = LookBefore::Change { found: true };
        let Some((kind, policy)) = self.looks_before(at) else { return Ok(found) };
        let time = match self.look(at)? {
            Some(RowOrigin { at: Some(time), by_us: false }) => time,
            Some(_) => return Ok(found),
            None => return Ok(LookBefore::Change { found: false }),
        };
        let action = policy.action(kind);
        let applied = match action {
            Action::Error => {
                let message = "the row to be changed was written by another origin";
                return Err(self.context.stop(at, kind, Err(message)));
            }
            Action::Skip => false,
            Action::Apply => true,
            Action::LastUpdateWins => self.is_later_than(time),
        };
        self.record(at, kind, (action, applied), None)?;
        Ok(if applied { found } else { LookBefore::Skip })
    }

    /// Applies the rule about a change that did something else than it must.
    ///
    /// The rule's action may conflict, too. Either another session has deleted the row in the way or inserted the missing
    /// row since the change met it, or another row has a unique value of the change. So the change is undone to be executed
    /// anew (false), unless this is its `last` attempt: then the rule of the second conflict counts.
    fn decide(&mut self, at: ChangeAt, conflict: &ChangeConflict, last: bool) -> Result<bool> {
        let (kind, action) = self.rule(at, conflict, How::AsSent)?;
        let apply = match action {
            Action::Error | Action::Skip => false,
            Action::Apply => true,
            Action::LastUpdateWins => match self.look(at)? {
                Some(RowOrigin { at: Some(time), .. }) => self.is_later_than(time),
                _ => true,
            },
        };
        if !apply {
            self.record(at, kind, (action, false), conflict.error())?;
            return Ok(true);
        }
        let how = match kind {
            ConflictType::UpdateMissing => How::UpdateAsInsert,
            _ => How::InsertAsUpdate,
        };
        let position = self.encoder.position();
        let second = match self.attempt(at, how)? {
            Attempt::Done(changes) => {
                self.changes.add(&changes);
                self.record(at, kind, (action, true), conflict.error())?;
                return Ok(true);
            }
            Attempt::Conflict(second) => second,
        };
        let may_pass =
            how == How::UpdateAsInsert || matches!(second, ChangeConflict::Missing { .. });
        if may_pass && !last {
            self.undo()?;
            self.exchange_control()?;
            self.encoder.forget_after(self.session, position);
            return Ok(false);
        }
        let second = match (second, conflict.error()) {
            // The row in the way has another key, so it is unknown which of two rows is meant.
            (ChangeConflict::Missing { .. }, Some(error)) => {
                return Err(self.context.stop_without_row(at, kind, action, error));
            }
            // The row with its key cannot be changed because of another row.
            (ChangeConflict::Refused { kind: ConflictType::InsertExists, error }, _) => {
                ChangeConflict::Refused { kind: ConflictType::MultipleUniqueConflicts, error }
            }
            (second, _) => second,
        };
        let (kind, action) = self.rule(at, &second, how)?;
        self.record(at, kind, (action, false), second.error())?;
        Ok(true)
    }

    /// The type of a conflict, and what its rule says, unless that is to stop the subscription. A refused change is undone.
    fn rule(
        &mut self,
        at: ChangeAt,
        conflict: &ChangeConflict,
        how: How,
    ) -> Result<(ConflictType, Action)> {
        let mut kind = conflict.kind();
        let mut action = self.action(at, kind);
        if let Some(error) = conflict.error() {
            self.undo()?;
            // The rule of the other type counts only if that of the first one is `error`.
            if action == Action::Error && self.violates_another(at, kind, how, error)? {
                kind = ConflictType::MultipleUniqueConflicts;
                action = self.action(at, kind);
            }
        }
        if action == Action::Error {
            let missing = "the row to be changed does not exist on the subscriber";
            return Err(self.context.stop(at, kind, conflict.error().ok_or(missing)));
        }
        Ok((kind, action))
    }

    /// Executes one change after a savepoint.
    ///
    /// A change that finds no row is executed once more: it may have waited for a transaction that deleted the row and
    /// inserted it again, and only the snapshot of a later statement contains that row (READ COMMITTED). The native worker
    /// also looks again (`RelationFindReplTupleByIndex`).
    fn attempt(&mut self, at: ChangeAt, how: How) -> Result<Attempt> {
        match self.execute(at, how)? {
            Attempt::Conflict(ChangeConflict::Missing { .. }) => self.execute(at, how),
            attempt => Ok(attempt),
        }
    }

    fn execute(&mut self, at: ChangeAt, how: How) -> Result<Attempt> {
        self.set_savepoint()?;
        let position = self.encoder.position();
        self.queue(at, how)?;
        let exchange = self.exchange()?;
        if let Some((error, statement)) = exchange.error {
            let kind = match statement {
                Expected::Change { .. } | Expected::Look { .. } => self.context.kind(&error, at),
                _ => None,
            };
            let Some(kind) = kind else {
                return Err(self.context.explain(&error, Some(statement)));
            };
            self.encoder.forget_after(self.session, position);
            return Ok(Attempt::Conflict(ChangeConflict::Refused { kind, error }));
        }
        let changes = self.encoder.take_changes();
        match exchange.last_change() {
            Some(change) if change.outcome() == Outcome::Missing => {
                let kind = self.context.missing(at);
                Ok(Attempt::Conflict(ChangeConflict::Missing { kind, changes }))
            }
            Some(change) if change.outcome() != Outcome::AsExpected => {
                Err(change.refusal(&self.context))
            }
            _ => Ok(Attempt::Done(changes)),
        }
    }

    /// Locks the row of a change and reads its origin; `None` if there is no such row.
    fn look(&mut self, at: ChangeAt) -> Result<Option<RowOrigin>> {
        self.queue(at, How::Look)?;
        let exchange = self.exchange_control()?;
        let row = exchange.statements.into_iter().rev().find_map(|(_, row)| row);
        Ok(row.map(|row| self.origin_of(at, &row)))
    }

    fn origin_of(&self, change: ChangeAt, row: &TextRow) -> RowOrigin {
        let cell = |index: usize| row.get(index).and_then(Option::as_deref);
        let ours = origin::prefix_in(cell(2).unwrap_or_default(), self.id);
        let at = cell(0).and_then(|time| time.parse().ok());
        let policy = self.policy(change);
        let copied_at = policy.and_then(|policy| policy.copied_at);
        let copied = at.is_some_and(|at| copied_at.is_some_and(|copied| at <= copied));
        RowOrigin { at, by_us: copied || cell(1).is_some_and(|origin| origin.starts_with(&ours)) }
    }

    fn is_later_than(&self, microseconds: i64) -> bool {
        self.work.part.head.commit_time.to_unix_micros() >= microseconds
    }

    fn is_as_expected(&self, exchange: &Exchange) -> bool {
        let mut unseen = None;
        let ours =
            exchange.statements.iter().all(|(completed, row)| match (completed.expected, row) {
                (Expected::Look { at }, Some(row)) => {
                    let made = self.origin_of(at, row);
                    made.at.is_none() || made.by_us
                }
                (Expected::Look { at }, None) => {
                    unseen = Some(at);
                    true
                }
                // Its row was inserted after the look.
                (Expected::Change { at, .. }, _) => unseen != Some(at) || completed.rows == 0,
                _ => true,
            });
        ours && exchange.unexpected().is_none()
    }

    fn looks_before(&self, at: ChangeAt) -> Option<(ConflictType, &'a TablePolicy)> {
        let policy = self.policy(at)?;
        let kind = match self.context.change(at)? {
            Message::Update(_) => ConflictType::UpdateOriginDiffers,
            Message::Delete(_) => ConflictType::DeleteOriginDiffers,
            _ => return None,
        };
        policy.looks_before(kind).then_some((kind, policy))
    }

    fn policy(&self, at: ChangeAt) -> Option<&'a TablePolicy> {
        self.context.map(at)?.conflicts.as_ref()
    }

    fn action(&self, at: ChangeAt, kind: ConflictType) -> Action {
        action(self.policy(at), kind)
    }
}
