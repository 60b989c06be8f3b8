//! From payloads to messages, in the order in which the publisher sent them.

use crate::message::{Message, is_change};
use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind};

/// How the publisher was asked to send large transactions: the option `streaming` of `pgoutput`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Streaming {
    /// Only after they have committed.
    #[default]
    Off,
    /// While they run (protocol 2, PostgreSQL 14 and later).
    On,
    /// While they run, and aborts say where and when (protocol 4, PostgreSQL 16 and later).
    Parallel,
}

/// Reads the messages of one replication connection.
///
/// Inside a stream block changes carry their transaction in front, outside they do not, and
/// nothing in a change itself tells which; so the decoder remembers whether a block is open. That
/// is all it remembers. A new connection needs a new decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    streaming: Streaming,
    in_stream: bool,
}

impl Decoder {
    /// For a connection that was started with this `streaming`.
    #[must_use]
    pub const fn new(streaming: Streaming) -> Self {
        Self { streaming, in_stream: false }
    }

    /// Whether a stream block is open: the next message must be a change in it, or its end.
    #[must_use]
    pub const fn in_stream(&self) -> bool {
        self.in_stream
    }

    /// Reads one message: the payload of one [`Frame::XLogData`](crate::Frame::XLogData).
    ///
    /// After an error the decoder is as it was before, but there is no use in going on: see
    /// [`DecodeError`].
    pub fn decode<'a>(&mut self, payload: &'a [u8]) -> Result<Message<'a>, DecodeError> {
        let mut reader = Reader::new(payload);
        let tag = reader.u8()?;
        let message = self
            .check_state(tag, &reader)
            .and_then(|()| {
                let parallel = self.streaming == Streaming::Parallel;
                Message::decode(tag, &mut reader, self.in_stream, parallel)
            })
            .map_err(|error| error.in_message(tag))?;
        match message {
            Message::StreamStart(_) => self.in_stream = true,
            Message::StreamStop => self.in_stream = false,
            _ => {}
        }
        Ok(message)
    }

    /// Whether a message of this kind may come now. Unknown kinds are left to the message itself.
    #[inline]
    fn check_state(&self, tag: u8, reader: &Reader<'_>) -> Result<(), DecodeError> {
        let expected_in_stream = match tag {
            _ if is_change(tag) => return Ok(()),
            b'B' | b'C' | b'S' | b'c' | b'A' | b'b' | b'P' | b'K' | b'r' | b'p' => false,
            b'E' => true,
            _ => return Ok(()),
        };
        if self.in_stream != expected_in_stream {
            return Err(reader.error_before(1, DecodeErrorKind::UnexpectedStreamState));
        }
        // A Stream Abort is let through: see `StreamAbort`.
        if tag == b'S' && self.streaming == Streaming::Off {
            return Err(reader.error_before(1, DecodeErrorKind::StreamingNotRequested));
        }
        Ok(())
    }
}

/// Reads one change again that was kept as its payload, without a [`Decoder`].
///
/// `in_stream` is what [`Decoder::in_stream`] was when the change arrived. Changes are what may
/// stand in a stream block: Insert, Update, Delete, Truncate, Relation, Type, Logical and Origin;
/// other messages are refused.
pub fn decode_change(payload: &[u8], in_stream: bool) -> Result<Message<'_>, DecodeError> {
    let mut reader = Reader::new(payload);
    let tag = reader.u8()?;
    if !is_change(tag) {
        return Err(reader.error_before(1, DecodeErrorKind::NotAChange).in_message(tag));
    }
    Message::decode(tag, &mut reader, in_stream, false).map_err(|error| error.in_message(tag))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RelId, Xid};

    const START: &[u8] = b"S\0\0\0\x01\x01";
    const STOP: &[u8] = b"E";
    const BEGIN: &[u8] = b"B\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x01";
    const INSERT: &[u8] = b"I\0\0\0\x07N\0\0";
    const STREAMED_INSERT: &[u8] = b"I\0\0\0\x05\0\0\0\x07N\0\0";

    fn unexpected(tag: u8) -> DecodeError {
        DecodeError { offset: 0, kind: DecodeErrorKind::UnexpectedStreamState, message: Some(tag) }
    }

    #[test]
    fn changes_carry_their_transaction_inside_a_block_only() {
        let mut decoder = Decoder::new(Streaming::On);
        assert_eq!(decoder.decode(INSERT).unwrap().stream_xid(), None);
        decoder.decode(START).unwrap();
        assert!(decoder.in_stream());
        let Message::Insert(insert) = decoder.decode(STREAMED_INSERT).unwrap() else { panic!() };
        assert_eq!((insert.xid, insert.relation), (Some(Xid(5)), RelId(7)));
        assert_eq!(decoder.decode(STOP), Ok(Message::StreamStop));
        assert!(!decoder.in_stream());
        assert_eq!(decoder.decode(INSERT).unwrap().stream_xid(), None);
    }

    #[test]
    fn a_block_begins_and_ends_once_and_holds_changes_only() {
        let mut decoder = Decoder::new(Streaming::Parallel);
        assert_eq!(decoder.decode(STOP), Err(unexpected(b'E')));
        decoder.decode(START).unwrap();
        for tag in *b"SBCcAbPKrp" {
            assert_eq!(decoder.decode(&[tag]), Err(unexpected(tag)));
        }
        assert!(decoder.in_stream(), "an error leaves the state as it was");
        decoder.decode(STOP).unwrap();
        assert!(decoder.decode(BEGIN).is_ok());
    }

    #[test]
    fn a_block_that_was_not_asked_for_is_refused() {
        let mut decoder = Decoder::new(Streaming::Off);
        let error = decoder.decode(START).unwrap_err();
        assert_eq!(error.kind, DecodeErrorKind::StreamingNotRequested);
        assert!(!decoder.in_stream());
    }

    #[test]
    fn unknown_and_empty_messages_are_refused() {
        for streamed in [false, true] {
            let mut decoder = Decoder::new(Streaming::On);
            if streamed {
                decoder.decode(START).unwrap();
            }
            let error = decoder.decode(b"?").unwrap_err();
            let kind = DecodeErrorKind::UnknownMessage(b'?');
            assert_eq!(error, DecodeError { offset: 0, kind, message: Some(b'?') });
            let kind = DecodeErrorKind::Truncated { needed: 1, left: 0 };
            assert_eq!(decoder.decode(b""), Err(DecodeError { offset: 0, kind, message: None }));
        }
    }

    #[test]
    fn a_kept_change_is_read_again_without_a_decoder() {
        let mut decoder = Decoder::new(Streaming::On);
        assert_eq!(decode_change(INSERT, false), decoder.decode(INSERT));
        decoder.decode(START).unwrap();
        assert_eq!(decode_change(STREAMED_INSERT, true), decoder.decode(STREAMED_INSERT));
        for payload in [START, STOP, BEGIN, b"?"] {
            let error = decode_change(payload, false).unwrap_err();
            assert_eq!(error.kind, DecodeErrorKind::NotAChange);
        }
    }
}
