//! The tables of both servers: how each is identified, which rules the subscriber has for it, and the digest of rows.

use engine::key::KeyForm;
use engine::net::{TableFolding, TableRules};
use engine::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use pgoutput::RelId;

use crate::simulation::rng::mix;

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

/// What one row adds to the digest of a database. Digests are sums, so each is of a multiset of
/// rows, and a transaction adds the same whenever it finds the rows that it found on the publisher.
pub(crate) fn digest(table: usize, row: Row) -> u64 {
    let row = row.iter().fold(0_u64, |all, value| all << 16 | u64::from(*value));
    mix(mix(row.wrapping_add(0x51)).wrapping_add(mix(table as u64 + 77)))
}

/// The row that the trigger writes about a database of this digest. `fired` is how often it has run
/// in the transaction.
pub(crate) fn audit(digest: u64, fired: u64) -> Row {
    let digest = mix(digest.wrapping_add(mix(fired)));
    let [a, b, c, d, e, f, g, h] = digest.to_be_bytes();
    [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes)
}

/// Whether rows are found by the first column.
pub(crate) fn is_keyed(table: usize) -> bool {
    matches!(table, PLAIN | UNIQUE | PARENT | CHILD | TRIGGERED)
}

pub(super) fn is_full(table: usize, full_identity: bool) -> bool {
    matches!(table, FULL | UNCERTAIN) || table == UNIQUE && full_identity
}

/// As the program makes them of the subscriber's catalogue.
pub(super) fn locks(table: usize, full_identity: bool) -> LockRules {
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
        user_code: table == TRIGGERED,
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
pub(super) fn rules(table: usize, as_sent: bool) -> TableRules {
    let fold = match table {
        UNCERTAIN => TableFolding::Never { user_code: false },
        TRIGGERED => TableFolding::Never { user_code: true },
        _ if as_sent => TableFolding::AsSent,
        FULL => TableFolding::WholeRow,
        APPEND => TableFolding::Append,
        _ => TableFolding::Key(vec![(0, KeyForm::Integer)]),
    };
    let root = u32::try_from(table).expect("few tables");
    TableRules {
        published: RelId(root),
        root,
        storage: None,
        columns: 4,
        fold,
        updates_alone: false,
        moves: true,
        seeks: false,
        told_apart: Vec::new(),
        written: Vec::new(),
    }
}
