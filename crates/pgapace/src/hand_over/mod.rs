//! A process gives a subscription up because another one asks it to: `pgapace hand-over` and `pgapace
//! switchover`.
//!
//! ```text
//!  verb                                   process that runs the subscription (epoch E)
//!
//!  row in pgapace.hand_over, for E ────►  the leader finds it, and takes no new transaction
//!                                         what is in flight is committed, durable and acknowledged
//!                                         the stream and the apply sessions end
//!            ◄──── done_at, and the LSN ─ the control session ends, and the owner's lock with it
//!  owner's lock: another process has it
//!                                         hand-over:  the process ends with its own exit code
//!                                         switchover: the process stands aside. It runs the subscription
//!                                                     again when the session of the verb is gone
//! ```
//!
//! The row is the only link between the two. It names the epoch, so that the process that comes next does
//! not obey it. A process remembers its last epoch, so that it obeys while it retries after an error. A
//! row whose session is gone has no effect, except on a process that has seen it already.
//!
//! A transaction that does not end in time is rolled back. Its publisher sends it again to the next
//! process, as after a crash.

mod asking;
mod row;

pub(crate) use asking::{ask, ask_to_stand_aside};
pub(crate) use row::{AtStart, Request, asked, done, request_sql, started_sql, wait_aside};
