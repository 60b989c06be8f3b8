//! The replies that the subscriber has to send to queued statements.

use engine::net::ChangeAt;
use engine::worker::ExpectedReply;
use pgoutput::{Lsn, Xid};

use crate::apply::encoder::sought::SoughtNumber;
use crate::subscriber::state::statistics::Changes;
use crate::subscriber::statement::row::Expect;

/// The reply to one statement, or to a Sync. Places are in the first group in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Expected {
    /// A statement about the transaction, the session, or the tables of pgapace.
    Control,
    /// Net changes, which must affect so many rows.
    Net {
        rows: u64,
        /// Index of the table version in the group.
        table: u32,
    },
    /// Net changes of rows that may be missing.
    Sought {
        number: SoughtNumber,
        /// Index of the table version in the group.
        table: u32,
    },
    /// A single change.
    Change {
        at: ChangeAt,
        expect: Expect,
    },
    /// The row of a change, which is locked and read.
    Look {
        at: ChangeAt,
    },
    Truncate {
        at: ChangeAt,
    },
    /// The progress row after this part.
    Progress {
        part: u32,
    },
    Commit {
        part: u32,
        /// The source transactions that it commits, if no Sync follows it.
        commits: Option<Committing>,
    },
    /// The end of a subscriber transaction; `None` after one that failed.
    Sync {
        commits: Option<Committing>,
    },
}

impl ExpectedReply for Expected {
    fn sync() -> Self {
        Self::Sync { commits: None }
    }

    fn is_sync(&self) -> bool {
        matches!(self, Self::Sync { .. })
    }

    fn commits(&self) -> Option<Lsn> {
        match self {
            Self::Sync { commits: Some(commits) } | Self::Commit { commits: Some(commits), .. } => {
                Some(commits.end)
            }
            _ => None,
        }
    }
}

/// The source transactions that one subscriber transaction commits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Committing {
    /// The end of the source transaction before its first.
    pub(crate) after: Lsn,
    /// The end of its last source transaction.
    pub(crate) end: Lsn,
    /// The number of its changes, by kind. Missing rows are counted when the replies come.
    pub(crate) changes: Changes,
    /// The transaction is not committed but prepared, as this transaction of the publisher.
    pub(crate) prepared: Option<Xid>,
    /// Whether it has run user code, which may have set `synchronous_commit`: then the commit is durable only after a
    /// flush.
    pub(crate) user_code: bool,
}
