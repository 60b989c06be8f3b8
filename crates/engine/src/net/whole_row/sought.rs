//! Rows without a key that may be missing: which changes would find nothing then.
//!
//! If a row is missing, so is everything that the segment would have made of it. One by one, each of its changes
//! looks for an equal row. The subscriber is asked for that ([`Seek::passed`](crate::net::Seek::passed)). The rows of
//! other lineages are known here: if an image of one of them has the same form as an image of this lineage, the
//! changes of this one are not listed. This leaves out more changes than it must: the two rows need not exist at
//! the same time.

use std::hash::Hasher;

use pgoutput::{Column, Tuple};
use rustc_hash::FxHasher;

use crate::key::KeyForm;
use crate::net::{ChangeAt, Row, Seek};

#[derive(Debug)]
pub(super) struct Sought<'t, 'a> {
    /// See [`TableRules::told_apart`](crate::net::TableRules::told_apart).
    told_apart: &'t [(usize, KeyForm)],
    /// The changes that look for the row of a lineage, in stream order.
    changes: Vec<(u32, ChangeAt)>,
    /// The rows that a lineage was and is no more, except the first one.
    passed: Vec<(u32, Tuple<'a>)>,
    /// Hashes of the forms of all images, and their lineages.
    forms: Vec<(u64, u32)>,
    /// A value has no form: it may equal any other one.
    formless: bool,
    buffer: Vec<u8>,
}

impl<'t, 'a> Sought<'t, 'a> {
    pub(super) fn new(told_apart: &'t [(usize, KeyForm)]) -> Self {
        Self {
            told_apart,
            changes: Vec::new(),
            passed: Vec::new(),
            forms: Vec::new(),
            formless: false,
            buffer: Vec::new(),
        }
    }

    /// A change looks for a row that existed before the segment, with which this lineage begins.
    pub(super) fn takes(&mut self, place: u32, at: ChangeAt, image: &Row<'a>) {
        self.changes.push((place, at));
        self.has_image(place, image);
    }

    /// A change looks for what an earlier one has made of this row.
    pub(super) fn takes_again(&mut self, place: u32, at: ChangeAt, image: Tuple<'a>) {
        self.changes.push((place, at));
        self.passed.push((place, image));
    }

    pub(super) fn has_image(&mut self, place: u32, image: &Row<'a>) {
        let mut hasher = FxHasher::default();
        let mut forms = self.told_apart.iter().peekable();
        for (column, value) in image.columns().enumerate() {
            let Some((_, form)) = forms.next_if(|(told_apart, _)| *told_apart == column) else {
                continue;
            };
            if value == Column::Null {
                hasher.write_u8(0);
                continue;
            }
            self.buffer.clear();
            self.formless |= !form.append(value, &mut self.buffer);
            hasher.write_usize(self.buffer.len());
            hasher.write(&self.buffer);
        }
        self.forms.push((hasher.finish(), place));
    }

    /// By lineage; empties the lists.
    pub(super) fn take(&mut self, lineages: usize) -> Vec<Seek<'a>> {
        let mut alone = vec![!std::mem::take(&mut self.formless); lineages];
        self.forms.sort_unstable();
        for same in self.forms.chunk_by(|one, other| one.0 == other.0) {
            // They are sorted by lineage, too.
            if same.first().map(|image| image.1) != same.last().map(|image| image.1) {
                same.iter().for_each(|(_, place)| alone[*place as usize] = false);
            }
        }
        self.forms.clear();
        let mut seeks = vec![Seek::default(); lineages];
        for (place, at) in self.changes.drain(..).filter(|(place, _)| alone[*place as usize]) {
            seeks[place as usize].changes.push(at);
        }
        for (place, row) in self.passed.drain(..).filter(|(place, _)| alone[*place as usize]) {
            seeks[place as usize].passed.push(Row::Sent(row));
        }
        seeks
    }
}
