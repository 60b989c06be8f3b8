//! A model of the subscriber database: row versions, sessions that wait for each other, commits that a
//! crash loses.
//!
//! It behaves as PostgreSQL under READ COMMITTED: a statement sees what had committed when it began, waits
//! for the transaction that has written the row or the unique key, and then sees the newest version.

use std::collections::VecDeque;
use std::rc::Rc;

use engine::blockers::PREPARED;
use engine::history::{Applied, Memory};
use engine::progress::Range;
use pgoutput::{Lsn, Xid};

use crate::simulation::history::{
    AUDIT, FULL, History, Preparation, Row, Set, TABLES, TRIGGERED, UNCERTAIN, UNIQUE, audit,
    digest, is_keyed,
};

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
struct ProgressRow {
    range: Range,
    memory: Option<Memory>,
    created: Tx,
    deleted: Tx,
}

/// A transaction of the publisher that is prepared on the subscriber, or is about to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreparedHere {
    pub(crate) xid: Xid,
    pub(crate) prepare_lsn: Lsn,
}

impl PreparedHere {
    pub(crate) fn of(one: &Preparation) -> Self {
        Self { xid: one.xid, prepare_lsn: one.prepare_lsn }
    }
}

/// The state of a prepared transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Prepared,
    Committed,
    Absent,
}

/// A row of `pgapace.prepared`.
#[derive(Debug)]
struct Note {
    of: PreparedHere,
    /// Written by the prepared transaction itself.
    committed: bool,
    created: Tx,
    deleted: Tx,
}

/// A row of `pg_prepared_xacts`, and what the transaction has changed.
#[derive(Debug)]
struct PreparedTransaction {
    of: PreparedHere,
    tx: Tx,
    delta: u64,
    changed: u16,
    truncated: u16,
}

/// The rows that a commit made visible, and the progress that it recorded.
#[derive(Debug, Clone, Copy, Default)]
struct Logged {
    visible: Set,
    recorded: Set,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Find {
    Key(u16),
    Row(Row),
    /// Any row.
    All,
}

impl Find {
    fn is(self, row: Row) -> bool {
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
    Rows(usize, Rc<[RowOp]>, As),
    Truncate(u16),
    Progress {
        range: Range,
        ordered: bool,
        memory: Option<Memory>,
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
    /// An error that a set can meet, and its rows one by one cannot.
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

#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) pid: i32,
    pub(crate) commands: VecDeque<Command>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) broken: bool,
    tx: Tx,
    /// Its transaction has failed.
    failed: bool,
    /// It skips everything up to the Sync, after an error.
    skipping: bool,
    waits_for: Tx,
    command_id: u32,
    delta: u64,
    /// How often the trigger has run in the transaction.
    fired: u64,
    /// The transaction has changed rows as sets; as single changes.
    sets: bool,
    alone: bool,
    changed: u16,
    truncated: u16,
    progress: Vec<Range>,
    savepoints: Vec<Savepoint>,
    now: Running,
}

/// The state of a transaction at a savepoint.
#[derive(Debug, Clone, Copy)]
struct Savepoint {
    command_id: u32,
    delta: u64,
    changed: u16,
    truncated: u16,
    fired: u64,
}

/// The statement that is being executed.
#[derive(Debug, Default)]
struct Running {
    begun: bool,
    snapshot: usize,
    next: usize,
    affected: usize,
    /// An update that has marked its old version: that version, and the new row.
    half: Option<(usize, Row)>,
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
            memory: Some(Memory::since(Lsn(100))),
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

