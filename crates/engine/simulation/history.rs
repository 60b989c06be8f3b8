//! What the publisher commits: transactions over a few tables, and what each does to them.

use std::collections::HashMap;
use std::ops::Range;

use engine::key::KeyForm;
use engine::net::{Fold, TableRules};
use engine::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use pgoutput::{Delete, Insert, Lsn, Message, OldTuple, RelId, TupleBuilder, Update, builder};

use crate::simulation::rng::{Rng, mix};

/// A row: its key, a unique value, a reference, and a value. 0 is NULL in the second and third.
pub(crate) type Row = [u16; 4];

/// Found by the key, with nothing else.
pub(crate) const PLAIN: usize = 0;
/// The second column is unique on the target.
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
/// A trigger on the target writes into [`AUDIT`] what it sees of the whole database.
pub(crate) const TRIGGERED: usize = 7;
/// On the target only.
pub(crate) const AUDIT: usize = 8;
pub(crate) const TABLES: usize = 9;
/// Those that are published.
const PUBLISHED: usize = 8;

/// More transactions do not fit into a [`Set`].
pub(crate) const MOST_TRANSACTIONS: usize = 64;
/// Transactions, by bit.
pub(crate) type Set = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Insert,
    Update,
    Delete,
    /// Of the tables whose bit is set in `truncated`.
    Truncate,
}

#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) table: usize,
    pub(crate) truncated: u16,
    pub(crate) old: Row,
    pub(crate) new: Row,
    /// Columns that an update leaves out because they did not change (toasted).
    pub(crate) left_out: [bool; 4],
    /// As sent; empty for a truncate.
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Transaction {
    pub(crate) commit_lsn: Lsn,
    pub(crate) end_lsn: Lsn,
    pub(crate) changes: Vec<Change>,
    /// More than one if it is large.
    pub(crate) parts: Vec<Range<usize>>,
    /// What it adds to the [digest](digest) of the database.
    pub(crate) delta: u64,
    /// Those before it that it depends on.
    pub(crate) depends_on: Set,
    /// The publisher says that its WAL ends here, after the transaction.
    pub(crate) keepalive: Option<Lsn>,
}

#[derive(Debug)]
pub(crate) struct History {
    pub(crate) transactions: Vec<Transaction>,
    pub(crate) locks: Vec<LockRules>,
    pub(crate) rules: Vec<TableRules>,
    /// Of the target after everything.
    pub(crate) digest: u64,
}

/// What one row adds to the digest of a database. Digests are sums, so each is of a multiset of
/// rows, and a transaction adds the same whenever it finds the rows that it found on the publisher.
pub(crate) fn digest(table: usize, row: Row) -> u64 {
    let row = row.iter().fold(0_u64, |all, value| all << 16 | u64::from(*value));
    mix(mix(row.wrapping_add(0x51)).wrapping_add(mix(table as u64 + 77)))
}

/// What the trigger writes about a database of this digest.
pub(crate) fn audit(digest: u64) -> Row {
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
            tables: vec![Vec::new(); TABLES],
            digest: 0,
            full_identity,
            keys: rng.one_of(&[2, 3, 5, 9]),
            values: 0,
            weights: [8, 8, 3, 4, 4, 2, 0, 0],
            truncates: rng.chance(1, 4),
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
        let mut lsn = 100;
        let mut transactions = Vec::new();
        for _ in 0..count {
            let before = builder.digest;
            let size = if large && rng.chance(1, 8) { 6 } else { 0 } + 1 + rng.below(most);
            let mut changes: Vec<Change> = Vec::new();
            for _ in 0..size {
                changes.extend(builder.change(rng));
            }
            let commit_lsn = Lsn(lsn + rng.next() % 3);
            let end_lsn = Lsn(commit_lsn.0 + 1 + rng.next() % 4);
            lsn = end_lsn.0;
            let keepalive = rng.chance(1, 6).then(|| {
                lsn += 1 + rng.next() % 3;
                Lsn(lsn)
            });
            let middle = if size > 6 { 1 + rng.below(size - 1) } else { changes.len() };
            let middle = middle.min(changes.len());
            let mut parts = vec![0..middle, middle..changes.len()];
            if size <= 6 {
                parts.pop();
            }
            transactions.push(Transaction {
                commit_lsn,
                end_lsn,
                changes,
                parts,
                delta: builder.digest.wrapping_sub(before),
                depends_on: 0,
                keepalive,
            });
        }
        depend(&mut transactions);
        let locks = (0..PUBLISHED).map(|table| locks(table, full_identity)).collect();
        let rules = (0..PUBLISHED).map(rules).collect();
        Self { transactions, locks, rules, digest: builder.digest }
    }

    /// The end of the publisher's WAL.
    pub(crate) fn end(&self) -> Lsn {
        self.transactions.last().map_or(Lsn(0), |last| last.keepalive.unwrap_or(last.end_lsn))
    }

    /// The transactions that end after `after`, up to `through`.
    pub(crate) fn range(&self, after: Lsn, through: Lsn) -> Set {
        let inside = |t: &Transaction| t.end_lsn > after && t.end_lsn <= through;
        let all = self.transactions.iter().enumerate().filter(|(_, t)| inside(t));
        all.fold(0, |set, (number, _)| set | 1 << number)
    }
}

