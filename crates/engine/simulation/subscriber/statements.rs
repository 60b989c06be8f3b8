//! Executes statements, a little of one at a time.

use crate::simulation::history::History;
use crate::simulation::subscriber::commands::{As, Command, Fault, Reply, RowOp};
use crate::simulation::subscriber::prepared::Note;
use crate::simulation::subscriber::sessions::Running;
use crate::simulation::subscriber::{Database, Done, Status, Stop};

impl Database {
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
                self.begin(number);
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
            Command::Progress { range, ordered, mark } => {
                self.record(number, *range, *ordered, *mark)?;
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
            Command::Savepoint(savepoint) => {
                session.set_savepoint(*savepoint)?;
                Ok(Some(Reply::Completed(0)))
            }
            Command::Release(savepoint) => {
                session.release(*savepoint)?;
                Ok(Some(Reply::Completed(0)))
            }
            Command::RollbackTo(savepoint) => {
                self.roll_back_to(number, *savepoint)?;
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
            Command::Rows { table, rows, later, sort } => {
                self.change_rows(number, *table, (rows, later), *sort)
            }
        }
    }
    fn begin(&mut self, number: usize) {
        let session = &mut self.sessions[number];
        session.tx = self.status.len();
        (session.command_id, session.delta) = (0, 0);
        (session.changed, session.truncated) = (0, 0);
        (session.fired, session.sets, session.alone) = (0, false, false);
        session.progress.clear();
        session.savepoints.clear();
        self.status.push(Status::Running);
    }

    fn roll_back_to(&mut self, number: usize, savepoint: usize) -> Done<()> {
        let session = &mut self.sessions[number];
        session.failed = false;
        let Some(to) = session.savepoints.get(savepoint).copied() else {
            return Err(Stop::Wrong("there is no such savepoint".to_owned()));
        };
        self.undo_since(number, to, savepoint);
        Ok(())
    }

    /// Changes the next row; replies when it was the last one.
    fn change_rows(
        &mut self,
        number: usize,
        table: usize,
        (rows, later): (&[RowOp], &[RowOp]),
        sort: As,
    ) -> Done<Option<Reply>> {
        self.lock_table(number, table)?;
        let session = &mut self.sessions[number];
        session.alone |= sort == As::Alone;
        session.sets |= sort != As::Alone;
        let next = session.now.next;
        if let Some((row, rest)) = rows.get(next..).and_then(<[_]>::split_first) {
            let affected = self.row(number, table, row, [rest, later])?;
            let now = &mut self.sessions[number].now;
            now.next += 1;
            now.affected += affected;
        }
        let now = &self.sessions[number].now;
        let done = now.next >= rows.len();
        if let As::Counted(expected) = sort
            && done
            && now.affected != expected
        {
            return Err(Stop::Fail(Fault::AsSet));
        }
        Ok(done.then_some(Reply::Completed(now.affected)))
    }
}
