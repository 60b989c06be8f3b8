//! What the publisher does: transactions over a few tables, some of them open for long, and what each
//! does to the tables when it commits.
//!
//! What the subscriber must have is counted here, by executing what has committed one transaction after
//! the other. Nothing of the engine takes part in that.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use engine::history::Fate;
use engine::key::KeyForm;
use engine::net::{TableFolding, TableRules};
use engine::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use pgoutput::{Lsn, Timestamp, Xid};

use crate::simulation::rng::{Rng, mix};

/// A row: its key, a unique value, a reference, and a value. 0 is NULL in the second and third.
pub(crate) type Row = [u16; 4];

/// Found by the key, with nothing else.
pub(crate) const PLAIN: usize = 0;
/// The second column is unique on the subscriber.
pub(crate) const UNIQUE: usize = 1;
/// The third column of [`CHILD`] refers to its key.
pub(crate) const PARENT: usize = 2;
pub(crate) const CHILD: usize = 3;
/// REPLICA IDENTITY FULL, rows may be equal.
pub(crate) const FULL: usize = 4;
/// No replica identity: rows are only inserted.
pub(crate) const APPEND: usize = 5;
/// REPLICA IDENTITY FULL, and nothing is certain of its types: change by change.
pub(crate) const UNCERTAIN: usize = 6;
/// A trigger on the subscriber writes into [`AUDIT`] what it sees of the whole database.
pub(crate) const TRIGGERED: usize = 7;
/// On the subscriber only.
pub(crate) const AUDIT: usize = 8;
pub(crate) const TABLES: usize = 9;
/// Those that are published.
pub(crate) const PUBLISHED: usize = 8;

/// More transactions do not fit into a [`Set`].
pub(crate) const MOST_TRANSACTIONS: usize = 64;
/// Committed transactions, by bit.
pub(crate) type Set = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Insert,
    Update,
    Delete,
    /// Of the tables whose bit is set in `truncated`.
    Truncate,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) table: usize,
    pub(crate) truncated: u16,
    pub(crate) old: Row,
    pub(crate) new: Row,
    /// Columns that an update leaves out because they did not change (toasted).
    pub(crate) left_out: [bool; 4],
}

impl Change {
    /// Whether it changes rows of a table.
    pub(crate) fn touches(&self, table: usize) -> bool {
        match self.kind {
            Kind::Truncate => self.truncated & 1 << table != 0,
            _ => self.table == table,
        }
    }
}

/// A record of the publisher's WAL, as far as it is decoded.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) at: Lsn,
    pub(crate) end: Lsn,
    pub(crate) xid: Xid,
    pub(crate) kind: RecordKind,
}

#[derive(Debug, Clone)]
pub(crate) enum RecordKind {
    /// Made by this subtransaction, if by one.
    Change(Change, Option<Xid>),
    /// These subtransactions did not happen, the outermost first.
    Undo(Vec<Xid>),
    Prepare,
    Commit,
    Rollback,
    /// Nothing for us.
    Other,
}

/// A transaction that has committed.
#[derive(Debug, Clone)]
pub(crate) struct Transaction {
    pub(crate) xid: Xid,
    pub(crate) commit_lsn: Lsn,
    pub(crate) end_lsn: Lsn,
    pub(crate) changes: Vec<Change>,
    /// What it adds to the [digest](digest) of the database.
    pub(crate) delta: u64,
    /// Those before it that it depends on.
    pub(crate) depends_on: Set,
}

/// A transaction that was prepared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preparation {
    pub(crate) xid: Xid,
    pub(crate) prepare_lsn: Lsn,
    /// Where its end begins and ends, and whether it committed; `None` if it stays prepared.
    pub(crate) ended: Option<(Lsn, Lsn, bool)>,
}

/// When a transaction was open.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) first: Lsn,
    pub(crate) end: Option<Lsn>,
}

