//! The rows after the committed transactions, and the dependencies between these.

use std::collections::{BTreeMap, HashMap};

use pgoutput::Xid;

use crate::simulation::history::row_locks::{Lock, rows_of};
use crate::simulation::history::tables::{
    APPEND, AUDIT, CHILD, PARENT, PUBLISHED, Row, TABLES, TRIGGERED, audit, digest, is_keyed,
};
use crate::simulation::history::{Kind, Record, RecordKind, Set, Span, Transaction};

pub(super) fn spans(wal: &[Record]) -> Vec<Span> {
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
pub(super) fn execute(transactions: &mut [Transaction]) -> u64 {
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

/// Sets the transactions that each one depends on, derived from its changes and not from the writeset.
pub(super) fn depend(transactions: &mut [Transaction]) {
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