    pub(crate) fn open_session(&mut self) -> Session {
        self.next_pid += 1;
        Session { pid: self.next_pid, ..Session::default() }
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

    /// Whether a session has something to do and does not wait.
    pub(crate) fn can_run(&self, session: usize) -> bool {
        let session = &self.sessions[session];
        !session.broken && !session.commands.is_empty() && !self.is_running(session.waits_for)
    }

    /// Whether it is in the middle of a set.
    pub(crate) fn is_at_set(&self, session: usize) -> bool {
        let command = self.sessions[session].commands.front();
        matches!(command, Some(Command::Rows(_, _, As::Set | As::Counted(_))))
    }

    /// Whether a session executes something that can be canceled.
    pub(crate) fn is_cancellable(&self, session: usize) -> bool {
        let session = &self.sessions[session];
        !session.skipping
            && !session.broken
            && session.tx != 0
            && matches!(
                session.commands.front(),
                Some(
                    Command::Rows(..)
                        | Command::Truncate(_)
                        | Command::Progress { .. }
                        | Command::NotePrepared(_)
                )
            )
    }

    /// Whether a session commits next.
    pub(crate) fn is_at_commit(&self, session: usize) -> bool {
        let session = &self.sessions[session];
        !session.skipping
            && session.tx != 0
            && matches!(session.commands.front(), Some(Command::Commit | Command::Prepare(_)))
    }

    /// Whether a COMMIT can fail because of a deferred constraint, and if so, whether only after sets.
    pub(crate) fn can_fail_to_commit(&self, session: usize) -> Option<bool> {
        let is_commit = matches!(self.sessions[session].commands.front(), Some(Command::Commit));
        let Session { sets, alone, savepoints, .. } = &self.sessions[session];
        // A transaction in parts fails at COMMIT only if rows would fail too: each part was answered.
        let only_sets = *sets && !alone && savepoints.is_empty();
        (is_commit && self.is_at_commit(session)).then_some(only_sets)
    }

    /// Which backend waits for which.
    pub(crate) fn waits(&self) -> Vec<(i32, i32)> {
        let mut waits = Vec::new();
        for session in self.sessions.iter().filter(|session| self.is_running(session.waits_for)) {
            let holder = self.sessions.iter().find(|other| other.tx == session.waits_for);
            // A transaction without a session is prepared.
            waits.push((session.pid, holder.map_or(PREPARED, |holder| holder.pid)));
        }
        waits
    }

    /// A session that waits, through others, for itself.
    pub(crate) fn deadlocked(&self) -> Option<usize> {
        let waits = self.waits();
        (0..self.sessions.len()).find(|session| {
            let own = self.sessions[*session].pid;
            let mut at = own;
            for _ in 0..waits.len() {
                match waits.iter().find(|(waiter, _)| *waiter == at) {
                    Some((_, holder)) if *holder == own => return true,
                    Some((_, holder)) => at = *holder,
                    None => return false,
                }
            }
            false
        })
    }

    /// The present command fails.
    pub(crate) fn fail(&mut self, session: usize, fault: Fault) {
        // A COMMIT that fails ends the transaction too.
        let commits = matches!(self.sessions[session].commands.pop_front(), Some(Command::Commit));
        if commits {
            self.abort(session);
        } else {
            self.undo(session);
        }
        let session = &mut self.sessions[session];
        session.failed = !commits;
        session.replies.push_back(Reply::Error(fault));
        session.skipping = true;
    }

    /// An error undoes what was done since the last savepoint; without one, the whole transaction. Its
    /// locks stay until it is rolled back, except those of rows.
    fn undo(&mut self, number: usize) {
        let session = &mut self.sessions[number];
        match session.savepoints.len().checked_sub(1).filter(|_| session.tx != 0) {
            None => self.abort(number),
            Some(last) => {
                session.waits_for = 0;
                session.now = Running::default();
                let to = session.savepoints[last];
                self.undo_since(number, to, last);
            }
        }
    }

    fn abort(&mut self, number: usize) {
        let session = &mut self.sessions[number];
        if session.tx != 0 {
            self.status[session.tx] = Status::Aborted;
        }
        session.tx = 0;
        session.waits_for = 0;
        session.now = Running::default();
    }

    /// The backend ends.
    pub(crate) fn terminate(&mut self, session: usize) {
        self.abort(session);
        let session = &mut self.sessions[session];
        session.commands.clear();
        session.replies.clear();
        session.broken = true;
    }

    /// Executes a little of the present command.
    pub(crate) fn step(&mut self, number: usize, history: &History) -> Result<(), String> {
        self.sessions[number].waits_for = 0;
        let Some(command) = self.sessions[number].commands.pop_front() else { return Ok(()) };
        let skipping = self.sessions[number].skipping;
        if matches!(command, Command::Sync) {
            let session = &mut self.sessions[number];
            session.skipping = false;
            let idle = session.tx == 0 && !session.failed;
            session.replies.push_back(Reply::Ready { idle });
            return Ok(());
        }
        if skipping {
            return Ok(());
        }
        match self.execute(number, &command, history) {
            Ok(Some(reply)) => {
                let session = &mut self.sessions[number];
                session.now = Running::default();
                session.command_id += 1;
                session.replies.push_back(reply);
            }
            Ok(None) => self.sessions[number].commands.push_front(command),
            Err(Stop::Wait(tx)) => {
                let session = &mut self.sessions[number];
                session.waits_for = tx;
                session.commands.push_front(command);
            }
            Err(Stop::Fail(fault)) => {
                self.sessions[number].commands.push_front(command);
                self.fail(number, fault);
            }
            Err(Stop::Wrong(what)) => return Err(what),
        }
        Ok(())
    }

    fn execute(
        &mut self,
        number: usize,
        command: &Command,
        history: &History,
    ) -> Done<Option<Reply>> {
        let commits = self.commits;
        let session = &mut self.sessions[number];
        if !session.now.begun {
            session.now.begun = true;
            session.now.snapshot = commits;
        }
        match command {
            Command::Begin if session.failed => Err(Stop::Fail(Fault::Failed)),
            Command::Begin if session.tx != 0 => {
                Err(Stop::Wrong("BEGIN inside a transaction".to_owned()))
            }
            Command::Begin => {
                session.tx = self.status.len();
                (session.command_id, session.delta) = (0, 0);
                (session.changed, session.truncated) = (0, 0);
                (session.fired, session.sets, session.alone) = (0, false, false);
                session.progress.clear();
                session.savepoints.clear();
                self.status.push(Status::Running);
                Ok(Some(Reply::Completed(0)))
            }
            Command::Rollback => {
                session.failed = false;
                self.abort(number);
                Ok(Some(Reply::RolledBack))
            }
            Command::Commit if session.failed => {
                session.failed = false;
                self.abort(number);
                Ok(Some(Reply::RolledBack))
            }
            Command::Nothing | Command::Sync => Ok(Some(Reply::Completed(0))),
            _ if session.tx == 0 => {
                Err(Stop::Wrong("a statement outside of a transaction".to_owned()))
            }
            Command::Commit => {
                self.commit(number, history).map_err(Stop::Wrong)?;
                Ok(Some(Reply::Completed(0)))
            }
            Command::Progress { range, ordered, memory } => {
                self.record(number, *range, *ordered, *memory)?;
                Ok(Some(Reply::Completed(1)))
            }
            Command::NotePrepared(of) => {
                let (created, deleted) = (session.tx, 0);
                self.notes.push(Note { of: *of, committed: true, created, deleted });
                Ok(Some(Reply::Completed(1)))
            }
            Command::Prepare(of) => {
                self.prepare(number, *of)?;
                Ok(Some(Reply::Completed(0)))
            }
            Command::Savepoint(number) => {
                if session.savepoints.len() != *number {
                    return Err(Stop::Wrong("savepoints come in order".to_owned()));
                }
                let Session { command_id, delta, changed, truncated, fired, .. } = *session;
                let savepoint = Savepoint { command_id, delta, changed, truncated, fired };
                session.savepoints.push(savepoint);
                Ok(Some(Reply::Completed(0)))
            }
            Command::Release(number) => {
                if session.savepoints.len() != *number + 1 {
                    return Err(Stop::Wrong(
                        "a savepoint is released that is not there".to_owned(),
                    ));
                }
                session.savepoints.pop();
                Ok(Some(Reply::Completed(0)))
            }
            Command::RollbackTo(savepoint) => {
                session.failed = false;
                let Some(to) = session.savepoints.get(*savepoint).copied() else {
                    return Err(Stop::Wrong("there is no such savepoint".to_owned()));
                };
                self.undo_since(number, to, *savepoint);
                Ok(Some(Reply::Completed(0)))
            }
            Command::ForgetPrepared(of) => {
                let tx = session.tx;
                self.delete_notes(*of, tx);
                Ok(Some(Reply::Completed(0)))
            }
            Command::Truncate(tables) => {
                self.truncate(number, *tables)?;
                Ok(Some(Reply::Completed(0)))
            }
            Command::Rows(table, rows, sort) => {
                self.lock_table(number, *table)?;
                let session = &mut self.sessions[number];
                session.alone |= *sort == As::Alone;
                session.sets |= *sort != As::Alone;
                let next = self.sessions[number].now.next;
                if let Some((row, later)) = rows.get(next..).and_then(<[_]>::split_first) {
                    let affected = self.row(number, *table, row, later)?;
                    let now = &mut self.sessions[number].now;
                    now.next += 1;
                    now.affected += affected;
                }
                let now = &self.sessions[number].now;
                let done = now.next >= rows.len();
                if let As::Counted(expected) = sort
                    && done
                    && now.affected != *expected
                {
                    return Err(Stop::Fail(Fault::AsSet));
                }
                Ok(done.then_some(Reply::Completed(now.affected)))
            }
        }
    }

    fn lock_table(&mut self, number: usize, table: usize) -> Done<()> {
        let own = self.sessions[number].tx;
        for (tx, changed, truncated) in self.holders() {
            if tx != own && (truncated | changed & self.hidden) & 1 << table != 0 {
                return Err(Stop::Wait(tx));
            }
        }
        self.sessions[number].changed |= 1 << table;
        Ok(())
    }

    /// Transactions that have locked tables, and which tables.
    fn holders(&self) -> impl Iterator<Item = (Tx, u16, u16)> {
        let sessions = self.sessions.iter().map(|one| (one.tx, one.changed, one.truncated));
        let prepared = self.prepared.iter().map(|one| (one.tx, one.changed, one.truncated));
        sessions.chain(prepared).filter(|(tx, ..)| self.is_running(*tx))
    }

    fn truncate(&mut self, number: usize, tables: u16) -> Done<()> {
        let tx = self.sessions[number].tx;
        for (other, changed, truncated) in self.holders() {
            if other != tx && (truncated | changed) & tables != 0 {
                return Err(Stop::Wait(other));
            }
        }
        let command = self.sessions[number].command_id;
        for table in (0..TABLES).filter(|table| tables & 1 << table != 0) {
            for at in 0..self.tables[table].len() {
                let version = &self.tables[table][at];
                let there = version.created.0 == tx || self.is_committed(version.created.0);
                let gone = version.deleted.0 == tx || self.is_committed(version.deleted.0);
                if there && !gone {
                    self.delete(number, table, at, command);
                }
            }
        }
        self.sessions[number].truncated |= tables;
        Ok(())
    }

    fn undo_since(&mut self, number: usize, to: Savepoint, savepoint: usize) {
        let session = &mut self.sessions[number];
        session.savepoints.truncate(savepoint + 1);
        (session.delta, session.changed, session.truncated) = (to.delta, to.changed, to.truncated);
        session.fired = to.fired;
        let tx = session.tx;
        let undone = |(writer, command): (Tx, u32)| writer == tx && command > to.command_id;
        for version in self.tables.iter_mut().flatten() {
            if undone(version.created) {
                version.created = (0, 0);
            }
            if undone(version.deleted) {
                version.deleted = (0, 0);
                version.next = None;
            }
        }
    }

    fn delete(&mut self, number: usize, table: usize, at: usize, command: u32) {
        let version = &mut self.tables[table][at];
        let session = &mut self.sessions[number];
        version.deleted = (session.tx, command);
        version.next = None;
        session.delta = session.delta.wrapping_sub(digest(table, version.row));
    }

    fn create(&mut self, number: usize, table: usize, row: Row) -> usize {
        let session = &mut self.sessions[number];
        session.delta = session.delta.wrapping_add(digest(table, row));
        let created = (session.tx, session.command_id);
        self.tables[table].push(Version { row, created, deleted: (0, 0), next: None });
        self.tables[table].len() - 1
    }

    /// Returns how many rows were affected. `later` are the rows that the same set changes later.
    fn row(&mut self, number: usize, table: usize, op: &RowOp, later: &[RowOp]) -> Done<usize> {
        let half = self.sessions[number].now.half;
        match (op, half) {
            (RowOp::Insert(row), _) => {
                self.check_unique(number, table, *row, later)?;
                self.create(number, table, *row);
            }
            (RowOp::Delete(find), _) => {
                let Some(at) = self.find(number, table, find)? else { return Ok(0) };
                let command = self.sessions[number].command_id;
                self.delete(number, table, at, command);
            }
            (RowOp::Update(find, set), None) => {
                let Some(at) = self.find(number, table, find)? else { return Ok(0) };
                let command = self.sessions[number].command_id;
                let old = self.tables[table][at].row;
                let mut new = old;
                for (column, value) in set.iter().enumerate() {
                    new[column] = value.unwrap_or(new[column]);
                }
                self.delete(number, table, at, command);
                self.sessions[number].now.half = Some((at, new));
                return self.row(number, table, op, later);
            }
            (RowOp::Update(..), Some((at, new))) => {
                self.check_unique(number, table, new, later)?;
                let next = self.create(number, table, new);
                self.tables[table][at].next = Some(next);
                self.sessions[number].now.half = None;
            }
        }
        if table == TRIGGERED {
            let session = &mut self.sessions[number];
            session.fired += 1;
            let row = audit(self.digest.wrapping_add(session.delta), session.fired);
            self.create(number, AUDIT, row);
        }
        Ok(1)
    }

    /// The version to be changed, when no other transaction is changing it.
    fn find(&self, number: usize, table: usize, find: &Find) -> Done<Option<usize>> {
        let Session { tx, command_id, now, .. } = &self.sessions[number];
        let matches = |row: &Row| find.is(*row);
        let before = |(writer, command): (Tx, u32)| {
            if writer == *tx { command < *command_id } else { self.is_in(writer, now.snapshot) }
        };
        let versions = &self.tables[table];
        let found = versions.iter().position(|version| {
            matches(&version.row)
                && before(version.created)
                && !before(version.deleted)
                && version.deleted.0 != *tx
        });
        let Some(mut at) = found else { return Ok(None) };
        loop {
            let version = &versions[at];
            let deleter = version.deleted.0;
            if deleter == *tx {
                return Ok(None);
            }
            if self.is_running(deleter) {
                return Err(Stop::Wait(deleter));
            }
            if !self.is_committed(deleter) {
                return Ok(Some(at));
            }
            match version.next {
                Some(next) if matches(&versions[next].row) => at = next,
                _ => return Ok(None),
            }
        }
    }

    fn check_unique(&self, number: usize, table: usize, row: Row, later: &[RowOp]) -> Done<()> {
        let tx = self.sessions[number].tx;
        for version in &self.tables[table] {
            let same = is_keyed(table) && version.row[0] == row[0]
                || table == UNIQUE && row[1] != 0 && version.row[1] == row[1];
            if !same {
                continue;
            }
            let (created, deleted) = (version.created.0, version.deleted.0);
            if created != tx && self.is_running(created) {
                return Err(Stop::Wait(created));
            }
            if created != tx && !self.is_committed(created) || deleted == tx {
                continue;
            }
            if self.is_running(deleted) {
                return Err(Stop::Wait(deleted));
            }
            if !self.is_committed(deleted) {
                // The set itself changes it later.
                let changes =
                    |op: &RowOp| matches!(op, RowOp::Update(find, _) if find.is(version.row));
                let in_order = !later.iter().any(changes);
                return Err(Stop::Fail(if in_order { Fault::Unique } else { Fault::AsSet }));
            }
        }
        Ok(())
    }

    fn record(
        &mut self,
        number: usize,
        range: Range,
        ordered: bool,
        memory: Option<Memory>,
    ) -> Done<()> {
        let tx = self.sessions[number].tx;
        let there =
            |row: &ProgressRow| self.is_committed(row.created) && !self.is_committed(row.deleted);
        let turn = |row: &ProgressRow| row.range.through == range.after && there(row);
        if ordered && !self.progress.iter().any(turn) {
            return Err(Stop::Fail(Fault::Turn));
        }
        for row in &self.progress {
            if row.range.through != range.through && row.range.after != range.after {
                continue;
            }
            if self.is_running(row.created) {
                return Err(Stop::Wait(row.created));
            }
            if there(row) {
                return Err(Stop::Fail(Fault::Unique));
            }
        }
        self.progress.push(ProgressRow { range, memory, created: tx, deleted: 0 });
        self.sessions[number].progress.push(range);
        Ok(())
    }

    /// Commits, and checks what must hold of what is visible then.
    fn commit(&mut self, number: usize, history: &History) -> Result<(), String> {
        let session = &mut self.sessions[number];
        let tx = std::mem::take(&mut session.tx);
        let set = session.progress.iter().fold(0, |set, r| set | history.range(r.after, r.through));
        let ranges = session.progress.clone();
        let delta = session.delta;
        if ranges.len() != 1 {
            return Err(format!("P3: a commit with the progress {ranges:?}"));
        }
        // The bits mean other changes in another history.
        if self.followed_before.is_none() && self.recorded & set != 0 {
            return Err(format!("P3: recorded twice: {:#x} of {ranges:?}", self.recorded & set));
        }
        self.log_commit(tx, delta, Logged { visible: set & !self.committed, recorded: set });
        let visible = self.check_visible(set, ranges[0].through, history);
        visible.map_err(|what| format!("{what}, with {ranges:?}"))
    }

    fn log_commit(&mut self, tx: Tx, delta: u64, logged: Logged) {
        self.digest = self.digest.wrapping_add(delta);
        self.commits = self.log.len();
        self.status[tx] = Status::Committed(self.commits);
        self.log.push(logged);
        self.committed |= logged.visible;
        self.recorded |= logged.recorded;
    }

    /// Executes a transaction that no other one waits for.
    fn small_commit(&mut self) -> Tx {
        let tx = self.status.len();
        self.status.push(Status::Running);
        self.log_commit(tx, 0, Logged::default());
        tx
    }

    /// Checks that must hold when these have become visible.
    fn check_visible(&self, set: Set, through: Lsn, history: &History) -> Result<(), String> {
        if let Some(followed) = self.followed_before {
            // The rows belong to another history. Transactions that a gap in it left out may be applied
            // before pgapace notices. Beyond `followed`, only idle progress may be recorded.
            let applied = through > followed && set != 0;
            return if applied { Err("P5: another history is applied".to_owned()) } else { Ok(()) };
        }
        let mut expected = 0_u64;
        for (number, transaction) in history.transactions.iter().enumerate() {
            if self.committed & 1 << number != 0 {
                expected = expected.wrapping_add(transaction.delta);
            }
            if set & 1 << number != 0 {
                let before = (1 << number) - 1;
                let needed = if self.ordered { before } else { transaction.depends_on };
                let missing = needed & !self.committed;
                if missing != 0 {
                    return Err(format!("P2: {number} is committed before {missing:#x}"));
                }
            }
        }
        if expected != self.digest {
            return Err("P1, P5: the rows are others than expected".to_owned());
        }
        Ok(())
    }

    /// PREPARE TRANSACTION, which is durable when it is answered.
    fn prepare(&mut self, number: usize, of: PreparedHere) -> Done<()> {
        if self.prepared.iter().any(|one| one.of == of) {
            return Err(Stop::Fail(Fault::Name));
        }
        let session = &mut self.sessions[number];
        let tx = std::mem::take(&mut session.tx);
        let Session { delta, changed, truncated, .. } = *session;
        self.prepared.push(PreparedTransaction { of, tx, delta, changed, truncated });
        self.durable = self.commits;
        Ok(())
    }

    /// Records, in a commit of its own, that these are about to be prepared.
    pub(crate) fn note_prepared(&mut self, all: &[PreparedHere]) {
        let created = self.small_commit();
        for of in all {
            if !self.notes_of(*of).any(|note| !note.committed) {
                self.notes.push(Note { of: *of, committed: false, created, deleted: 0 });
            }
        }
    }

    fn notes_of(&self, of: PreparedHere) -> impl Iterator<Item = &Note> {
        let there = move |note: &&Note| {
            note.of == of && self.is_committed(note.created) && !self.is_committed(note.deleted)
        };
        self.notes.iter().filter(there)
    }

    fn delete_notes(&mut self, of: PreparedHere, tx: Tx) {
        for at in 0..self.notes.len() {
            let note = &self.notes[at];
            let (created, deleted) = (note.created, note.deleted);
            if note.of == of && self.is_committed(created) && !self.is_committed(deleted) {
                self.notes[at].deleted = tx;
            }
        }
    }

    pub(crate) fn forget_prepared(&mut self, of: PreparedHere) {
        let tx = self.small_commit();
        self.delete_notes(of, tx);
    }

    /// Whether the records say that it has committed.
    pub(crate) fn has_committed(&self, of: PreparedHere) -> bool {
        self.notes_of(of).any(|note| note.committed)
    }

    /// COMMIT PREPARED or ROLLBACK PREPARED, which are durable when they are answered. Whether it was
    /// prepared.
    pub(crate) fn resolve(
        &mut self,
        of: PreparedHere,
        commit: bool,
        history: &History,
    ) -> Result<bool, String> {
        let Some(place) = self.prepared.iter().position(|one| one.of == of) else {
            return Ok(false);
        };
        let PreparedTransaction { tx, delta, .. } = self.prepared.swap_remove(place);
        if commit {
            let (visible, through) = match history.number(of.xid) {
                Some(number) => (1 << number, history.transactions[number].end_lsn),
                None if history.empty.contains(&of.xid) => (0, Lsn(0)),
                None => return Err(format!("P1: {of:?} did not happen")),
            };
            if self.followed_before.is_none() && self.committed & visible != 0 {
                return Err(format!("P3: {of:?} is committed twice"));
            }
            self.log_commit(tx, delta, Logged { visible, recorded: 0 });
            self.durable = self.commits;
            self.check_visible(visible, through, history)?;
        } else {
            self.status[tx] = Status::Aborted;
        }
        Ok(true)
    }

    /// The transactions that are prepared, or were about to be.
    pub(crate) fn known_prepared(&self) -> Vec<(PreparedHere, Standing)> {
        let there = |note: &&Note| {
            !note.committed && self.is_committed(note.created) && !self.is_committed(note.deleted)
        };
        let noted = self.notes.iter().filter(there).map(|note| note.of);
        let mut all: Vec<_> = self.prepared.iter().map(|one| one.of).collect();
        for of in noted {
            if !all.contains(&of) {
                all.push(of);
            }
        }
        let standing = |of: PreparedHere| {
            if self.has_committed(of) {
                Standing::Committed
            } else if self.prepared.iter().any(|one| one.of == of) {
                Standing::Prepared
            } else {
                Standing::Absent
            }
        };
        all.into_iter().map(|of| (of, standing(of))).collect()
    }

    /// Whether a transaction is prepared, so that a crash does not lose it.
    pub(crate) fn is_prepared(&self, xid: Xid) -> bool {
        self.prepared.iter().any(|one| one.of.xid == xid)
    }

    /// A small synchronous commit, which removes old progress rows. It makes every earlier commit durable.
    pub(crate) fn flush(&mut self, before: Lsn) {
        let tx = self.small_commit();
        for at in 0..self.progress.len() {
            let row = &self.progress[at];
            if row.range.through < before
                && self.is_committed(row.created)
                && !self.is_committed(row.deleted)
            {
                self.progress[at].deleted = tx;
            }
        }
        self.durable = self.commits;
    }

    pub(crate) fn durable_set(&self) -> Set {
        self.log[..=self.durable].iter().fold(0, |all, logged| all | logged.visible)
    }

    /// The number of commits, without those that were lost.
    pub(crate) fn commits(&self) -> usize {
        self.commits
    }

    pub(crate) fn undurable(&self) -> usize {
        self.commits - self.durable
    }

    /// Crashes, and loses the last commits.
    pub(crate) fn crash(&mut self, lost: usize) {
        for session in 0..self.sessions.len() {
            self.terminate(session);
        }
        let last = self.commits - lost;
        for (tx, status) in self.status.iter_mut().enumerate() {
            match *status {
                Status::Committed(at) if at > last => *status = Status::Aborted,
                Status::Running if self.prepared.iter().all(|one| one.tx != tx) => {
                    *status = Status::Aborted;
                }
                _ => {}
            }
        }
        self.log.truncate(last + 1);
        self.commits = last;
        // Everything that it comes up with is durable.
        self.durable = last;
        self.committed = self.log.iter().fold(0, |all, logged| all | logged.visible);
        self.recorded = self.log.iter().fold(0, |all, logged| all | logged.recorded);
        self.digest = self.count();
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

    /// The progress rows, in order.
    pub(crate) fn read_progress(&self) -> Vec<Applied> {
        let there =
            |row: &&ProgressRow| self.is_committed(row.created) && !self.is_committed(row.deleted);
        let applied = |row: &ProgressRow| Applied { range: row.range, memory: row.memory };
        let mut rows: Vec<_> = self.progress.iter().filter(there).map(applied).collect();
        rows.sort_by_key(|applied| applied.range.through);
        rows
    }

    pub(crate) fn is_recorded(&self, end: Lsn) -> bool {
        self.read_progress().iter().any(|applied| applied.range.through == end)
    }
}

/// How a single change finds its row.
pub(crate) fn find(table: usize, row: Row) -> Find {
    if matches!(table, FULL | UNCERTAIN) { Find::Row(row) } else { Find::Key(row[0]) }
}
