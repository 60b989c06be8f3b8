//! `O`: the origin of a transaction that was replicated to this publisher.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, RawName, writer};

/// The replication origin of the transaction (`logicalrep_write_origin` in `proto.c`).
///
/// The message follows the one that begins a transaction. In a streamed transaction it is in the
/// first block. It never has an xid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin<'a> {
    /// LSN of the commit on the server of origin. It is 0/0 in a streamed transaction, which has
    /// not committed there yet.
    pub lsn: Lsn,
    /// The name of the origin on the publisher (`pg_replication_origin.roname`).
    pub name: RawName<'a>,
}

impl<'a> Origin<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self { lsn: reader.lsn()?, name: reader.raw_name()? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::lsn(out, self.lsn);
        writer::raw_name(out, self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;
    use crate::message::testing::{check, check_in_stream};

    #[test]
    fn origin() {
        check(
            b"O\0\0\0\0\0\0\0\x07pg_16389\0",
            Message::Origin(Origin { lsn: Lsn(7), name: RawName(b"pg_16389") }),
        );
    }

    #[test]
    fn an_origin_inside_a_stream_block_has_no_xid() {
        check_in_stream(
            b"O\0\0\0\0\0\0\0\0pg_16389\0",
            Message::Origin(Origin { lsn: Lsn::INVALID, name: RawName(b"pg_16389") }),
        );
    }
}
