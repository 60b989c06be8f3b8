//! The client side of the PostgreSQL frontend/backend protocol 3.0: connection strings, TLS,
//! authentication, pipelined sessions and replication sessions.
//!
//! All calls block. One thread owns one connection and uses a non-blocking socket with poll(2). The
//! crate does not interpret the contents of a replication stream.
//!
//! - [`ConnInfo`] completes and checks a connection string as libpq does.
//! - [`Session::connect`] opens a [`Session`]: whole SQL statements, COPY, and a raw pipeline.
//!   Queueing a Bind in the pipeline allocates nothing, and replies are read in place.
//! - [`ReplicationStream`] carries CopyData in both directions and returns chunks of whole messages.
//! - [`CancelHandle`] and [`Waker`] are the only handles that other threads hold.
//!
//! Why a wire layer of its own: no crate offers a replication connection with libpq's connection
//! strings, and a pipelined session needs control over every Sync. Statements that are not
//! pipelined use the same [`Session`], so that every connection understands the same connection
//! strings. The socket is non-blocking, so a long pipeline cannot deadlock with a server that wants
//! to answer.

#![forbid(unsafe_code)]

mod connect;
mod conninfo;
mod error;
mod memory;
mod protection;
mod quote;
mod replication;
mod session;
mod stream;
mod version;

pub use connect::{CancelHandle, Startup};
pub use conninfo::{ConnInfo, ConnInfoError, without_passwords};
pub use error::{Error, Result, ServerError};
pub use memory::zeroed;
pub use protection::{Protection, Verified};
pub use quote::{quote_ident, quote_literal, quote_replication_literal};
pub use replication::{
    CopyChunk, EndReason, Frames, Haste, Received, ReplicationStream, StatusSender, WaitOutcome,
    Waker,
};
pub use session::{
    Column, CopyData, CopyIn, CopyOut, DataRow, DescribedColumn, Param, PreparedStatement, Queued,
    Reply, Row, RowDescription, RowIter, Rows, Session, TransactionStatus, affected_rows,
};
pub use stream::{Activity, AnswerWait};
pub use version::ServerVersion;
