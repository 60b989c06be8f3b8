//! `D`: a deleted row.

use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind, OldTuple, RelId, Xid, writer};

/// A row was deleted, or a row filter turned an update into a delete (`logicalrep_write_delete` in
/// `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Delete<'a> {
    /// The xid of the transaction or subtransaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// The table, as described by its last [`Relation`](crate::Relation) message.
    pub relation: RelId,
    /// The old row.
    pub old: OldTuple<'a>,
}

impl<'a> Delete<'a> {
    #[inline]
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        let xid = reader.stream_xid(in_stream)?;
        let relation = RelId(reader.u32()?);
        let kind = reader.u8()?;
        match OldTuple::decode_after(kind, reader)? {
            Some(old) => Ok(Self { xid, relation, old }),
            None => Err(reader.error_before(1, DecodeErrorKind::UnknownTupleKind(kind))),
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u32(out, self.relation.0);
        self.old.encode(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused};
    use crate::{Message, TupleBuilder};

    #[test]
    fn a_delete_by_key() {
        let old = TupleBuilder::new().text("1").null();
        check(
            b"D\0\0\x40\x01K\0\x02t\0\0\0\x011n",
            Message::Delete(Delete {
                xid: None,
                relation: RelId(16385),
                old: OldTuple::Key(old.tuple()),
            }),
        );
    }

    #[test]
    fn a_streamed_delete_by_the_whole_row() {
        let old = TupleBuilder::new().text("1").null();
        check_in_stream(
            b"D\0\0\0\x05\0\0\x40\x01O\0\x02t\0\0\0\x011n",
            Message::Delete(Delete {
                xid: Some(Xid(5)),
                relation: RelId(16385),
                old: OldTuple::Full(old.tuple()),
            }),
        );
    }

    #[test]
    fn there_is_no_new_row() {
        refused(b"D\0\0\x40\x01N\0\0", 5, DecodeErrorKind::UnknownTupleKind(b'N'));
    }
}
