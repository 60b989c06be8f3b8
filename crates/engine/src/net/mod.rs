//! Net changes: inside a group the changes of one row fold into one.
//!
//! A [`Folder`] takes the changes of a group in stream order and gives [`Step`]s: for each table
//! *segments* of net changes, which may be executed as sets (deletes, then updates, then inserts),
//! and between them single changes that must be executed as the publisher sent them. Executing the
//! steps in order gives the same tables as executing every change in stream order, or it affects
//! another number of rows than the step says; then the group is rolled back and its transactions
//! are executed one by one. So the result, and every conflict, is the same at every group size
//! (promise P8).
//!
//! Steps of different lanes never touch the same rows. The segments and single changes of one lane
//! stay in stream order; those of different lanes only around a barrier.

mod append;
mod fold;
mod keyed;
mod merge;
#[cfg(test)]
mod tests;
mod whole_row;

pub use fold::Folder;

use pgoutput::{Column, Tuple, TupleColumns};

use crate::key::KeyForm;

/// Where a change stands: which part of the group, which change of the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeAt {
    /// Index of the transaction part in the group.
    pub part: u32,
    /// Index of the change in the part.
    pub change: u32,
}

/// How the changes of one version of a table may be folded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRules {
    /// The topmost relation of the subscriber that holds its rows. Tables of one lane share rows, so
    /// a change of one closes the open segment of every other.
    pub lane: u32,
    /// Number of published columns: a tuple of another size is left to row mode, which refuses it.
    pub columns: usize,
    /// How rows are told apart.
    pub fold: TableFolding,
    /// Updates are executed one by one (a column that UPDATE cannot set is published, and only the
    /// subscriber knows whether it changed).
    pub updates_alone: bool,
}

/// How rows of a table are told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableFolding {
    /// By columns that find at most one row on the subscriber: index of the published column, and when
    /// two of its values are equal there.
    Key(Vec<(usize, KeyForm)>),
    /// By nothing but all columns together: equal rows are counted (REPLICA IDENTITY FULL without
    /// a usable key). Only changes with a complete old row can be folded.
    WholeRow,
    /// Rows cannot be found: inserts are collected, everything else is left to row mode.
    Append,
    /// Row mode: nothing is folded. With `barrier` a change may run code of users, so everything
    /// before it, of every table, is executed before it.
    Never {
        /// Whether user code may run.
        barrier: bool,
    },
}

/// What is to be executed next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a> {
    /// Net changes of one table.
    Segment(Segment<'a>),
    /// One change (insert, update, delete or truncate), as the publisher sent it.
    Alone(ChangeAt),
}

/// Net changes of one table version, each of another row: executed as absent, deletes, updates,
/// inserts. Only under [`TableFolding::Key`] a row may stand in two of them: deleted, then inserted. Under
/// [`TableFolding::WholeRow`] the rows are not distinct but counted; then all updates must be matched with
/// rows before any is written, because one may leave what another looks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segment<'a> {
    /// The caller's number of the table version.
    pub table: usize,
    /// Rows that were inserted and deleted again: a delete of them must find nothing.
    pub absent: Vec<Row<'a>>,
    /// Rows to delete: each must be found. Only the columns that find the row have values.
    /// Under [`TableFolding::Key`] deletes, updates and absent rows are sorted by the forms of their keys:
    /// neighbours lie together, and locks are taken in one order everywhere.
    pub deletes: Vec<Old<'a>>,
    /// Rows to update: each must be found.
    pub updates: Vec<Update<'a>>,
    /// Rows to insert.
    pub inserts: Vec<Row<'a>>,
}

impl Segment<'_> {
    /// Whether nothing is to be executed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.absent.is_empty()
            && self.deletes.is_empty()
            && self.updates.is_empty()
            && self.inserts.is_empty()
    }
}

/// The row that a delete or update finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Old<'a> {
    /// Its columns.
    pub row: Row<'a>,
    /// Under [`TableFolding::WholeRow`]: number of the equal rows it belongs to, counted from 0 over the
    /// deletes and updates of the segment. Otherwise 0.
    pub class: u32,
    /// Under [`TableFolding::WholeRow`]: its number among the deletes (or among the updates) of its class,
    /// counted from 0. Otherwise 0.
    pub nth: u32,
}

/// A row and its new values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update<'a> {
    /// The row to find under [`TableFolding::WholeRow`]; under [`TableFolding::Key`] the key columns of `new` find
    /// it, and this is `None`.
    pub old: Option<Old<'a>>,
    /// New values. `Unchanged` columns keep what the subscriber has. Key columns always have a value.
    pub new: Row<'a>,
}

/// The columns of a row, in the order of the Relation message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row<'a> {
    /// As one message sent them.
    Sent(Tuple<'a>),
    /// Taken from several messages, where later ones left large values out.
    Merged(Vec<Column<'a>>),
}

impl<'a> Row<'a> {
    /// Walks the columns.
    #[must_use]
    pub fn columns(&self) -> RowColumns<'_, 'a> {
        match self {
            Self::Sent(tuple) => RowColumns::Sent(tuple.columns()),
            Self::Merged(columns) => RowColumns::Merged(columns.iter()),
        }
    }
}

/// Walks the columns of a [`Row`].
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
