//! The messages of `pgoutput`: one module each, with its fields, decoding, encoding and tests.

mod begin;
mod commit;
mod delete;
mod insert;
mod logical;
mod origin;
mod prepare;
mod relation;
mod stream;
mod truncate;
mod type_info;
mod update;

pub use begin::Begin;
pub use commit::Commit;
pub use delete::Delete;
pub use insert::Insert;
pub use logical::LogicalMessage;
pub use origin::Origin;
pub use prepare::{BeginPrepare, CommitPrepared, Prepare, RollbackPrepared};
pub use relation::{Columns, Relation, RelationColumn, RelationColumns, ReplicaIdentity};
pub use stream::{StreamAbort, StreamCommit, StreamStart};
pub use truncate::{RelIds, RelIdsIter, Truncate};
pub use type_info::TypeInfo;
pub use update::Update;

use crate::reader::Reader;
use crate::{DecodeError, DecodeErrorKind, Xid};

/// A message of the output plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// `B`: the begin of a transaction.
    Begin(Begin),
    /// `C`: the commit of a transaction.
    Commit(Commit),
    /// `O`: the origin of a transaction that was replicated to this publisher.
    Origin(Origin<'a>),
    /// `R`: the definition of a table from here on.
    Relation(Relation<'a>),
    /// `Y`: the name of a type that is not built in.
    Type(TypeInfo<'a>),
    /// `I`: an inserted row.
    Insert(Insert<'a>),
    /// `U`: an updated row.
    Update(Update<'a>),
    /// `D`: a deleted row.
    Delete(Delete<'a>),
    /// `T`: truncated tables.
    Truncate(Truncate<'a>),
    /// `M`: a logical decoding message of an application.
    Logical(LogicalMessage<'a>),
    /// `S`: the start of a block of a streamed transaction.
    StreamStart(StreamStart),
    /// `E`: the end of the block.
    StreamStop,
    /// `c`: the commit of a streamed transaction.
    StreamCommit(StreamCommit),
    /// `A`: the abort of a streamed transaction or of one of its subtransactions.
    StreamAbort(StreamAbort),
    /// `b`: the begin of a transaction that will be prepared.
    BeginPrepare(BeginPrepare<'a>),
    /// `P`: a transaction is prepared.
    Prepare(Prepare<'a>),
    /// `K`: the commit of a prepared transaction.
    CommitPrepared(CommitPrepared<'a>),
    /// `r`: the rollback of a prepared transaction.
    RollbackPrepared(RollbackPrepared<'a>),
    /// `p`: a streamed transaction is prepared.
    StreamPrepare(Prepare<'a>),
}

/// Whether this is a change: a message that a stream block may contain. All except Origin start
/// with their xid there.
pub(crate) fn is_change(tag: u8) -> bool {
    matches!(tag, b'I' | b'U' | b'D' | b'R' | b'Y' | b'T' | b'M' | b'O')
}

impl<'a> Message<'a> {
    /// Decodes the bytes after the message type. Under parallel streaming, `abort_has_position` is
    /// true.
    #[inline]
    pub(crate) fn decode(
        tag: u8,
        reader: &mut Reader<'a>,
        in_stream: bool,
        abort_has_position: bool,
    ) -> Result<Self, DecodeError> {
        let message = match tag {
            b'I' => Self::Insert(Insert::decode(reader, in_stream)?),
            b'U' => Self::Update(Update::decode(reader, in_stream)?),
            b'D' => Self::Delete(Delete::decode(reader, in_stream)?),
            b'B' => Self::Begin(Begin::decode(reader)?),
            b'C' => Self::Commit(Commit::decode(reader)?),
            b'O' => Self::Origin(Origin::decode(reader)?),
            b'R' => Self::Relation(Relation::decode(reader, in_stream)?),
            b'Y' => Self::Type(TypeInfo::decode(reader, in_stream)?),
            b'T' => Self::Truncate(Truncate::decode(reader, in_stream)?),
            b'M' => Self::Logical(LogicalMessage::decode(reader, in_stream)?),
            b'S' => Self::StreamStart(StreamStart::decode(reader)?),
            b'E' => Self::StreamStop,
            b'c' => Self::StreamCommit(StreamCommit::decode(reader)?),
            b'A' => Self::StreamAbort(StreamAbort::decode(reader, abort_has_position)?),
            b'b' => Self::BeginPrepare(BeginPrepare::decode(reader)?),
            b'P' => Self::Prepare(Prepare::decode(reader)?),
            b'K' => Self::CommitPrepared(CommitPrepared::decode(reader)?),
            b'r' => Self::RollbackPrepared(RollbackPrepared::decode(reader)?),
            b'p' => Self::StreamPrepare(Prepare::decode(reader)?),
            _ => return Err(reader.error_before(1, DecodeErrorKind::UnknownMessage(tag))),
        };
        reader.finish()?;
        Ok(message)
    }

    /// Appends the message to `out` as a publisher sends it, for tests and simulations.
    ///
    /// The xid in front of a change is written if the change has one. So changes inside a stream
    /// block must have one, and others must not. Nothing else is checked: unknown flags and unset
    /// LSNs are written as they are.
    ///
    /// # Panics
    ///
    /// If a [`LogicalMessage`] has 2 GiB or more. In debug builds, also if a name contains a zero
    /// byte.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.tag());
        match self {
            Self::Begin(message) => message.encode(out),
            Self::Commit(message) => message.encode(out),
            Self::Origin(message) => message.encode(out),
            Self::Relation(message) => message.encode(out),
            Self::Type(message) => message.encode(out),
            Self::Insert(message) => message.encode(out),
            Self::Update(message) => message.encode(out),
            Self::Delete(message) => message.encode(out),
            Self::Truncate(message) => message.encode(out),
            Self::Logical(message) => message.encode(out),
            Self::StreamStart(message) => message.encode(out),
            Self::StreamStop => {}
            Self::StreamCommit(message) => message.encode(out),
            Self::StreamAbort(message) => message.encode(out),
            Self::BeginPrepare(message) => message.encode(out),
            Self::Prepare(message) | Self::StreamPrepare(message) => message.encode(out),
            Self::CommitPrepared(message) => message.encode(out),
            Self::RollbackPrepared(message) => message.encode(out),
        }
    }

    /// The message type: its first byte.
    #[must_use]
    pub const fn tag(&self) -> u8 {
        match self {
            Self::Begin(_) => b'B',
            Self::Commit(_) => b'C',
            Self::Origin(_) => b'O',
            Self::Relation(_) => b'R',
            Self::Type(_) => b'Y',
            Self::Insert(_) => b'I',
            Self::Update(_) => b'U',
            Self::Delete(_) => b'D',
            Self::Truncate(_) => b'T',
            Self::Logical(_) => b'M',
            Self::StreamStart(_) => b'S',
            Self::StreamStop => b'E',
            Self::StreamCommit(_) => b'c',
            Self::StreamAbort(_) => b'A',
            Self::BeginPrepare(_) => b'b',
            Self::Prepare(_) => b'P',
            Self::CommitPrepared(_) => b'K',
            Self::RollbackPrepared(_) => b'r',
            Self::StreamPrepare(_) => b'p',
        }
    }

    /// The xid of the transaction or subtransaction of a change; only inside a stream block.
    #[must_use]
    pub const fn stream_xid(&self) -> Option<Xid> {
        match self {
            Self::Relation(message) => message.xid,
            Self::Type(message) => message.xid,
            Self::Insert(message) => message.xid,
            Self::Update(message) => message.xid,
            Self::Delete(message) => message.xid,
            Self::Truncate(message) => message.xid,
            Self::Logical(message) => message.xid,
            _ => None,
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Helpers that compare a message with its bytes.

    use super::Message;
    use crate::{DecodeError, DecodeErrorKind, Decoder, Streaming};

    fn decode(bytes: &[u8], in_stream: bool) -> Result<Message<'_>, DecodeError> {
        let mut decoder = Decoder::new(Streaming::On);
        if in_stream {
            decoder.decode(b"S\0\0\0\x01\x01").unwrap();
        }
        decoder.decode(bytes)
    }

    fn check_at(bytes: &[u8], message: Message<'_>, in_stream: bool) {
        assert_eq!(decode(bytes, in_stream), Ok(message));
        let mut out = Vec::new();
        message.encode(&mut out);
        assert_eq!(out.escape_ascii().to_string(), bytes.escape_ascii().to_string());
    }

    fn refused_at(bytes: &[u8], offset: usize, kind: DecodeErrorKind, in_stream: bool) {
        let message = bytes.first().copied();
        assert_eq!(decode(bytes, in_stream), Err(DecodeError { offset, kind, message }));
    }

    pub(crate) fn check(bytes: &[u8], message: Message<'_>) {
        check_at(bytes, message, false);
    }

    pub(crate) fn check_in_stream(bytes: &[u8], message: Message<'_>) {
        check_at(bytes, message, true);
    }

    pub(crate) fn refused(bytes: &[u8], offset: usize, kind: DecodeErrorKind) {
        refused_at(bytes, offset, kind, false);
    }

    pub(crate) fn refused_in_stream(bytes: &[u8], offset: usize, kind: DecodeErrorKind) {
        refused_at(bytes, offset, kind, true);
    }
}