/// The publisher's tables while the history is made.
struct Builder {
    tables: Vec<Vec<Row>>,
    digest: u64,
    full_identity: bool,
    keys: u16,
    values: u16,
    weights: [usize; PUBLISHED],
    truncates: bool,
}

impl Builder {
    /// A change that the publisher could make now, if chance finds one.
    fn change(&mut self, rng: &mut Rng) -> Option<Change> {
        let mut at = rng.below(self.weights.iter().sum());
        let mut table = 0;
        while at >= self.weights[table] {
            at -= self.weights[table];
            table += 1;
        }
        if self.truncates && rng.chance(1, 40) {
            return self.truncate(table, rng);
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
            (Kind::Insert, _) => ([0; 4], self.row(table, rng)),
            (_, None) => return None,
            (Kind::Update, Some(old)) => (old, self.row(table, rng)),
            (_, Some(old)) => (old, [0; 4]),
        };
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
        if !self.is_possible(kind, table, old, new) {
            return None;
        }
        let mut left_out = [false; 4];
        if kind == Kind::Update {
            for column in [1, 3] {
                let same = old[column] == new[column] && old[column] != 0;
                left_out[column] = same && rng.chance(1, 2);
            }
        }
        if kind != Kind::Insert {
            let place = self.tables[table].iter().position(|row| *row == old)?;
            self.tables[table].swap_remove(place);
            self.digest = self.digest.wrapping_sub(digest(table, old));
        }
        if kind != Kind::Delete {
            self.tables[table].push(new);
            self.digest = self.digest.wrapping_add(digest(table, new));
        }
        if table == TRIGGERED {
            self.digest = self.digest.wrapping_add(digest(AUDIT, audit(self.digest)));
        }
        let truncated = 0;
        let mut change = Change { kind, table, truncated, old, new, left_out, bytes: Vec::new() };
        let full = matches!(table, FULL | UNCERTAIN) || table == UNIQUE && self.full_identity;
        change.bytes = bytes(&change, full);
        Some(change)
    }

