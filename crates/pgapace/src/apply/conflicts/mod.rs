//! Conflicts that a rule of the user decides: one source transaction, change by change.
//!
//! Where rules exist, a group that does not do exactly what it must, as sets, comes here, one
//! transaction after the other (only of the oldest group: see `worker`). Each is tried as it was sent
//! first, in one round trip. If every change did what it must, it is committed. If not, it is rolled
//! back and carried out again with a savepoint before each change, and each is judged before the
//! next is sent: the rule acts on that change alone. What was decided is written to
//! `pgapace.conflict` in the same subscriber transaction, as progress is: so it is there exactly if the
//! transaction is, and the same at every group size.
//!
//! A conflict that stops the subscription, with a rule or without one, is counted and recorded when
//! the run has ended (`subscription`): nothing of its transaction stays.

mod decision;
mod exchange;
mod judge;
pub(crate) mod requirements;
mod uniqueness;

use std::collections::VecDeque;

use engine::worker::GroupMember;
use wire::Session;

use crate::apply::answers::{Committing, Pending};
use crate::apply::conflicts::judge::Judge;
use crate::apply::encoder::Encoder;
use crate::apply::work::Group;
use crate::error::Result;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::statistics::Counters;
pub(crate) use uniqueness::violates_several;

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
/// What stops the subscription: a conflict whose rule is `error`, and every other error. The subscriber
/// transaction is then open, and the session of no more use.
pub(crate) fn carry_out(
    session: &mut Session,
    encoder: &mut Encoder,
    group: &Group,
    index: usize,
    pending: &mut VecDeque<Pending>,
) -> Result<Judged> {
    let mut judge = Judge::new(session, encoder, group, index, pending)?;
    let at_once = if judge.work.is_whole() { judge.at_once()? } else { None };
    let committed = match at_once {
        Some(committed) => Some(committed),
        None => judge.one_by_one()?,
    };
    let Judge { counters, conflicts, more, .. } = judge;
    Ok(Judged { committed, counters, conflicts, more })
}
