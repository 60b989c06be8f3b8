//! One round trip: everything that is queued, and everything that is answered.

use std::collections::VecDeque;

use wire::{Reply, Session, affected_rows};

use crate::apply::answers::Pending;
use crate::apply::encoder::resolution::How;
use crate::error::{Failure, Result};
use crate::subscriber::statement::row::Expect;

/// A statement that was queued.
#[derive(Debug, Clone, Copy)]
pub(super) struct Awaited {
    pub(super) pending: Pending,
    pub(super) how: How,
}

/// A statement that was carried out.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) awaited: Awaited,
    /// Rows that it affected.
    pub(super) rows: u64,
    pub(super) rolled_back: bool,
    /// The last row that it returned.
    pub(super) row: Option<Vec<Option<String>>>,
}

/// What was answered.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) statements: Vec<Statement>,
    /// The first error, and the statement that it is of; none after it was carried out.
    pub(super) error: Option<(wire::Error, Awaited)>,
}

impl Seen {
    /// Rows that the last change affected; `None` if it may affect any number.
    pub(super) fn rows_changed(&self) -> Option<u64> {
        let mut carried = 0;
        let mut changed = None;
        for statement in &self.statements {
            let Pending::Change { expect, .. } = statement.awaited.pending else { continue };
            match expect {
                Expect::Any => {}
                Expect::OneWithNext => carried = statement.rows,
                Expect::One => changed = Some(std::mem::take(&mut carried) + statement.rows),
            }
        }
        changed
    }

    /// Whether every change that must affect one row did.
    pub(super) fn every_row_was_there(&self) -> bool {
        let mut carried = 0;
        self.statements.iter().all(|statement| match statement.awaited.pending {
            Pending::Change { expect: Expect::OneWithNext, .. } => {
                carried = statement.rows;
                true
            }
            Pending::Change { expect: Expect::One, .. } => {
                std::mem::take(&mut carried) + statement.rows == 1
            }
            _ => true,
        })
    }
}

/// Sends what is queued and takes all answers, up to the last Sync.
pub(super) fn exchange(session: &mut Session, awaited: &mut VecDeque<Awaited>) -> Result<Seen> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "applying changes");
    session.flush().map_err(|e| failed(&e))?;
    let mut seen = Seen::default();
    let mut row = None;
    while session.pending_ready() > 0 {
        match session.next_reply().map_err(|e| failed(&e))? {
            Reply::DataRow(data) => {
                let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
                row = Some(data.values().map(|value| value.map(text)).collect());
            }
            Reply::CommandComplete(tag) => {
                let (rows, rolled_back) = (affected_rows(tag), tag == "ROLLBACK");
                let awaited = awaited.pop_front().ok_or_else(unasked)?;
                seen.statements.push(Statement { awaited, rows, rolled_back, row: row.take() });
            }
            Reply::Error(error) => {
                let error = wire::Error::Server(error);
                // One that ends the session comes whenever it likes.
                let statement = awaited.pop_front().ok_or_else(|| failed(&error))?;
                awaited.clear();
                seen.error = Some((error, statement));
            }
            _ => {}
        }
    }
    Ok(seen)
}

fn unasked() -> Failure {
    Failure::internal("the subscriber answered a statement nobody sent")
}
