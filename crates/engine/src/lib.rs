//! The pure core of pgapace: everything between a decoded message and a statement.
//!
//! Nothing here knows sockets, clocks or threads. Events go in and commands come out, so a test can
//! replay any interleaving, crash or error from a seed. The modules are listed in the order in
//! which a change passes through them:
//!
//! 1. [`relation`]: the versions of the publisher's table definitions.
//! 1. [`transaction`]: a run of changes of one source transaction, kept as references into the
//!    received bytes.
//! 1. [`assemble`]: turns messages into transactions, and splits large ones into parts.
//! 1. [`barrier`]: where the stream waits so that both servers show one state of the publisher.
//! 1. [`intake`]: what becomes of each message and each part.
//! 1. [`streaming`]: which changes of a streamed transaction may be applied before its commit, and
//!    in which session.
//! 1. [`sync_lsn`]: which changes of a table its initial copy already contains.
//! 1. [`table_sync`]: the synchronization state of a table.
//! 1. [`deferred`]: the changes that wait until the copy of their table is complete.
//! 1. [`group`]: turns adjacent transactions into apply groups.
//! 1. [`key`], [`net`]: fold the changes of one row in a group into one net change.
//! 1. [`writeset`]: which changes of a group depend on which earlier groups.
//! 1. [`work`], [`dispatch`]: which worker gets which group, and when.
//! 1. [`order`]: which groups have ended, and which may proceed.
//! 1. [`worker`]: the next step of a worker, and what the answers of the subscriber mean for it.
//! 1. [`blockers`]: which groups are rolled back when they block the oldest group.
//! 1. [`serialized`]: which tables run one transaction at a time because that happens often.
//! 1. [`prefetch`]: whether reads are so slow that rows are read before they are needed.
//! 1. [`session_leases`]: how many sessions each of several subscriptions has.
//! 1. [`progress`]: the received, applied and durable positions, and what may be acknowledged.
//! 1. [`unresolved`]: when a held prepared transaction is due, and how long a committed one is
//!    kept.
//! 1. [`published`]: whether a table was published without interruption.
//! 1. [`forecast`]: what a number of workers would make of a recorded stream, in virtual time.
//! 1. [`history`]: whether the publisher still has the history that the recorded progress belongs
//!    to.
//! 1. [`stream_start`]: where a run asks the publisher to begin.
//! 1. [`heartbeat`]: whether the process that runs a subscription has stopped, as another one sees it.
//! 1. [`sequence`]: the position to set for a sequence of the subscriber; the stream has no
//!    sequences.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod barrier;
pub mod blockers;
pub mod deferred;
pub mod dispatch;
pub mod forecast;
pub mod group;
pub mod heartbeat;
pub mod history;
pub mod intake;
pub mod key;
pub mod net;
pub mod order;
pub mod other_table;
pub mod prefetch;
pub mod progress;
pub mod published;
pub mod relation;
pub mod sequence;
pub mod serialized;
pub mod session_leases;
pub mod spread;
pub mod stream_start;
pub mod streaming;
pub mod sync_lsn;
pub mod table_name;
pub mod table_sync;
pub mod transaction;
pub mod unresolved;
pub mod work;
pub mod worker;
pub mod writeset;
