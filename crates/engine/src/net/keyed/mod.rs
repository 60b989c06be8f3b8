//! Folding by key: the net change of each row since the segment was opened.

mod entry;
mod moves;

use std::cmp::Ordering;
use std::hash::Hasher;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use pgoutput::{Column, Message, OldTuple, Tuple};
use rustc_hash::FxHasher;

use super::merge::{inserted, overwrite};
use super::{ChangeAt, Row, Seek, Seeks, Segment, Update};
use crate::key::KeyForm;
use entry::{Before, Counts, Entry, Now};

/// An open segment under [`TableFolding::Key`](super::TableFolding::Key).
#[derive(Debug)]
pub(super) struct Keyed<'t, 'a> {
    key: &'t [(usize, KeyForm)],
    /// Column and its position in the key, in the order of the columns.
    key_columns: Vec<(usize, usize)>,
    /// See [`TableRules::written`](super::TableRules::written).
    written: &'t [usize],
    columns: usize,
    /// Canonical forms of the keys of `entries`. In a key of several columns, each form follows its
    /// length.
    keys: Vec<u8>,
    index: HashTable<Indexed>,
    entries: Vec<Entry<'a>>,
    /// Entry of every insert, in stream order. Outdated if the entry names a later insert.
    inserts: Vec<u32>,
    /// Key columns of the current change, in the order of the key.
    values: Vec<Column<'a>>,
    /// Whether an update of a key is folded: see [`TableRules::moves`](super::TableRules::moves).
    moves: bool,
    /// The changes that must find the row of an entry, and the entry, in stream order; `None` if they are
    /// not listed.
    seeks: Option<Vec<(u32, ChangeAt)>>,
}

/// An entry with 32 bits of its hash: these avoid most key comparisons, and hashing again when the
/// index grows.
#[derive(Debug, Clone, Copy)]
struct Indexed {
    hash: u32,
    entry: u32,
}

/// Keys of one segment take at most 4 GiB. This limit is far lower, so that the key of one more
/// change always fits.
const MAX_KEY_BYTES: usize = 1 << 31;

/// The result of [`Keyed::compare_key`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ComparedKey {
    Same,
    /// The same; some values were not sent.
    Filled,
    Changed,
}

/// The result of [`Keyed::find`].
#[derive(Debug, Clone, Copy)]
enum KeyLookup {
    /// The key has this entry.
    Known(u32),
    /// The key has no entry: one must be added, whose key starts here.
    New(usize),
}

impl<'t, 'a> Keyed<'t, 'a> {
    pub(super) fn new(key: &'t [(usize, KeyForm)], written: &'t [usize], columns: usize) -> Self {
        let mut key_columns: Vec<_> =
            key.iter().enumerate().map(|(place, &(column, _))| (column, place)).collect();
        key_columns.sort_unstable();
        Self {
            key,
            key_columns,
            written,
            columns,
            keys: Vec::new(),
            index: HashTable::new(),
            entries: Vec::new(),
            inserts: Vec::new(),
            values: vec![Column::Null; key.len()],
            moves: false,
            seeks: None,
        }
    }

    /// The same, with [`Segment::seeks`] if `seeks` says so.
    pub(super) fn seeking(self, seeks: bool) -> Self {
        Self { seeks: seeks.then(Vec::new), ..self }
    }

