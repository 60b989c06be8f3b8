//! Frames: the contents of one CopyData packet, in either direction.
//!
//! See the chapter "Streaming Replication Protocol" of the PostgreSQL documentation. The
//! publisher's side is `src/backend/replication/walsender.c`.

use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind, Lsn, Timestamp, writer};

/// A frame that the publisher sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// `w`: one message of the output plugin.
    XLogData {
        /// LSN of the change, or end of the transaction for a message that ends one. It is 0/0 if
        /// another message of the same change follows, so it may go backwards.
        start: Lsn,
        /// Equal to `start` in logical replication.
        end: Lsn,
        /// Time on the publisher when it sent the frame.
        sent: Timestamp,
        /// The message, for [`Decoder::decode`](crate::Decoder::decode).
        payload: &'a [u8],
    },
    /// `k`: primary keepalive message.
    Keepalive {
        /// Current end of WAL on the publisher.
        wal_end: Lsn,
        /// Time on the publisher when it sent the frame.
        sent: Timestamp,
        /// Whether the publisher needs a [`StatusUpdate`] at once. Without one it closes the
        /// connection.
        reply_requested: bool,
    },
    /// `s`: primary status update, the reply to a [`PrimaryStatusRequest`] (PostgreSQL 19 and
    /// later).
    PrimaryStatus {
        /// Position up to which WAL was written on the publisher.
        lsn: Lsn,
        /// The oldest transaction ID that is being committed: 64 bits, with its epoch.
        oldest_commit_xid: u64,
        /// The next transaction ID to be assigned: 64 bits, with its epoch.
        next_xid: u64,
        /// Time on the publisher when it sent the frame.
        sent: Timestamp,
    },
}

impl<'a> Frame<'a> {
    /// Decodes the contents of one CopyData packet.
    #[inline]
    pub fn decode(copy_data: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(copy_data);
        let frame = match reader.u8()? {
            b'w' => {
                let (start, end, sent) = (reader.lsn()?, reader.lsn()?, reader.timestamp()?);
                return Ok(Self::XLogData { start, end, sent, payload: reader.rest() });
            }
            b'k' => Self::Keepalive {
                wal_end: reader.lsn()?,
                sent: reader.timestamp()?,
                reply_requested: reader.bool()?,
            },
            b's' => Self::PrimaryStatus {
                lsn: reader.lsn()?,
                oldest_commit_xid: reader.u64()?,
                next_xid: reader.u64()?,
                sent: reader.timestamp()?,
            },
            kind => return Err(reader.error_before(1, DecodeErrorKind::UnknownFrame(kind))),
        };
        reader.finish()?;
        Ok(frame)
    }

    /// Appends the contents of one CopyData packet to `out`, as a publisher sends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::XLogData { start, end, sent, payload } => {
                writer::u8(out, b'w');
                writer::lsn(out, start);
                writer::lsn(out, end);
                writer::timestamp(out, sent);
                out.extend_from_slice(payload);
            }
            Self::Keepalive { wal_end, sent, reply_requested } => {
                writer::u8(out, b'k');
                writer::lsn(out, wal_end);
                writer::timestamp(out, sent);
                writer::u8(out, u8::from(reply_requested));
            }
            Self::PrimaryStatus { lsn, oldest_commit_xid, next_xid, sent } => {
                writer::u8(out, b's');
                writer::lsn(out, lsn);
                writer::u64(out, oldest_commit_xid);
                writer::u64(out, next_xid);
                writer::timestamp(out, sent);
            }
        }
    }
}

/// `r`: standby status update, the positions of the subscriber.
///
/// The publisher may discard all WAL before `flush`. Changes that are not durable by then are lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusUpdate {
    /// Position up to which the subscriber has received. The publisher only displays it.
    pub write: Lsn,
    /// Position up to which the subscriber is durable. Only this one advances the slot's
    /// `confirmed_flush_lsn`.
    pub flush: Lsn,
    /// Position up to which changes are visible. `synchronous_commit = remote_apply` waits for it.
    pub apply: Lsn,
    /// Time on the subscriber.
    pub clock: Timestamp,
    /// Whether the publisher must reply at once with a [`Frame::Keepalive`].
    pub reply_requested: bool,
}

