//! A barrier: snapshots of both servers that show the same state of the publisher, while the subscription
//! goes on streaming.
//!
//! ```text
//!  verb (verify, repair)                  process that runs the subscription
//!
//!  row in pgapace.barrier:
//!  requested ────────────────────────►  the leader finds it, and starts the keeper, a thread
//!                                       keeper: the leader delays what arrives
//!            ◄──────────── creating ──  keeper: creates a temporary slot on the publisher: LSN L
//!                                       leader: commits what is before L, and nothing behind it
//!                                       keeper: exports a snapshot of the subscriber
//!            ◄─────────────── ready ──  keeper: the leader goes on, unless the request `holds` it
//!  imports both snapshots
//!  deletes the row ──────────────────►  keeper: ends the snapshots; the leader goes on
//! ```
//!
//! The row is the only link between the two processes, so either may die at any time. The next run of the
//! subscription deletes the rows of a process that died, before it applies anything. The keeper deletes the
//! row of a verb that died. While the stream is held, a verb writes only in a transaction that also deletes
//! the row (`row::take_sql`). So the stream cannot go on before that transaction has ended.
//!
//! See [`engine::barrier`] for why the leader delays.

mod failing_run;
pub(crate) mod keeper;
mod row;
pub(crate) mod taker;
pub(crate) mod waiting_for;

pub(crate) use row::clear_sql;