    /// The same, with [`Segment::moves`] if `moves` says so.
    pub(super) fn moving(self, moves: bool) -> Self {
        Self { moves, ..self }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether no change looks for a row that existed before the segment.
    pub(super) fn needs_no_row(&self) -> bool {
        self.entries.iter().all(|entry| entry.before == Before::Absent)
    }

    /// Takes a change. Returns false, and changes nothing, if it cannot be folded.
    #[inline]
    pub(super) fn push(&mut self, at: ChangeAt, message: &Message<'a>) -> bool {
        let folded = match message {
            Message::Insert(insert) => self.insert(insert.new),
            Message::Update(update) => self.update(at, update.old.as_ref(), update.new),
            Message::Delete(delete) => self.delete(at, *delete.old.tuple()),
            _ => None,
        };
        folded.is_some()
    }

    #[inline]
    fn note_seek(&mut self, place: u32, at: ChangeAt) {
        if let Some(seeks) = &mut self.seeks {
            seeks.push((place, at));
        }
    }

    fn insert(&mut self, new: Tuple<'a>) -> Option<()> {
        self.read_key(&new)?;
        let inserted_at = index_u32(self.inserts.len());
        match self.find()? {
            KeyLookup::New(key) => {
                let place = self.add(key, (Before::Absent, Now::Inserted), inserted(new));
                self.inserts.push(place);
            }
            KeyLookup::Known(place) => {
                let entry = &mut self.entries[place as usize];
                if entry.now != Now::Absent {
                    return None;
                }
                entry.now = Now::Inserted;
                entry.row = inserted(new);
                entry.inserted = inserted_at;
                self.inserts.push(place);
            }
        }
        Some(())
    }

    fn update(&mut self, at: ChangeAt, old: Option<&OldTuple<'a>>, new: Tuple<'a>) -> Option<()> {
        self.read_key(&new)?;
        let filled = match old.map(|old| self.compare_key(old.tuple())) {
            Some(ComparedKey::Changed) if self.moves => return self.move_row(old?.tuple(), new),
            Some(ComparedKey::Changed) => return None,
            Some(ComparedKey::Filled) => true,
            Some(ComparedKey::Same) | None => false,
        };
        match self.find()? {
            KeyLookup::New(key) => {
                let mut row = Row::Sent(new);
                if filled {
                    self.fill_key(&mut row);
                }
                let place = self.add(key, (Before::Stays, Now::Same), row);
                self.note_seek(place, at);
            }
            KeyLookup::Known(place) => {
                if self.ends_written(place, Some(&new)) {
                    return None;
                }
                let entry = &mut self.entries[place as usize];
                if entry.now == Now::Absent {
                    return None;
                }
                overwrite(&mut entry.row, new);
                if entry.now == Now::Same {
                    self.note_seek(place, at);
                }
            }
        }
        Some(())
    }

    fn delete(&mut self, at: ChangeAt, old: Tuple<'a>) -> Option<()> {
        self.read_key(&old)?;
        match self.find()? {
            KeyLookup::New(key) => {
                let none = Row::Sent(Tuple::default());
                let place = self.add(key, (Before::Deleted, Now::Absent), none);
                self.entries[place as usize].old = old;
                self.note_seek(place, at);
            }
            KeyLookup::Known(place) => {
                let now = self.entries[place as usize].now;
                if now == Now::Absent || self.ends_written(place, None) {
                    return None;
                }
                self.leave(place, old);
                match now {
                    Now::Same => {
                        self.entries[place as usize].before = Before::Deleted;
                        self.note_seek(place, at);
                    }
                    Now::Arrived(from) => self.entries[from as usize].before = Before::Deleted,
                    Now::Inserted | Now::Absent => {}
                }
            }
        }
        Some(())
    }

    /// Whether folding a change would lose a value that must be written: the `new` row has another one, or the row is
    /// deleted (`None`).
    fn ends_written(&self, place: u32, new: Option<&Tuple<'a>>) -> bool {
        if self.written.is_empty() {
            return false;
        }
        let now: Vec<_> = self.entries[place as usize].row.columns().collect();
        let new: Option<Vec<_>> = new.map(|new| new.columns().collect());
        let ends = |value: Column<'a>, new: Column<'a>| {
            value != Column::Unchanged && new != Column::Unchanged && new != value
        };
        self.written.iter().any(|&column| match (now.get(column), &new) {
            (Some(value), Some(new)) => new.get(column).is_some_and(|new| ends(*value, *new)),
            (Some(value), None) => *value != Column::Unchanged,
            (None, _) => false,
        })
    }

    /// Takes the row away from a key, and returns it. `old`: as the message calls it.
    fn leave(&mut self, place: u32, old: Tuple<'a>) -> Row<'a> {
        let entry = &mut self.entries[place as usize];
        if matches!(entry.before, Before::Absent | Before::Stays) {
            entry.old = old;
        }
        entry.now = Now::Absent;
        entry.take_row()
    }

    /// Reads the key columns of a row into `values`. Returns `None` if the row does not fit the
    /// table.
    #[inline]
    fn read_key(&mut self, row: &Tuple<'a>) -> Option<()> {
        if row.len() != self.columns || self.key.is_empty() {
            return None;
        }
        let mut columns = row.columns();
        let mut next = 0;
        for &(column, place) in &self.key_columns {
            self.values[place] = columns.nth(column.checked_sub(next)?)?;
            next = column + 1;
        }
        Some(())
    }

    /// Compares `values`, the key of the new row, with the old row, and fills unchanged values from
    /// the old row. The key has changed even if only its spelling did: the new spelling must be written.
    fn compare_key(&mut self, old: &Tuple<'a>) -> ComparedKey {
        if old.len() != self.columns {
            return ComparedKey::Changed;
        }
        let mut compared = ComparedKey::Same;
        let mut columns = old.columns();
        let mut next = 0;
        for &(column, place) in &self.key_columns {
            let Some(old) = columns.nth(column - next) else { return ComparedKey::Changed };
            next = column + 1;
            let value = &mut self.values[place];
            if *value == Column::Unchanged {
                *value = old;
                if compared == ComparedKey::Same {
                    compared = ComparedKey::Filled;
                }
            } else if *value != old {
                compared = ComparedKey::Changed;
            }
        }
        compared
    }

    /// Writes `values` to the key columns of a row that have no value.
    #[cold]
    fn fill_key(&self, row: &mut Row<'a>) {
        let unchanged =
            |&(column, _): &(usize, usize)| row.columns().nth(column) == Some(Column::Unchanged);
        if !self.key_columns.iter().any(unchanged) {
            return;
        }
        let mut columns: Vec<_> = row.columns().collect();
        for &(column, place) in &self.key_columns {
            columns[column] = self.values[place];
        }
        *row = Row::Merged(columns);
    }

    /// Finds the entry of the key in `values`. If there is none, reserves one in the index; then
    /// [`Self::add`] must follow. Returns `None` if the key has no form.
    #[inline]
    fn find(&mut self) -> Option<KeyLookup> {
        let start = self.append_key()?;
        let Self { keys, entries, .. } = self;
        let hash = hash(&keys[start..]);
        match self.index.entry(spread(hash), has_key_at(keys, entries, start, hash), |indexed| {
            spread(indexed.hash)
        }) {
            Place::Occupied(place) => {
                let entry = place.get().entry;
                keys.truncate(start);
                Some(KeyLookup::Known(entry))
            }
            Place::Vacant(place) => {
                place.insert(Indexed { hash, entry: index_u32(entries.len()) });
                Some(KeyLookup::New(start))
            }
        }
    }

    /// Appends the form of the key in `values` to `keys`, and returns where it starts. Appends nothing if the
    /// key has no form.
    #[inline]
    fn append_key(&mut self) -> Option<usize> {
        let keys = &mut self.keys;
        let start = keys.len();
        if start > MAX_KEY_BYTES {
            return None;
        }
        let has_form = match (self.key, self.values.as_slice()) {
            ([(_, form)], [value]) => form.append(*value, keys),
            (key, values) => key
                .iter()
                .zip(values)
                .all(|((_, form), value)| append_with_length(*form, *value, keys)),
        };
        if !has_form {
            keys.truncate(start);
            return None;
        }
        Some(start)
    }

    /// Adds the entry whose key [`Self::find`] appended at `key_start`.
    #[inline]
    fn add(&mut self, key_start: usize, (before, now): (Before, Now), row: Row<'a>) -> u32 {
        let entry = index_u32(self.entries.len());
        self.entries.push(Entry {
            key_start: index_u32(key_start),
            key_end: index_u32(self.keys.len()),
            before,
            now,
            inserted: index_u32(self.inserts.len()),
            old: Tuple::default(),
            row,
        });
        entry
    }

    /// Returns the net changes and empties the segment, but keeps its memory for the next one.
    pub(super) fn close(&mut self, table: usize) -> Segment<'a> {
        let mut counts = Counts::default();
        for entry in &self.entries {
            counts.add(entry);
        }
        let mut segment = Segment {
            table,
            absent: Vec::with_capacity(counts.absent),
            deletes: Vec::with_capacity(counts.deletes),
            moves: Vec::with_capacity(counts.moves),
            chained: false,
            updates: Vec::with_capacity(counts.updates),
            inserts: Vec::with_capacity(counts.inserts),
            seeks: Seeks::default(),
        };
        let mut seeks = self.take_seeks();
        let mut seek_of = |place: u32| {
            let changes = seeks.get_mut(place as usize).map(std::mem::take).unwrap_or_default();
            Seek { changes, passed: Vec::new() }
        };
        // The inserts are first, because the loop below takes the rows.
        for (at, &place) in self.inserts.iter().enumerate() {
            let entry = &mut self.entries[place as usize];
            if entry.now == Now::Inserted && entry.inserted as usize == at {
                segment.inserts.push(entry.take_row());
            }
        }
        if counts.absent + counts.deletes + counts.moves + counts.updates > 0 {
            for place in self.sorted() {
                let entry = &mut self.entries[place as usize];
                match (entry.before, entry.now) {
                    (Before::Absent, Now::Absent) => segment.absent.push(Row::Sent(entry.old)),
                    (Before::Absent, _) => {}
                    (Before::Deleted, _) => {
                        segment.deletes.push(entry.old_row());
                        if self.seeks.is_some() {
                            segment.seeks.deletes.push(seek_of(place));
                        }
                    }
                    (Before::Moved(to), now) => {
                        let other = |from: u32| from != place;
                        segment.chained |= matches!(now, Now::Arrived(from) if other(from));
                        let old = Some(entry.old_row());
                        let new = self.entries[to as usize].take_row();
                        segment.moves.push(Update { old, new });
                    }
                    (Before::Stays, _) => {
                        segment.updates.push(Update { old: None, new: entry.take_row() });
                        if self.seeks.is_some() {
                            segment.seeks.updates.push(seek_of(place));
                        }
                    }
                }
            }
        }
        self.keys.clear();
        self.index.clear();
        self.entries.clear();
        self.inserts.clear();
        segment
    }

    /// The changes that must find its row, by entry.
    fn take_seeks(&mut self) -> Vec<Vec<ChangeAt>> {
        let Some(seeks) = &mut self.seeks else { return Vec::new() };
        let mut by_entry = vec![Vec::new(); self.entries.len()];
        for (place, at) in seeks.drain(..) {
            by_entry[place as usize].push(at);
        }
        by_entry
    }

    /// The entries of keys that had a row before, and of those that are absent, sorted by their keys: by length,
    /// then by bytes. This orders integers in text and in binary.
    fn sorted(&self) -> impl Iterator<Item = u32> + use<'t, 'a> {
        let mut places: Vec<(u32, u32, u64)> = Vec::with_capacity(self.entries.len());
        for (place, entry) in self.entries.iter().enumerate() {
            if entry.before == Before::Absent && entry.now != Now::Absent {
                continue;
            }
            // The first eight bytes nearly always decide, without access to the keys.
            let key = &self.keys[entry.key()];
            let mut first = [0; 8];
            let length = key.len().min(8);
            first[..length].copy_from_slice(&key[..length]);
            places.push((index_u32(key.len()), index_u32(place), u64::from_be_bytes(first)));
        }
        places.sort_unstable_by(|one, other| {
            (one.0, one.2).cmp(&(other.0, other.2)).then_with(|| {
                let key = |place: u32| &self.keys[self.entries[place as usize].key()];
                if one.0 <= 8 { Ordering::Equal } else { key(one.1).cmp(key(other.1)) }
            })
        });
        places.into_iter().map(|(_, place, _)| place)
    }
}

/// Whether an entry has the key whose form starts at `start` and ends with `keys`, and which has this hash.
#[inline]
fn has_key_at<'k, 'a>(
    keys: &'k [u8],
    entries: &'k [Entry<'a>],
    start: usize,
    hash: u32,
) -> impl Fn(&Indexed) -> bool + use<'k, 'a> {
    move |indexed| {
        indexed.hash == hash && keys[entries[indexed.entry as usize].key()] == keys[start..]
    }
}

/// Appends the length of a form, then the form, so that the columns of a key stay distinct.
fn append_with_length(form: KeyForm, value: Column<'_>, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    if !form.append(value, out) {
        return false;
    }
    let length = index_u32(out.len() - start - 4);
    out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    true
}

/// The lower half of the hash. In the upper half, similar keys have similar values.
#[inline]
fn hash(key: &[u8]) -> u32 {
    let mut hasher = FxHasher::default();
    hasher.write(key);
    let [.., a, b, c, d] = hasher.finish().to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// Spreads a hash over 64 bits, because the index uses the lowest and the highest of them.
#[inline]
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Always fits: the keys of a segment are limited, and a group has far fewer changes.
#[inline]
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("groups are bounded well below 4 Gi")
}
