//! `S`, `E`, `c`, `A`: large transactions that are sent while they are in progress.
//!
//! Their changes are sent in blocks between Stream Start and Stream Stop. Blocks of several
//! transactions may alternate. A Stream Commit or Stream Abort, outside of any block, ends the
//! transaction.

use crate::reader::Reader;
use crate::{DecodeError, Lsn, Timestamp, Xid, writer};

/// `S`: the start of a block of changes of one transaction (`logicalrep_write_stream_start` in
/// `proto.c`). It ends with [`Message::StreamStop`](crate::Message::StreamStop).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamStart {
    /// The xid of the transaction. Its changes may have xids of subtransactions. Never 0.
    pub xid: Xid,
    /// Whether this is the first block of the transaction.
    pub first_segment: bool,
}

impl StreamStart {
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { xid: reader.valid_xid()?, first_segment: reader.bool()? })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::xid(out, self.xid);
        writer::u8(out, u8::from(self.first_segment));
    }
}

/// `c`: the commit of a streamed transaction (`logicalrep_write_stream_commit` in `proto.c`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamCommit {
    /// The xid of the transaction.
    pub xid: Xid,
    /// Always 0 in versions 2 to 4 of the protocol.
    pub flags: u8,
    /// Start of the commit record.
    pub commit_lsn: Lsn,
    /// End of the commit record.
    pub end_lsn: Lsn,
    /// Commit time on the publisher.
    pub commit_time: Timestamp,
}

impl StreamCommit {
    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            xid: reader.xid()?,
            flags: reader.flags(0)?,
            commit_lsn: reader.lsn()?,
            end_lsn: reader.lsn()?,
            commit_time: reader.timestamp()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::xid(out, self.xid);
        writer::u8(out, self.flags);
        writer::lsn(out, self.commit_lsn);
        writer::lsn(out, self.end_lsn);
        writer::timestamp(out, self.commit_time);
    }
}

/// `A`: the abort of a streamed transaction or of one of its subtransactions
/// (`logicalrep_write_stream_abort` in `proto.c`).
///
/// The message may name a transaction of which nothing was sent. PostgreSQL 18 before the minor
/// releases of August 2026 sends such a message even if streaming was not requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamAbort {
    /// The xid of the transaction.
    pub xid: Xid,
    /// The xid of the aborted subtransaction; equal to `xid` if the whole transaction was aborted.
    pub subxid: Xid,
    /// End and time of the abort record: sent always with
    /// [`Streaming::Parallel`](crate::Streaming::Parallel), and otherwise never.
    pub abort: Option<(Lsn, Timestamp)>,
}

impl StreamAbort {
    pub(crate) fn decode(reader: &mut Reader<'_>, parallel: bool) -> Result<Self, DecodeError> {
        Ok(Self {
            xid: reader.xid()?,
            subxid: reader.xid()?,
            abort: if parallel { Some((reader.lsn()?, reader.timestamp()?)) } else { None },
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::xid(out, self.xid);
        writer::xid(out, self.subxid);
        if let Some((lsn, time)) = self.abort {
            writer::lsn(out, lsn);
            writer::timestamp(out, time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::testing::{check, refused};
    use crate::{DecodeErrorKind, Decoder, Message, Streaming};

    #[test]
    fn stream_start() {
        for (flag, first_segment) in [(0, false), (1, true)] {
            check(
                &[b'S', 0, 0, 2, 0xDC, flag],
                Message::StreamStart(StreamStart { xid: Xid(732), first_segment }),
            );
        }
        refused(b"S\0\0\0\x01\x02", 5, DecodeErrorKind::UnexpectedFlags(2));
        refused(b"S\0\0\0\0\x01", 1, DecodeErrorKind::ZeroXid);
    }

    #[test]
    fn stream_commit() {
        check(
            b"c\0\0\x02\xDC\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03",
            Message::StreamCommit(StreamCommit {
                xid: Xid(732),
                flags: 0,
                commit_lsn: Lsn(1),
                end_lsn: Lsn(2),
                commit_time: Timestamp(3),
            }),
        );
        refused(b"c\0\0\x02\xDC\x80", 5, DecodeErrorKind::UnexpectedFlags(0x80));
    }

    #[test]
    fn a_stream_abort_has_a_position_only_with_parallel_streaming() {
        let short = b"A\0\0\0\x05\0\0\0\x06";
        let long = b"A\0\0\0\x05\0\0\0\x06\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02";
        let abort =
            |abort| Message::StreamAbort(StreamAbort { xid: Xid(5), subxid: Xid(6), abort });
        let position = Some((Lsn(1), Timestamp(2)));
        check(short, abort(None));
        for streaming in [Streaming::Off, Streaming::On] {
            assert_eq!(Decoder::new(streaming).decode(short), Ok(abort(None)));
            assert_eq!(
                Decoder::new(streaming).decode(long).unwrap_err().kind,
                DecodeErrorKind::TrailingBytes(16)
            );
        }
        let mut decoder = Decoder::new(Streaming::Parallel);
        assert_eq!(decoder.decode(long), Ok(abort(position)));
        assert_eq!(
            decoder.decode(short).unwrap_err().kind,
            DecodeErrorKind::Truncated { needed: 8, left: 0 }
        );
    }
}
