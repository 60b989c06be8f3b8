//! Tuples: the column values of a row, in the order of the Relation message.

use std::fmt;
use std::iter::FusedIterator;

use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind, writer};

/// Maximum number of columns of a row (`MaxTupleAttributeNumber` in
/// `src/include/access/htup_details.h`).
pub const MAX_COLUMNS: u16 = 1664;

/// A column value as the publisher sent it ("TupleData" in the chapter "Logical Replication Message
/// Formats", `logicalrep_write_tuple` in `proto.c`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Column<'a> {
    /// SQL NULL. In an [`OldTuple::Key`] it also stands for every column outside the key.
    Null,
    /// An unchanged TOASTed value, which is not sent.
    Unchanged,
    /// The text format, in the encoding of the replication connection, without a terminating zero
    /// byte. It is not checked here: the input function of the subscriber's type does that.
    Text(&'a [u8]),
    /// The output of the type's send function, requested by the option `binary`. A type without
    /// such a function is sent as text all the same.
    Binary(&'a [u8]),
}

/// Values are printed as escaped text instead of lists of numbers.
impl fmt::Debug for Column<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("Null"),
            Self::Unchanged => f.write_str("Unchanged"),
            Self::Text(value) => write!(f, "Text(\"{}\")", value.escape_ascii()),
            Self::Binary(value) => write!(f, "Binary(\"{}\")", value.escape_ascii()),
        }
    }
}

/// A row whose bytes are checked but not unpacked: iterating over its columns reads them.
///
/// Two rows are equal if their bytes are, that is, if all columns are. A row without columns is
/// legal, as is a table without columns.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Tuple<'a> {
    count: u16,
    /// Whether one of them is [`Column::Unchanged`].
    unchanged: bool,
    /// Exactly `count` valid columns.
    columns: &'a [u8],
}

impl<'a> Tuple<'a> {
    /// `columns` must hold exactly `count` valid columns, and `unchanged` must say what they have.
    pub(crate) const fn from_parts(count: u16, unchanged: bool, columns: &'a [u8]) -> Self {
        Self { count, unchanged, columns }
    }

    #[inline]
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let count = reader.column_count()?;
        let start = reader.clone();
        let mut unchanged = false;
        for _ in 0..count {
            match reader.u8()? {
                b't' | b'b' => {
                    let length = reader.length()?;
                    reader.bytes(length)?;
                }
                b'n' => {}
                b'u' => unchanged = true,
                kind => {
                    return Err(reader.error_before(1, DecodeErrorKind::UnknownColumnKind(kind)));
                }
            }
        }
        Ok(Self { count, unchanged, columns: reader.read_since(&start) })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u16(out, self.count);
        out.extend_from_slice(self.columns);
    }

    /// The number of columns, at most [`MAX_COLUMNS`].
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether the row has no columns.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a column is [`Column::Unchanged`]. It was found when the row was decoded.
    #[must_use]
    pub const fn has_unchanged(&self) -> bool {
        self.unchanged
    }

    /// The columns in the order of the Relation message. Each iteration takes time in proportion to
    /// the number of columns; values are not accessed.
    #[must_use]
    pub const fn columns(&self) -> TupleColumns<'a> {
        TupleColumns { left: self.count, rest: self.columns }
    }
}

impl fmt::Debug for Tuple<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.columns()).finish()
    }
}

/// Iterates over the columns of a [`Tuple`].
#[derive(Clone, Debug)]
pub struct TupleColumns<'a> {
    left: u16,
    rest: &'a [u8],
}

impl<'a> Iterator for TupleColumns<'a> {
    type Item = Column<'a>;

    #[inline]
    fn next(&mut self) -> Option<Column<'a>> {
        // The bytes were checked when the tuple was decoded, so each `?` only ends the iteration
        // after the last column.
        let (&kind, rest) = self.rest.split_first()?;
        self.left -= 1;
        if kind == b'n' || kind == b'u' {
            self.rest = rest;
            return Some(if kind == b'n' { Column::Null } else { Column::Unchanged });
        }
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) =
            rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        self.rest = rest;
        Some(if kind == b't' { Column::Text(value) } else { Column::Binary(value) })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::from(self.left);
        (left, Some(left))
    }
}

impl ExactSizeIterator for TupleColumns<'_> {}
impl FusedIterator for TupleColumns<'_> {}

