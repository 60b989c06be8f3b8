//! From a row to the number of a key.

use std::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use pgoutput::{Column, Delete, Insert, Message, OldTuple, Tuple, Update};

use super::rules::LockColumn;

/// What a key belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Row,
    Unique,
    Foreign,
}

/// A key of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Is(u64),
    /// A column is NULL.
    Null,
    /// The stream does not tell.
    Unknown,
}

/// What a NULL in a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nulls {
    /// Nothing is equal to it.
    Distinct,
    /// It is equal to NULL.
    Equal,
}

/// Makes numbers of keys, without allocating.
#[derive(Debug)]
pub(super) struct Keys {
    state: FixedState,
    bytes: Vec<u8>,
}

impl Keys {
    pub(super) fn new() -> Self {
        // A seed that those who write the rows do not know. It decides nothing but which keys share
        // a number by chance, one in 2^64.
        let seed = std::hash::RandomState::new().hash_one(0_u64);
        Self { state: FixedState::with_seed(seed), bytes: Vec::new() }
    }

    /// The only key of a constraint of which nothing more is certain.
    pub(super) fn constant(&self, kind: Kind, root: u32, id: u32) -> u64 {
        let mut hasher = self.state.build_hasher();
        start(&mut hasher, kind, root, id);
        hasher.finish()
    }

    /// The key that a row has in these columns; `value` says what it has in one of them, if that is
    /// known.
    #[inline]
    pub(super) fn key<'a>(
        &mut self,
        (kind, root, id): (Kind, u32, u32),
        columns: &[LockColumn],
        nulls: Nulls,
        value: impl Fn(&LockColumn) -> Option<Column<'a>>,
    ) -> Key {
        self.bytes.clear();
        let alone = columns.len() == 1;
        for column in columns {
            let Some(value) = value(column) else { return Key::Unknown };
            if value == Column::Null {
                match nulls {
                    Nulls::Distinct => return Key::Null,
                    Nulls::Equal => self.bytes.extend_from_slice(&NULL),
                }
            } else if alone && nulls == Nulls::Distinct {
                if !column.form.append(value, &mut self.bytes) {
                    return Key::Unknown;
                }
            } else {
                // After its length, so that values cannot run into each other.
                let at = self.bytes.len();
                self.bytes.extend_from_slice(&[0; 4]);
                if !column.form.append(value, &mut self.bytes) {
                    return Key::Unknown;
                }
                let Ok(length) = u32::try_from(self.bytes.len() - at - 4) else {
                    return Key::Unknown;
                };
                self.bytes[at..at + 4].copy_from_slice(&length.to_be_bytes());
            }
        }
        let mut hasher = self.state.build_hasher();
        start(&mut hasher, kind, root, id);
        hasher.write(&self.bytes);
        Key::Is(hasher.finish())
    }
}

/// In place of a length that no value has.
const NULL: [u8; 4] = u32::MAX.to_be_bytes();

fn start(hasher: &mut impl Hasher, kind: Kind, root: u32, id: u32) {
    let kind = match kind {
        Kind::Row => 0,
        Kind::Unique => 1,
        Kind::Foreign => 2,
    };
    hasher.write_u64(u64::from(root) << 32 | u64::from(id));
    hasher.write_u8(kind);
}

/// What happens to a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Insert,
    Update,
    Delete,
}

/// The rows of a change: what the stream says of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    change: Change,
    pub(super) old: Option<OldTuple<'a>>,
    pub(super) new: Option<Tuple<'a>>,
}

impl<'a> Rows<'a> {
    /// `None` for what changes no row.
    pub(super) fn of(message: &Message<'a>) -> Option<Self> {
        match *message {
            Message::Insert(Insert { new, .. }) => {
                Some(Self { change: Change::Insert, old: None, new: Some(new) })
            }
            Message::Update(Update { old, new, .. }) => {
                Some(Self { change: Change::Update, old, new: Some(new) })
            }
            Message::Delete(Delete { old, .. }) => {
                Some(Self { change: Change::Delete, old: Some(old), new: None })
            }
            _ => None,
        }
    }

    pub(super) fn is_insert(&self) -> bool {
        self.change == Change::Insert
    }

    pub(super) fn is_update(&self) -> bool {
        self.change == Change::Update
    }

    /// The value before, if the stream has it.
    #[inline]
    pub(super) fn before(&self, column: &LockColumn) -> Option<Column<'a>> {
        match &self.old {
            Some(OldTuple::Full(row)) => sent(row, column),
            // A column of a replica identity that is not FULL is never NULL: this one was left out.
            Some(OldTuple::Key(row)) => sent(row, column).filter(|value| *value != Column::Null),
            None if column.in_identity => sent(&self.new?, column),
            None => None,
        }
    }

    /// The value after, if the stream has it.
    #[inline]
    pub(super) fn after(&self, column: &LockColumn) -> Option<Column<'a>> {
        let row = self.new.as_ref()?;
        sent(row, column).or_else(|| {
            let left_out = row.columns().nth(column.column)? == Column::Unchanged;
            if left_out && self.old.is_some() { self.before(column) } else { None }
        })
    }

    /// Whether an update surely left a column as it was.
    fn is_unchanged(&self, column: &LockColumn) -> bool {
        let Some(new) = self.new.and_then(|row| row.columns().nth(column.column)) else {
            return false;
        };
        new == Column::Unchanged
            || match &self.old {
                Some(_) => self.before(column) == Some(new),
                None => column.in_identity,
            }
    }

    /// Whether an update surely left these columns as they were.
    pub(super) fn are_unchanged(&self, columns: &[LockColumn]) -> bool {
        !columns.is_empty() && columns.iter().all(|column| self.is_unchanged(column))
    }
}

#[inline]
fn sent<'a>(row: &Tuple<'a>, column: &LockColumn) -> Option<Column<'a>> {
    row.columns().nth(column.column).filter(|value| *value != Column::Unchanged)
}
