//! PostgreSQL's logical replication protocol: decodes bytes into messages, and encodes messages for
//! tests.
//!
//! A publisher sends CopyData packets. Each contains one [`Frame`]; a frame of kind
//! [`Frame::XLogData`] contains one [`Message`] of the output plugin `pgoutput`. This crate knows
//! only these bytes. It has no socket and no clock. Its only state is whether the publisher is
//! inside a block of a streamed transaction (see [`Decoder`]).
//!
//! Three rules hold throughout:
//!
//! * **Borrowed.** A message refers to the bytes that it was decoded from. Decoding copies and
//!   allocates nothing, and columns are read in place.
//! * **Checked once.** Decoding checks every length, kind and name of the message. Iterating over
//!   the result cannot fail.
//! * **Strict.** Input that is truncated, too long, of an unknown kind or with unknown flags is a
//!   [`DecodeError`] that names the byte. It is never a panic, and the decoder never guesses: a
//!   change that is misread would corrupt a user's table.
//!
//! The crate covers all versions of the protocol, 1 to 4, and the primary status messages of
//! PostgreSQL 19. Names follow the chapters "Streaming Replication Protocol", "Logical Streaming
//! Replication Protocol" and "Logical Replication Message Formats" of the PostgreSQL documentation.
//! The authority is `src/backend/replication/logical/proto.c`.
//!
//! ```
//! use pgoutput::{Column, Decoder, Frame, Message, Streaming};
//!
//! let copy_data = b"w\0\0\0\0\x01\x6B\x37\x48\0\0\0\0\x01\x6B\x37\x48\0\0\0\0\0\0\0\0\
//!     I\0\0\x40\x01N\0\x02t\0\0\0\x0242n";
//! let mut decoder = Decoder::new(Streaming::Off);
//! let Frame::XLogData { start, payload, .. } = Frame::decode(copy_data)? else { unreachable!() };
//! assert_eq!(start.to_string(), "0/16B3748");
//! let Message::Insert(insert) = decoder.decode(payload)? else { unreachable!() };
//! let columns: Vec<_> = insert.new.columns().collect();
//! assert_eq!(columns, [Column::Text(b"42"), Column::Null]);
//! # Ok::<(), pgoutput::DecodeError>(())
//! ```
#![forbid(unsafe_code)]

pub mod builder;
mod decoder;
mod error;
mod frame;
mod ids;
mod lsn;
mod message;
mod raw_name;
mod reader;
mod timestamp;
mod tuple;
mod writer;

pub use builder::{ColumnsBuilder, RelIdsBuilder, TupleBuilder};
pub use decoder::{Decoder, Streaming, decode_change};
pub use error::{DecodeError, DecodeErrorKind};
pub use frame::{Frame, PrimaryStatusRequest, StatusUpdate};
pub use ids::{RelId, TypeOid, Xid};
pub use lsn::{Lsn, ParseLsnError};
pub use message::{
    Begin, BeginPrepare, Columns, Commit, CommitPrepared, Delete, Insert, LogicalMessage, Message,
    Origin, Prepare, RelIds, RelIdsIter, Relation, RelationColumn, RelationColumns,
    ReplicaIdentity, RollbackPrepared, StreamAbort, StreamCommit, StreamStart, Truncate, TypeInfo,
    Update,
};
pub use raw_name::RawName;
pub use timestamp::Timestamp;
pub use tuple::{Column, MAX_COLUMNS, OldTuple, Tuple, TupleColumns};
