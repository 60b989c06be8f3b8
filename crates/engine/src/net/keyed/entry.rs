//! An entry of a segment: the row that had a key before, and the row that has it now.

use std::ops::Range;

use pgoutput::Tuple;

use crate::net::{Old, Row};

/// The row that had a key before the segment, and the row that has it now.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) key_start: u32,
    pub(super) key_end: u32,
    pub(super) before: Before,
    pub(super) now: Now,
    /// Index of its last insert in `inserts`.
    pub(super) inserted: u32,
    /// The old row of a change that took a row away from the key: of the row before the segment, if there
    /// was one.
    pub(super) old: Tuple<'a>,
    /// The row that has the key now, if there is one.
    pub(super) row: Row<'a>,
}

/// The row that had the key before the segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// There was none.
    Absent,
    /// It still has the key.
    Stays,
    Deleted,
    /// Its key was updated. This entry has it now.
    Moved(u32),
}

/// The row that has the key now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Now {
    /// There is none.
    Absent,
    /// The one that had it before.
    Same,
    /// One that was inserted.
    Inserted,
    /// The row that had the key of this entry before the segment. The entry is the same one if only the spelling of its
    /// key changed.
    Arrived(u32),
}

impl<'a> Entry<'a> {
    #[inline]
    pub(super) fn key(&self) -> Range<usize> {
        self.key_start as usize..self.key_end as usize
    }

    pub(super) fn take_row(&mut self) -> Row<'a> {
        std::mem::replace(&mut self.row, Row::Sent(Tuple::default()))
    }

    pub(super) fn old_row(&self) -> Old<'a> {
        Old { row: Row::Sent(self.old), class: 0, nth: 0 }
    }
}

/// Number of rows of each kind in a segment.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) absent: usize,
    pub(super) deletes: usize,
    pub(super) moves: usize,
    pub(super) updates: usize,
    pub(super) inserts: usize,
}

impl Counts {
    pub(super) fn add(&mut self, Entry { before, now, .. }: &Entry<'_>) {
        self.absent += usize::from((*before, *now) == (Before::Absent, Now::Absent));
        self.deletes += usize::from(*before == Before::Deleted);
        self.moves += usize::from(matches!(before, Before::Moved(_)));
        self.updates += usize::from(*before == Before::Stays);
        self.inserts += usize::from(*now == Now::Inserted);
    }
}
