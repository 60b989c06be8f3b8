//! PostgreSQL's logical replication protocol: bytes to messages, and for tests back.
//!
//! A publisher sends CopyData packets. Each holds one [`Frame`]; a frame of kind
//! [`Frame::XLogData`] holds one [`Message`] of the output plugin `pgoutput`. This crate knows
//! these bytes and nothing else: no socket, no clock, no state but whether the publisher is inside
//! a block of a streamed transaction (see [`Decoder`]).
//!
//! Three rules hold throughout:
//!
//! * **Borrowed.** A message points into the bytes it was decoded from. Nothing is copied and
//!   nothing is allocated; columns are walked where they lie.
//! * **Checked once.** Decoding looks at every length, kind and name in the message. What it
//!   returns can be walked without a further error.
//! * **Strict.** Input that is cut short, too long, of an unknown kind or with unknown flags is a
//!   [`DecodeError`] which names the byte, never a panic and never a guess. A change that is
//!   misread would be applied to somebody's table.
//!
//! All versions of the protocol are covered, 1 to 4, and the primary status exchange of
//! PostgreSQL 19. The names follow the chapters "Streaming Replication Protocol", "Logical
//! Streaming Replication Protocol" and "Logical Replication Message Formats" of the PostgreSQL
//! documentation; the authority is `src/backend/replication/logical/proto.c`.
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
pub use timestamp::Timestamp;
pub use tuple::{Column, MAX_COLUMNS, OldTuple, Tuple, TupleColumns};
