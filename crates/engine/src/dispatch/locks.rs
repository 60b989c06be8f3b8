//! Takes the locks of a group's changes in the [writeset](crate::writeset), which says what the group must wait for.

use pgoutput::{DecodeError, Message};

use super::{Dispatch, Dispatchable};
use crate::group::GroupSeq;
use crate::worker::Dependent;
use crate::writeset::{LockRules, Verdict, Writeset};

/// The locks of a change are not known. Both are bugs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// A change cannot be decoded that the assembler took.
    #[error("a change cannot be decoded again: {0}")]
    Decode(#[from] DecodeError),
    /// A table was mapped as for one worker.
    #[error("a table was mapped without its locks")]
    Unmapped,
}

/// Takes the locks of changes, one after the other.
#[derive(Debug)]
pub struct Locks<'w> {
    writeset: &'w mut Writeset,
    /// By change, whether it is dependent.
    dependent: Vec<bool>,
}

impl Locks<'_> {
    /// A change of one table; `None` if it is not applied.
    pub fn change(&mut self, rules: Option<&LockRules>, message: &Message<'_>) {
        let verdict =
            rules.map_or(Verdict::Independent, |rules| self.writeset.change(rules, message));
        self.dependent.push(verdict == Verdict::Dependent);
    }

    /// A TRUNCATE of these tables.
    pub fn truncate(&mut self, tables: &[&LockRules]) {
        let verdict =
            if tables.is_empty() { Verdict::Independent } else { self.writeset.truncate(tables) };
        self.dependent.push(verdict == Verdict::Dependent);
    }
}

impl<T: Dispatchable> Dispatch<T> {
    /// Takes the locks of all changes of a group. Returns which changes must wait for which groups.
    pub(super) fn lock(
        &mut self,
        worker: usize,
        seq: GroupSeq,
        continued: bool,
        works: &[T],
    ) -> Result<Dependent, LockError> {
        if self.writeset.is_some() && self.is_alone(seq, continued) {
            return Ok(Dependent::default());
        }
        let Some(writeset) = &mut self.writeset else { return Ok(Dependent::default()) };
        if !continued {
            self.blame.settle(writeset);
            writeset.open(seq, self.workers.queue(worker).back().copied());
        }
        if works.iter().any(Dispatchable::ends_prepared) {
            // Its changes are on the subscriber already. Nothing that was sent between its PREPARE and
            // this touches a row of it, because on the publisher it held their locks all that time; so
            // nothing before it waits for it, and it is never behind a group that does. Later groups
            // wait until it has ended.
            writeset.isolate();
        }
        if self.blame.note(seq, works.iter().flat_map(Dispatchable::tables)) {
            writeset.isolate();
        }
        let mut locks = Locks { writeset, dependent: Vec::new() };
        works.iter().try_for_each(|work| work.lock(&mut locks))?;
        let mut changes = locks.dependent;
        if !changes.contains(&true) {
            changes.clear();
        }
        let ends = works.last().is_some_and(|work| work.end().is_some());
        // One whose end is still to come runs only as the oldest.
        Ok(if ends {
            Dependent { prerequisites: writeset.close(), changes }
        } else {
            Dependent::default()
        })
    }
}
