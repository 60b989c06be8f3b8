//! Folding by key: the net change of each row since the segment was opened.

use std::cmp::Ordering;
use std::hash::Hasher;
use std::ops::Range;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use pgoutput::{Column, Message, OldTuple, Tuple};
use rustc_hash::FxHasher;

use super::merge::{inserted, overwrite};
use super::{ChangeAt, Old, Row, Seeks, Segment, Update};
use crate::key::KeyForm;

/// An open segment under [`TableFolding::Key`](super::TableFolding::Key).
#[derive(Debug)]
pub(super) struct Keyed<'t, 'a> {
    key: &'t [(usize, KeyForm)],
    /// Column and its position in the key, in the order of the columns.
    key_columns: Vec<(usize, usize)>,
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

/// The net change of the row with one key.
#[derive(Debug)]
struct Entry<'a> {
    key_start: u32,
    key_end: u32,
    net: Net,
    /// Index of its last insert in `inserts`.
    inserted: u32,
    /// The old row that identifies it, if it was deleted.
    deleted: Tuple<'a>,
    /// The current row, if it exists.
    row: Row<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Net {
    /// Inserted and deleted: the row did not exist before and does not exist now.
    Absent,
    Insert,
    Update,
    Delete,
    /// Deleted and inserted again.
    Replace,
}

/// Keys of one segment take at most 4 GiB. This limit is far lower, so that the key of one more
/// change always fits.
const MAX_KEY_BYTES: usize = 1 << 31;

/// The result of [`Keyed::find`].
#[derive(Debug, Clone, Copy)]
enum KeyLookup {
    /// The key has this entry.
    Known(u32),
    /// The key has no entry: one must be added, whose key starts here.
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
            seeks: None,
        }
    }

    /// The same, with [`Segment::seeks`] if `seeks` says so.
    pub(super) fn seeking(self, seeks: bool) -> Self {
        Self { seeks: seeks.then(Vec::new), ..self }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether no change looks for a row that existed before the segment.
    pub(super) fn needs_no_row(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.net, Net::Insert | Net::Absent))
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
        match self.find()? {
            KeyLookup::New(key) => {
                let place = self.add(key, Net::Insert, Tuple::default(), inserted(new));
                self.inserts.push(place);
            }
            KeyLookup::Known(place) => {
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

    fn update(&mut self, at: ChangeAt, old: Option<&OldTuple<'a>>, new: Tuple<'a>) -> Option<()> {
        self.read_key(&new)?;
        let filled = match old {
            Some(old) => self.compare_key(old.tuple())?,
            None => false,
        };
        match self.find()? {
            KeyLookup::New(key) => {
                let mut row = Row::Sent(new);
                if filled {
                    self.fill_key(&mut row);
                }
                let place = self.add(key, Net::Update, Tuple::default(), row);
                self.note_seek(place, at);
            }
            KeyLookup::Known(place) => {
                let entry = &mut self.entries[place as usize];
                let seeks = entry.net == Net::Update;
                match entry.net {
                    Net::Insert | Net::Update | Net::Replace => overwrite(&mut entry.row, new),
                    Net::Absent | Net::Delete => return None,
                }
                if seeks {
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
                let place = self.add(key, Net::Delete, old, Row::Sent(Tuple::default()));
                self.note_seek(place, at);
            }
            KeyLookup::Known(place) => {
                let entry = &mut self.entries[place as usize];
                let seeks = entry.net == Net::Update;
                entry.net = match entry.net {
                    Net::Insert => Net::Absent,
                    Net::Update | Net::Replace => Net::Delete,
                    Net::Absent | Net::Delete => return None,
                };
                entry.deleted = old;
                entry.row = Row::Sent(Tuple::default());
                if seeks {
                    self.note_seek(place, at);
                }
            }
        }
        Some(())
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
    /// the old row. Returns whether it filled any. Returns `None` if the key changed, even if only
    /// its spelling did: the new spelling must be written.
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

    /// Finds the entry of the key in `values`. If there is none, reserves one in the index; then
    /// [`Self::add`] must follow. Returns `None` if the key has no form.
    #[inline]
    fn find(&mut self) -> Option<KeyLookup> {
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
                Some(KeyLookup::Known(entry))
            }
            Place::Vacant(place) => {
                place.insert(Indexed { hash, entry: index_u32(entries.len()) });
                Some(KeyLookup::New(start))
            }
        }
    }

    /// Adds the entry whose key [`Self::find`] appended at `key_start`.
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

    /// Returns the net changes and empties the segment, but keeps its memory for the next one.
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
            seeks: Seeks::default(),
        };
        let mut seeks = self.take_seeks();
        let mut seeks_of =
            |place: u32| seeks.get_mut(place as usize).map(std::mem::take).unwrap_or_default();
        // The inserts are first, because the loop below takes the rows.
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
                        if self.seeks.is_some() {
                            segment.seeks.deletes.push(seeks_of(place));
                        }
                    }
                    Net::Update => {
                        segment.updates.push(Update { old: None, new: entry.take_row() });
                        if self.seeks.is_some() {
                            segment.seeks.updates.push(seeks_of(place));
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

    /// The entries that are not plain inserts, sorted by their keys: by length, then by bytes. This
    /// orders integers in text and in binary.
    fn sorted(&self) -> impl Iterator<Item = u32> + use<'t, 'a> {
        let mut places: Vec<(u32, u32, u64)> = Vec::with_capacity(self.entries.len());
        for (place, entry) in self.entries.iter().enumerate() {
            if entry.net == Net::Insert {
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
    /// Whether the row exists now because it was inserted.
    fn inserts(self) -> bool {
        matches!(self, Self::Insert | Self::Replace)
    }
}

/// Number of rows of each kind in a segment.
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
