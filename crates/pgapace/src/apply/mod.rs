//! From transactions to committed rows: the leader hands groups out, apply workers execute them.
//!
//! Imports run one way. A module imports only from lines above its own:
//!
//! 1. `work`, `readable`, `expected`, `apply_session`, `session_leases`, `thread`, `shared_commit_order`, `conflict_log`,
//!    `read_tables` and `tables`, `schema_watch`, `requests`
//! 2. `offender`, `opposite_standbys`, `blockers`, `bookkeeping`, `prefetch`, `spool_memory`
//! 3. `context`: what an error says about a change; `encoder`: groups to queued statements; `durability`
//! 4. `replies`: what the subscriber says about those statements
//! 5. `conflicts`: rules decide about single changes; `streams`: streaming apply
//! 6. `worker`: apply workers
//! 7. `pool`
//! 8. `leader`

pub(crate) mod apply_session;
pub(crate) mod blockers;
pub(crate) mod bookkeeping;
pub(crate) mod conflict_log;
pub(crate) mod conflicts;
pub(crate) mod context;
pub(crate) mod durability;
pub(crate) mod encoder;
pub(crate) mod expected;
pub(crate) mod leader;
pub(crate) mod offender;
pub(crate) mod opposite_standbys;
pub(crate) mod pool;
pub(crate) mod prefetch;
pub(crate) mod read_tables;
pub(crate) mod readable;
pub(crate) mod remedy;
pub(crate) mod replies;
pub(crate) mod requests;
pub(crate) mod schema_watch;
pub(crate) mod session_leases;
pub(crate) mod shared_commit_order;
pub(crate) mod spool_memory;
pub(crate) mod standby_wait;
pub(crate) mod streams;
pub(crate) mod tables;
pub(crate) mod thread;
pub(crate) mod user_code;
pub(crate) mod work;
pub(crate) mod worker;
