//! The decoder of a connection: payloads to messages, in the order in which the publisher sent
//! them.

use crate::message::{Message, is_change};
use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind};

/// The option `streaming` of `pgoutput`: when the publisher sends large transactions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Streaming {
    /// Only after their commit.
    #[default]
    Off,
    /// While they are in progress (protocol 2, PostgreSQL 14 and later).
    On,
    /// While they are in progress. Aborts include an LSN and a time (protocol 4, PostgreSQL 16 and
    /// later).
    Parallel,
}

/// Decodes the messages of one replication connection.
///
/// Inside a stream block, a change starts with its xid; outside, it does not. The change itself
/// does not show which is the case, so the decoder remembers whether a block is open. It has no
/// other state. A new connection needs a new decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    streaming: Streaming,
    in_stream: bool,
}

impl Decoder {
    /// A decoder for a connection that was started with this `streaming` option.
    #[must_use]
    pub const fn new(streaming: Streaming) -> Self {
        Self { streaming, in_stream: false }
    }

    /// Whether a stream block is open. If so, the next message must be a change in it, or its end.
    #[must_use]
    pub const fn in_stream(&self) -> bool {
        self.in_stream
    }

    /// Decodes one message: the payload of one [`Frame::XLogData`](crate::Frame::XLogData).
    ///
    /// After an error the state is unchanged, but the stream must not be continued: see
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

    /// Checks that a message of this kind may come now. Unknown kinds are rejected by
    /// [`Message::decode`].
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
        // A Stream Abort is accepted: see `StreamAbort`.
        if tag == b'S' && self.streaming == Streaming::Off {
            return Err(reader.error_before(1, DecodeErrorKind::StreamingNotRequested));
        }
        Ok(())
    }
}

/// Decodes the payload of one change again, without a [`Decoder`].
///
/// `in_stream` is what [`Decoder::in_stream`] was when the change arrived. Changes are the messages
/// that a stream block may contain: Insert, Update, Delete, Truncate, Relation, Type, Logical and
/// Origin. Other messages are rejected.
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
    fn changes_have_an_xid_only_inside_a_block() {
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
    fn a_block_starts_and_stops_once_and_contains_only_changes() {
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
    fn a_block_that_was_not_requested_is_rejected() {
        let mut decoder = Decoder::new(Streaming::Off);
        let error = decoder.decode(START).unwrap_err();
        assert_eq!(error.kind, DecodeErrorKind::StreamingNotRequested);
        assert!(!decoder.in_stream());
    }

    #[test]
    fn unknown_and_empty_messages_are_rejected() {
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
    fn a_stored_change_is_decoded_again_without_a_decoder() {
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
