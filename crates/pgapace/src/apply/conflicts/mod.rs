//! Applies conflict rules of the user: to one source transaction, change by change.
//!
//! If a group with a table under rules fails as sets, its transactions come here one after the other, and
//! only as the oldest group (see `worker`). Each is first executed as it was sent, in one round trip, and
//! committed if every change had the expected effect. Otherwise it is rolled back and executed again in
//! [`pieces`], each after a savepoint and in one round trip. A piece that fails is rolled back, and a shorter one
//! is tried. Each part of a large transaction is executed in this way. The changes of the shortest pieces are
//! executed one by one, with a savepoint before each. Such a change is judged before the next is sent, so a rule
//! acts on that change alone. The decisions are written to `pgapace.conflict` in the same subscriber transaction, as
//! progress is. So they are there exactly if the transaction is, and the same at every group size.
//!
//! A conflict that stops the subscription, with a rule or without one, is counted and recorded when the
//! run has ended (`subscription`), because its transaction is rolled back.

mod decision;
mod exchange;
mod judge;
mod pieces;
pub(crate) mod requirements;
mod uniqueness;

use std::collections::VecDeque;

use engine::worker::GroupMember;
use wire::Session;

use crate::apply::conflicts::judge::Judge;
use crate::apply::encoder::Encoder;
use crate::apply::expected::{Committing, Expected};
use crate::apply::work::Group;
use crate::apply::worker::TableConflicts;
use crate::error::Result;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;
pub(crate) use uniqueness::violates_several;

/// The result of a transaction, or of a part of it.
#[derive(Debug, Default)]
pub(crate) struct Judged {
    /// `None` in the middle of a transaction.
    pub(crate) committed: Option<Committing>,
    /// Conflicts only.
    pub(crate) counters: Counters,
    pub(crate) conflicts: Vec<Conflict>,
    /// All of them, by table.
    pub(crate) by_table: Vec<TableConflicts>,
    /// How many more there were.
    pub(crate) more: u64,
}

impl Judged {
    fn conflicts(&self) -> u64 {
        self.conflicts.len() as u64 + self.more
    }
}

/// Executes part `index` of a group. The session must be idle, or inside the transaction whose earlier
/// parts were executed here. `expected` is empty, unless the session was lost during a commit.
///
/// # Errors
/// Those that stop the subscription: a conflict whose rule is `error`, and every other error. The
/// subscriber transaction is then open, and the session cannot be used any more.
pub(crate) fn execute(
    session: &mut Session,
    encoder: &mut Encoder,
    group: &Group,
    index: usize,
    expected: &mut VecDeque<Expected>,
) -> Result<Judged> {
    let mut judge = Judge::new(session, encoder, group, index, expected)?;
    let whole = judge.work.is_whole();
    let at_once = if whole { judge.at_once()? } else { None };
    let committed = match at_once {
        Some(committed) => Some(committed),
        None => judge.search(whole)?,
    };
    Ok(Judged { committed, ..judge.judged })
}
