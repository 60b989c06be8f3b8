//! Set mode: the net changes of a table become a few statements, each of which changes many rows.
//!
//! Every statement has a number of rows that it must affect. After another number, or an error, the
//! group is rolled back and its transactions are applied in row mode. So a set statement must only
//! be detectably right. It says which rows are missing only where some are expected to be: see
//! [`crate::subscriber::term`].

mod array;
mod array_text;
mod columns;
mod inserts;
mod keyed;
mod leaves;
mod moving;
pub(crate) mod prefetch;
mod row_array;
mod rows;
pub(crate) mod sql;
#[cfg(test)]
mod tests;
mod whole;

use engine::net::{Seeks, Segment};
use wire::Session;

use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::statement::bind;
use crate::subscriber::statement::cache::{Check, Kind, Shape, StatementCache};
use crate::subscriber::statement::column_set::ColumnSet;
use crate::subscriber::statement::copy::Format;
use crate::subscriber::statement::row::{self, PlanError};
use columns::Columns;
use rows::Rows;

/// Maximum number of rows in one statement.
const ROWS: usize = 10_000;
/// A statement is complete when its arrays have this many bytes. The server stores the rows once more, until version 16 in
/// up to twice the memory, and writes a temporary file once they exceed `work_mem`, which is 4 MB by default.
const BYTES: usize = 3 << 19;
/// Maximum number of row shapes that get their own statements. Rows of further shapes share one, if that is
/// possible, or are queued one by one.
const SHAPES: usize = 8;
/// An update with at least so many bytes of values is queued alone: the server copies the values of a set several times,
/// which costs more than a statement.
const LARGE_ROW: usize = 8 << 10;
/// For fewer rows than this, single statements are cheaper.
const FEW: usize = 4;
/// The same for rows of one shape in a table whose updates vary: a statement of their own is worth its Parse.
const FEW_OF_VARIED: usize = 64;

/// The number of rows that one queued Execute must affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected<'s> {
    pub(crate) rows: u64,
    /// No other number is possible: the statement fails instead.
    pub(crate) sure: bool,
    /// If rows may be missing, those that it looks for.
    pub(crate) sought: Option<Sought<'s>>,
    /// It is a COPY in binary format: the types of the columns must be looked at before the commit.
    pub(crate) misreads: bool,
}

/// The rows that a statement looks for, where some may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sought<'s> {
    /// The list of the segment that they are in.
    pub(crate) rows_of: SoughtIn,
    /// Their indexes there.
    pub(crate) rows: &'s [u32],
    /// The statement returns the numbers of those that it did not find. If not, it looks for one row.
    pub(crate) listed: bool,
}

/// The lists of a [`Segment`] whose rows must be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SoughtIn {
    Deletes,
    Updates,
}

/// Why a segment cannot be queued. The part that is already queued must not be committed.
#[derive(Debug)]
pub(crate) enum SetError {
    /// Row mode would refuse the change too, and reports it.
    Plan(PlanError),
    /// Updates that must be one statement cannot be: separate statements might find rows that another
    /// one wrote.
    Apart,
    Wire(wire::Error),
}

impl std::fmt::Display for SetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::Apart => f.write_str("updates whose rows meet cannot be one statement"),
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

/// Buffers for building statements, reused from one to the next.
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

/// The session that statements are queued on, its prepared statements, and the receiver of expected
/// row counts.
pub(crate) struct Subscriber<'t, E> {
    pub(crate) session: &'t mut Session,
    pub(crate) statements: &'t mut StatementCache,
    pub(crate) map: &'t TableMap,
    /// Whether statements check their row counts themselves, where possible.
    pub(crate) counted: bool,
    /// Whether statements say which rows are missing.
    pub(crate) seeks: bool,
    /// Whether the transaction has locked the table.
    locked: bool,
    /// Called once per Execute, in order.
    pub(crate) expect: E,
}

