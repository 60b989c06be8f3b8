//! `I`: an inserted row.

use crate::reader::Reader;
use crate::tuple::{decode_new_after, encode_new};
use crate::{DecodeError, RelId, Tuple, Xid, writer};

/// A row was inserted, or a row filter turned an update into an insert (`logicalrep_write_insert`
/// in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Insert<'a> {
    /// The xid of the transaction or subtransaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// The table, as described by its last [`Relation`](crate::Relation) message.
    pub relation: RelId,
    /// The new row. It may contain [`Column::Unchanged`](crate::Column::Unchanged) if a row filter
    /// turned an update into an insert.
    pub new: Tuple<'a>,
}

impl<'a> Insert<'a> {
    #[inline]
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        let xid = reader.stream_xid(in_stream)?;
        let relation = RelId(reader.u32()?);
        let kind = reader.u8()?;
        Ok(Self { xid, relation, new: decode_new_after(kind, reader)? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u32(out, self.relation.0);
        encode_new(&self.new, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused, refused_in_stream};
    use crate::{DecodeErrorKind, Message, TupleBuilder};

    #[test]
    fn insert() {
        let new = TupleBuilder::new().text("42").null().unchanged().binary([0, 255]);
        check(
            b"I\0\0\x40\x01N\0\x04t\0\0\0\x0242nub\0\0\0\x02\0\xFF",
            Message::Insert(Insert { xid: None, relation: RelId(16385), new: new.tuple() }),
        );
    }

    #[test]
    fn streamed_insert() {
        check_in_stream(
            b"I\0\0\x02\xDC\0\0\x40\x01N\0\0",
            Message::Insert(Insert {
                xid: Some(Xid(732)),
                relation: RelId(16385),
                new: Tuple::default(),
            }),
        );
        refused_in_stream(b"I\0\0\0\0\0\0\x40\x01N\0\0", 1, DecodeErrorKind::ZeroXid);
    }

    #[test]
    fn only_a_new_row_is_inserted() {
        refused(b"I\0\0\x40\x01K\0\0", 5, DecodeErrorKind::UnknownTupleKind(b'K'));
        refused(b"I\0\0\x40\x01N\0\0N", 8, DecodeErrorKind::TrailingBytes(1));
    }
}
