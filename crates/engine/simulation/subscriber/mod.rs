//! A model of the subscriber database: row versions, sessions that wait for each other, commits that a
//! crash loses.
//!
//! It behaves as PostgreSQL under READ COMMITTED: a statement sees what had committed when it began, waits
//! for the transaction that has written the row or the unique key, and then sees the newest version.

mod commands;
mod commits;
mod prepared;
mod rows;
mod sessions;
mod statements;

use engine::history::HistoryMark;
use engine::progress::Range;
use pgoutput::Lsn;

use crate::simulation::history::{Row, Set, TABLES, digest};
use crate::simulation::subscriber::commits::{Logged, ProgressRow};
use crate::simulation::subscriber::prepared::{Note, PreparedTransaction};
use crate::simulation::subscriber::sessions::Session;

pub(crate) use commands::{As, Command, Fault, Find, Reply, RowOp, find};
pub(crate) use prepared::{PreparedHere, Standing};

/// A subscriber transaction; 0 is none.
type Tx = usize;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Running,
    /// Its number among all commits.
    Committed(usize),
    Aborted,
}

#[derive(Debug)]
struct Version {
    row: Row,
    created: (Tx, u32),
    /// 0 if it is not deleted.
    deleted: (Tx, u32),
    next: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct Database {
    status: Vec<Status>,
    tables: Vec<Vec<Version>>,
    progress: Vec<ProgressRow>,
    pub(crate) sessions: Vec<Session>,
    commits: usize,
    durable: usize,
    /// The digest of what is committed.
    digest: u64,
    pub(crate) committed: Set,
    /// The part of it that progress covers.
    recorded: Set,
    log: Vec<Logged>,
    notes: Vec<Note>,
    prepared: Vec<PreparedTransaction>,
    next_pid: i32,
    /// Whether each commit must have all earlier ones before it.
    pub(crate) ordered: bool,
    /// Tables that a transaction locks to its end when it changes them: locks that the program does not
    /// know.
    pub(crate) hidden: u16,
    /// The number of commits when the publisher lost its last ones.
    pub(crate) commits_before: usize,
    /// The publisher has another history now; this much of it was applied.
    pub(crate) followed_before: Option<Lsn>,
}

/// Why a statement cannot go on.
enum Stop {
    Wait(Tx),
    Fail(Fault),
    Wrong(String),
}

type Done<T> = std::result::Result<T, Stop>;

impl Database {
    pub(crate) fn new() -> Self {
        let start = ProgressRow {
            range: Range { after: Lsn(0), through: Lsn(100) },
            mark: Some(HistoryMark::since(Lsn(100))),
            created: 1,
            deleted: 0,
        };
        Self {
            status: vec![Status::Aborted, Status::Committed(0)],
            tables: (0..TABLES).map(|_| Vec::new()).collect(),
            progress: vec![start],
            sessions: Vec::new(),
            commits: 0,
            durable: 0,
            digest: 0,
            committed: 0,
            recorded: 0,
            log: vec![Logged::default()],
            notes: Vec::new(),
            prepared: Vec::new(),
            next_pid: 10,
            ordered: true,
            hidden: 0,
            commits_before: 0,
            followed_before: None,
        }
    }

    fn is_running(&self, tx: Tx) -> bool {
        tx != 0 && self.status[tx] == Status::Running
    }

    fn is_committed(&self, tx: Tx) -> bool {
        matches!(self.status[tx], Status::Committed(_))
    }

    fn is_in(&self, tx: Tx, snapshot: usize) -> bool {
        matches!(self.status[tx], Status::Committed(at) if at <= snapshot)
    }

    /// The digest of the rows, computed again.
    pub(crate) fn count(&self) -> u64 {
        let mut all = 0_u64;
        for (table, versions) in self.tables.iter().enumerate() {
            for version in versions {
                if self.is_committed(version.created.0) && !self.is_committed(version.deleted.0) {
                    all = all.wrapping_add(digest(table, version.row));
                }
            }
        }
        all
    }
}
