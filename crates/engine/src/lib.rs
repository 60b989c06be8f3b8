//! The pure core of pgapace: what happens between a decoded message and a statement.
//!
//! Nothing here knows sockets, clocks or threads: events go in, commands come out. That is what
//! lets a test run any interleaving, crash or error from a seed. Modules stand in the order in
//! which a change meets them:
//!
//! 1. [`relation`]: what the publisher says its tables look like, by version.
//! 2. [`transaction`]: a run of changes of one source transaction, kept as references into the
//!    received bytes.
//! 3. [`assemble`]: messages to transactions, large ones in parts.
//! 4. [`early`]: what of a streamed transaction may be applied while it is open.
//! 5. [`gate`]: which changes of a table are already in its initial copy.
//! 6. [`deferred`]: changes of a table that is being copied, put off.
//! 7. [`group`]: adjacent transactions to apply groups.
//! 8. [`key`], [`net`]: the changes of one row folded into one, inside a group.
//! 9. [`writeset`]: which changes of a group must wait for which groups before it.
//! 10. [`order`]: which groups have ended, and who may go on.
//! 11. [`worker`]: what a worker does with its groups next, and what answers mean for them.
//! 12. [`blockers`]: which groups give way when the oldest one waits for a lock of a later one.
//! 13. [`demotion`]: which tables are applied in stream order because that happens often.
//! 14. [`read_ahead`]: whether reads are so slow that rows are read before they are needed.
//! 15. [`share`]: how many sessions each of several subscriptions has.
//! 16. [`progress`]: received, applied, durable: what may be acknowledged.
//! 17. [`history`]: may a publisher's timeline be followed from where we are?
#![forbid(unsafe_code)]

pub mod assemble;
pub mod blockers;
pub mod deferred;
pub mod demotion;
pub mod early;
pub mod gate;
pub mod group;
pub mod history;
pub mod key;
pub mod net;
pub mod order;
pub mod progress;
pub mod read_ahead;
pub mod relation;
pub mod share;
pub mod transaction;
pub mod worker;
pub mod writeset;
