//! The rows of a set of updates as one array of the table's row type: see [`row_values`](crate::subscriber::row_values).

use engine::net::Row;
use pgoutput::Column;

use super::array::{HEADER, NULL, write_header};
use super::columns::ROW_BYTES;
use crate::subscriber::row_values::RowValues;

/// An array of rows, all of which have new values in the same columns.
#[derive(Debug, Default)]
pub(super) struct RowArray {
    bytes: Vec<u8>,
    /// Where each row begins.
    starts: Vec<usize>,
    row_type: u32,
    /// Whether each published column has a value.
    sent: Vec<bool>,
    /// For each published column, which values it has had.
    seen: Vec<Seen>,
}

/// Whether a column was NULL in some row, and whether it had a value in some row. A row that was taken back still counts.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Seen {
    pub(super) null: bool,
    pub(super) value: bool,
}

impl RowArray {
    /// Starts an array for rows like this one; returns false if they are not sent so. All values must be binary. Half of
    /// the fields must not be NULL: an array for each column costs less where most columns are NULL in all rows. Or one of
    /// the values must be an array, which would be text otherwise.
    pub(super) fn begin(
        &mut self,
        form: &RowValues,
        row: &Row<'_>,
        finds: impl Fn(usize) -> bool,
    ) -> bool {
        self.bytes.clear();
        self.bytes.resize(HEADER, 0);
        self.starts.clear();
        self.row_type = form.row_type.oid;
        self.sent.clear();
        let (mut filled, mut has_array) = (0, false);
        let published = form.fields.iter().filter(|field| field.published);
        for ((column, value), field) in row.columns().enumerate().zip(published) {
            let sent = match value {
                Column::Binary(_) | Column::Null => true,
                Column::Unchanged if !finds(column) => false,
                Column::Text(_) | Column::Unchanged => return false,
            };
            let is_filled = matches!(value, Column::Binary(_));
            filled += usize::from(is_filled);
            has_array |= is_filled && field.is_array;
            self.sent.push(sent);
        }
        self.seen.clear();
        self.seen.resize(self.sent.len(), Seen::default());
        has_array || 2 * filled >= form.fields.len()
    }

    /// Whether each published column has a value.
    pub(super) fn sent(&self) -> &[bool] {
        &self.sent
    }

    /// For each published column, which values it has had.
    pub(super) fn seen(&self) -> &[Seen] {
        &self.seen
    }

    /// Appends a row and returns its size in bytes; returns `None`, with nothing appended, if its shape differs from
    /// that of the first row, or if it is too large.
    pub(super) fn push(&mut self, form: &RowValues, row: &Row<'_>) -> Option<usize> {
        let start = self.bytes.len();
        let appended = self.append(form, row, start);
        match appended {
            Some(_) => self.starts.push(start),
            None => self.bytes.truncate(start),
        }
        appended
    }

    /// Removes the row that was appended last.
    pub(super) fn undo(&mut self) {
        if let Some(start) = self.starts.pop() {
            self.bytes.truncate(start);
        }
    }

