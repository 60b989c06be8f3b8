//! Folding by key: what happened to each row since the segment was opened.

use std::cmp::Ordering;
use std::hash::Hasher;
use std::ops::Range;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use pgoutput::{Column, Message, OldTuple, Tuple};
use rustc_hash::FxHasher;

use super::merge::{inserted, overwrite};
use super::{Old, Row, Segment, Update};
use crate::key::KeyForm;

/// An open segment under [`TableFolding::Key`](super::TableFolding::Key).
#[derive(Debug)]
pub(super) struct Keyed<'t, 'a> {
    key: &'t [(usize, KeyForm)],
    /// Column and place in the key, in the order of the columns.
    key_columns: Vec<(usize, usize)>,
    columns: usize,
    /// Forms of the keys of `entries`; in a key of several columns each after its length.
    keys: Vec<u8>,
    index: HashTable<Indexed>,
    entries: Vec<Entry<'a>>,
    /// Entry of every insert in stream order; outdated where the entry names a later one.
    inserts: Vec<u32>,
    /// Key columns of the change at hand, in the order of the key.
    values: Vec<Column<'a>>,
}

/// An entry, with enough of its hash that most comparisons are spared and growing is cheap.
#[derive(Debug, Clone, Copy)]
struct Indexed {
    hash: u32,
    entry: u32,
}

/// What happened to the row of one key.
#[derive(Debug)]
struct Entry<'a> {
    key_start: u32,
    key_end: u32,
    net: Net,
    /// Place of its last insert in `inserts`.
    inserted: u32,
    /// What finds the row, if it was deleted.
    deleted: Tuple<'a>,
    /// The row, if it is there now.
    row: Row<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Net {
    /// Inserted and deleted: it was not there and is not there.
    Absent,
    Insert,
    Update,
    Delete,
    /// Deleted and inserted again.
    Replace,
}

/// Keys of one segment lie in 4 GiB; far less, so that a change more always fits.
const MAX_KEY_BYTES: usize = 1 << 31;

/// What [`Keyed::find`] says of a key.
#[derive(Debug, Clone, Copy)]
enum Found {
    /// Place of its entry.
    Known(u32),
    /// It has none: one must be added, whose key starts here.
    New(usize),
}

