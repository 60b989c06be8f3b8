//! Sessions: what each does next, what it waits for, and how it ends.

use std::collections::VecDeque;

use engine::blockers::PREPARED;
use engine::progress::Range;

use crate::simulation::history::Row;
use crate::simulation::subscriber::commands::{As, Command, Fault, Reply};
use crate::simulation::subscriber::{Database, Done, Status, Stop, Tx};

#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) pid: i32,
    pub(crate) commands: VecDeque<Command>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) broken: bool,
    pub(super) tx: Tx,
    /// Its transaction has failed.
    pub(super) failed: bool,
    /// It skips everything up to the Sync, after an error.
    pub(super) skipping: bool,
    pub(super) waits_for: Tx,
    pub(super) command_id: u32,
    pub(super) delta: u64,
    /// How often the trigger has run in the transaction.
    pub(super) fired: u64,
    /// The transaction has changed rows as sets; as single changes.
    pub(super) sets: bool,
    pub(super) alone: bool,
    pub(super) changed: u16,
    pub(super) truncated: u16,
    pub(super) progress: Vec<Range>,
    pub(super) savepoints: Vec<Savepoint>,
    pub(super) now: Running,
}

/// The state of a transaction at a savepoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Savepoint {
    pub(super) command_id: u32,
    pub(super) delta: u64,
    pub(super) changed: u16,
    pub(super) truncated: u16,
    pub(super) fired: u64,
}

/// The statement that is being executed.
#[derive(Debug, Default)]
pub(super) struct Running {
    pub(super) begun: bool,
    pub(super) snapshot: usize,
    pub(super) next: usize,
    pub(super) affected: usize,
    /// An update that has marked its old version: that version, and the new row.
    pub(super) half: Option<(usize, Row)>,
}

impl Session {
    pub(super) fn set_savepoint(&mut self, number: usize) -> Done<()> {
        if self.savepoints.len() != number {
            return Err(Stop::Wrong("savepoints come in order".to_owned()));
        }
        let Self { command_id, delta, changed, truncated, fired, .. } = *self;
        self.savepoints.push(Savepoint { command_id, delta, changed, truncated, fired });
        Ok(())
    }

    pub(super) fn release(&mut self, number: usize) -> Done<()> {
        if self.savepoints.len() != number + 1 {
            return Err(Stop::Wrong("a savepoint is released that is not there".to_owned()));
        }
        self.savepoints.pop();
        Ok(())
    }
}

impl Database {
    pub(crate) fn open_session(&mut self) -> Session {
        self.next_pid += 1;
        Session { pid: self.next_pid, ..Session::default() }
    }

    /// Whether a session has something to do and does not wait.
    pub(crate) fn can_run(&self, session: usize) -> bool {
        let session = &self.sessions[session];
        !session.broken && !session.commands.is_empty() && !self.is_running(session.waits_for)
    }

    /// Whether it is in the middle of a set.
    pub(crate) fn is_at_set(&self, session: usize) -> bool {
        let command = self.sessions[session].commands.front();
        matches!(command, Some(Command::Rows { sort: As::Set | As::Counted(_), .. }))
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
                    Command::Rows { .. }
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

    pub(super) fn abort(&mut self, number: usize) {
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

    pub(super) fn undo_since(&mut self, number: usize, to: Savepoint, savepoint: usize) {
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
}
