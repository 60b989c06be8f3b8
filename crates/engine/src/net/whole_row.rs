//! Folding of rows without a key: equal rows are interchangeable, so they are counted.
//!
//! A change takes one of the rows that equal its old image. It prefers a row that the segment
//! itself produced to one that existed before. For each old image, the subscriber must therefore
//! provide as many rows as the maximum by which takes exceeded the rows produced so far. That
//! number never decreases. Executing one by one finds all rows if and only if the subscriber has
//! that many, so no missing row is hidden and none is invented.
//!
//! Images are equal if their bytes are. The subscriber may consider more images equal (numeric 1.0
//! and 1.00), but each class finds only rows that are identical to it. If there are too few, fewer
//! rows than expected are affected. Module `sought` tells which changes find no row then, where no
//! other row could be taken instead.

mod sought;

use std::hash::Hasher;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use pgoutput::{Column, Message, OldTuple, Tuple};
use rustc_hash::FxHasher;

use super::merge::{filled, inserted};
use super::{ChangeAt, Old, Row, Segment, Update};
use crate::key::KeyForm;
use sought::Sought;

/// An open segment under [`TableFolding::WholeRow`](super::TableFolding::WholeRow).
#[derive(Debug)]
pub(super) struct WholeRow<'t, 'a> {
    columns: usize,
    lineages: Vec<Lineage<'a>>,
    /// For each current image, the lineage that took it last.
    images: HashTable<Indexed>,
    /// The distinct old images of rows that existed before the segment.
    classes: Vec<Class<'a>>,
    class_index: HashTable<Indexed>,
    /// Collects [`Segment::seeks`]; `None` if they are not asked for.
    sought: Option<Sought<'t, 'a>>,
}

/// A lineage or class, and the hash of its image.
#[derive(Debug, Clone, Copy)]
struct Indexed {
    hash: u64,
    place: u32,
}

/// The history of one row within the segment.
#[derive(Debug)]
struct Lineage<'a> {
    /// The class of a row that existed before; `None` if the row was inserted.
    class: Option<u32>,
    /// The current row; `None` if it was deleted.
    image: Option<Row<'a>>,
    /// The lineage that took the same image before this one.
    next: Option<u32>,
}

/// Equal rows that existed before the segment.
#[derive(Debug)]
struct Class<'a> {
    row: Tuple<'a>,
    deletes: u32,
    updates: u32,
}

