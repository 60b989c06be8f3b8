//! The pure core of pgapace: what happens between a decoded message and a statement.
//!
//! Nothing here knows sockets, clocks or threads: events go in, commands come out. That is what
//! lets a test run any interleaving, crash or error from a seed. Modules stand in the order in
//! which a change meets them:
//!
//! 1. [`relation`]: what the publisher says its tables look like, by version.
//! 1. [`transaction`]: a run of changes of one source transaction, kept as references into the
//!    received bytes.
//! 1. [`assemble`]: messages to transactions, large ones in parts.
//! 1. [`early`], [`streams`]: what of a streamed transaction may be applied while it is open, and on
//!    which session.
//! 1. [`sync LSN`]: which changes of a table are already in its initial copy.
//! 1. [`table_sync`]: how far the copy of a table has come.
//! 1. [`deferred`]: changes of a table that is being copied, put off.
//! 1. [`group`]: adjacent transactions to apply groups.
//! 1. [`key`], [`net`]: the changes of one row folded into one, inside a group.
//! 1. [`writeset`]: which changes of a group must wait for which groups before it.
//! 1. [`work`], [`dispatch`]: which group goes to which worker, and when.
//! 1. [`order`]: which groups have ended, and who may go on.
//! 1. [`worker`]: what a worker does with its groups next, and what answers mean for them.
//! 1. [`blockers`]: which groups give way when the oldest one waits for a lock of a later one.
//! 1. [`serialized`]: which tables are applied in stream order because that happens often.
//! 1. [`read_ahead`]: whether reads are so slow that rows are read before they are needed.
//! 1. [`share`]: how many sessions each of several subscriptions has.
//! 1. [`progress`]: received, applied, durable: what may be acknowledged.
//! 1. [`unresolved`]: prepared transactions: when one is due, and what keeps it from being forgotten.
//! 1. [`published`]: was a table published all the time?
//! 1. [`history`]: is the publisher's history the one that our progress belongs to?
//! 1. [`sequence`]: where a sequence of the subscriber is to stand; sequences are not in the stream.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod blockers;
pub mod deferred;
pub mod dispatch;
pub mod group;
pub mod history;
pub mod key;
pub mod net;
pub mod order;
pub mod progress;
pub mod published;
pub mod read_ahead;
pub mod relation;
pub mod sequence;
pub mod serialized;
pub mod share;
pub mod streaming;
pub mod sync_lsn;
pub mod table_sync;
pub mod transaction;
pub mod unresolved;
pub mod work;
pub mod worker;
pub mod writeset;
