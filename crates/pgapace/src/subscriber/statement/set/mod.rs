//! Set mode: the net changes of a table become few statements that change many rows each.
//!
//! Every statement says how many rows it must affect. Another number, or an error, means that the
//! group is rolled back and its transactions are replayed in row mode; so a set statement must be
//! detectably right, and says nothing about which row was missing.

pub(crate) mod ahead;
mod array;
mod columns;
mod inserts;
mod keyed;
mod rows;
pub(crate) mod sql;
#[cfg(test)]
mod tests;
mod whole;

use engine::net::Segment;
use wire::Session;

use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::statement::cache::StatementCache;
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::row::{self, PlanError};
use columns::Columns;
use rows::Rows;

/// Rows of one statement at most.
const ROWS: usize = 10_000;
/// A statement is complete when its arrays have this many bytes.
const BYTES: usize = 4 << 20;
/// So many different shapes of rows get statements of their own; what is left over goes row by
/// row.
const SHAPES: usize = 8;
/// Fewer rows than this are cheaper one by one.
const FEW: usize = 4;

/// What one queued Execute must affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) rows: u64,
    /// Another number cannot come: the statement fails by itself.
    pub(crate) sure: bool,
}

/// Why a segment cannot be queued. What has been queued of it must not be committed.
#[derive(Debug)]
pub(crate) enum SetError {
    /// Row mode would refuse the change too, and names it.
    Plan(PlanError),
    /// Updates that must be one statement, or they would find each other's rows, cannot be one.
    Apart,
    Wire(wire::Error),
}

impl std::fmt::Display for SetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::Apart => {
                f.write_str("the updates of a table without a key cannot be one statement")
            }
            Self::Wire(error) => error.fmt(f),
        }
    }
}

impl From<PlanError> for SetError {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl From<wire::Error> for SetError {
    fn from(error: wire::Error) -> Self {
        Self::Wire(error)
    }
}

/// Memory in which statements are put together, kept from one to the next.
#[derive(Debug, Default)]
pub(crate) struct SetBuffers {
    search: Columns,
    new: Columns,
    whole: whole::Classes,
    set: ColumnSet,
    nulls: ColumnSet,
    text: ColumnSet,
    rows: Rows,
}

/// Where statements go: the session, what is prepared there, and who counts the answers.
pub(crate) struct Subscriber<'t, E> {
    pub(crate) session: &'t mut Session,
    pub(crate) statements: &'t mut StatementCache,
    pub(crate) map: &'t TableMap,
    /// Whether statements count what they find themselves, where they can.
    pub(crate) counted: bool,
    /// Called once for every Execute, in order.
    pub(crate) expect: E,
}

/// Queues all statements of a segment in order: absent rows, deletes, updates, inserts. Calls
/// `expect` once for each Execute, in order: exactly one CommandComplete answers each. `counted`:
/// statements fail by themselves when they find other rows than expected, where they can; it costs the
/// subscriber some work.
pub(crate) fn queue_segment(
    session: &mut Session,
    statements: &mut StatementCache,
    buffers: &mut SetBuffers,
    map: &TableMap,
    segment: &Segment<'_>,
    counted: bool,
    expect: &mut impl FnMut(Expected),
) -> Result<(), SetError> {
    refuse_misread(map, segment)?;
    let mut subscriber = Subscriber { session, statements, map, counted, expect };
    if matches!(map.search, Search::WholeRow(_)) && !map.columns.is_empty() {
        whole::queue(&mut subscriber, buffers, segment)?;
    } else {
        keyed::queue(&mut subscriber, buffers, segment)?;
    }
    inserts::queue(&mut subscriber, &mut buffers.rows, &segment.inserts)
}

/// Refuses values that the subscriber would read as other ones; few tables have any to look at.
fn refuse_misread(map: &TableMap, segment: &Segment<'_>) -> Result<(), PlanError> {
    if map.misread.is_empty() {
        return Ok(());
    }
    let Segment { absent, deletes, updates, inserts, .. } = segment;
    let old = updates.iter().filter_map(|update| update.old.as_ref()).chain(deletes);
    let new = updates.iter().map(|update| &update.new);
    let mut rows = absent.iter().chain(old.map(|old| &old.row)).chain(new).chain(inserts);
    rows.try_for_each(|row| row::refuse_misread(map, row.columns()))
}

impl<E: FnMut(Expected)> Subscriber<'_, E> {
    /// A statement that is to find so many rows; one that is `counted` returns one row then.
    fn expect(&mut self, rows: usize, counted: bool) {
        let rows = if counted { 1 } else { rows as u64 };
        (self.expect)(Expected { rows, sure: counted });
    }

    /// A statement that affects so many rows or fails.
    fn expect_all(&mut self, rows: usize) {
        (self.expect)(Expected { rows: rows as u64, sure: true });
    }
}

/// Changes that can share statements.
trait Batch {
    /// Fewer changes than this are queued one by one.
    const FEW: usize;

    /// Starts a statement.
    fn begin(&mut self);
    /// Adds a change; false, with nothing added, if it does not fit in with those added before.
    fn push(&mut self, index: usize) -> bool;
    /// The size of the statement so far.
    fn bytes(&self) -> usize;
    /// Queues the changes added as one statement; false if that cannot be done.
    fn queue(&mut self) -> Result<bool, SetError>;
    /// Queues one change by itself.
    fn queue_alone(&mut self, index: usize) -> Result<(), SetError>;
}

/// Queues `count` changes with as few statements as their shapes allow.
fn queue_batches(batch: &mut impl Batch, count: usize) -> Result<(), SetError> {
    queue_pass(batch, 0..count).and_then(|mut left| {
        for _ in 1..SHAPES {
            if left.is_empty() {
                return Ok(());
            }
            left = queue_pass(batch, left.into_iter())?;
        }
        left.into_iter().try_for_each(|index| batch.queue_alone(index))
    })
}

/// One walk over changes; gives back those of other shapes.
fn queue_pass<B: Batch>(
    batch: &mut B,
    indexes: impl Iterator<Item = usize>,
) -> Result<Vec<usize>, SetError> {
    let (mut members, mut left) = (Vec::new(), Vec::new());
    batch.begin();
    for index in indexes {
        if batch.push(index) {
            members.push(index);
            if members.len() == ROWS || batch.bytes() >= BYTES {
                queue_members(batch, &mut members)?;
            }
        } else if members.is_empty() {
            // It does not fit in with nothing either.
            batch.queue_alone(index)?;
            batch.begin();
        } else {
            left.push(index);
        }
    }
    queue_members(batch, &mut members)?;
    Ok(left)
}

fn queue_members<B: Batch>(batch: &mut B, members: &mut Vec<usize>) -> Result<(), SetError> {
    if members.is_empty() {
        return Ok(());
    }
    if members.len() < B::FEW || !batch.queue()? {
        members.iter().try_for_each(|index| batch.queue_alone(*index))?;
    }
    members.clear();
    batch.begin();
    Ok(())
}
