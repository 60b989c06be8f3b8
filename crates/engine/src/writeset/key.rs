//! Hashes of the keys of a row.

use std::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use pgoutput::{Column, Delete, Insert, Message, OldTuple, Tuple, Update};

use super::rules::LockColumn;

/// The kind of constraint that a key belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Row,
    Unique,
    Foreign,
}

/// The key of a row in some columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Is(u64),
    /// A column is NULL.
    Null,
    /// The stream does not contain the value of a column.
    Unknown,
}

/// Whether a NULL in a key equals another NULL, as it does in `NULLS NOT DISTINCT` constraints and
/// in whole rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nulls {
    /// Nothing.
    Distinct,
    /// Another NULL.
    Equal,
}

/// Hashes keys without allocating for each one.
#[derive(Debug)]
pub(super) struct Keys {
    state: FixedState,
    bytes: Vec<u8>,
}

impl Keys {
    pub(super) fn new() -> Self {
        // The seed is random, so that writers of rows cannot construct collisions. It only
        // determines which keys share a hash: one pair in 2^64.
        let seed = std::hash::RandomState::new().hash_one(0_u64);
        Self { state: FixedState::with_seed(seed), bytes: Vec::new() }
    }

    /// The only key of a constraint whose keys cannot be compared with certainty.
    pub(super) fn constant(&self, kind: Kind, root: u32, id: u32) -> u64 {
        let mut hasher = self.state.build_hasher();
        start(&mut hasher, kind, root, id);
        hasher.finish()
    }

    /// The key that a row has in these columns. `value` returns the value of a column, if it is
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
                // The length precedes the value, so that the columns stay distinct.
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

/// Written instead of a length. No value has this length.
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

/// The operation on a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Insert,
    Update,
    Delete,
}

/// The old and new row of a change, as far as the stream contains them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    change: Change,
    pub(super) old: Option<OldTuple<'a>>,
    pub(super) new: Option<Tuple<'a>>,
}

impl<'a> Rows<'a> {
    /// Returns `None` for a message that changes no row.
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

    /// The old value of a column, if the stream contains it.
    #[inline]
    pub(super) fn before(&self, column: &LockColumn) -> Option<Column<'a>> {
        match &self.old {
            Some(OldTuple::Full(row)) => sent(row, column),
            // A replica identity that is not FULL has no NULL values. A NULL here is a column
            // outside of it.
            Some(OldTuple::Key(row)) => sent(row, column).filter(|value| *value != Column::Null),
            None if column.in_identity => sent(&self.new?, column),
            None => None,
        }
    }

    /// The new value of a column, if the stream contains it.
    #[inline]
    pub(super) fn after(&self, column: &LockColumn) -> Option<Column<'a>> {
        let row = self.new.as_ref()?;
        sent(row, column).or_else(|| {
            let left_out = row.columns().nth(column.column)? == Column::Unchanged;
            if left_out && self.old.is_some() { self.before(column) } else { None }
        })
    }

    /// Whether an update certainly left a column unchanged.
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

    /// Whether an update certainly left these columns unchanged.
    pub(super) fn are_unchanged(&self, columns: &[LockColumn]) -> bool {
        !columns.is_empty() && columns.iter().all(|column| self.is_unchanged(column))
    }
}

#[inline]
fn sent<'a>(row: &Tuple<'a>, column: &LockColumn) -> Option<Column<'a>> {
    row.columns().nth(column.column).filter(|value| *value != Column::Unchanged)
}