    fn row(&mut self, table: usize, rng: &mut Rng) -> Row {
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

    fn truncate(&mut self, table: usize, rng: &mut Rng) -> Option<Change> {
        let mut truncated = 1_u16 << table;
        if rng.chance(1, 3) {
            truncated |= 1 << rng.one_of(&[PLAIN, UNIQUE, FULL, APPEND]);
        }
        if truncated & 1 << PARENT != 0 {
            truncated |= 1 << CHILD;
        }
        // A trigger of its own would run there.
        truncated &= !(1 << TRIGGERED);
        if truncated == 0 {
            return None;
        }
        for table in 0..PUBLISHED {
            if truncated & 1 << table != 0 {
                for row in std::mem::take(&mut self.tables[table]) {
                    self.digest = self.digest.wrapping_sub(digest(table, row));
                }
            }
        }
        let (old, new) = ([0; 4], [0; 4]);
        let (kind, left_out) = (Kind::Truncate, [false; 4]);
        Some(Change { kind, table, truncated, old, new, left_out, bytes: Vec::new() })
    }
}

/// A row as the publisher sends it.
fn tuple(row: Row, left_out: [bool; 4]) -> TupleBuilder {
    (0..4).fold(TupleBuilder::new(), |tuple, column| match (row[column], left_out[column]) {
        (_, true) => tuple.unchanged(),
        (0, _) => tuple.null(),
        (value, _) => tuple.text(value.to_string()),
    })
}

fn bytes(change: &Change, full: bool) -> Vec<u8> {
    let (xid, relation) = (None, RelId(1));
    let new = tuple(change.new, change.left_out);
    let old = if full {
        tuple(change.old, [false; 4])
    } else {
        tuple([change.old[0], 0, 0, 0], [false; 4])
    };
    let old = if full { OldTuple::Full(old.tuple()) } else { OldTuple::Key(old.tuple()) };
    builder::encoded(&match change.kind {
        Kind::Insert => Message::Insert(Insert { xid, relation, new: new.tuple() }),
        Kind::Update => {
            let sent = full || change.old[0] != change.new[0];
            let old = sent.then_some(old);
            Message::Update(Update { xid, relation, old, new: new.tuple() })
        }
        Kind::Delete => Message::Delete(Delete { xid, relation, old }),
        Kind::Truncate => return Vec::new(),
    })
}

/// As the program makes them of the target's catalogue.
fn locks(table: usize, full_identity: bool) -> LockRules {
    let full = matches!(table, FULL | UNCERTAIN) || table == UNIQUE && full_identity;
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
    let root = u32::try_from(table).expect("few tables");
    let parent = u32::try_from(PARENT).expect("few tables");
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

fn rules(table: usize) -> TableRules {
    let fold = match table {
        FULL => Fold::WholeRow,
        APPEND => Fold::Append,
        UNCERTAIN => Fold::Never { barrier: false },
        TRIGGERED => Fold::Never { barrier: true },
        _ => Fold::Key(vec![(0, KeyForm::Integer)]),
    };
    let lane = u32::try_from(table).expect("few tables");
    TableRules { lane, columns: 4, fold, updates_alone: false }
}

/// Which transactions depend on which: not by what the writeset says, but by what they did.
fn depend(transactions: &mut [Transaction]) {
    #[derive(PartialEq, Eq, Hash, Clone, Copy)]
    enum Thing {
        Row(usize, Row),
        Parent(u16),
        Table(usize),
        Everything,
    }
    // Who wrote a thing, and who read it.
    let mut known: HashMap<Thing, (Set, Set)> = HashMap::new();
    // Who took all children away.
    let mut emptied: Set = 0;
    for (number, transaction) in transactions.iter_mut().enumerate() {
        let own: Set = 1 << number;
        let (mut before, mut removes_parent) = (0, false);
        let mut touch = |thing, write: bool| {
            let (writers, readers) = known.entry(thing).or_default();
            before |= *writers | if write { *readers } else { 0 };
            *if write { writers } else { readers } |= own;
        };
        for change in &transaction.changes {
            touch(Thing::Everything, change.table == TRIGGERED && change.kind != Kind::Truncate);
            if change.kind == Kind::Truncate {
                for table in (0..PUBLISHED).filter(|table| change.truncated & 1 << table != 0) {
                    touch(Thing::Table(table), true);
                }
                if change.truncated & 1 << CHILD != 0 {
                    emptied |= own;
                }
                continue;
            }
            let table = change.table;
            touch(Thing::Table(table), false);
            let mut rows = Vec::new();
            if change.kind != Kind::Insert {
                rows.push(change.old);
            }
            if change.kind != Kind::Delete {
                rows.push(change.new);
            }
            for row in &rows {
                if is_keyed(table) {
                    touch(Thing::Row(table, [row[0], 0, 0, 0]), true);
                } else if table != APPEND {
                    // Equal rows are interchangeable, but who takes one needs it to be there.
                    touch(Thing::Row(table, *row), true);
                }
            }
            let changed = |column: usize| rows.len() < 2 || rows[0][column] != rows[1][column];
            if table == PARENT && change.kind != Kind::Insert && changed(0) {
                removes_parent = true;
            }
            for row in &rows {
                // Unique values are the target's to watch over; one that comes and goes within a
                // group is seen by nobody.
                if table == PARENT && changed(0) {
                    touch(Thing::Parent(row[0]), true);
                }
                if table == CHILD && row[2] != 0 && changed(2) {
                    touch(Thing::Parent(row[2]), false);
                }
            }
        }
        if removes_parent {
            before |= emptied;
        }
        transaction.depends_on = before & !own;
    }
}
