//! The rows that statements in flight look for, where some are expected to be missing: which changes are
//! skipped if a row is not found.

use std::sync::Arc;

use engine::net::{ChangeAt, Seeks};
use rustc_hash::FxHashMap;

use crate::error::{Failure, Result};
use crate::subscriber::mapping::TableMap;
use crate::subscriber::statement::set::{Sought, SoughtIn};

/// A statement that looks for rows, some of which may be missing. Its number is part of the expected reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SoughtNumber(u32);

/// The statements that were queued, and are not answered.
#[derive(Debug, Default)]
pub(crate) struct SoughtRows {
    next: u32,
    statements: FxHashMap<u32, Statement>,
}

#[derive(Debug)]
struct Statement {
    /// The table. Finding it again by the group would take as long as the group has transactions.
    map: Arc<TableMap>,
    /// For each row, the changes that look for it; empty if it is not known which would not find it.
    changes: Vec<Vec<ChangeAt>>,
    /// Whether it returns the numbers of the missing rows.
    listed: bool,
    /// The rows that it has named as missing, counted from 0, and the number of those that it found.
    missing: Vec<usize>,
    found: Option<u64>,
}

/// The rows that a statement has found.
#[derive(Debug)]
pub(crate) enum Found {
    /// Every row.
    All,
    /// Every row but those that these changes look for.
    AllBut(Vec<ChangeAt>),
    /// Other rows than one for each change.
    Others,
}

impl SoughtRows {
    /// The number of the next statement.
    pub(super) fn position(&self) -> SoughtNumber {
        SoughtNumber(self.next)
    }

    /// Everything that was queued from this number on is undone.
    pub(super) fn forget_from(&mut self, SoughtNumber(position): SoughtNumber) {
        self.statements.retain(|number, _| *number < position);
    }

    /// A statement is queued that looks for these rows of a segment.
    pub(super) fn queued(
        &mut self,
        sought: Sought<'_>,
        seeks: &Seeks<'_>,
        map: &Arc<TableMap>,
    ) -> SoughtNumber {
        let rows = match sought.rows_of {
            SoughtIn::Deletes => &seeks.deletes,
            SoughtIn::Updates => &seeks.updates,
        };
        let changes = sought.rows.iter().map(|row| rows[*row as usize].changes.clone()).collect();
        let number = self.next;
        self.next += 1;
        let (map, listed) = (Arc::clone(map), sought.listed);
        let statement = Statement { map, changes, listed, missing: Vec::new(), found: None };
        self.statements.insert(number, statement);
        SoughtNumber(number)
    }

    /// A statement has returned this value: the number of a missing row from 1 on, or, negative or zero,
    /// how many it found.
    pub(crate) fn returned(&mut self, number: SoughtNumber, value: Option<&[u8]>) -> Result<()> {
        // A statement for one row may return a row of no columns.
        let Some(statement) = self.statements.get_mut(&number.0).filter(|one| one.listed) else {
            return Ok(());
        };
        let value = value.and_then(|value| std::str::from_utf8(value).ok()?.parse::<i64>().ok());
        let value = value.ok_or_else(|| Failure::internal("a list of missing rows is not one"))?;
        match usize::try_from(value) {
            Ok(row) if row > 0 => statement.missing.push(row - 1),
            _ => statement.found = Some(value.unsigned_abs()),
        }
        Ok(())
    }

    /// A statement is answered; it affected so many rows, if it is no list. Returns the rows that it found, and its
    /// table; `None` if no such statement was queued.
    pub(crate) fn answered(
        &mut self,
        SoughtNumber(number): SoughtNumber,
        affected: u64,
    ) -> Option<(Found, Arc<TableMap>)> {
        let statement = self.statements.remove(&number)?;
        let map = Arc::clone(&statement.map);
        Some((statement.answered(affected), map))
    }
}

impl Statement {
    fn answered(self, affected: u64) -> Found {
        let Self { changes, listed, mut missing, mut found, .. } = self;
        if !listed {
            found = Some(affected);
            missing.extend((affected == 0).then_some(0));
        }
        if found != Some((changes.len() - missing.len()) as u64) {
            return Found::Others;
        }
        if missing.is_empty() {
            return Found::All;
        }
        if missing.iter().any(|row| changes[*row].is_empty()) {
            return Found::Others;
        }
        let mut changes: Vec<_> = missing.iter().flat_map(|row| changes[*row].clone()).collect();
        changes.sort_unstable_by_key(|at| (at.part, at.change));
        Found::AllBut(changes)
    }
}
