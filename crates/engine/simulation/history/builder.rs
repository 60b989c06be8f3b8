//! Makes a history: transactions that are open side by side, with subtransactions, until each ends.

use pgoutput::{Lsn, Xid};

use crate::simulation::history::row_locks::{Lock, locks_of};
use crate::simulation::history::tables::{PUBLISHED, Row};
use crate::simulation::history::{Change, Kind, Preparation, Record, RecordKind, Transaction};
use crate::simulation::rng::Rng;

/// A transaction that is open.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) xid: Xid,
    pub(super) changes: Vec<(Change, Undone)>,
    /// The locks that it holds, and how many of them each change added.
    pub(super) locks: Vec<(Lock, bool)>,
    marks: Vec<usize>,
    /// Subtransactions that are not ended, by their place in `subs`.
    stack: Vec<usize>,
    /// All that happened, and where their changes begin.
    subs: Vec<(Xid, usize)>,
    /// The next change begins a subtransaction.
    enters: bool,
    pub(super) prepares: bool,
    pub(super) prepared: bool,
}

/// Rows that a change removed.
pub(super) type Undone = Vec<(usize, Row)>;

/// The publisher while the history is made. Its tables have what open transactions did, too; those hold
/// locks, so that nobody else sees it.
#[derive(Clone)]
pub(super) struct Builder {
    pub(super) rng: Rng,
    pub(super) wal: Vec<Record>,
    pub(super) lsn: u64,
    pub(super) next_xid: u32,
    pub(super) tables: Vec<Vec<Row>>,
    pub(super) keys: u16,
    pub(super) values: u16,
    pub(super) weights: [usize; PUBLISHED],
    pub(super) truncates: bool,
    pub(super) open: Vec<Open>,
    /// Those that stay prepared.
    pub(super) left: Vec<Open>,
    pub(super) most_open: usize,
    /// So many of four that are open for long are prepared.
    pub(super) prepares: usize,
    pub(super) committed: Vec<Transaction>,
    pub(super) preparations: Vec<Preparation>,
}

impl Builder {
    /// Another history parts from it before step `forks`: that, and where.
    pub(super) fn build(
        &mut self,
        (count, most, large): (usize, usize, bool),
        forks: Option<usize>,
    ) -> Option<(Box<Self>, Lsn)> {
        let mut other = None;
        for step in 0..4 * count {
            if self.committed.len() + self.open.len() >= count {
                break;
            }
            if forks == Some(step) {
                let rng = self.rng.fork();
                other = Some((Box::new(Self { rng, ..self.clone() }), Lsn(self.lsn)));
            }
            if !self.open.is_empty() && self.rng.chance(1, 2) {
                let at = self.rng.below(self.open.len());
                self.go_on(at);
            } else if self.open.len() < self.most_open && self.rng.chance(1, 3) {
                let open = self.begin();
                self.open.push(open);
                self.go_on(self.open.len() - 1);
            } else {
                let open = self.begin();
                self.open.push(open);
                let at = self.open.len() - 1;
                self.open[at].prepares = self.open[at].prepares && self.rng.chance(1, 2);
                let size = if large && self.rng.chance(1, 8) { 6 } else { 0 } + 1;
                for _ in 0..size + self.rng.below(most) {
                    self.change(at);
                }
                if self.open[at].prepares {
                    self.prepare(at);
                } else {
                    self.end(at, true);
                }
            }
            if self.rng.chance(1, 6) {
                self.record(Xid(0), RecordKind::Other);
            }
        }
        while !self.open.is_empty() {
            let at = self.rng.below(self.open.len());
            if self.open[at].prepared && self.rng.chance(1, 4) {
                let left = self.open.swap_remove(at);
                let (xid, ended) = (left.xid, None);
                let prepare_lsn = self.prepared_at(xid);
                self.preparations.push(Preparation { xid, prepare_lsn, ended });
                self.left.push(left);
            } else {
                self.go_on(at);
            }
        }
        if self.rng.chance(1, 2) {
            self.record(Xid(0), RecordKind::Other);
        }
        if let Some((other, _)) = &mut other {
            other.build((count, most, large), None);
        }
        other
    }

    fn begin(&mut self) -> Open {
        self.next_xid += 1;
        Open {
            xid: Xid(self.next_xid),
            changes: Vec::new(),
            locks: Vec::new(),
            marks: Vec::new(),
            stack: Vec::new(),
            subs: Vec::new(),
            enters: false,
            prepares: self.most_open > 0 && self.rng.chance(self.prepares, 4),
            prepared: false,
        }
    }

    pub(super) fn record(&mut self, xid: Xid, kind: RecordKind) -> (Lsn, Lsn) {
        let (at, end) = match kind {
            RecordKind::Change(..) => (Lsn(self.lsn), Lsn(self.lsn + self.rng.next() % 2)),
            _ => {
                let at = self.lsn + self.rng.next() % 3;
                (Lsn(at), Lsn(at + 1 + self.rng.next() % 4))
            }
        };
        self.lsn = end.0;
        self.wal.push(Record { at, end, xid, kind });
        (at, end)
    }