impl<'t, 'a> WholeRow<'t, 'a> {
    /// With `told_apart`, [`Segment::seeks`] is filled: see [`TableRules::told_apart`](super::TableRules::told_apart).
    pub(super) fn new(columns: usize, told_apart: Option<&'t [(usize, KeyForm)]>) -> Self {
        Self {
            columns,
            lineages: Vec::new(),
            images: HashTable::new(),
            classes: Vec::new(),
            class_index: HashTable::new(),
            sought: told_apart.map(Sought::new),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lineages.is_empty()
    }

    /// Whether no change looks for a row that existed before the segment.
    pub(super) fn needs_no_row(&self) -> bool {
        self.classes.is_empty()
    }

    /// Takes a change. Returns false, and changes nothing, if it cannot be folded.
    pub(super) fn push(&mut self, at: ChangeAt, message: &Message<'a>) -> bool {
        match message {
            Message::Insert(insert) => self.insert(insert.new),
            Message::Update(update) => {
                update.old.is_some_and(|old| self.update(at, &old, update.new))
            }
            Message::Delete(delete) => self.delete(at, &delete.old),
            _ => false,
        }
    }

    fn insert(&mut self, new: Tuple<'a>) -> bool {
        if new.len() != self.columns {
            return false;
        }
        let place = self.add(None);
        self.set_image(place, inserted(new));
        true
    }

    fn update(&mut self, at: ChangeAt, old: &OldTuple<'a>, new: Tuple<'a>) -> bool {
        let Some(old) = self.complete(old).filter(|_| new.len() == self.columns) else {
            return false;
        };
        let place = self.take(at, old);
        self.set_image(place, filled(&old, new));
        true
    }

    fn delete(&mut self, at: ChangeAt, old: &OldTuple<'a>) -> bool {
        let Some(old) = self.complete(old) else {
            return false;
        };
        self.take(at, old);
        true
    }

    /// The old row, if all of its values are known.
    fn complete(&self, old: &OldTuple<'a>) -> Option<Tuple<'a>> {
        match old {
            OldTuple::Full(row) if row.len() == self.columns && !row.has_unchanged() => Some(*row),
            OldTuple::Full(_) | OldTuple::Key(_) => None,
        }
    }

    /// Takes the image `row` from a lineage of the segment, or else from a row that existed before.
    fn take(&mut self, at: ChangeAt, row: Tuple<'a>) -> u32 {
        let image = Row::Sent(row);
        let hash = hash(&image);
        let Self { images, lineages, sought, .. } = self;
        let same = |indexed: &Indexed| {
            indexed.hash == hash && has_image(&lineages[indexed.place as usize], &image)
        };
        if let Ok(mut found) = images.find_entry(hash, same) {
            let place = found.get().place;
            let lineage = &mut lineages[place as usize];
            lineage.image = None;
            match lineage.next.take() {
                Some(next) => found.get_mut().place = next,
                None => {
                    found.remove();
                }
            }
            if let Some(sought) = sought.as_mut().filter(|_| lineage.class.is_some()) {
                sought.takes_again(place, at, row);
            }
            return place;
        }
        let class = self.class(row, hash);
        let place = self.add(Some(class));
        if let Some(sought) = &mut self.sought {
            sought.takes(place, at, &image);
        }
        place
    }

    fn class(&mut self, row: Tuple<'a>, hash: u64) -> u32 {
        let Self { classes, class_index, .. } = self;
        let same =
            |indexed: &Indexed| indexed.hash == hash && classes[indexed.place as usize].row == row;
        match class_index.entry(hash, same, |indexed| indexed.hash) {
            Place::Occupied(found) => found.get().place,
            Place::Vacant(vacant) => {
                let place = index_u32(classes.len());
                vacant.insert(Indexed { hash, place });
                classes.push(Class { row, deletes: 0, updates: 0 });
                place
            }
        }
    }

    fn add(&mut self, class: Option<u32>) -> u32 {
        let place = index_u32(self.lineages.len());
        self.lineages.push(Lineage { class, image: None, next: None });
        place
    }

    /// Gives an image to a lineage that has none.
    fn set_image(&mut self, place: u32, row: Row<'a>) {
        let hash = hash(&row);
        let Self { images, lineages, .. } = self;
        let same = |indexed: &Indexed| {
            indexed.hash == hash && has_image(&lineages[indexed.place as usize], &row)
        };
        let next = match images.entry(hash, same, |indexed| indexed.hash) {
            Place::Occupied(mut found) => {
                Some(std::mem::replace(&mut found.get_mut().place, place))
            }
            Place::Vacant(vacant) => {
                vacant.insert(Indexed { hash, place });
                None
            }
        };
        if let Some(sought) = &mut self.sought {
            sought.has_image(place, &row);
        }
        let lineage = &mut lineages[place as usize];
        lineage.image = Some(row);
        lineage.next = next;
    }

    /// Returns the net changes, which may be none, and empties the segment.
    pub(super) fn close(&mut self, table: usize) -> Segment<'a> {
        let mut segment = Segment { table, ..Segment::default() };
        let mut seeks = self.sought.as_mut().map(|sought| sought.take(self.lineages.len()));
        for (place, lineage) in self.lineages.drain(..).enumerate() {
            let Some(number) = lineage.class else {
                segment.inserts.extend(lineage.image);
                continue;
            };
            let class = &mut self.classes[number as usize];
            let count = match lineage.image {
                Some(_) => &mut class.updates,
                None => &mut class.deletes,
            };
            let old = Old { row: Row::Sent(class.row), class: number, nth: *count };
            *count += 1;
            if let Some(seeks) = &mut seeks {
                let seek = std::mem::take(&mut seeks[place]);
                match lineage.image {
                    Some(_) => segment.seeks.updates.push(seek),
                    None => segment.seeks.deletes.push(seek),
                }
            }
            match lineage.image {
                Some(new) => segment.updates.push(Update { old: Some(old), new }),
                None => segment.deletes.push(old),
            }
        }
        self.images.clear();
        self.classes.clear();
        self.class_index.clear();
        segment
    }
}

/// Whether the row equals the image of the lineage, whichever messages they came from.
fn has_image(lineage: &Lineage<'_>, row: &Row<'_>) -> bool {
    match (&lineage.image, row) {
        (Some(Row::Sent(image)), Row::Sent(row)) => image == row,
        (Some(image), row) => image.columns().eq(row.columns()),
        (None, _) => false,
    }
}

/// Hashes the columns only, so it does not matter which messages the row came from.
fn hash(row: &Row<'_>) -> u64 {
    let mut hasher = FxHasher::default();
    for column in row.columns() {
        match column {
            Column::Null | Column::Unchanged => hasher.write_u8(0),
            Column::Text(value) | Column::Binary(value) => {
                hasher.write_usize(value.len());
                hasher.write(value);
            }
        }
    }
    hasher.finish()
}

/// Always fits: a group has far fewer than 4 Gi changes.
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("groups are bounded well below 4 Gi")
}
