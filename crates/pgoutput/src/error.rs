//! What can be wrong with the publisher's bytes.

use std::fmt;

use crate::tuple::MAX_COLUMNS;

/// The bytes are not a frame or message of the protocol.
///
/// There is no way to go on after this error: one that is skipped is a change that is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}at byte {offset}: {kind}", Place(*message))]
pub struct DecodeError {
    /// Where, in bytes from the beginning of the slice that was given to decode.
    pub offset: usize,
    /// What was found there.
    pub kind: DecodeErrorKind,
    /// The message being read: its first byte, once that was read. `None` for a frame.
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

/// What is wrong at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// The bytes end inside a field.
    #[error("the data ends here: {needed} bytes are needed, {left} are left")]
    Truncated {
        /// Bytes the field takes.
        needed: usize,
        /// Bytes there are.
        left: usize,
    },
    /// No message begins with this byte.
    #[error("there is no message of kind {}", Byte(*.0))]
    UnknownMessage(u8),
    /// No frame begins with this byte.
    #[error("there is no frame of kind {}", Byte(*.0))]
    UnknownFrame(u8),
    /// Not one of `N`, `K`, `O`, or not where it may be.
    #[error("{} does not announce a row that may be here", Byte(*.0))]
    UnknownTupleKind(u8),
    /// Not one of `n`, `u`, `t`, `b`.
    #[error("there is no column value of kind {}", Byte(*.0))]
    UnknownColumnKind(u8),
    /// Not one of `d`, `n`, `f`, `i`.
    #[error("there is no replica identity {}", Byte(*.0))]
    UnknownReplicaIdentity(u8),
    /// A length or count below zero.
    #[error("the length is negative: {0}")]
    NegativeLength(i32),
    /// More columns than a row of PostgreSQL can have, [`MAX_COLUMNS`].
    #[error("more than {MAX_COLUMNS} columns")]
    TooManyColumns,
    /// A name that is not UTF-8.
    ///
    /// Names are quoted into SQL for a session whose encoding is UTF-8. A byte sequence that is
    /// none could change meaning on the way, so it is refused here rather than repaired.
    #[error("the name is not UTF-8")]
    NotUtf8,
    /// A name without its end.
    #[error("the name is not ended by a zero byte")]
    MissingNul,
    /// Bytes after the last field.
    #[error("the message is over, but {0} bytes follow")]
    TrailingBytes(usize),
    /// Flag bits this program does not know; they may change what the message means.
    #[error("unknown flags {0:#04x}")]
    UnexpectedFlags(u8),
    /// A position that PostgreSQL always sets is 0/0. Its own subscriber refuses these too.
    #[error("the log position is not set")]
    ZeroLsn,
    /// The transaction of a streamed change is 0. PostgreSQL's own subscriber refuses it too.
    #[error("the transaction id is not set")]
    ZeroXid,
    /// A block of a streamed transaction holds changes only; a block cannot begin inside another
    /// nor end without having begun.
    #[error(
        "the message cannot come here: a stream block begins and ends once, and holds changes only"
    )]
    UnexpectedStreamState,
    /// A stream block although streaming was not asked for.
    #[error("a stream block begins, but streaming was not asked for")]
    StreamingNotRequested,
    /// A message that belongs to no relation's data was given to
    /// [`decode_change`](crate::decode_change).
    #[error("a message of this kind is not a change")]
    NotAChange,
}

/// The message in which the error lies, for the front of the text.
struct Place(Option<u8>);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(tag) => write!(f, "message {} ", Byte(tag)),
            None => Ok(()),
        }
    }
}

/// A byte that should have been a letter: `'I'`, `'\x00'`.
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
    fn an_error_says_where_and_what_in_plain_words() {
        let kind = DecodeErrorKind::Truncated { needed: 8, left: 3 };
        assert_eq!(
            DecodeError::new(17, kind).in_message(b'I').to_string(),
            "message 'I' at byte 17: the data ends here: 8 bytes are needed, 3 are left"
        );
        assert_eq!(
            DecodeError::new(0, DecodeErrorKind::UnknownFrame(0)).to_string(),
            "at byte 0: there is no frame of kind '\\x00'"
        );
        assert_eq!(DecodeErrorKind::UnexpectedFlags(2).to_string(), "unknown flags 0x02");
    }
}