#[derive(Debug)]
pub(crate) struct History {
    pub(crate) wal: Vec<Record>,
    /// What has committed and changed something, in that order.
    pub(crate) transactions: Vec<Transaction>,
    /// What has committed and changed nothing.
    pub(crate) empty: Vec<Xid>,
    pub(crate) preparations: Vec<Preparation>,
    /// Of all transactions with changes.
    pub(crate) spans: Vec<Span>,
    /// Whether they are sent when they are prepared.
    pub(crate) two_phase: bool,
    /// Whether the publisher may send transactions that are open.
    pub(crate) streams: bool,
    pub(crate) locks: Vec<LockRules>,
    pub(crate) rules: Vec<TableRules>,
    /// [`UNIQUE`] is sent with complete old rows.
    full_identity: bool,
    last_xid: Xid,
    /// What happens when the publisher goes back to a position: another history from there on.
    pub(crate) other: Option<(Rc<History>, Lsn)>,
    /// Where it parted from another one: the clock went on meanwhile.
    parted: Option<Lsn>,
    /// Of the subscriber after everything.
    pub(crate) digest: u64,
}

/// What one row adds to the digest of a database. Digests are sums, so each is of a multiset of
/// rows, and a transaction adds the same whenever it finds the rows that it found on the publisher.
pub(crate) fn digest(table: usize, row: Row) -> u64 {
    let row = row.iter().fold(0_u64, |all, value| all << 16 | u64::from(*value));
    mix(mix(row.wrapping_add(0x51)).wrapping_add(mix(table as u64 + 77)))
}

/// What the trigger writes when it runs for the how manieth time in a transaction, about a database of
/// this digest.
pub(crate) fn audit(digest: u64, fired: u64) -> Row {
    let digest = mix(digest.wrapping_add(mix(fired)));
    let [a, b, c, d, e, f, g, h] = digest.to_be_bytes();
    [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes)
}

/// Whether rows are found by the first column.
pub(crate) fn is_keyed(table: usize) -> bool {
    matches!(table, PLAIN | UNIQUE | PARENT | CHILD | TRIGGERED)
}

impl History {
    pub(crate) fn random(rng: &mut Rng) -> Self {
        let full_identity = rng.chance(1, 4);
        let mut builder = Builder {
            rng: rng.fork(),
            wal: Vec::new(),
            lsn: 100,
            next_xid: 700,
            tables: vec![Vec::new(); TABLES],
            keys: rng.one_of(&[2, 3, 5, 9]),
            values: 0,
            weights: [8, 8, 3, 4, 4, 2, 0, 0],
            truncates: rng.chance(1, 4),
            open: Vec::new(),
            left: Vec::new(),
            most_open: rng.one_of(&[0, 0, 1, 3]),
            prepares: rng.one_of(&[0, 1, 3]),
            committed: Vec::new(),
            preparations: Vec::new(),
        };
        if rng.chance(1, 3) {
            builder.weights[UNCERTAIN] = 2;
        }
        if rng.chance(1, 3) {
            builder.weights[TRIGGERED] = rng.one_of(&[1, 20]);
        }
        if rng.chance(1, 4) {
            // Few tables: more conflicts.
            let only = rng.one_of(&[PLAIN, UNIQUE, CHILD, FULL]);
            for table in [PLAIN, UNIQUE, CHILD, FULL] {
                if table != only {
                    builder.weights[table] = 0;
                }
            }
            builder.weights[PARENT] = if only == CHILD { 8 } else { 0 };
        }
        let bound = rng.one_of(&[4, 12, MOST_TRANSACTIONS - 2]);
        let count = 2 + rng.below(bound);
        let most = rng.one_of(&[1, 3, 6]);
        let large = rng.chance(1, 4);
        let forks = rng.chance(1, 3).then(|| rng.below(2 * count));
        let other = builder.build((count, most, large), forks);
        let (two_phase, streams) = (rng.chance(4, 5), rng.chance(2, 3));
        let as_sent = rng.chance(1, 16);
        let rules: Vec<_> = (0..PUBLISHED).map(|table| rules(table, as_sent)).collect();
        let made = |builder| Self::made(builder, two_phase, streams, full_identity, rules.clone());
        let mut history = made(builder);
        history.other = other.map(|(other, at)| {
            let mut other = made(*other);
            other.parted = Some(at);
            (Rc::new(other), at)
        });
        history
    }

