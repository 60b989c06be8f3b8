//! A naive model: the locks of a change, computed from its true rows and kept in a list.

use std::collections::BTreeMap;

use super::bed::{column, key, table, with_unique};
use crate::writeset::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock};

/// A row of three columns; 0 is NULL in a column that allows NULL.
pub(super) type Values = [u8; 3];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Insert,
    Update,
    Delete,
    Truncate,
}

#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) table: usize,
    pub(super) kind: Kind,
    pub(super) old: Values,
    pub(super) new: Values,
    /// Whether the second column is left out if it did not change.
    pub(super) toasted: bool,
}

/// Rules of each table, and whether its replica identity is FULL.
pub(super) fn tables() -> Vec<(LockRules, bool)> {
    let foreign = |id, parent| ForeignLock { id, parent, columns: vec![column(2)], certain: true };
    let referenced = |id| ReferencedLock { id, columns: vec![key(0)], certain: true };
    let child = LockRules { foreign: vec![foreign(9, 11)], ..with_unique(10) };
    let mut full = child.clone();
    full.unique[0].columns = vec![key(1)];
    full.foreign = vec![
        ForeignLock { columns: vec![key(2)], ..foreign(9, 11) },
        ForeignLock { columns: vec![key(1)], ..foreign(6, 11) },
    ];
    let unsent = ReferencedLock { id: 6, columns: vec![column(1)], certain: true };
    let parent = LockRules {
        foreign: vec![foreign(8, 11)],
        referenced: vec![referenced(9), referenced(8), unsent],
        ..table(11)
    };
    let by_second = LockRules { identity: 2, row: RowLock::Key(vec![key(1)]), ..table(10) };
    let all = (0..3).map(key).collect();
    vec![
        (child, false),
        (parent, false),
        (full, true),
        (LockRules { row: RowLock::WholeRow(all), ..table(12) }, true),
        (LockRules { row: RowLock::Table, ..table(13) }, false),
        (LockRules { whole_table: true, ..table(14) }, false),
        (by_second, true),
        (LockRules { user_code: true, ..table(15) }, false),
    ]
}

/// A change in the notation of [`bytes`](super::bed::bytes).
pub(super) fn words(op: &Op, full: bool) -> String {
    let word =
        |at: usize, value: u8| if at > 0 && value == 0 { "-".into() } else { value.to_string() };
    let row = |row: Values| [0, 1, 2].map(|at| word(at, row[at])).join(" ");
    let identity = format!("{} - -", op.old[0]);
    let mut new = row(op.new);
    if left_out(op) {
        new = format!("{} ~ {}", word(0, op.new[0]), word(2, op.new[2]));
    }
    match (op.kind, full) {
        (Kind::Insert, _) => format!("I {new}"),
        (Kind::Update, true) => format!("U O {} > {new}", row(op.old)),
        (Kind::Update, false) if op.old[0] == op.new[0] => format!("U {new}"),
        (Kind::Update, false) => format!("U K {identity} > {new}"),
        (Kind::Delete, true) => format!("D O {}", row(op.old)),
        (Kind::Delete, false) => format!("D K {identity}"),
        (Kind::Truncate, _) => "T".to_owned(),
    }
}

