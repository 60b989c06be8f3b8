//! What the publisher does: transactions over a few tables, some of them open for long, and what each
//! does to the tables when it commits.
//!
//! What the subscriber must have is counted here, by executing what has committed one transaction after
//! the other. Nothing of the engine takes part in that.

mod builder;
mod changes;
mod outcome;
mod row_locks;
mod tables;

use std::rc::Rc;

use engine::history::Fate;
use engine::net::TableRules;
use engine::writeset::LockRules;
use pgoutput::{Lsn, Timestamp, Xid};

use crate::simulation::history::builder::Builder;
use crate::simulation::history::outcome::{depend, execute, spans};
use crate::simulation::history::tables::{is_full, locks, rules};
use crate::simulation::rng::Rng;

pub(crate) use tables::{
    APPEND, AUDIT, CHILD, FULL, PARENT, PLAIN, PUBLISHED, Row, TABLES, TRIGGERED, UNCERTAIN,
    UNIQUE, audit, digest, is_keyed,
};

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