    fn made(
        builder: Builder,
        two_phase: bool,
        streams: bool,
        full_identity: bool,
        rules: Vec<TableRules>,
    ) -> Self {
        let Builder { wal, mut committed, preparations, next_xid, .. } = builder;
        let empty = committed.iter().filter(|one| one.changes.is_empty()).map(|one| one.xid);
        let empty = empty.collect();
        committed.retain(|one| !one.changes.is_empty());
        let digest = execute(&mut committed);
        depend(&mut committed);
        let spans = spans(&wal);
        Self {
            wal,
            spans,
            transactions: committed,
            preparations,
            empty,
            last_xid: Xid(next_xid),
            other: None,
            parted: None,
            two_phase,
            streams,
            locks: (0..PUBLISHED).map(|table| locks(table, full_identity)).collect(),
            rules,
            full_identity,
            digest,
        }
    }

    /// The end of the publisher's WAL.
    pub(crate) fn end(&self) -> Lsn {
        self.wal.last().map_or(Lsn(100), |last| last.end)
    }

    /// The transactions that end after `after`, up to `through`.
    pub(crate) fn range(&self, after: Lsn, through: Lsn) -> Set {
        let inside = |t: &Transaction| t.end_lsn > after && t.end_lsn <= through;
        let all = self.transactions.iter().enumerate().filter(|(_, t)| inside(t));
        all.fold(0, |set, (number, _)| set | 1 << number)
    }

    /// The place of a transaction among those that have committed.
    pub(crate) fn number(&self, xid: Xid) -> Option<usize> {
        self.transactions.iter().position(|transaction| transaction.xid == xid)
    }

    /// The rows of a table, after those transactions that `counts` takes, which must be the first ones.
    pub(crate) fn rows_of(&self, table: usize, counts: impl Fn(&Transaction) -> bool) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        let counted = self.transactions.iter().filter(|one| counts(one));
        for change in counted.flat_map(|one| &one.changes).filter(|change| change.touches(table)) {
            if change.kind == Kind::Truncate {
                rows.clear();
                continue;
            }
            let before = (change.kind != Kind::Insert)
                .then(|| rows.iter().position(|row| *row == change.old))
                .flatten();
            if let Some(place) = before {
                rows.swap_remove(place);
            }
            if change.kind != Kind::Delete {
                rows.push(change.new);
            }
        }
        rows
    }

    /// The rows of a table under a snapshot: everything that commits before it.
    pub(crate) fn rows_at(&self, table: usize, snapshot: Lsn) -> Vec<Row> {
        self.rows_of(table, |one| one.commit_lsn < snapshot)
    }

    /// Where it rolls back what another history has prepared, too.
    pub(crate) fn rolls_back(&self, prepared: &Preparation) -> Option<Lsn> {
        let same =
            |one: &&Preparation| (one.xid, one.prepare_lsn) == (prepared.xid, prepared.prepare_lsn);
        let ended = self.preparations.iter().find(same)?.ended;
        ended.filter(|(_, _, commits)| !commits).map(|(_, end, _)| end)
    }

    /// When something was written.
    pub(crate) fn time(&self, at: Lsn) -> Timestamp {
        let time = i64::try_from(at.0).expect("a short history") * 1000;
        Timestamp(time + i64::from(self.parted.is_some_and(|parted| at >= parted)))
    }

    /// What the publisher says of a transaction.
    pub(crate) fn fate(&self, xid: Xid) -> Fate {
        match self.number(xid) {
            Some(number) => Fate::CommittedAt(self.time(self.transactions[number].commit_lsn)),
            None if self.empty.contains(&xid) => Fate::Unknown,
            None if xid > self.last_xid => Fate::Unassigned,
            None => Fate::Aborted,
        }
    }

    /// Whether changes of a table are sent with complete old rows.
    pub(crate) fn is_full(&self, table: usize) -> bool {
        is_full(table, self.full_identity)
    }
}

fn is_full(table: usize, full_identity: bool) -> bool {
    matches!(table, FULL | UNCERTAIN) || table == UNIQUE && full_identity
}

/// A lock of a change on the publisher.
#[derive(Debug, PartialEq, Eq, Hash, Clone, Copy)]
enum Lock {
    Row(usize, Row),
    Unique(u16),
    Parent(u16),
    Table(usize),
    Everything,
}

/// A transaction that is open.
#[derive(Clone)]
struct Open {
    xid: Xid,
    changes: Vec<(Change, Undone)>,
    /// The locks that it holds, and how many of them each change added.
    locks: Vec<(Lock, bool)>,
    marks: Vec<usize>,
    /// Subtransactions that are not ended, by their place in `subs`.
    stack: Vec<usize>,
    /// All that happened, and where their changes begin.
    subs: Vec<(Xid, usize)>,
    /// The next change begins a subtransaction.
    enters: bool,
    prepares: bool,
    prepared: bool,
}