impl<'t, 'a> Keyed<'t, 'a> {
    pub(super) fn new(key: &'t [(usize, KeyForm)], columns: usize) -> Self {
        let mut key_columns: Vec<_> =
            key.iter().enumerate().map(|(place, &(column, _))| (column, place)).collect();
        key_columns.sort_unstable();
        Self {
            key,
            key_columns,
            columns,
            keys: Vec::new(),
            index: HashTable::new(),
            entries: Vec::new(),
            inserts: Vec::new(),
            values: vec![Column::Null; key.len()],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes a change, or leaves everything as it is and returns false.
    #[inline]
    pub(super) fn push(&mut self, message: &Message<'a>) -> bool {
        let folded = match message {
            Message::Insert(insert) => self.insert(insert.new),
            Message::Update(update) => self.update(update.old.as_ref(), update.new),
            Message::Delete(delete) => self.delete(*delete.old.tuple()),
            _ => None,
        };
        folded.is_some()
    }

    fn insert(&mut self, new: Tuple<'a>) -> Option<()> {
        self.read_key(&new)?;
        match self.find()? {
            Found::New(key) => {
                let place = self.add(key, Net::Insert, Tuple::default(), inserted(new));
                self.inserts.push(place);
            }
            Found::Known(place) => {
                let inserted_at = index_u32(self.inserts.len());
                let entry = &mut self.entries[place as usize];
                entry.net = match entry.net {
                    Net::Absent => Net::Insert,
                    Net::Delete => Net::Replace,
                    Net::Insert | Net::Update | Net::Replace => return None,
                };
                entry.row = inserted(new);
                entry.inserted = inserted_at;
                self.inserts.push(place);
            }
        }
        Some(())
    }

    fn update(&mut self, old: Option<&OldTuple<'a>>, new: Tuple<'a>) -> Option<()> {
        self.read_key(&new)?;
        let filled = match old {
            Some(old) => self.compare_key(old.tuple())?,
            None => false,
        };
        match self.find()? {
            Found::New(key) => {
                let mut row = Row::Sent(new);
                if filled {
                    self.fill_key(&mut row);
                }
                self.add(key, Net::Update, Tuple::default(), row);
            }
            Found::Known(place) => {
                let entry = &mut self.entries[place as usize];
                match entry.net {
                    Net::Insert | Net::Update | Net::Replace => overwrite(&mut entry.row, new),
                    Net::Absent | Net::Delete => return None,
                }
            }
        }
        Some(())
    }

    fn delete(&mut self, old: Tuple<'a>) -> Option<()> {
        self.read_key(&old)?;
        match self.find()? {
            Found::New(key) => {
                self.add(key, Net::Delete, old, Row::Sent(Tuple::default()));
            }
            Found::Known(place) => {
                let entry = &mut self.entries[place as usize];
                entry.net = match entry.net {
                    Net::Insert => Net::Absent,
                    Net::Update | Net::Replace => Net::Delete,
                    Net::Absent | Net::Delete => return None,
                };
                entry.deleted = old;
                entry.row = Row::Sent(Tuple::default());
            }
        }
        Some(())
    }

    /// Reads the key columns of a row into `values`; `None` if the row cannot be of this table.
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

    /// Compares `values`, the key of the new row, with the old row and takes from there what was
    /// left out. `None` if the key changed, be it only its spelling: that must be written. Whether
    /// something was left out.
    fn compare_key(&mut self, old: &Tuple<'a>) -> Option<bool> {
        if old.len() != self.columns {
            return None;
        }
        let mut filled = false;
        let mut columns = old.columns();
        let mut next = 0;
        for &(column, place) in &self.key_columns {
            let old = columns.nth(column.checked_sub(next)?)?;
            next = column + 1;
            let value = &mut self.values[place];
            if *value == Column::Unchanged {
                *value = old;
                filled = true;
            } else if *value != old {
                return None;
            }
        }
        Some(filled)
    }

    /// Writes `values` to the key columns of a row.
    #[cold]
    fn fill_key(&self, row: &mut Row<'a>) {
        let mut columns: Vec<_> = row.columns().collect();
        for &(column, place) in &self.key_columns {
            columns[column] = self.values[place];
        }
        *row = Row::Merged(columns);
    }

    /// Finds the entry of the key in `values`, or makes room for it in the index: then [`Self::add`]
    /// must follow. `None` if the key has no form.
    #[inline]
    fn find(&mut self) -> Option<Found> {
        let Self { keys, entries, .. } = self;
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
        let hash = hash(&keys[start..]);
        let same = |indexed: &Indexed| {
            indexed.hash == hash && { keys[entries[indexed.entry as usize].key()] == keys[start..] }
        };
        match self.index.entry(spread(hash), same, |indexed| spread(indexed.hash)) {
            Place::Occupied(place) => {
                let entry = place.get().entry;
                keys.truncate(start);
                Some(Found::Known(entry))
            }
            Place::Vacant(place) => {
                place.insert(Indexed { hash, entry: index_u32(entries.len()) });
                Some(Found::New(start))
            }
        }
    }

    /// Adds the entry whose key [`Self::find`] has appended from `key_start` on.
    #[inline]
    fn add(&mut self, key_start: usize, net: Net, deleted: Tuple<'a>, row: Row<'a>) -> u32 {
        let entry = index_u32(self.entries.len());
        self.entries.push(Entry {
            key_start: index_u32(key_start),
            key_end: index_u32(self.keys.len()),
            net,
            inserted: index_u32(self.inserts.len()),
            deleted,
            row,
        });
        entry
    }

    /// The net changes; nothing is left, but the memory is kept for the next segment.
    pub(super) fn close(&mut self, table: usize) -> Segment<'a> {
        let mut counts = Counts::default();
        for entry in &self.entries {
            counts.add(entry.net);
        }
        let mut segment = Segment {
            table,
            absent: Vec::with_capacity(counts.absent),
            deletes: Vec::with_capacity(counts.deletes),
            updates: Vec::with_capacity(counts.updates),
            inserts: Vec::with_capacity(counts.inserts),
        };
        // Before the others, which take the rows away.
        for (at, &place) in self.inserts.iter().enumerate() {
            let entry = &mut self.entries[place as usize];
            if entry.net.inserts() && entry.inserted as usize == at {
                segment.inserts.push(entry.take_row());
            }
        }
        if counts.absent + counts.deletes + counts.updates > 0 {
            for place in self.sorted() {
                let entry = &mut self.entries[place as usize];
                match entry.net {
                    Net::Insert => {}
                    Net::Absent => segment.absent.push(Row::Sent(entry.deleted)),
                    Net::Delete | Net::Replace => {
                        let row = Row::Sent(entry.deleted);
                        segment.deletes.push(Old { row, class: 0, nth: 0 });
                    }
                    Net::Update => {
                        segment.updates.push(Update { old: None, new: entry.take_row() });
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

    /// The entries that are not just inserts, sorted by their keys: by length, then bytes, so that
    /// integers are in order in text as well as in binary.
    fn sorted(&self) -> impl Iterator<Item = u32> + use<'t, 'a> {
        let mut places: Vec<(u32, u32, u64)> = Vec::with_capacity(self.entries.len());
        for (place, entry) in self.entries.iter().enumerate() {
            if entry.net == Net::Insert {
                continue;
            }
            // The first bytes decide nearly always, without a look at the keys themselves.
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

impl<'a> Entry<'a> {
    #[inline]
    fn key(&self) -> Range<usize> {
        self.key_start as usize..self.key_end as usize
    }

    fn take_row(&mut self) -> Row<'a> {
        std::mem::replace(&mut self.row, Row::Sent(Tuple::default()))
    }
}

impl Net {
    /// Whether the row is there now because it was inserted.
    fn inserts(self) -> bool {
        matches!(self, Self::Insert | Self::Replace)
    }
}

/// How many rows of each kind a segment has.
#[derive(Debug, Default)]
struct Counts {
    absent: usize,
    deletes: usize,
    updates: usize,
    inserts: usize,
}

impl Counts {
    fn add(&mut self, net: Net) {
        self.absent += usize::from(net == Net::Absent);
        self.deletes += usize::from(matches!(net, Net::Delete | Net::Replace));
        self.updates += usize::from(net == Net::Update);
        self.inserts += usize::from(net.inserts());
    }
}

/// Appends a form after its length, so that the forms of several columns cannot run into each
/// other.
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

/// The lower half: in the upper one, keys that differ little differ little.
#[inline]
fn hash(key: &[u8]) -> u32 {
    let mut hasher = FxHasher::default();
    hasher.write(key);
    let [.., a, b, c, d] = hasher.finish().to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// The index looks at the lowest and at the highest bits of 64.
#[inline]
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Keys of a segment are limited and a group has far fewer changes, so an index always fits.
#[inline]
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("groups are bounded well below 4 Gi")
}
