//! Folding for tables whose rows cannot be identified: only inserts are collected.

use pgoutput::{Message, Tuple};

use super::merge::inserted;
use super::{Row, Segment};

/// An open segment under [`TableFolding::Append`](super::TableFolding::Append).
#[derive(Debug, Default)]
pub(super) struct Append<'a> {
    columns: usize,
    rows: Vec<Row<'a>>,
}

impl<'a> Append<'a> {
    pub(super) fn new(columns: usize) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Takes a change. Returns false, and changes nothing, if it cannot be folded.
    #[inline]
    pub(super) fn push(&mut self, message: &Message<'a>) -> bool {
        match message {
            Message::Insert(insert) => self.insert(insert.new),
            _ => false,
        }
    }

    fn insert(&mut self, new: Tuple<'a>) -> bool {
        if new.len() != self.columns {
            return false;
        }
        self.rows.push(inserted(new));
        true
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the net changes and empties the segment.
    pub(super) fn close(&mut self, table: usize) -> Segment<'a> {
        Segment { table, inserts: std::mem::take(&mut self.rows), ..Segment::default() }
    }
}