/// Rows that a change removed.
type Undone = Vec<(usize, Row)>;

/// The publisher while the history is made. Its tables have what open transactions did, too; those hold
/// locks, so that nobody else sees it.
#[derive(Clone)]
struct Builder {
    rng: Rng,
    wal: Vec<Record>,
    lsn: u64,
    next_xid: u32,
    tables: Vec<Vec<Row>>,
    keys: u16,
    values: u16,
    weights: [usize; PUBLISHED],
    truncates: bool,
    open: Vec<Open>,
    /// Those that stay prepared.
    left: Vec<Open>,
    most_open: usize,
    /// So many of four that are open for long are prepared.
    prepares: usize,
    committed: Vec<Transaction>,
    preparations: Vec<Preparation>,
}

impl Builder {
    /// Another history parts from it before step `forks`: that, and where.
    fn build(
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

    fn record(&mut self, xid: Xid, kind: RecordKind) -> (Lsn, Lsn) {
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

    fn end(&mut self, at: usize, commits: bool) {
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
    fn change(&mut self, at: usize) {
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

    fn find_change(&mut self, at: usize) -> Option<Change> {
        let rng = &mut self.rng;
        let mut weight = rng.below(self.weights.iter().sum());
        let mut table = 0;
        while weight >= self.weights[table] {
            weight -= self.weights[table];
            table += 1;
        }
        if table == TRIGGERED && self.open[at].prepares {
            // A trigger runs when it is prepared, and sees another database.
            return None;
        }
        if self.truncates && rng.chance(1, 40) {
            return self.truncate(table);
        }
        let rows = &self.tables[table];
        let picked = (!rows.is_empty()).then(|| rows[rng.below(rows.len())]);
        let kind = match rng.below(10) {
            0..4 => Kind::Insert,
            4..8 => Kind::Update,
            _ => Kind::Delete,
        };
        let kind = if table == APPEND { Kind::Insert } else { kind };
        let (old, mut new) = match (kind, picked) {
            (Kind::Insert, _) => ([0; 4], self.row(table)),
            (_, None) => return None,
            (Kind::Update, Some(old)) => (old, self.row(table)),
            (_, Some(old)) => (old, [0; 4]),
        };
        let rng = &mut self.rng;
        if kind == Kind::Update {
            let kept: [bool; 4] = match rng.below(4) {
                0 => [false; 4],
                1 => [true, false, false, false],
                _ => [true, true, true, false],
            };
            for column in 0..4 {
                if kept[column] {
                    new[column] = old[column];
                }
            }
        }
        let mut left_out = [false; 4];
        if kind == Kind::Update {
            for column in [1, 3] {
                let same = old[column] == new[column] && old[column] != 0;
                left_out[column] = same && rng.chance(1, 2);
            }
        }
        let change = Change { kind, table, truncated: 0, old, new, left_out };
        self.is_possible(kind, table, old, new).then_some(change)
    }

    fn row(&mut self, table: usize) -> Row {
        let rng = &mut self.rng;
        let key = 1 + rng.value(self.keys - 1);
        if matches!(table, FULL | UNCERTAIN | APPEND) {
            return [key.min(3), rng.value(1), 0, rng.value(1)];
        }
        self.values += 1;
        let second = if table == UNIQUE { rng.value(self.keys) } else { 0 };
        let third = if table == CHILD { rng.value(self.keys) } else { 0 };
        [key, second, third, self.values]
    }

    /// Whether the publisher's constraints allow it.
    fn is_possible(&self, kind: Kind, table: usize, old: Row, new: Row) -> bool {
        let is_free = |column: usize| {
            old[column] == new[column]
                || self.tables[table].iter().all(|row| row[column] != new[column])
        };
        let writes = kind != Kind::Delete;
        if writes && is_keyed(table) && !is_free(0) {
            return false;
        }
        if writes && table == UNIQUE && new[1] != 0 && !is_free(1) {
            return false;
        }
        if writes && table == CHILD && new[2] != 0 {
            return self.tables[PARENT].iter().any(|parent| parent[0] == new[2]);
        }
        let leaves = kind != Kind::Insert && old[0] != new[0];
        if leaves && table == PARENT {
            return self.tables[CHILD].iter().all(|child| child[2] != old[0]);
        }
        true
    }

    fn truncate(&mut self, table: usize) -> Option<Change> {
        let mut truncated = 1_u16 << table;
        if self.rng.chance(1, 3) {
            truncated |= 1 << self.rng.one_of(&[PLAIN, UNIQUE, FULL, APPEND]);
        }
        if truncated & 1 << PARENT != 0 {
            truncated |= 1 << CHILD;
        }
        // A trigger of its own would run there.
        truncated &= !(1 << TRIGGERED);
        let (kind, old, new, left_out) = (Kind::Truncate, [0; 4], [0; 4], [false; 4]);
        (truncated != 0).then_some(Change { kind, table, truncated, old, new, left_out })
    }
}

/// The locks that a change holds on the publisher until its transaction ends, and whether each excludes others.
fn locks_of(change: &Change) -> Vec<(Lock, bool)> {
    let Change { kind, table, truncated, old, new, .. } = *change;
    if kind == Kind::Truncate {
        let tables = (0..PUBLISHED).filter(|table| truncated & 1 << table != 0);
        return tables.map(|table| (Lock::Table(table), true)).collect();
    }
    let mut locks = vec![(Lock::Table(table), false)];
    let rows = rows_of(change);
    for row in &rows {
        if is_keyed(table) {
            locks.push((Lock::Row(table, [row[0], 0, 0, 0]), true));
        } else if table != APPEND {
            locks.push((Lock::Row(table, *row), true));
        }
        if table == UNIQUE && row[1] != 0 {
            locks.push((Lock::Unique(row[1]), true));
        }
        if table == PARENT {
            locks.push((Lock::Parent(row[0]), rows.len() < 2 || old[0] != new[0]));
        }
        if table == CHILD && row[2] != 0 {
            locks.push((Lock::Parent(row[2]), false));
        }
    }
    locks
}

/// The rows that a change removes and makes.
fn rows_of(change: &Change) -> Vec<Row> {
    match change.kind {
        Kind::Insert => vec![change.new],
        Kind::Update => vec![change.old, change.new],
        Kind::Delete => vec![change.old],
        Kind::Truncate => Vec::new(),
    }
}

fn spans(wal: &[Record]) -> Vec<Span> {
    let mut spans: BTreeMap<Xid, Span> = BTreeMap::new();
    for record in wal {
        match record.kind {
            RecordKind::Change(..) => {
                spans.entry(record.xid).or_insert(Span { first: record.at, end: None });
            }
            RecordKind::Commit | RecordKind::Rollback => {
                if let Some(span) = spans.get_mut(&record.xid) {
                    span.end = Some(record.end);
                }
            }
            RecordKind::Undo(_) | RecordKind::Prepare | RecordKind::Other => {}
        }
    }
    spans.into_values().collect()
}

/// Executes what has committed, one transaction after the other: what each adds to the digest, and what
/// that is in the end.
fn execute(transactions: &mut [Transaction]) -> u64 {
    let mut tables: Vec<Vec<Row>> = vec![Vec::new(); TABLES];
    let mut all = 0_u64;
    for transaction in transactions {
        let (before, mut fired) = (all, 0);
        for change in &transaction.changes {
            if change.kind == Kind::Truncate {
                for table in (0..PUBLISHED).filter(|table| change.truncated & 1 << table != 0) {
                    for row in std::mem::take(&mut tables[table]) {
                        all = all.wrapping_sub(digest(table, row));
                    }
                }
                continue;
            }
            let rows = &mut tables[change.table];
            if change.kind != Kind::Insert {
                let place = rows.iter().position(|row| *row == change.old);
                rows.swap_remove(place.expect("what has committed can be executed in order"));
                all = all.wrapping_sub(digest(change.table, change.old));
            }
            if change.kind != Kind::Delete {
                rows.push(change.new);
                all = all.wrapping_add(digest(change.table, change.new));
            }
            if change.table == TRIGGERED {
                fired += 1;
                all = all.wrapping_add(digest(AUDIT, audit(all, fired)));
            }
        }
        transaction.delta = all.wrapping_sub(before);
    }
    all
}

/// As the program makes them of the subscriber's catalogue.
fn locks(table: usize, full_identity: bool) -> LockRules {
    let full = is_full(table, full_identity);
    let column = |column| LockColumn {
        column,
        form: KeyForm::Integer,
        in_identity: full || column == 0 && table != APPEND,
    };
    let row = match table {
        FULL => RowLock::WholeRow((0..4).map(column).collect()),
        APPEND | UNCERTAIN => RowLock::Table,
        _ => RowLock::Key(vec![column(0)]),
    };
    // Oid 0 is none.
    let root = u32::try_from(table).expect("few tables") + 1;
    let parent = u32::try_from(PARENT).expect("few tables") + 1;
    let mut rules = LockRules {
        root,
        identity: 1,
        row,
        unique: Vec::new(),
        foreign: Vec::new(),
        referenced: Vec::new(),
        whole_table: table == UNCERTAIN,
        barrier: table == TRIGGERED,
    };
    match table {
        UNIQUE => rules.unique.push(UniqueLock {
            id: 7,
            columns: vec![column(1)],
            certain: true,
            nulls_not_distinct: false,
        }),
        PARENT => {
            rules.referenced.push(ReferencedLock {
                id: 9,
                columns: vec![column(0)],
                certain: true,
            });
        }
        CHILD => rules.foreign.push(ForeignLock {
            id: 9,
            parent,
            columns: vec![column(2)],
            certain: true,
        }),
        _ => {}
    }
    rules
}

/// `as_sent`: as with `--apply-mode row`.
fn rules(table: usize, as_sent: bool) -> TableRules {
    let fold = match table {
        UNCERTAIN => TableFolding::Never { barrier: false },
        TRIGGERED => TableFolding::Never { barrier: true },
        _ if as_sent => TableFolding::AsSent,
        FULL => TableFolding::WholeRow,
        APPEND => TableFolding::Append,
        _ => TableFolding::Key(vec![(0, KeyForm::Integer)]),
    };
    let root = u32::try_from(table).expect("few tables");
    TableRules { root, storage: None, columns: 4, fold, updates_alone: false, seeks: false }
}

/// Which transactions depend on which: not by what the writeset says, but by what they did.
fn depend(transactions: &mut [Transaction]) {
    // The transactions that wrote and that read what a lock protects.
    let mut known: HashMap<Lock, (Set, Set)> = HashMap::new();
    // The transactions that removed all children.
    let mut emptied: Set = 0;
    for (number, transaction) in transactions.iter_mut().enumerate() {
        let own: Set = 1 << number;
        let (mut before, mut removes_parent) = (0, false);
        let mut touch = |lock, write: bool| {
            let (writers, readers) = known.entry(lock).or_default();
            before |= *writers | if write { *readers } else { 0 };
            *if write { writers } else { readers } |= own;
        };
        for change in &transaction.changes {
            touch(Lock::Everything, change.table == TRIGGERED && change.kind != Kind::Truncate);
            if change.kind == Kind::Truncate {
                for table in (0..PUBLISHED).filter(|table| change.truncated & 1 << table != 0) {
                    touch(Lock::Table(table), true);
                }
                if change.truncated & 1 << CHILD != 0 {
                    emptied |= own;
                }
                continue;
            }
            let table = change.table;
            touch(Lock::Table(table), false);
            let rows = rows_of(change);
            for row in &rows {
                if is_keyed(table) {
                    touch(Lock::Row(table, [row[0], 0, 0, 0]), true);
                } else if table != APPEND {
                    // Equal rows are interchangeable, but who takes one needs it to be there.
                    touch(Lock::Row(table, *row), true);
                }
            }
            let changed = |column: usize| rows.len() < 2 || rows[0][column] != rows[1][column];
            if table == PARENT && change.kind != Kind::Insert && changed(0) {
                removes_parent = true;
            }
            for row in &rows {
                // Unique values are the subscriber's to watch over; one that comes and goes within a
                // group is seen by nobody.
                if table == PARENT && changed(0) {
                    touch(Lock::Parent(row[0]), true);
                }
                if table == CHILD && row[2] != 0 && changed(2) {
                    touch(Lock::Parent(row[2]), false);
                }
            }
        }
        if removes_parent {
            before |= emptied;
        }
        transaction.depends_on = before & !own;
    }
}
