//! Builders that own the rows, columns and lists of a message, for tests and simulations.
//!
//! A message borrows its contents, so something must own them. pgapace itself never builds
//! messages. So nothing here is optimized, and contents that cannot be sent cause a panic.
//!
//! ```
//! use pgoutput::{Insert, Message, RelId, TupleBuilder};
//!
//! let row = TupleBuilder::new().text("42").null();
//! let insert = Message::Insert(Insert { xid: None, relation: RelId(7), new: row.tuple() });
//! assert_eq!(pgoutput::builder::encoded(&insert), b"I\0\0\0\x07N\0\x02t\0\0\0\x0242n");
//! ```

use crate::message::{Columns, Message, RelIds, RelationColumn};
use crate::{Column, Frame, Lsn, MAX_COLUMNS, RelId, Timestamp, Tuple, TypeOid, writer};

/// The encoded message: the payload of a frame.
#[must_use]
pub fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(&mut out);
    out
}

/// The encoded message in its frame: the contents of one CopyData packet.
#[must_use]
pub fn in_frame(lsn: Lsn, sent: Timestamp, message: &Message<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    Frame::XLogData { start: lsn, end: lsn, sent, payload: &encoded(message) }.encode(&mut out);
    out
}

/// Owns a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TupleBuilder {
    count: u16,
    unchanged: bool,
    columns: Vec<u8>,
}

impl TupleBuilder {
    /// A row without columns.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends SQL NULL as the next column.
    #[must_use]
    pub fn null(mut self) -> Self {
        self.push(Column::Null);
        self
    }

    /// Appends an unchanged TOASTed value, which is not sent, as the next column.
    #[must_use]
    pub fn unchanged(mut self) -> Self {
        self.push(Column::Unchanged);
        self
    }

    /// Appends a value in its text format as the next column.
    #[must_use]
    pub fn text(mut self, value: impl AsRef<[u8]>) -> Self {
        self.push(Column::Text(value.as_ref()));
        self
    }

    /// Appends a value in its binary format as the next column.
    #[must_use]
    pub fn binary(mut self, value: impl AsRef<[u8]>) -> Self {
        self.push(Column::Binary(value.as_ref()));
        self
    }

    /// Appends a column.
    ///
    /// # Panics
    ///
    /// If the row already has [`MAX_COLUMNS`] columns, or if the value has 2 GiB or more.
    pub fn push(&mut self, column: Column<'_>) {
        count_one_more(&mut self.count);
        self.unchanged |= column == Column::Unchanged;
        let (kind, value) = match column {
            Column::Null => (b'n', None),
            Column::Unchanged => (b'u', None),
            Column::Text(value) => (b't', Some(value)),
            Column::Binary(value) => (b'b', Some(value)),
        };
        self.columns.push(kind);
        if let Some(value) = value {
            writer::length(&mut self.columns, value.len());
            self.columns.extend_from_slice(value);
        }
    }

    /// The row, to use in a message.
    #[must_use]
    pub fn tuple(&self) -> Tuple<'_> {
        Tuple::from_parts(self.count, self.unchanged, &self.columns)
    }
}

impl<'a> Extend<Column<'a>> for TupleBuilder {
    fn extend<I: IntoIterator<Item = Column<'a>>>(&mut self, columns: I) {
        for column in columns {
            self.push(column);
        }
    }
}

impl<'a> FromIterator<Column<'a>> for TupleBuilder {
    fn from_iter<I: IntoIterator<Item = Column<'a>>>(columns: I) -> Self {
        let mut builder = Self::new();
        builder.extend(columns);
        builder
    }
}

/// Owns the columns of a [`Relation`](crate::Relation).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColumnsBuilder {
    count: u16,
    columns: Vec<u8>,
}

impl ColumnsBuilder {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a column; see [`RelationColumn`] for the arguments.
    #[must_use]
    pub fn column(mut self, key: bool, name: &str, type_oid: TypeOid, type_modifier: i32) -> Self {
        self.push(RelationColumn { key, name, type_oid, type_modifier });
        self
    }

    /// Appends a column.
    ///
    /// # Panics
    ///
    /// If there are already [`MAX_COLUMNS`] columns. In debug builds, also if the name contains a
    /// zero byte.
    pub fn push(&mut self, column: RelationColumn<'_>) {
        count_one_more(&mut self.count);
        column.encode(&mut self.columns);
    }

    /// The columns, to use in a message.
    #[must_use]
    pub fn columns(&self) -> Columns<'_> {
        Columns::from_parts(self.count, &self.columns)
    }
}

impl<'a> Extend<RelationColumn<'a>> for ColumnsBuilder {
    fn extend<I: IntoIterator<Item = RelationColumn<'a>>>(&mut self, columns: I) {
        for column in columns {
            self.push(column);
        }
    }
}

impl<'a> FromIterator<RelationColumn<'a>> for ColumnsBuilder {
    fn from_iter<I: IntoIterator<Item = RelationColumn<'a>>>(columns: I) -> Self {
        let mut builder = Self::new();
        builder.extend(columns);
        builder
    }
}

/// Owns the tables of a [`Truncate`](crate::Truncate).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelIdsBuilder {
    ids: Vec<[u8; 4]>,
}

impl RelIdsBuilder {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a table.
    #[must_use]
    pub fn id(mut self, id: RelId) -> Self {
        self.push(id);
        self
    }

    /// Appends a table.
    pub fn push(&mut self, id: RelId) {
        self.ids.push(id.0.to_be_bytes());
    }

    /// The tables, to use in a message.
    #[must_use]
    pub fn rel_ids(&self) -> RelIds<'_> {
        RelIds::from_ids(&self.ids)
    }
}

impl Extend<RelId> for RelIdsBuilder {
    fn extend<I: IntoIterator<Item = RelId>>(&mut self, ids: I) {
        for id in ids {
            self.push(id);
        }
    }
}

impl FromIterator<RelId> for RelIdsBuilder {
    fn from_iter<I: IntoIterator<Item = RelId>>(ids: I) -> Self {
        let mut builder = Self::new();
        builder.extend(ids);
        builder
    }
}

fn count_one_more(count: &mut u16) {
    assert!(*count < MAX_COLUMNS, "a row has at most {MAX_COLUMNS} columns");
    *count += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_returns_its_columns() {
        let columns =
            [Column::Null, Column::Unchanged, Column::Text(b"t"), Column::Binary(b"\x00")];
        let row = TupleBuilder::from_iter(columns);
        assert_eq!(row.tuple().columns().collect::<Vec<_>>(), columns);
        assert_eq!(row, TupleBuilder::new().null().unchanged().text("t").binary([0]));
    }

    #[test]
    #[should_panic(expected = "at most 1664 columns")]
    fn a_row_cannot_be_wider_than_postgresql_allows() {
        let _row = TupleBuilder::from_iter([Column::Null; 1665]);
    }

    #[test]
    fn a_message_is_wrapped_in_a_frame() {
        let copy_data = in_frame(Lsn(1), Timestamp(2), &Message::StreamStop);
        assert_eq!(
            Frame::decode(&copy_data),
            Ok(Frame::XLogData { start: Lsn(1), end: Lsn(1), sent: Timestamp(2), payload: b"E" })
        );
    }
}
