//! The locks that a change holds on the publisher, and the rows that it writes.

use crate::simulation::history::tables::{APPEND, CHILD, PARENT, PUBLISHED, Row, UNIQUE, is_keyed};
use crate::simulation::history::{Change, Kind};

/// A lock of a change on the publisher.
#[derive(Debug, PartialEq, Eq, Hash, Clone, Copy)]
pub(super) enum Lock {
    Row(usize, Row),
    Unique(u16),
    Parent(u16),
    Table(usize),
    Everything,
}

/// The locks that a change holds on the publisher until its transaction ends, and whether each excludes others.
pub(super) fn locks_of(change: &Change) -> Vec<(Lock, bool)> {
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
pub(super) fn rows_of(change: &Change) -> Vec<Row> {
    match change.kind {
        Kind::Insert => vec![change.new],
        Kind::Update => vec![change.old, change.new],
        Kind::Delete => vec![change.old],
        Kind::Truncate => Vec::new(),
    }
}