    fn append(&mut self, form: &RowValues, row: &Row<'_>, start: usize) -> Option<usize> {
        let bytes = &mut self.bytes;
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&u32::try_from(form.fields.len()).ok()?.to_be_bytes());
        let mut values = row.columns();
        let mut columns = self.sent.iter().zip(&mut self.seen);
        for field in &form.fields {
            bytes.extend_from_slice(&field.type_oid.to_be_bytes());
            if !field.published {
                bytes.extend_from_slice(&NULL);
                continue;
            }
            let (value, (sent, seen)) = (values.next()?, columns.next()?);
            match (value, *sent) {
                (Column::Binary(value), true) => {
                    // A row that is too large must leave no memory: the array keeps its capacity.
                    if bytes.len() - start + value.len() > ROW_BYTES {
                        return None;
                    }
                    bytes.extend_from_slice(&i32::try_from(value.len()).ok()?.to_be_bytes());
                    bytes.extend_from_slice(value);
                    seen.value = true;
                }
                (Column::Null, true) | (Column::Unchanged, false) => {
                    bytes.extend_from_slice(&NULL);
                    seen.null = true;
                }
                _ => return None,
            }
        }
        if values.next().is_some() {
            return None;
        }
        let added = bytes.len() - start;
        bytes[start..start + 4].copy_from_slice(&i32::try_from(added - 4).ok()?.to_be_bytes());
        Some(added)
    }

    /// Completes the array.
    pub(super) fn finish(&mut self) {
        write_header(&mut self.bytes, false, self.row_type, self.starts.len());
    }

    /// The array, after [`Self::finish`].
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::catalogue::RowType;
    use crate::subscriber::row_values::Field;

    fn form() -> RowValues {
        let field = |type_oid, published| Field { type_oid, published, is_array: false };
        let fields = vec![field(23, true), field(25, false), field(20, true), field(25, true)];
        RowValues { row_type: RowType { oid: 16_400, array: 16_401, attributes: 9 }, fields }
    }

    fn row<'a>(values: &[Column<'a>]) -> Row<'a> {
        Row::Merged(values.to_vec())
    }

    #[test]
    fn binary_form() {
        let (mut array, form) = (RowArray::default(), form());
        let first = row(&[Column::Binary(b"key1"), Column::Binary(b"12345678"), Column::Unchanged]);
        assert!(array.begin(&form, &first, |column| column == 0));
        assert_eq!(array.sent(), [true, true, false]);
        assert_eq!(array.push(&form, &first), Some(4 + 4 + 4 * 8 + 4 + 8));
        assert_eq!(array.push(&form, &first), Some(4 + 4 + 4 * 8 + 4 + 8));
        array.undo();
        array.finish();
        let words = |words: &[i32]| words.iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<_>>();
        let expected = [
            words(&[1, 0, 16_400, 1, 1, 48, 4, 23, 4]),
            b"key1".to_vec(),
            words(&[25, -1, 20, 8]),
            b"12345678".to_vec(),
            words(&[25, -1]),
        ];
        assert_eq!(array.bytes(), expected.concat());
    }

    #[test]
    fn other_rows_leave_nothing() {
        let (mut array, form) = (RowArray::default(), form());
        let first = [Column::Binary(b"key1"), Column::Binary(b"1"), Column::Unchanged];
        assert!(array.begin(&form, &row(&first), |column| column == 0));
        assert!(array.push(&form, &row(&first)).is_some());
        let size = array.bytes().len();
        let large = vec![0; ROW_BYTES];
        for other in [
            &[Column::Binary(b"key1"), Column::Binary(b"1"), Column::Binary(b"x")][..],
            &[Column::Binary(b"key1"), Column::Unchanged, Column::Unchanged],
            &[Column::Binary(b"key1"), Column::Text(b"1"), Column::Unchanged],
            &[Column::Binary(b"key1"), Column::Binary(&large), Column::Unchanged],
            &first[..2],
            &[first[0], first[1], first[2], Column::Null],
        ] {
            assert_eq!(array.push(&form, &row(other)), None, "{other:?}");
            assert_eq!(array.bytes().len(), size);
        }
        assert!(array.bytes.capacity() < ROW_BYTES);
    }

    #[test]
    fn rows_that_cannot_be_sent() {
        let (mut array, form) = (RowArray::default(), form());
        let finds = |column| column == 0;
        let value = Column::Binary(b"1");
        assert!(array.begin(&form, &row(&[value, value, Column::Null]), finds));
        for values in [
            [Column::Text(b"1"), value, value],
            [Column::Unchanged, value, value],
            [value, Column::Text(b"1"), value],
            // Mostly NULL.
            [value, Column::Null, Column::Null],
        ] {
            assert!(!array.begin(&form, &row(&values), finds), "{values:?}");
        }
        let mut form = form;
        form.fields[0].is_array = true;
        assert!(array.begin(&form, &row(&[value, Column::Null, Column::Null]), finds));
    }
}
