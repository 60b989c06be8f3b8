//! `M`: a logical decoding message that an application wrote to the WAL.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, RawName, Xid, writer};

/// A message written by `pg_logical_emit_message` (`logicalrep_write_message` in `proto.c`). It is
/// sent only if the option `messages` is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogicalMessage<'a> {
    /// The xid of the transaction or subtransaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// Whether the message is part of its transaction. A non-transactional message is sent at once,
    /// outside of any transaction, even if its transaction is rolled back.
    pub transactional: bool,
    /// LSN of the message.
    pub lsn: Lsn,
    /// The prefix, which names the application that it is for.
    pub prefix: RawName<'a>,
    /// The content, as arbitrary bytes.
    pub content: &'a [u8],
}

/// `MESSAGE_TRANSACTIONAL` in `proto.c`.
const FLAG_TRANSACTIONAL: u8 = 1;

impl<'a> LogicalMessage<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        let xid = reader.stream_xid(in_stream)?;
        let transactional = reader.flags(FLAG_TRANSACTIONAL)? == FLAG_TRANSACTIONAL;
        let lsn = reader.lsn()?;
        let prefix = reader.raw_name()?;
        let length = reader.length()?;
        Ok(Self { xid, transactional, lsn, prefix, content: reader.bytes(length)? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u8(out, if self.transactional { FLAG_TRANSACTIONAL } else { 0 });
        writer::lsn(out, self.lsn);
        writer::raw_name(out, self.prefix);
        writer::length(out, self.content.len());
        out.extend_from_slice(self.content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, check_in_stream, refused};
    use crate::{DecodeErrorKind, Message};

    #[test]
    fn a_message_outside_of_transactions() {
        check(
            b"M\0\0\0\0\0\x01\x6B\x37\x48app\0\0\0\0\x03\0hi",
            Message::Logical(LogicalMessage {
                xid: None,
                transactional: false,
                lsn: Lsn(0x016B_3748),
                prefix: RawName(b"app"),
                content: b"\0hi",
            }),
        );
    }

    #[test]
    fn a_streamed_message() {
        check_in_stream(
            b"M\0\0\0\x05\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0",
            Message::Logical(LogicalMessage {
                xid: Some(Xid(5)),
                transactional: true,
                lsn: Lsn(1),
                prefix: RawName(b""),
                content: b"",
            }),
        );
    }

    #[test]
    fn wrong_flags_and_lengths_are_rejected() {
        refused(b"M\x02", 1, DecodeErrorKind::UnexpectedFlags(2));
        refused(
            b"M\0\0\0\0\0\0\0\0\x01p\0\x80\0\0\0",
            12,
            DecodeErrorKind::NegativeLength(i32::MIN),
        );
        refused(
            b"M\0\0\0\0\0\0\0\0\x01p\0\0\0\0\x02x",
            16,
            DecodeErrorKind::Truncated { needed: 2, left: 1 },
        );
    }
}
