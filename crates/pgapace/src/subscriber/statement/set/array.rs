//! One column of a set statement: a one-dimensional array in PostgreSQL's binary format.
//!
//! Values in text format become elements of a `text[]`, whose binary format is the text itself,
//! without quotes or escapes.

use pgoutput::Column;

use crate::subscriber::statement::copy::Format;

/// Number of dimensions, flags, element type, length, lower bound: 4 bytes each.
pub(super) const HEADER: usize = 20;
/// Stands in place of the length of an element, or of a field of a row.
pub(super) const NULL: [u8; 4] = (-1_i32).to_be_bytes();

/// Writes the header of an array of one dimension into its first [`HEADER`] bytes.
pub(super) fn write_header(array: &mut [u8], has_nulls: bool, element_type: u32, length: usize) {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let words = [1, u32::from(has_nulls), element_type, length, 1];
    for (to, word) in array.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_be_bytes());
    }
}

/// An array that grows by one element per row.
#[derive(Debug, Default)]
pub(crate) struct Array {
    bytes: Vec<u8>,
    /// Position of the newest element, and `format` before it was appended.
    newest: usize,
    format_before: Option<Format>,
    /// `None` as long as all elements are NULL.
    format: Option<Format>,
    nulls: usize,
}

impl Array {
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(HEADER, 0);
        self.newest = HEADER;
        self.format = None;
        self.format_before = None;
        self.nulls = 0;
    }

    pub(crate) fn format(&self) -> Option<Format> {
        self.format
    }

    pub(crate) fn has_nulls(&self) -> bool {
        self.nulls != 0
    }

    /// Appends a value. Returns false, with nothing appended, if the value was not sent, or if its
    /// format differs from that of the others.
    #[inline]
    pub(crate) fn push(&mut self, value: Column<'_>) -> bool {
        let (bytes, format) = match value {
            Column::Null => {
                self.begin();
                self.nulls += 1;
                self.bytes.extend_from_slice(&NULL);
                return true;
            }
            Column::Text(bytes) => (bytes, Format::Text),
            Column::Binary(bytes) => (bytes, Format::Binary),
            Column::Unchanged => return false,
        };
        let Ok(length) = i32::try_from(bytes.len()) else { return false };
        if self.format.is_some_and(|known| known != format) {
            return false;
        }
        self.begin();
        self.format = Some(format);
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(bytes);
        true
    }

    /// Appends a number to an array of `int4`.
    pub(crate) fn push_number(&mut self, number: i32) {
        self.push(Column::Binary(&number.to_be_bytes()));
    }

    fn begin(&mut self) {
        self.newest = self.bytes.len();
        self.format_before = self.format;
    }

    /// Removes the newest element; may be called once per element.
    pub(crate) fn undo(&mut self) {
        if self.bytes.get(self.newest..) == Some(&NULL) {
            self.nulls -= 1;
        }
        self.bytes.truncate(self.newest);
        self.format = self.format_before;
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Writes the header.
    pub(crate) fn finish(&mut self, element_type: u32, length: usize) {
        let has_nulls = self.has_nulls();
        write_header(&mut self.bytes, has_nulls, element_type, length);
    }

    /// Makes it an array without elements.
    pub(crate) fn finish_empty(&mut self, element_type: u32) {
        let words = [0, 0, element_type].map(u32::to_be_bytes);
        self.bytes.clear();
        words.iter().for_each(|word| self.bytes.extend_from_slice(word));
    }

    /// The array, after [`Self::finish`] or [`Self::finish_empty`].
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::{Array, Format};
    use pgoutput::Column;

    #[test]
    fn binary_form() {
        let mut array = Array::default();
        array.clear();
        array.push_number(7);
        assert!(!array.push(Column::Text(b"x")));
        assert!(!array.push(Column::Unchanged));
        assert!(array.push(Column::Null));
        assert!(array.push(Column::Binary(b"")));
        array.undo();
        array.finish(23, 2);
        assert_eq!(
            array.bytes(),
            b"\0\0\0\x01\0\0\0\x01\0\0\0\x17\0\0\0\x02\0\0\0\x01\0\0\0\x04\0\0\0\x07\xff\xff\xff\xff"
        );
    }

    #[test]
    fn a_null_taken_back() {
        let mut array = Array::default();
        array.clear();
        assert!(array.push(Column::Text(b"")));
        assert!(array.push(Column::Null));
        assert!(array.has_nulls());
        array.undo();
        assert!(!array.has_nulls());
        assert!(array.push(Column::Text(b"")));
        array.undo();
        assert!(!array.has_nulls());
    }

    #[test]
    fn the_first_value_decides_the_format() {
        let mut array = Array::default();
        array.clear();
        assert!(array.push(Column::Null));
        assert_eq!(array.format(), None);
        assert!(array.has_nulls());
        assert!(array.push(Column::Text(b"a")));
        array.undo();
        assert_eq!(array.format(), None);
        assert!(array.push(Column::Binary(b"a")));
        assert_eq!(array.format(), Some(Format::Binary));
        array.finish(17, 2);
        assert_eq!(array.bytes()[20..], *b"\xff\xff\xff\xff\0\0\0\x01a");
    }
}
