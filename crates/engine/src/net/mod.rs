//! Net changes: the changes of one row within a group fold into one.
//!
//! A [`Folder`] takes the changes of a group in stream order and returns [`Step`]s. For each table
//! these are *segments* of net changes, which may be executed as sets: deletes, then updates of keys, then other
//! updates, then inserts. Between segments there are single changes, which must be executed as the publisher sent
//! them.
//!
//! Executing the steps in order leaves the same tables as executing every change in stream order,
//! or it affects another number of rows than a step states. In that case the group is rolled back,
//! and its transactions are executed one by one. So the result and every conflict are the same at
//! every group size, with one exception: values of constraints beside the key are checked against rows that only
//! the subscriber has as the segment leaves them. A value that a later change replaces is not checked, unless it is in
//! [`TableRules::written`]. And if a later change deletes or updates such a row, its values are free for earlier changes.
//!
//! Steps of different lanes never touch the same rows, nor rows that a constraint relates: a unique
//! constraint of a partitioned table contains the partition key, so rows of two partitions never
//! conflict. The segments and single changes of one lane
//! stay in stream order. Between lanes, the order is kept only around user code.

mod append;
mod fold;
mod keyed;
mod merge;
#[cfg(test)]
mod tests;
mod whole_row;

pub use fold::Folder;

use pgoutput::{Column, RelId, Tuple, TupleColumns};

use crate::key::KeyForm;

/// The position of a change in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeAt {
    /// Index of the transaction part in the group.
    pub part: u32,
    /// Index of the change in that part.
    pub change: u32,
}

/// How the changes of one version of a table may be folded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRules {
    /// The oid of the published table on the publisher.
    pub published: RelId,
    /// The topmost relation of the subscriber that holds the rows. Tables below one may share rows.
    /// Then a change of one table closes the open segments of the others.
    pub root: u32,
    /// The relation of the subscriber that alone stores the rows; `None` for a partitioned table, whose
    /// rows its partitions store. See [`Folder`].
    pub storage: Option<u32>,
    /// Number of published columns. A tuple of another size is left to row mode, which rejects it.
    pub columns: usize,
    /// How rows are identified.
    pub fold: TableFolding,
    /// Whether updates are executed one by one. This is so if a published column cannot be set by
    /// UPDATE: only the subscriber can tell whether its value changed.
    pub updates_alone: bool,
    /// Whether updates of keys are folded, under [`TableFolding::Key`]: see [`Segment::moves`]. If not, they are
    /// executed one by one, as they are where `seeks` is set.
    pub moves: bool,
    /// Whether [`Segment::seeks`] is filled, under [`TableFolding::Key`] and [`TableFolding::WholeRow`].
    pub seeks: bool,
    /// Columns, in their order, in whose forms rows that are equal on the subscriber never differ. Needed for `seeks`
    /// under [`TableFolding::WholeRow`].
    pub told_apart: Vec<(usize, KeyForm)>,
    /// Columns of which each value is written that the publisher wrote, under [`TableFolding::Key`]: no later change
    /// of the row is folded into it, if the value is then no more. So it meets the rows that only the subscriber has.
    pub written: Vec<usize>,
}

impl TableRules {
    /// Whether updates are executed one by one.
    #[must_use]
    pub fn has_single_updates(&self) -> bool {
        self.updates_alone
            || matches!(
                self.fold,
                TableFolding::Append | TableFolding::AsSent | TableFolding::Never { .. }
            )
    }
}

/// How the rows of a table are identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableFolding {
    /// By columns that find at most one row on the subscriber. Each has its index among the
    /// published columns and the form in which its values are compared.
    Key(Vec<(usize, KeyForm)>),
    /// By all columns together, so equal rows are counted (REPLICA IDENTITY FULL without a usable
    /// key). Only changes with a complete old row can be folded.
    WholeRow,
    /// Not at all: inserts are collected, and everything else is left to row mode.
    Append,
    /// As well as by one of the others, but nothing is folded: each change is executed as the publisher
    /// sent it, because the user wants that (`--apply-mode row`).
    AsSent,
    /// Nothing is folded, because a change has other effects than those on its row. With `user_code`, a
    /// change may run user code, so all earlier changes of every table are executed before it.
    Never {
        /// Whether user code may run.
        user_code: bool,
    },
}

/// The next thing to execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a> {
    /// Net changes of one table.
    Segment(Segment<'a>),
    /// One change (insert, update, delete or truncate), as the publisher sent it.
    Alone(ChangeAt),
}