impl StatusUpdate {
    /// Appends the contents of one CopyData packet to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, b'r');
        writer::lsn(out, self.write);
        writer::lsn(out, self.flush);
        writer::lsn(out, self.apply);
        writer::timestamp(out, self.clock);
        writer::u8(out, u8::from(self.reply_requested));
    }

    /// Decodes the contents of one CopyData packet, as a publisher does.
    pub fn decode(copy_data: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(copy_data);
        expect_kind(&mut reader, b'r')?;
        let update = Self {
            write: reader.lsn()?,
            flush: reader.lsn()?,
            apply: reader.lsn()?,
            clock: reader.timestamp()?,
            reply_requested: reader.bool()?,
        };
        reader.finish()?;
        Ok(update)
    }
}

/// `p`: primary status request, which asks for a [`Frame::PrimaryStatus`] (PostgreSQL 19 and
/// later).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrimaryStatusRequest {
    /// Time on the subscriber.
    pub clock: Timestamp,
}

impl PrimaryStatusRequest {
    /// Appends the contents of one CopyData packet to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        writer::u8(out, b'p');
        writer::timestamp(out, self.clock);
    }

    /// Decodes the contents of one CopyData packet, as a publisher does.
    pub fn decode(copy_data: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(copy_data);
        expect_kind(&mut reader, b'p')?;
        let request = Self { clock: reader.timestamp()? };
        reader.finish()?;
        Ok(request)
    }
}

fn expect_kind(reader: &mut Reader<'_>, expected: u8) -> Result<(), DecodeError> {
    let kind = reader.u8()?;
    if kind != expected {
        return Err(reader.error_before(1, DecodeErrorKind::UnknownFrame(kind)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(frame: Frame<'_>, bytes: &[u8]) {
        assert_eq!(Frame::decode(bytes), Ok(frame));
        let mut out = Vec::new();
        frame.encode(&mut out);
        assert_eq!(out, bytes);
    }

    #[test]
    fn log_data_contains_the_payload_unchanged() {
        check(
            Frame::XLogData {
                start: Lsn(0x16B_3748),
                end: Lsn(0x16B_3748),
                sent: Timestamp(-2),
                payload: b"E",
            },
            b"w\0\0\0\0\x01\x6B\x37\x48\0\0\0\0\x01\x6B\x37\x48\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFEE",
        );
    }

    #[test]
    fn keepalive() {
        check(
            Frame::Keepalive { wal_end: Lsn(1 << 32), sent: Timestamp(5), reply_requested: true },
            b"k\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x05\x01",
        );
    }

    #[test]
    fn primary_status() {
        check(
            Frame::PrimaryStatus {
                lsn: Lsn(1),
                oldest_commit_xid: 2,
                next_xid: 1 << 32 | 3,
                sent: Timestamp(4),
            },
            b"s\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\x01\0\0\0\x03\0\0\0\0\0\0\0\x04",
        );
    }

    #[test]
    fn status_update() {
        let update = StatusUpdate {
            write: Lsn(3),
            flush: Lsn(1),
            apply: Lsn(2),
            clock: Timestamp(4),
            reply_requested: true,
        };
        let bytes = b"r\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\
            \0\0\0\0\0\0\0\x04\x01";
        let mut out = Vec::new();
        update.encode(&mut out);
        assert_eq!(out, bytes);
        assert_eq!(StatusUpdate::decode(bytes), Ok(update));
    }

    #[test]
    fn primary_status_request() {
        let request = PrimaryStatusRequest { clock: Timestamp(9) };
        let mut out = Vec::new();
        request.encode(&mut out);
        assert_eq!(out, b"p\0\0\0\0\0\0\0\x09");
        assert_eq!(PrimaryStatusRequest::decode(&out), Ok(request));
    }

    #[test]
    fn other_packets_are_rejected() {
        let cases: [(&[u8], usize, DecodeErrorKind); 5] = [
            (b"", 0, DecodeErrorKind::Truncated { needed: 1, left: 0 }),
            (b"x", 0, DecodeErrorKind::UnknownFrame(b'x')),
            (b"w\0\0\0", 1, DecodeErrorKind::Truncated { needed: 8, left: 3 }),
            (b"k\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x05\x02", 17, DecodeErrorKind::UnexpectedFlags(2)),
            (b"k\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x05\x01!", 18, DecodeErrorKind::TrailingBytes(1)),
        ];
        for (bytes, offset, kind) in cases {
            assert_eq!(Frame::decode(bytes), Err(DecodeError::new(offset, kind)));
        }
        assert_eq!(
            StatusUpdate::decode(b"k"),
            Err(DecodeError::new(0, DecodeErrorKind::UnknownFrame(b'k')))
        );
    }
}
