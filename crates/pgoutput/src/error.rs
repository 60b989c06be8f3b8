//! Errors in the bytes that a publisher sent.

use std::fmt;

use crate::tuple::MAX_COLUMNS;

/// The bytes are not a frame or message of the protocol.
///
/// The stream cannot be continued after this error: to skip the message would be to lose a change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}at byte {offset}: {kind}", Place(*message))]
pub struct DecodeError {
    /// Offset of the error in bytes from the start of the decoded slice.
    pub offset: usize,
    /// The kind of the error.
    pub kind: DecodeErrorKind,
    /// Type of the message (its first byte), if that was read. `None` for a frame.
    pub message: Option<u8>,
}

impl DecodeError {
    #[cold]
    pub(crate) fn new(offset: usize, kind: DecodeErrorKind) -> Self {
        Self { offset, kind, message: None }
    }

    #[cold]
    pub(crate) fn in_message(mut self, tag: u8) -> Self {
        self.message = Some(tag);
        self
    }
}

/// The kind of a decoding error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// The bytes end inside a field.
    #[error("insufficient data: the field needs {needed} bytes, {left} are left")]
    Truncated {
        /// Number of bytes that the field needs.
        needed: usize,
        /// Number of bytes left.
        left: usize,
    },
    /// No message has this type.
    #[error("unrecognized message type {}", Byte(*.0))]
    UnknownMessage(u8),
    /// No frame has this type.
    #[error("unrecognized frame type {}", Byte(*.0))]
    UnknownFrame(u8),
    /// Not one of `N`, `K`, `O`, or not allowed here.
    #[error("unexpected tuple type {}", Byte(*.0))]
    UnknownTupleKind(u8),
    /// Not one of `n`, `u`, `t`, `b`.
    #[error("unrecognized data representation type {}", Byte(*.0))]
    UnknownColumnKind(u8),
    /// Not one of `d`, `n`, `f`, `i`.
    #[error("unrecognized replica identity {}", Byte(*.0))]
    UnknownReplicaIdentity(u8),
    /// A length or count is negative.
    #[error("negative length: {0}")]
    NegativeLength(i32),
    /// More columns than a row of PostgreSQL can have ([`MAX_COLUMNS`]).
    #[error("more than {MAX_COLUMNS} columns")]
    TooManyColumns,
    /// A name is not UTF-8.
    ///
    /// Names are quoted into SQL for a session with client encoding UTF-8. An invalid byte sequence
    /// could change its meaning there, so it is rejected instead of repaired.
    #[error("the name is not valid UTF-8")]
    NotUtf8,
    /// A name has no terminating zero byte.
    #[error("the name has no terminating zero byte")]
    MissingNul,
    /// Bytes follow the last field.
    #[error("{0} bytes follow the end of the message")]
    TrailingBytes(usize),
    /// Flag bits are set that this crate does not know. They may change the meaning of the message.
    #[error("unknown flags {0:#04x}")]
    UnexpectedFlags(u8),
    /// An LSN that PostgreSQL always sets is 0/0. PostgreSQL's apply worker rejects these too.
    #[error("the LSN is not set")]
    ZeroLsn,
    /// The xid of a streamed change is 0. PostgreSQL's apply worker rejects it too.
    #[error("the transaction ID is not set")]
    ZeroXid,
    /// A message is inside a stream block that allows only changes, or outside of the block that it
    /// must end.
    #[error("unexpected message: a stream block starts and stops once, and contains only changes")]
    UnexpectedStreamState,
    /// A stream block starts although streaming was not requested.
    #[error("unexpected stream start: streaming was not requested")]
    StreamingNotRequested,
    /// A message other than a change was passed to [`decode_change`](crate::decode_change).
    #[error("a message of this type is not a change")]
    NotAChange,
}

/// The message that contains the error, as a prefix of the error text.
struct Place(Option<u8>);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(tag) => write!(f, "message {} ", Byte(tag)),
            None => Ok(()),
        }
    }
}

/// A message type or other byte, printed as `'I'` or `'\x00'`.
struct Byte(u8);

impl fmt::Display for Byte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}'", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_states_the_message_the_offset_and_the_cause() {
        let kind = DecodeErrorKind::Truncated { needed: 8, left: 3 };
        assert_eq!(
            DecodeError::new(17, kind).in_message(b'I').to_string(),
            "message 'I' at byte 17: insufficient data: the field needs 8 bytes, 3 are left"
        );
        assert_eq!(
            DecodeError::new(0, DecodeErrorKind::UnknownFrame(0)).to_string(),
            "at byte 0: unrecognized frame type '\\x00'"
        );
        assert_eq!(DecodeErrorKind::UnexpectedFlags(2).to_string(), "unknown flags 0x02");
    }
}