/// Queues all statements of a segment in this order: absent rows, deletes, moves, updates, inserts. Calls
/// `expect` once per Execute, in order; exactly one CommandComplete answers each. With `counted`,
/// statements fail by themselves after another number of rows, where possible. That costs the
/// subscriber some CPU time.
pub(crate) fn queue_segment(
    session: &mut Session,
    statements: &mut StatementCache,
    buffers: &mut SetBuffers,
    map: &TableMap,
    segment: &Segment<'_>,
    counted: bool,
    expect: &mut impl FnMut(Expected<'_>),
) -> Result<(), SetError> {
    refuse_misread(map, segment)?;
    let seeks = segment.seeks != Seeks::default();
    let locked = false;
    let mut subscriber = Subscriber { session, statements, map, counted, seeks, locked, expect };
    if matches!(map.search, Search::WholeRow(_)) && !map.columns.is_empty() {
        whole::queue(&mut subscriber, buffers, segment)?;
    } else {
        keyed::queue(&mut subscriber, buffers, segment)?;
    }
    inserts::queue(&mut subscriber, &mut buffers.rows, &segment.inserts)
}

/// Returns an error if the subscriber would read a value as a different one. Few tables have such
/// columns.
fn refuse_misread(map: &TableMap, segment: &Segment<'_>) -> Result<(), PlanError> {
    if map.misread.is_empty() {
        return Ok(());
    }
    let Segment { absent, deletes, moves, updates, inserts, .. } = segment;
    let updates = || moves.iter().chain(updates);
    let old = updates().filter_map(|update| update.old.as_ref()).chain(deletes);
    let new = updates().map(|update| &update.new);
    let mut rows = absent.iter().chain(old.map(|old| &old.row)).chain(new).chain(inserts);
    rows.try_for_each(|row| row::refuse_misread(map, row.columns()))
}

impl<E: FnMut(Expected<'_>)> Subscriber<'_, E> {
    /// Changes settings for this transaction. Not prepared, because it is rare.
    fn queue_settings(&mut self, sql: &str) -> Result<(), SetError> {
        self.session.queue_parse("", sql, &[]);
        self.session.queue_bind("", std::iter::empty())?;
        self.session.queue_execute();
        self.expect_all(1);
        Ok(())
    }

    /// Locks the table, before whole rows of it are bound to a statement.
    ///
    /// The server reads parameters before it locks the tables of a statement (`exec_bind_message` in `postgres.c`). If the
    /// statement then waited for an ALTER TABLE that changes the type of a column, it would take values of the row type
    /// before apart as values of the one behind, and store bytes of other values, or of other memory.
    fn queue_lock(&mut self) -> Result<(), SetError> {
        if std::mem::replace(&mut self.locked, true) {
            return Ok(());
        }
        let none = &ColumnSet::default();
        let (kind, check, whole) = (Kind::Lock, Check::None, false);
        let shape = Shape { kind, set: none, nulls: none, text: none, check, whole };
        let prepared = bind::prepare(self.session, self.statements, self.map, &shape);
        self.session.queue_bind(&prepared.name, std::iter::empty())?;
        self.session.queue_execute();
        self.expect_all(0);
        Ok(())
    }

    /// Expects a statement to find this many rows. A `counted` statement then returns one row.
    fn expect(&mut self, rows: usize, counted: bool) {
        let rows = if counted { 1 } else { rows as u64 };
        (self.expect)(Expected { rows, sure: counted, sought: None, misreads: false });
    }

    /// Expects a statement that either affects this many rows or fails.
    fn expect_all(&mut self, rows: usize) {
        (self.expect)(Expected { rows: rows as u64, sure: true, sought: None, misreads: false });
    }

    /// Expects a COPY, which either affects this many rows or fails.
    fn expect_copy(&mut self, rows: usize, format: Format) {
        let (rows, misreads) = (rows as u64, format == Format::Binary);
        (self.expect)(Expected { rows, sure: true, sought: None, misreads });
    }

    /// Expects a statement to find these rows, or to say which are missing.
    fn expect_sought(&mut self, sought: Sought<'_>) {
        let rows = sought.rows.len() as u64;
        (self.expect)(Expected { rows, sure: false, sought: Some(sought), misreads: false });
    }
}

/// A group has far fewer than 2^32 changes.
fn number(index: usize) -> u32 {
    u32::try_from(index).expect("groups are bounded well below 4 Gi")
}

/// Changes that can share statements.
trait Batch {
    /// Fewer changes than this are queued one by one.
    fn few(&self) -> usize;
    /// Whether fewer changes are left to the statement that [`Self::mix`] begins.
    fn leaves_few(&self) -> bool {
        false
    }
    /// From now on, changes of all shapes are added to one statement. False if that is not possible.
    fn mix(&mut self) -> bool {
        false
    }
    /// The number of rows and of bytes with which a statement is complete.
    fn limits(&self) -> (usize, usize) {
        (ROWS, BYTES)
    }

    /// Starts a new statement.
    fn begin(&mut self);
    /// Adds a change; returns false, with nothing added, if its shape differs from the others.
    fn push(&mut self, index: usize) -> bool;
    /// Takes the newest change out of the statement again, because it is large; false if it must stay.
    fn take_back(&mut self) -> bool {
        false
    }
    /// Size of the statement so far, in bytes.
    fn bytes(&self) -> usize;
    /// Queues the added changes as one statement; returns false if that is not possible.
    fn queue(&mut self) -> Result<bool, SetError>;
    /// Queues one change by itself.
    fn queue_alone(&mut self, index: usize) -> Result<(), SetError>;
}

/// Queues `count` changes with as few statements as their shapes allow.
fn queue_batches(batch: &mut impl Batch, count: usize) -> Result<(), SetError> {
    let left = queue_pass(batch, 0..count)?;
    let mut left = queue_passes(batch, left, SHAPES - 1)?;
    if !left.is_empty() && batch.mix() {
        left = queue_passes(batch, left, SHAPES)?;
    }
    left.into_iter().try_for_each(|index| batch.queue_alone(index))
}

/// Queues the changes of at most so many shapes; returns the indexes of the others.
fn queue_passes(
    batch: &mut impl Batch,
    mut left: Vec<usize>,
    shapes: usize,
) -> Result<Vec<usize>, SetError> {
    for _ in 0..shapes {
        if left.is_empty() {
            break;
        }
        left = queue_pass(batch, left.into_iter())?;
    }
    Ok(left)
}

/// Queues the changes of one shape; returns the indexes of the others.
fn queue_pass<B: Batch>(
    batch: &mut B,
    indexes: impl Iterator<Item = usize>,
) -> Result<Vec<usize>, SetError> {
    let (mut members, mut left) = (Vec::new(), Vec::new());
    let (rows, bytes) = batch.limits();
    batch.begin();
    for index in indexes {
        let before = batch.bytes();
        if batch.push(index) {
            if batch.bytes() - before >= LARGE_ROW && batch.take_back() {
                batch.queue_alone(index)?;
                if members.is_empty() {
                    batch.begin();
                }
                continue;
            }
            members.push(index);
            if members.len() >= rows || batch.bytes() >= bytes {
                queue_members(batch, &mut members, &mut left)?;
            }
        } else if members.is_empty() {
            // The change does not fit even into an empty statement.
            batch.queue_alone(index)?;
            batch.begin();
        } else {
            left.push(index);
        }
    }
    queue_members(batch, &mut members, &mut left)?;
    Ok(left)
}

fn queue_members<B: Batch>(
    batch: &mut B,
    members: &mut Vec<usize>,
    left: &mut Vec<usize>,
) -> Result<(), SetError> {
    if members.is_empty() {
        return Ok(());
    }
    let few = members.len() < batch.few();
    if few && batch.leaves_few() {
        left.extend_from_slice(members);
    } else if few || !batch.queue()? {
        members.iter().try_for_each(|index| batch.queue_alone(*index))?;
    }
    members.clear();
    batch.begin();
    Ok(())
}
