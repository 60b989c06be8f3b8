//! The statements that a session can be sent, and their replies.

use std::rc::Rc;

use engine::history::HistoryMark;
use engine::progress::Range;

use crate::simulation::history::{FULL, Row, UNCERTAIN};
use crate::simulation::subscriber::prepared::PreparedHere;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Find {
    Key(u16),
    Row(Row),
    /// Any row.
    All,
}

impl Find {
    pub(super) fn is(self, row: Row) -> bool {
        match self {
            Self::Key(key) => row[0] == key,
            Self::Row(wanted) => row == wanted,
            Self::All => true,
        }
    }
}

/// The change of one row. An update keeps the columns that have no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOp {
    Insert(Row),
    Update(Find, [Option<u16>; 4]),
    Delete(Find),
}

#[derive(Debug)]
pub(crate) enum Command {
    Begin,
    Rollback,
    Nothing,
    /// Rows of one table.
    Rows {
        table: usize,
        rows: Rc<[RowOp]>,
        /// Rows that the next statement of the same net changes updates.
        later: Rc<[RowOp]>,
        sort: As,
    },
    Truncate(u16),
    Progress {
        range: Range,
        ordered: bool,
        mark: Option<HistoryMark>,
    },
    /// The row of `pgapace.prepared` that shows whether it has committed.
    NotePrepared(PreparedHere),
    Prepare(PreparedHere),
    ForgetPrepared(PreparedHere),
    Savepoint(usize),
    Release(usize),
    RollbackTo(usize),
    Commit,
    Sync,
}

/// How rows are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum As {
    /// One row, as the publisher changed it.
    Alone,
    Set,
    /// A set that fails if it affects another number of rows.
    Counted(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// 23505: a row was in the way.
    Unique,
    /// 23502: the predecessor's progress row is not there.
    Turn,
    /// An error that net changes can meet, and the changes one by one cannot.
    AsSet,
    /// 40P01, 57014: the next attempt may succeed.
    Passing,
    /// 25P02: the transaction has failed already.
    Failed,
    /// 42710: the name of a prepared transaction is in use.
    Name,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Completed(usize),
    /// COMMIT of a failed transaction.
    RolledBack,
    Error(Fault),
    Ready {
        idle: bool,
    },
}

/// How a single change finds its row.
pub(crate) fn find(table: usize, row: Row) -> Find {
    if matches!(table, FULL | UNCERTAIN) { Find::Row(row) } else { Find::Key(row[0]) }
}
