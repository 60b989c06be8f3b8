//! A compact notation for changes and rules.

use pgoutput::{
    Delete, Insert, Message, OldTuple, RelId, TupleBuilder, Update, builder, decode_change,
};

use crate::group::GroupSeq;
use crate::key::KeyForm;
use crate::writeset::Verdict::{Dependent, Independent};
use crate::writeset::{
    LockColumn, LockRules, Prerequisites, RowLock, UniqueLock, Verdict, Writeset, WritesetLimits,
};

pub(super) const LIMITS: WritesetLimits = WritesetLimits { keys_per_table: 1000, keys: 10_000 };

/// A column outside the publisher's replica identity.
pub(super) fn column(column: usize) -> LockColumn {
    LockColumn { column, form: KeyForm::Bytes, in_identity: false }
}

/// A column of the publisher's replica identity.
pub(super) fn key(column: usize) -> LockColumn {
    LockColumn { column, form: KeyForm::Bytes, in_identity: true }
}

/// A table whose rows are identified by the first column.
pub(super) fn table(root: u32) -> LockRules {
    LockRules {
        root,
        identity: 1,
        row: RowLock::Key(vec![key(0)]),
        unique: Vec::new(),
        foreign: Vec::new(),
        referenced: Vec::new(),
        whole_table: false,
        user_code: false,
    }
}

/// The same with a unique index on the second column.
pub(super) fn with_unique(root: u32) -> LockRules {
    let unique =
        UniqueLock { id: 7, columns: vec![column(1)], certain: true, nulls_not_distinct: false };
    LockRules { unique: vec![unique], ..table(root) }
}

/// A row as text: `-` is NULL, `~` is a value that was not sent.
pub(super) fn row(words: &str) -> TupleBuilder {
    words.split_whitespace().fold(TupleBuilder::new(), |row, word| match word {
        "-" => row.null(),
        "~" => row.unchanged(),
        word => row.text(word),
    })
}

/// The bytes of a change: `I new`, `U new`, `U K old > new`, `U O old > new`, `D K old`, `D O old`.
pub(super) fn bytes(change: &str) -> Vec<u8> {
    let (kind, rest) = change.split_at(1);
    let rest = rest.trim();
    let (relation, xid) = (RelId(1), None);
    let (old, new) = match rest.split_once('>') {
        Some((old, new)) => (Some(old), new),
        None if kind == "D" => (Some(rest), ""),
        None => (None, rest),
    };
    let old = old.map(|old| (old.trim().starts_with('O'), row(&old.trim()[1..])));
    let old = old.as_ref().map(|(full, row)| match full {
        true => OldTuple::Full(row.tuple()),
        false => OldTuple::Key(row.tuple()),
    });
    let new = row(new);
    builder::encoded(&match kind {
        "I" => Message::Insert(Insert { xid, relation, new: new.tuple() }),
        "U" => Message::Update(Update { xid, relation, old, new: new.tuple() }),
        "D" => Message::Delete(Delete { xid, relation, old: old.unwrap() }),
        _ => panic!("{change}"),
    })
}

/// A writeset that opens one group after the other.
pub(super) struct Bed {
    pub(super) set: Writeset,
    next: u64,
}

impl Bed {
    pub(super) fn ordered() -> Self {
        Self::new(LIMITS, true)
    }

    pub(super) fn unordered() -> Self {
        Self::new(LIMITS, false)
    }

    pub(super) fn new(limits: WritesetLimits, ordered: bool) -> Self {
        Self { set: Writeset::new(limits, ordered), next: 1 }
    }

    /// The verdicts of the next group, `.` for independent and `x` for dependent, and what it waits
    /// for.
    pub(super) fn group(
        &mut self,
        ahead: Option<u64>,
        changes: &[(&LockRules, &str)],
    ) -> (String, Prerequisites) {
        self.open(ahead);
        let verdicts = changes.iter().map(|(rules, change)| self.change(rules, change)).collect();
        (verdicts, self.set.close())
    }

    pub(super) fn open(&mut self, ahead: Option<u64>) {
        self.set.open(GroupSeq(self.next), ahead.map(GroupSeq));
        self.next += 1;
    }

    pub(super) fn change(&mut self, rules: &LockRules, change: &str) -> char {
        if change == "T" {
            return letter(self.set.truncate(&[rules]));
        }
        let bytes = bytes(change);
        letter(self.set.change(rules, &decode_change(&bytes, false).unwrap()))
    }

    pub(super) fn committed(&mut self, group: u64) {
        self.set.committed(GroupSeq(group));
    }
}

pub(super) fn letter(verdict: Verdict) -> char {
    match verdict {
        Independent => '.',
        Dependent => 'x',
    }
}

/// The verdict of a change after another change in flight.
#[track_caller]
pub(super) fn after(
    (first_rules, first): (&LockRules, &str),
    (rules, change): (&LockRules, &str),
) -> char {
    let mut bed = Bed::ordered();
    assert_eq!(
        bed.group(None, &[(first_rules, first)]),
        (".".to_owned(), Prerequisites::default())
    );
    bed.open(None);
    let verdict = bed.change(rules, change);
    let prerequisites = bed.set.close();
    assert_eq!(prerequisites.through, GroupSeq(u64::from(verdict == 'x')), "{first} {change}");
    assert_eq!(prerequisites.groups, []);
    verdict
}

pub(super) fn prerequisites(through: u64, groups: &[u64]) -> Prerequisites {
    Prerequisites {
        through: GroupSeq(through),
        groups: groups.iter().map(|group| GroupSeq(*group)).collect(),
    }
}