/// Net changes of one table version, each of another row. They are executed in the order absent,
/// deletes, moves, updates, inserts.
///
/// Only under [`TableFolding::Key`] may one row be in two lists: deleted, then inserted. Under
/// [`TableFolding::WholeRow`] rows are counted instead of distinguished. There, all updates must be matched
/// with rows before any is written, because one update may create the row that another looks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segment<'a> {
    /// Index of the table version, as the caller numbered it.
    pub table: usize,
    /// Rows that were inserted and deleted again. A delete of such a row must find nothing.
    pub absent: Vec<Row<'a>>,
    /// Rows to delete, each of which must be found. Only the columns that find the row have values.
    /// Under [`TableFolding::Key`], deletes, moves, updates and absent rows are sorted by the forms of their old keys.
    /// So neighbouring rows are accessed together, and all workers take row locks in one order.
    pub deletes: Vec<Old<'a>>,
    /// Rows to update that get another key, or another spelling of it, under [`TableFolding::Key`], each of which must
    /// be found.
    pub moves: Vec<Update<'a>>,
    /// Whether a row of `moves` gets the key that another one of them has. Then all of them must be matched with rows
    /// before any is written, and written as if all of them were deleted first.
    pub chained: bool,
    /// Rows to update, each of which must be found. Under [`TableFolding::Key`], they keep their keys.
    pub updates: Vec<Update<'a>>,
    /// Rows to insert.
    pub inserts: Vec<Row<'a>>,
    /// The changes that each delete and update stands for. Empty unless [`TableRules::seeks`] is set.
    pub seeks: Seeks<'a>,
}

/// The rows that a segment must find, where some may be missing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seeks<'a> {
    /// In the order of [`Segment::deletes`].
    pub deletes: Vec<Seek<'a>>,
    /// In the order of [`Segment::updates`].
    pub updates: Vec<Seek<'a>>,
}

/// A row that a segment must find.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seek<'a> {
    /// The changes that would not find it one by one, if it is missing. These are its changes before the first insert
    /// of it.
    ///
    /// Under [`TableFolding::WholeRow`], a change of another row may leave an equal row, or take it away. Where that is
    /// possible, there are no changes: it is not known then which would find nothing.
    pub changes: Vec<ChangeAt>,
    /// Under [`TableFolding::WholeRow`], what earlier changes make of the row, for which later ones look. None of these
    /// rows may be there either, because one of these changes would take it.
    pub passed: Vec<Row<'a>>,
}

impl Segment<'_> {
    /// Whether there is nothing to execute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.absent.is_empty()
            && self.deletes.is_empty()
            && self.moves.is_empty()
            && self.updates.is_empty()
            && self.inserts.is_empty()
    }
}

/// The old row that a delete or update must find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Old<'a> {
    /// The columns of the old row.
    pub row: Row<'a>,
    /// Under [`TableFolding::WholeRow`], the number of its class of equal rows, counted from 0 over the
    /// deletes and updates of the segment. Otherwise 0.
    pub class: u32,
    /// Under [`TableFolding::WholeRow`], its number among the deletes, or among the updates, of its class,
    /// counted from 0. Otherwise 0.
    pub nth: u32,
}

/// A row and its new values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update<'a> {
    /// The row to find under [`TableFolding::WholeRow`], and of [`Segment::moves`]. Otherwise `None`: the key columns
    /// of `new` find it.
    pub old: Option<Old<'a>>,
    /// The new values. `Unchanged` columns keep the subscriber's values. Key columns always have a
    /// value.
    pub new: Row<'a>,
}

/// The columns of a row, in the order of the Relation message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row<'a> {
    /// As one message sent them.
    Sent(Tuple<'a>),
    /// Merged from several messages, of which later ones left out unchanged values.
    Merged(Vec<Column<'a>>),
}

impl<'a> Row<'a> {
    /// Iterates over the columns.
    #[must_use]
    pub fn columns(&self) -> RowColumns<'_, 'a> {
        match self {
            Self::Sent(tuple) => RowColumns::Sent(tuple.columns()),
            Self::Merged(columns) => RowColumns::Merged(columns.iter()),
        }
    }
}

/// Iterates over the columns of a [`Row`].
#[derive(Debug, Clone)]
pub enum RowColumns<'r, 'a> {
    /// See [`Row::Sent`].
    Sent(TupleColumns<'a>),
    /// See [`Row::Merged`].
    Merged(std::slice::Iter<'r, Column<'a>>),
}

impl<'a> Iterator for RowColumns<'_, 'a> {
    type Item = Column<'a>;

    #[inline]
    fn next(&mut self) -> Option<Column<'a>> {
        match self {
            Self::Sent(columns) => columns.next(),
            Self::Merged(columns) => columns.next().copied(),
        }
    }
}