/// The old row of an update or delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OldTuple<'a> {
    /// `K`: the columns of the replica identity. All published columns are present; those outside
    /// the key are [`Column::Null`].
    Key(Tuple<'a>),
    /// `O`: the complete row, for REPLICA IDENTITY FULL.
    Full(Tuple<'a>),
}

impl<'a> OldTuple<'a> {
    /// The columns, for either kind.
    #[must_use]
    pub const fn tuple(&self) -> &Tuple<'a> {
        match self {
            Self::Key(tuple) | Self::Full(tuple) => tuple,
        }
    }

    /// Decodes the tuple after a `K` or `O`. Returns `None`, and reads nothing, after any other
    /// `kind`.
    #[inline]
    pub(crate) fn decode_after(
        kind: u8,
        reader: &mut Reader<'a>,
    ) -> Result<Option<Self>, DecodeError> {
        match kind {
            b'K' => Tuple::decode(reader).map(Self::Key).map(Some),
            b'O' => Tuple::decode(reader).map(Self::Full).map(Some),
            _ => Ok(None),
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let kind = match self {
            Self::Key(_) => b'K',
            Self::Full(_) => b'O',
        };
        writer::u8(out, kind);
        self.tuple().encode(out);
    }
}

/// Decodes the new row. `kind` is the byte before it, which must be `N`.
#[inline]
pub(crate) fn decode_new_after<'a>(
    kind: u8,
    reader: &mut Reader<'a>,
) -> Result<Tuple<'a>, DecodeError> {
    if kind != b'N' {
        return Err(reader.error_before(1, DecodeErrorKind::UnknownTupleKind(kind)));
    }
    Tuple::decode(reader)
}

pub(crate) fn encode_new(tuple: &Tuple<'_>, out: &mut Vec<u8>) {
    writer::u8(out, b'N');
    tuple.encode(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Tuple<'_>, DecodeError> {
        let mut reader = Reader::new(bytes);
        let tuple = Tuple::decode(&mut reader)?;
        reader.finish()?;
        Ok(tuple)
    }

    #[test]
    fn the_four_kinds_of_column_are_distinguished() {
        let tuple = decode(b"\0\x05nut\0\0\0\x02hib\0\0\0\x01\xFFt\0\0\0\0").unwrap();
        assert_eq!((tuple.len(), tuple.is_empty()), (5, false));
        let mut columns = tuple.columns();
        assert_eq!(columns.len(), 5);
        assert_eq!(columns.next(), Some(Column::Null));
        assert_eq!(columns.next(), Some(Column::Unchanged));
        assert_eq!(columns.next(), Some(Column::Text(b"hi")));
        assert_eq!(columns.next(), Some(Column::Binary(b"\xFF")));
        assert_eq!(columns.len(), 1);
        assert_eq!(columns.next(), Some(Column::Text(b"")));
        assert_eq!((columns.next(), columns.next(), columns.len()), (None, None, 0));
    }

    #[test]
    fn a_row_without_columns_is_legal() {
        let tuple = decode(b"\0\0").unwrap();
        assert!(tuple.is_empty());
        assert_eq!(tuple.columns().next(), None);
        assert_eq!(tuple, Tuple::default());
    }

    #[test]
    fn wrong_columns_are_rejected_at_their_offset() {
        let cases: [(&[u8], usize, DecodeErrorKind); 5] = [
            (b"\0\x02nx", 3, DecodeErrorKind::UnknownColumnKind(b'x')),
            (b"\0\x01t\xFF\xFF\xFF\xFF", 3, DecodeErrorKind::NegativeLength(-1)),
            (b"\0\x01t\0\0\0\x05abc", 7, DecodeErrorKind::Truncated { needed: 5, left: 3 }),
            (b"\0\x02n", 3, DecodeErrorKind::Truncated { needed: 1, left: 0 }),
            (b"\x06\x81n", 0, DecodeErrorKind::TooManyColumns),
        ];
        for (bytes, offset, kind) in cases {
            assert_eq!(decode(bytes), Err(DecodeError::new(offset, kind)), "{bytes:?}");
        }
    }

    #[test]
    fn rows_are_printed_as_text() {
        let tuple = decode(b"\0\x03nt\0\0\0\x02a\"b\0\0\0\x01\0").unwrap();
        assert_eq!(format!("{tuple:?}"), r#"[Null, Text("a\""), Binary("\x00")]"#);
    }
}
