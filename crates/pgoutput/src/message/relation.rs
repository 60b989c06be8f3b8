//! `R`: the definition of a table from here on.

use std::iter::FusedIterator;
use std::str;

use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind, RelId, TypeOid, Xid, writer};

/// The columns of a table, as of the changes that follow (`logicalrep_write_rel` in `proto.c`).
///
/// The publisher sends it before the first change of a table, and again whenever the table may have
/// changed, even within a transaction. It lists only published columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relation<'a> {
    /// The xid of its transaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// The OID by which changes refer to this message. A later message with the same OID replaces
    /// an earlier one.
    pub id: RelId,
    /// The schema. Never empty: PostgreSQL sends `pg_catalog` as an empty name, and decoding
    /// restores it.
    pub schema: &'a str,
    /// The table name.
    pub name: &'a str,
    /// The columns that identify rows on the publisher.
    pub replica_identity: ReplicaIdentity,
    /// The columns, in the order in which a [`Tuple`](crate::Tuple) contains them.
    pub columns: Columns<'a>,
}

impl<'a> Relation<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        Ok(Self {
            xid: reader.stream_xid(in_stream)?,
            id: RelId(reader.u32()?),
            schema: reader.schema()?,
            name: reader.name()?,
            replica_identity: ReplicaIdentity::decode(reader)?,
            columns: Columns::decode(reader)?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u32(out, self.id.0);
        writer::schema(out, self.schema);
        writer::name(out, self.name);
        writer::u8(out, self.replica_identity.as_byte());
        self.columns.encode(out);
    }
}

/// The contents of old rows, from `pg_class.relreplident`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplicaIdentity {
    /// `d`: the primary key; no columns if there is none.
    Default,
    /// `n`: no columns. The publisher rejects updates and deletes.
    Nothing,
    /// `f`: all columns.
    Full,
    /// `i`: the columns of the unique index chosen by REPLICA IDENTITY USING INDEX.
    Index,
}

impl ReplicaIdentity {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match reader.u8()? {
            b'd' => Ok(Self::Default),
            b'n' => Ok(Self::Nothing),
            b'f' => Ok(Self::Full),
            b'i' => Ok(Self::Index),
            other => Err(reader.error_before(1, DecodeErrorKind::UnknownReplicaIdentity(other))),
        }
    }

    const fn as_byte(self) -> u8 {
        match self {
            Self::Default => b'd',
            Self::Nothing => b'n',
            Self::Full => b'f',
            Self::Index => b'i',
        }
    }
}

/// One column of a [`Relation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelationColumn<'a> {
    /// Whether it belongs to the replica identity. With [`ReplicaIdentity::Full`] all columns do.
    pub key: bool,
    /// The column name.
    pub name: &'a str,
    /// The type on the publisher (`pg_attribute.atttypid`).
    pub type_oid: TypeOid,
    /// The type modifier, such as the length of a `varchar`, or -1 (`pg_attribute.atttypmod`).
    pub type_modifier: i32,
}

/// `LOGICALREP_IS_REPLICA_IDENTITY` in `proto.c`.
const FLAG_KEY: u8 = 1;

impl<'a> RelationColumn<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            key: reader.flags(FLAG_KEY)? == FLAG_KEY,
            name: reader.name()?,
            type_oid: TypeOid(reader.u32()?),
            type_modifier: reader.i32()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, if self.key { FLAG_KEY } else { 0 });
        writer::name(out, self.name);
        writer::u32(out, self.type_oid.0);
        writer::i32(out, self.type_modifier);
    }
}

/// The columns of a [`Relation`], checked but not unpacked.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Columns<'a> {
    count: u16,
    /// Exactly `count` valid columns.
    columns: &'a [u8],
}

impl<'a> Columns<'a> {
    /// `columns` must hold exactly `count` valid columns.
    pub(crate) const fn from_parts(count: u16, columns: &'a [u8]) -> Self {
        Self { count, columns }
    }

    fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let count = reader.column_count()?;
        let start = reader.clone();
        for _ in 0..count {
            RelationColumn::decode(reader)?;
        }
        Ok(Self { count, columns: reader.read_since(&start) })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        writer::u16(out, self.count);
        out.extend_from_slice(self.columns);
    }

    /// The number of columns, at most [`MAX_COLUMNS`](crate::MAX_COLUMNS).
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether the table has no published columns, which is legal.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The columns in the order of the message.
    #[must_use]
    pub const fn iter(&self) -> RelationColumns<'a> {
        RelationColumns { left: self.count, reader: Reader::new(self.columns) }
    }
}

impl<'a> IntoIterator for &Columns<'a> {
    type Item = RelationColumn<'a>;
    type IntoIter = RelationColumns<'a>;

    fn into_iter(self) -> RelationColumns<'a> {
        self.iter()
    }
}

impl std::fmt::Debug for Columns<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Iterates over the columns of a [`Relation`].
#[derive(Clone, Debug)]
pub struct RelationColumns<'a> {
    left: u16,
    reader: Reader<'a>,
}

impl<'a> Iterator for RelationColumns<'a> {
    type Item = RelationColumn<'a>;

    fn next(&mut self) -> Option<RelationColumn<'a>> {
        self.left = self.left.checked_sub(1)?;
        // The bytes were checked when the message was decoded. The second check of each name is
        // cheap, because relations are rare.
        RelationColumn::decode(&mut self.reader).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::from(self.left);
        (left, Some(left))
    }
}

impl ExactSizeIterator for RelationColumns<'_> {}
impl FusedIterator for RelationColumns<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused};
    use crate::{ColumnsBuilder, Message};

    #[test]
    fn relation() {
        let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1).column(
            false,
            "größe",
            TypeOid(1043),
            54,
        );
        check(
            b"R\0\0\x40\x01public\0t\0d\0\x02\
            \x01id\0\0\0\0\x17\xFF\xFF\xFF\xFF\
            \0gr\xC3\xB6\xC3\x9Fe\0\0\0\x04\x13\0\0\0\x36",
            Message::Relation(Relation {
                xid: None,
                id: RelId(16385),
                schema: "public",
                name: "t",
                replica_identity: ReplicaIdentity::Default,
                columns: columns.columns(),
            }),
        );
    }

    #[test]
    fn columns_are_returned_in_order() {
        let built = ColumnsBuilder::new().column(true, "a", TypeOid(23), -1).column(
            false,
            "b",
            TypeOid(25),
            4,
        );
        let columns = built.columns();
        assert_eq!((columns.len(), columns.is_empty(), columns.iter().len()), (2, false, 2));
        let second =
            RelationColumn { key: false, name: "b", type_oid: TypeOid(25), type_modifier: 4 };
        assert_eq!(columns.iter().nth(1), Some(second));
        assert_eq!(columns.iter().nth(2), None);
        assert!(columns.into_iter().next().unwrap().key);
    }

    #[test]
    fn no_schema_means_pg_catalog_and_no_columns_are_legal() {
        for (letter, replica_identity) in [
            (b'n', ReplicaIdentity::Nothing),
            (b'f', ReplicaIdentity::Full),
            (b'i', ReplicaIdentity::Index),
        ] {
            let mut bytes = b"R\0\0\0\x09\0\0\0\x07\0pg_class\0?\0\0".to_vec();
            bytes[19] = letter;
            check_in_stream(
                &bytes,
                Message::Relation(Relation {
                    xid: Some(Xid(9)),
                    id: RelId(7),
                    schema: "pg_catalog",
                    name: "pg_class",
                    replica_identity,
                    columns: Columns::default(),
                }),
            );
        }
    }

    #[test]
    fn wrong_relations_are_rejected_at_their_offset() {
        refused(b"R\0\0\0\x07s\0t", 7, DecodeErrorKind::MissingNul);
        refused(b"R\0\0\0\x07s\xC3\0t\0", 6, DecodeErrorKind::NotUtf8);
        refused(b"R\0\0\0\x07s\0t\0x", 9, DecodeErrorKind::UnknownReplicaIdentity(b'x'));
        refused(b"R\0\0\0\x07s\0t\0d\xFF\xFF", 10, DecodeErrorKind::TooManyColumns);
        refused(b"R\0\0\0\x07s\0t\0d\0\x01\x02", 12, DecodeErrorKind::UnexpectedFlags(2));
    }
}