    fn prepared_at(&self, xid: Xid) -> Lsn {
        let is_it =
            |record: &&Record| record.xid == xid && matches!(record.kind, RecordKind::Prepare);
        self.wal.iter().find(is_it).map_or(Lsn(0), |record| record.at)
    }

    /// One step of a transaction that is open.
    fn go_on(&mut self, at: usize) {
        let open = &mut self.open[at];
        if open.prepared {
            if self.rng.chance(1, 2) {
                let commits = self.rng.chance(3, 4);
                self.end(at, commits);
            }
            return;
        }
        match self.rng.below(12) {
            0..6 => {
                for _ in 0..1 + self.rng.below(4) {
                    self.change(at);
                }
            }
            6..8 => open.enters = true,
            8 => drop(open.stack.pop()),
            9 => self.undo(at),
            _ if open.prepares => self.prepare(at),
            _ => {
                let commits = self.rng.chance(4, 5);
                self.end(at, commits);
            }
        }
    }

    /// A subtransaction that is not ended did not happen, nor did any inside it.
    fn undo(&mut self, at: usize) {
        let open = &mut self.open[at];
        if open.stack.is_empty() {
            return;
        }
        let depth = self.rng.below(open.stack.len());
        let first = open.stack[depth];
        open.stack.truncate(depth);
        let start = open.subs[first].1;
        let undone = open.subs.split_off(first).into_iter().map(|(xid, _)| xid).collect();
        open.locks.truncate(open.marks[start]);
        open.marks.truncate(start);
        let changes = open.changes.split_off(start);
        let xid = open.xid;
        self.take_back(changes);
        self.record(xid, RecordKind::Undo(undone));
    }

    fn take_back(&mut self, changes: Vec<(Change, Undone)>) {
        for (change, removed) in changes.into_iter().rev() {
            if matches!(change.kind, Kind::Insert | Kind::Update) {
                let rows = &mut self.tables[change.table];
                let place = rows.iter().position(|row| *row == change.new).expect("it is there");
                rows.swap_remove(place);
            }
            for (table, row) in removed {
                self.tables[table].push(row);
            }
        }
    }

    fn prepare(&mut self, at: usize) {
        self.open[at].prepared = true;
        self.record(self.open[at].xid, RecordKind::Prepare);
    }

    pub(super) fn end(&mut self, at: usize, commits: bool) {
        let Open { xid, changes, prepared, .. } = self.open.swap_remove(at);
        let kind = if commits { RecordKind::Commit } else { RecordKind::Rollback };
        let (commit_lsn, end_lsn) = self.record(xid, kind);
        if prepared {
            let prepare_lsn = self.prepared_at(xid);
            let ended = Some((commit_lsn, end_lsn, commits));
            self.preparations.push(Preparation { xid, prepare_lsn, ended });
        }
        if commits {
            let changes = changes.into_iter().map(|(change, _)| change).collect();
            let (delta, depends_on) = (0, 0);
            let one = Transaction { xid, commit_lsn, end_lsn, changes, delta, depends_on };
            self.committed.push(one);
        } else {
            self.take_back(changes);
        }
    }

    /// A change that the publisher could make now, if chance finds one.
    pub(super) fn change(&mut self, at: usize) {
        let Some(change) = self.find_change(at) else { return };
        let locks = locks_of(&change);
        let free = |other: &Open| {
            other.locks.iter().all(|(held, write)| {
                locks.iter().all(|(lock, writes)| lock != held || !write && !writes)
            })
        };
        let others = self.open.iter().enumerate().filter(|(number, _)| *number != at);
        if !others.map(|(_, other)| other).chain(&self.left).all(free) {
            return;
        }
        let mut removed = Vec::new();
        if change.kind == Kind::Truncate {
            for table in (0..PUBLISHED).filter(|table| change.truncated & 1 << table != 0) {
                let rows = std::mem::take(&mut self.tables[table]);
                removed.extend(rows.into_iter().map(|row| (table, row)));
            }
        } else {
            let rows = &mut self.tables[change.table];
            if change.kind != Kind::Insert {
                let place = rows.iter().position(|row| *row == change.old).expect("it was found");
                removed.push((change.table, rows.swap_remove(place)));
            }
            if change.kind != Kind::Delete {
                rows.push(change.new);
            }
        }
        if self.open[at].enters {
            self.next_xid += 1;
        }
        let next_xid = self.next_xid;
        let open = &mut self.open[at];
        if std::mem::take(&mut open.enters) {
            open.stack.push(open.subs.len());
            open.subs.push((Xid(next_xid), open.changes.len()));
        }
        open.marks.push(open.locks.len());
        open.locks.extend(locks);
        open.changes.push((change, removed));
        let sub = open.stack.last().map(|sub| open.subs[*sub].0);
        let xid = open.xid;
        self.record(xid, RecordKind::Change(change, sub));
    }
}
