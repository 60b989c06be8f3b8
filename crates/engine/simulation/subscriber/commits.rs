//! Commits with their progress, what must hold of what they make visible, and which of them a crash loses.

use engine::history::{AppliedRange, HistoryMark};
use engine::progress::Range;
use pgoutput::Lsn;

use crate::simulation::history::{History, Set};
use crate::simulation::subscriber::commands::Fault;
use crate::simulation::subscriber::{Database, Done, Status, Stop, Tx};

#[derive(Debug)]
pub(super) struct ProgressRow {
    pub(super) range: Range,
    pub(super) mark: Option<HistoryMark>,
    pub(super) created: Tx,
    pub(super) deleted: Tx,
}

/// The rows that a commit made visible, and the progress that it recorded.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Logged {
    pub(super) visible: Set,
    pub(super) recorded: Set,
}

impl Database {
    pub(super) fn record(
        &mut self,
        number: usize,
        range: Range,
        ordered: bool,
        mark: Option<HistoryMark>,
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
        self.progress.push(ProgressRow { range, mark, created: tx, deleted: 0 });
        self.sessions[number].progress.push(range);
        Ok(())
    }

    /// Commits, and checks what must hold of what is visible then.
    pub(super) fn commit(&mut self, number: usize, history: &History) -> Result<(), String> {
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

    pub(super) fn log_commit(&mut self, tx: Tx, delta: u64, logged: Logged) {
        self.digest = self.digest.wrapping_add(delta);
        self.commits = self.log.len();
        self.status[tx] = Status::Committed(self.commits);
        self.log.push(logged);
        self.committed |= logged.visible;
        self.recorded |= logged.recorded;
    }

    /// Executes a transaction that no other one waits for.
    pub(super) fn small_commit(&mut self) -> Tx {
        let tx = self.status.len();
        self.status.push(Status::Running);
        self.log_commit(tx, 0, Logged::default());
        tx
    }

    /// Checks that must hold when these have become visible.
    pub(super) fn check_visible(
        &self,
        set: Set,
        through: Lsn,
        history: &History,
    ) -> Result<(), String> {
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

    /// The progress rows, in order.
    pub(crate) fn read_progress(&self) -> Vec<AppliedRange> {
        let there =
            |row: &&ProgressRow| self.is_committed(row.created) && !self.is_committed(row.deleted);
        let applied = |row: &ProgressRow| AppliedRange { range: row.range, history: row.mark };
        let mut rows: Vec<_> = self.progress.iter().filter(there).map(applied).collect();
        rows.sort_by_key(|applied| applied.range.through);
        rows
    }

    pub(crate) fn is_recorded(&self, end: Lsn) -> bool {
        self.read_progress().iter().any(|applied| applied.range.through == end)
    }
}
