//! `O`: the transaction did not begin on this publisher.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, writer};

/// Where the transaction came from before it was replicated to the publisher
/// (`logicalrep_write_origin` in `proto.c`).
///
/// Follows the message that begins a transaction; in a streamed one it stands in the first block.
/// It never carries a transaction id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin<'a> {
    /// Its commit on the server of origin; 0/0 in a streamed transaction, which has none yet.
    pub lsn: Lsn,
    /// The name the publisher gave to that origin (`pg_replication_origin.roname`).
    pub name: &'a str,
}

impl<'a> Origin<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(Self { lsn: reader.lsn()?, name: reader.name()? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::lsn(out, self.lsn);
        writer::name(out, self.name);
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
            Message::Origin(Origin { lsn: Lsn(7), name: "pg_16389" }),
        );
    }

    #[test]
    fn an_origin_inside_a_stream_has_no_transaction_id() {
        check_in_stream(
            b"O\0\0\0\0\0\0\0\0pg_16389\0",
            Message::Origin(Origin { lsn: Lsn::INVALID, name: "pg_16389" }),
        );
    }
}
