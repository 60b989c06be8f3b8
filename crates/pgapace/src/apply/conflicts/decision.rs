//! What becomes of each change.

use engine::net::ChangeAt;
use pgoutput::Message;

use crate::apply::answers::{Committing, Pending};
use crate::apply::conflicts::exchange::Seen;
use crate::apply::conflicts::judge::Judge;
use crate::apply::context::not_one_row;
use crate::apply::encoder::resolution::How;
use crate::error::Result;
use crate::subscriber::conflict::{Action, ConflictType, TablePolicy, action};
use crate::subscriber::origin;

/// Why a change did not do what it must.
enum Trouble {
    Refused { kind: ConflictType, error: wire::Error },
    Missing { kind: ConflictType },
}

/// Who made the row that is about to be changed.
struct Made {
    /// Microseconds since 1970, as the commit timestamp on the subscriber; `None` if it is not known,
    /// or not committed.
    at: Option<i64>,
    /// Whether this subscription did, when it applied changes or when it copied the table.
    by_us: bool,
}

impl<'a> Judge<'a> {
    /// The transaction as it was sent; `None` if it must be looked at more closely.
    pub(super) fn at_once(&mut self) -> Result<Option<Committing>> {
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
        self.roll_back(parsed)?;
        Ok(None)
    }

    pub(super) fn one_by_one(&mut self) -> Result<Option<Committing>> {
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
                return Err(self.context.stop(at, kind, Err(message)));
            }
            Action::Skip => false,
            Action::Apply => true,
            Action::LastUpdateWins => self.is_later_than(time),
        };
        self.record(at, kind, (action, applied), None)?;
        Ok(applied)
    }

    /// What the rule says about a change that did not do what it must.
    fn decide(&mut self, at: ChangeAt, trouble: &Trouble) -> Result<()> {
        let (mut kind, error) = match trouble {
            Trouble::Refused { kind, error } => (*kind, Some(error)),
            Trouble::Missing { kind } => (*kind, None),
        };
        let mut action = self.action(at, kind);
        if let Some(error) = error {
            self.undo()?;
            // One type of conflict, whose rule counts only where that of the other does not help.
            if action == Action::Error && self.violates_another(at, kind, error)? {
                kind = ConflictType::MultipleUniqueConflicts;
                action = self.action(at, kind);
            }
        }
        let refused = error.ok_or("the row to be changed is not on the subscriber");
        let apply = match action {
            Action::Error => return Err(self.context.stop(at, kind, refused)),
            Action::Skip => false,
            Action::Apply => true,
            Action::LastUpdateWins => match self.look(at)? {
                Some(Made { at: Some(time), .. }) => self.is_later_than(time),
                _ => true,
            },
        };
        if !apply {
            return self.record(at, kind, (action, false), error);
        }
        let how = match kind {
            ConflictType::UpdateMissing => How::UpdateAsInsert,
            _ => How::InsertAsUpdate,
        };
        match self.attempt(at, how)? {
            None => self.record(at, kind, (action, true), error),
            // The row of its key could be changed but for another row.
            Some(Trouble::Refused { kind: ConflictType::InsertExists, error })
                if kind == ConflictType::InsertExists =>
            {
                let kind = ConflictType::MultipleUniqueConflicts;
                let action = self.action(at, kind);
                if action == Action::Error {
                    return Err(self.context.stop(at, kind, Ok(&error)));
                }
                self.undo()?;
                self.record(at, kind, (action, false), Some(&error))
            }
            Some(Trouble::Refused { kind, error }) => Err(self.context.stop(at, kind, Ok(&error))),
            // The row in the way has another key: which of the two rows is meant nobody knows.
            Some(Trouble::Missing { .. }) => Err(self.context.stop(at, kind, refused)),
        }
    }

    /// Carries out one change after a savepoint.
    fn attempt(&mut self, at: ChangeAt, how: How) -> Result<Option<Trouble>> {
        self.set_savepoint()?;
        let parsed = self.encoder.parsed();
        self.queue(at, how)?;
        let seen = self.exchange()?;
        if let Some((error, awaited)) = seen.error {
            let kind = match awaited.pending {
                Pending::Change { .. } => self.context.kind(&error, at),
                _ => None,
            };
            let Some(kind) = kind else {
                return Err(self.context.explain(&error, Some(awaited.pending)));
            };
            self.encoder.forget_after(self.session, parsed);
            return Ok(Some(Trouble::Refused { kind, error }));
        }
        self.changes.add(&self.encoder.take_changes());
        match seen.rows_changed() {
            None | Some(1) => Ok(None),
            Some(0) => Ok(Some(Trouble::Missing { kind: self.context.missing(at) })),
            Some(rows) => Err(not_one_row(rows, self.context.offender(at))),
        }
    }

    /// Locks the row of a change and tells who made it; `None` if it is not there.
    fn look(&mut self, at: ChangeAt) -> Result<Option<Made>> {
        self.queue(at, How::Look)?;
        let seen = self.exchange_control()?;
        let row = seen.statements.into_iter().rev().find_map(|statement| statement.row);
        Ok(row.map(|row| self.made(at, &row)))
    }

    fn made(&self, change: ChangeAt, row: &[Option<String>]) -> Made {
        let cell = |index: usize| row.get(index).and_then(Option::as_deref);
        let ours = origin::prefix_in(cell(2).unwrap_or_default(), self.id);
        let at = cell(0).and_then(|time| time.parse().ok());
        let policy = self.policy(change);
        let copied_at = policy.and_then(|policy| policy.copied_at);
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
