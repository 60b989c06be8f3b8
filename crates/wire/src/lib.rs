//! How to talk to a PostgreSQL server: connection strings, TLS and authentication, one pipelined
//! session, one replication session.
//!
//! Everything here blocks: one thread owns one connection, on a non-blocking socket and poll(2).
//! The crate knows sockets and the frontend/backend protocol 3.0; what a replication stream
//! means is none of its business.
//!
//! - [`ConnInfo`] completes and checks a connection string the way libpq does.
//! - [`Session::connect`] makes a [`Session`]: SQL for control work, COPY, and a raw pipeline in
//!   which queueing a Bind allocates nothing and replies are read in place.
//! - [`ReplicationStream`] carries CopyData both ways and hands on whole chunks of messages.
//! - [`CancelHandle`] and [`Waker`] are what other threads may hold.

#![forbid(unsafe_code)]

mod connect;
mod conninfo;
mod error;
mod quote;
mod replication;
mod session;
mod stream;
mod version;

pub use connect::{CancelHandle, Startup};
pub use conninfo::{ConnInfo, ConnInfoError};
pub use error::{Error, Result, ServerError};
pub use quote::{quote_ident, quote_literal};
pub use replication::{
    CopyChunk, EndReason, Frames, Haste, Received, ReplicationStream, WaitOutcome, Waker,
};
pub use session::{
    Column, CopyData, CopyIn, CopyOut, DataRow, Param, Queued, Reply, Row, RowIter, Rows, Session,
    TransactionStatus, affected_rows,
};
pub use version::ServerVersion;