fn left_out(op: &Op) -> bool {
    op.kind == Kind::Update && op.toasted && op.old[1] == op.new[1] && op.old[1] != 0
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lock {
    Everything,
    Table(u32),
    /// The change touches rows of the table.
    Share(u32),
    Key {
        root: u32,
        kind: char,
        id: u32,
        key: Vec<u8>,
        write: bool,
    },
    /// References to rows of the table are removed; whether the rows are known.
    Drops(u32, bool),
    /// Keys that other tables may refer to are removed; whether the keys are known.
    Removes(u32, bool),
}

impl Lock {
    pub(super) fn root(&self) -> Option<u32> {
        match self {
            Self::Everything => None,
            Self::Table(root)
            | Self::Share(root)
            | Self::Key { root, .. }
            | Self::Drops(root, _)
            | Self::Removes(root, _) => Some(*root),
        }
    }

    /// Whether the later lock `other` must not overtake this one.
    fn conflicts(&self, other: &Self) -> bool {
        if *self == Self::Everything || *other == Self::Everything {
            return true;
        }
        if self.root() != other.root() {
            return false;
        }
        match (self, other) {
            (Self::Table(_), _) | (_, Self::Table(_)) => true,
            (
                Self::Key { kind, id, key, write, .. },
                Self::Key { kind: kind2, id: id2, key: key2, write: write2, .. },
            ) => (kind, id, key) == (kind2, id2, key2) && (*write || *write2),
            // If both are known, their key locks decide.
            (Self::Drops(_, known), Self::Removes(_, known2)) => !known || !known2,
            _ => false,
        }
    }
}

/// Whether the later change must not overtake the earlier one.
pub(super) fn conflict(before: &[Lock], later: &[Lock]) -> bool {
    before.iter().any(|one| later.iter().any(|other| one.conflicts(other)))
}

/// The locks of an operation. `identities` has the last identity number of each root.
pub(super) fn locks(
    op: &Op,
    rules: &LockRules,
    full: bool,
    identities: &mut BTreeMap<u32, u64>,
) -> Vec<Lock> {
    let root = rules.root;
    if rules.user_code {
        return vec![Lock::Everything];
    }
    if op.kind == Kind::Truncate {
        let dropped = rules.foreign.iter().map(|foreign| Lock::Drops(foreign.parent, false));
        return std::iter::once(Lock::Table(root)).chain(dropped).collect();
    }
    let mut locks = vec![Lock::Share(root)];
    let known = identities.insert(root, rules.identity).unwrap_or(rules.identity);
    let by_table = match &rules.row {
        RowLock::Table => op.kind != Kind::Insert,
        RowLock::WholeRow(_) => false,
        // With a NULL in the key, the row may be any.
        RowLock::Key(columns) => columns.iter().any(|column| {
            let at = column.column;
            let null = |row: Values| at > 0 && row[at] == 0;
            op.kind != Kind::Insert && null(op.old) || op.kind != Kind::Delete && null(op.new)
        }),
    };
    if rules.whole_table || known != rules.identity || by_table {
        locks.push(Lock::Table(root));
    }
    let mut take = |root, kind, id, columns: &[LockColumn], row: Values, write| {
        let key: Vec<_> = columns.iter().map(|column| row[column.column]).collect();
        let null = columns.iter().any(|column| column.column > 0 && row[column.column] == 0);
        if kind == 'r' || !null {
            locks.push(Lock::Key { root, kind, id, key, write });
        }
    };
    let (has_old, has_new) = (op.kind != Kind::Insert, op.kind != Kind::Delete);
    if let RowLock::Key(columns) | RowLock::WholeRow(columns) = &rules.row {
        if has_old {
            take(root, 'r', 0, columns, op.old, true);
        }
        if has_new {
            take(root, 'r', 0, columns, op.new, true);
        }
    }
    // Whether the stream reveals old values, and which columns did not change.
    let knows = |columns: &[LockColumn]| full || columns.iter().all(|column| column.in_identity);
    let same = |columns: &[LockColumn]| {
        op.kind == Kind::Update
            && columns.iter().all(|column| {
                let at = column.column;
                op.old[at] == op.new[at] && (knows(&[*column]) || at == 1 && left_out(op))
            })
    };
    let mut constraint = |root, kind, id, columns: &[LockColumn], write| {
        if same(columns) {
            return;
        }
        if has_old && knows(columns) {
            take(root, kind, id, columns, op.old, write);
        }
        if has_new {
            take(root, kind, id, columns, op.new, write);
        }
    };
    for unique in &rules.unique {
        constraint(root, 'u', unique.id, &unique.columns, true);
    }
    for referenced in &rules.referenced {
        constraint(root, 'f', referenced.id, &referenced.columns, true);
    }
    for foreign in &rules.foreign {
        constraint(foreign.parent, 'f', foreign.id, &foreign.columns, false);
    }
    let null =
        |columns: &[LockColumn]| columns.iter().any(|c| c.column > 0 && op.old[c.column] == 0);
    let goes =
        |columns: &[LockColumn]| has_old && !same(columns) && !(knows(columns) && null(columns));
    for foreign in &rules.foreign {
        if !same(&foreign.columns) {
            locks.push(Lock::Share(foreign.parent));
        }
        if goes(&foreign.columns) {
            locks.push(Lock::Drops(foreign.parent, knows(&foreign.columns)));
        }
    }
    for referenced in &rules.referenced {
        if goes(&referenced.columns) {
            locks.push(Lock::Removes(root, knows(&referenced.columns)));
            if !has_new && !knows(&referenced.columns) {
                locks.push(Lock::Table(root));
            }
        }
    }
    locks
}
