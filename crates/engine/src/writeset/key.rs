//! Hashes of the keys of a row.

use std::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use pgoutput::{Column, Delete, Insert, Message, OldTuple, Tuple, TupleColumns, Update};

use super::rules::LockColumn;
use crate::key::KeyForm;

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

    /// The key that a row has in these columns, after its change if `NEW`.
    #[inline]
    pub(super) fn key<const NEW: bool>(
        &mut self,
        (kind, root, id): (Kind, u32, u32),
        columns: &[LockColumn],
        nulls: Nulls,
        rows: &Rows<'_>,
    ) -> Key {
        self.bytes.clear();
        let appended = match (columns, nulls) {
            ([column], Nulls::Distinct) => {
                self.append_alone(column.form, rows.value::<NEW>(column))
            }
            _ => self.append_all::<NEW>(columns, nulls, rows),
        };
        match appended {
            Ok(()) => {
                let mut hasher = self.state.build_hasher();
                start(&mut hasher, kind, root, id);
                hasher.write(&self.bytes);
                Key::Is(hasher.finish())
            }
            Err(key) => key,
        }
    }

    /// Appends the value of the only column. Returns the key if it has no hash.
    #[inline]
    fn append_alone(&mut self, form: KeyForm, value: Option<Column<'_>>) -> Result<(), Key> {
        match value {
            None => Err(Key::Unknown),
            Some(Column::Null) => Err(Key::Null),
            Some(value) if form.append(value, &mut self.bytes) => Ok(()),
            Some(_) => Err(Key::Unknown),
        }
    }

    /// Appends the values of several columns. A row may have more than a thousand, so it is read once.
    fn append_all<const NEW: bool>(
        &mut self,
        columns: &[LockColumn],
        nulls: Nulls,
        rows: &Rows<'_>,
    ) -> Result<(), Key> {
        let mut walk = Walk::default();
        for column in columns {
            let value = rows.next_value::<NEW>(column, &mut walk).ok_or(Key::Unknown)?;
            if value == Column::Null {
                match nulls {
                    Nulls::Distinct => return Err(Key::Null),
                    Nulls::Equal => self.bytes.extend_from_slice(&NULL),
                }
                continue;
            }
            // The length precedes the value, so that the columns stay distinct.
            let at = self.bytes.len();
            self.bytes.extend_from_slice(&[0; 4]);
            if !column.form.append(value, &mut self.bytes) {
                return Err(Key::Unknown);
            }
            let length = u32::try_from(self.bytes.len() - at - 4).map_err(|_| Key::Unknown)?;
            self.bytes[at..at + 4].copy_from_slice(&length.to_be_bytes());
        }
        Ok(())
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

    /// The new or the old value of a column, if the stream contains it.
    #[inline]
    fn value<const NEW: bool>(&self, column: &LockColumn) -> Option<Column<'a>> {
        let at = |row: &Tuple<'a>| row.columns().nth(column.column);
        if NEW { self.after(column, at, at) } else { self.before(column, at) }
    }

    /// The same for one column after the other.
    #[inline]
    fn next_value<const NEW: bool>(
        &self,
        column: &LockColumn,
        walk: &mut Walk<'a>,
    ) -> Option<Column<'a>> {
        let Walk { old, new } = walk;
        if NEW {
            self.after(column, |row| new.at(row, column), |row| old.at(row, column))
        } else {
            self.before(column, |row| old.at(row, column))
        }
    }

    /// The old value of a column, if the stream contains it. `at` reads it from a row.
    #[inline]
    fn before(
        &self,
        column: &LockColumn,
        at: impl FnOnce(&Tuple<'a>) -> Option<Column<'a>>,
    ) -> Option<Column<'a>> {
        let row = match &self.old {
            Some(old) => old.tuple(),
            None if column.in_identity => self.new.as_ref()?,
            None => return None,
        };
        // A replica identity that is not FULL has no NULL values. A NULL here is a column outside of it.
        let is_key = matches!(self.old, Some(OldTuple::Key(_)));
        at(row).filter(|value| *value != Column::Unchanged && !(is_key && *value == Column::Null))
    }

    /// The new value of a column, if the stream contains it. `new` and `old` read it from a row.
    #[inline]
    fn after(
        &self,
        column: &LockColumn,
        new: impl FnOnce(&Tuple<'a>) -> Option<Column<'a>>,
        old: impl FnOnce(&Tuple<'a>) -> Option<Column<'a>>,
    ) -> Option<Column<'a>> {
        match new(self.new.as_ref()?)? {
            Column::Unchanged if self.old.is_some() => self.before(column, old),
            Column::Unchanged => None,
            value => Some(value),
        }
    }

    /// Whether an update certainly left a column unchanged.
    #[inline]
    fn is_unchanged(
        &self,
        column: &LockColumn,
        new: impl FnOnce(&Tuple<'a>) -> Option<Column<'a>>,
        old: impl FnOnce(&Tuple<'a>) -> Option<Column<'a>>,
    ) -> bool {
        let Some(value) = self.new.as_ref().and_then(new) else { return false };
        value == Column::Unchanged
            || match &self.old {
                Some(_) => self.before(column, old) == Some(value),
                None => column.in_identity,
            }
    }

    /// Whether an update certainly left these columns unchanged.
    pub(super) fn are_unchanged(&self, columns: &[LockColumn]) -> bool {
        if let [column] = columns {
            let at = |row: &Tuple<'a>| row.columns().nth(column.column);
            return self.is_unchanged(column, at, at);
        }
        let Walk { old, new } = &mut Walk::default();
        let mut all = columns.iter();
        !columns.is_empty()
            && all.all(|c| self.is_unchanged(c, |row| new.at(row, c), |row| old.at(row, c)))
    }
}

/// How far the old and the new row are read.
#[derive(Default)]
struct Walk<'a> {
    old: ReadTo<'a>,
    new: ReadTo<'a>,
}

/// A place in a row. Columns that are asked for in ascending order are read in one pass.
#[derive(Default)]
struct ReadTo<'a> {
    rest: Option<TupleColumns<'a>>,
    /// The first column of `rest`.
    next: usize,
}

impl<'a> ReadTo<'a> {
    #[inline]
    fn at(&mut self, row: &Tuple<'a>, column: &LockColumn) -> Option<Column<'a>> {
        if column.column < self.next {
            *self = Self::default();
        }
        let skipped = column.column - self.next;
        self.next = column.column + 1;
        self.rest.get_or_insert_with(|| row.columns()).nth(skipped)
    }
}
