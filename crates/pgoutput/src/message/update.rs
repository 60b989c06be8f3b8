//! `U`: an updated row.

use crate::reader::Reader;
use crate::tuple::{decode_new_after, encode_new};
use crate::{DecodeError, OldTuple, RelId, Tuple, Xid, writer};

/// A row was updated (`logicalrep_write_update` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Update<'a> {
    /// The xid of the transaction or subtransaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// The table, as described by its last [`Relation`](crate::Relation) message.
    pub relation: RelId,
    /// The old row. Without it the replica identity is unchanged, and its columns in `new` identify
    /// the row.
    pub old: Option<OldTuple<'a>>,
    /// The new row.
    pub new: Tuple<'a>,
}

impl<'a> Update<'a> {
    #[inline]
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        let xid = reader.stream_xid(in_stream)?;
        let relation = RelId(reader.u32()?);
        let mut kind = reader.u8()?;
        let old = OldTuple::decode_after(kind, reader)?;
        if old.is_some() {
            kind = reader.u8()?;
        }
        Ok(Self { xid, relation, old, new: decode_new_after(kind, reader)? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u32(out, self.relation.0);
        if let Some(old) = &self.old {
            old.encode(out);
        }
        encode_new(&self.new, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused};
    use crate::{DecodeErrorKind, Message, TupleBuilder};

    #[test]
    fn an_update_with_an_unchanged_key() {
        let new = TupleBuilder::new().text("1").text("x");
        check(
            b"U\0\0\x40\x01N\0\x02t\0\0\0\x011t\0\0\0\x01x",
            Message::Update(Update {
                xid: None,
                relation: RelId(16385),
                old: None,
                new: new.tuple(),
            }),
        );
    }

    #[test]
    fn an_update_of_the_key() {
        let (old, new) =
            (TupleBuilder::new().text("1").null(), TupleBuilder::new().text("2").unchanged());
        check(
            b"U\0\0\x40\x01K\0\x02t\0\0\0\x011nN\0\x02t\0\0\0\x012u",
            Message::Update(Update {
                xid: None,
                relation: RelId(16385),
                old: Some(OldTuple::Key(old.tuple())),
                new: new.tuple(),
            }),
        );
    }

    #[test]
    fn a_streamed_update_with_the_whole_old_row() {
        let (old, new) = (TupleBuilder::new().text("1"), TupleBuilder::new().text("2"));
        check_in_stream(
            b"U\0\0\0\x05\0\0\x40\x01O\0\x01t\0\0\0\x011N\0\x01t\0\0\0\x012",
            Message::Update(Update {
                xid: Some(Xid(5)),
                relation: RelId(16385),
                old: Some(OldTuple::Full(old.tuple())),
                new: new.tuple(),
            }),
        );
    }

    #[test]
    fn the_old_row_precedes_the_new_row() {
        refused(b"U\0\0\x40\x01x\0\0", 5, DecodeErrorKind::UnknownTupleKind(b'x'));
        refused(b"U\0\0\x40\x01K\0\0O\0\0", 8, DecodeErrorKind::UnknownTupleKind(b'O'));
        refused(b"U\0\0\x40\x01K\0\0", 8, DecodeErrorKind::Truncated { needed: 1, left: 0 });
    }
}
