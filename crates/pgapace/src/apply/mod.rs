//! From transactions to committed rows: the leader distributes, the workers apply.

pub(crate) mod answers;
pub(crate) mod blockers;
pub(crate) mod conflict_log;
pub(crate) mod conflicts;
pub(crate) mod context;
pub(crate) mod durability;
pub(crate) mod encoder;
pub(crate) mod incoming;
pub(crate) mod leader;
pub(crate) mod offender;
pub(crate) mod pool;
pub(crate) mod prefetch;
pub(crate) mod readable;
pub(crate) mod schema_watch;
pub(crate) mod sessions;
pub(crate) mod streams;
pub(crate) mod tables;
pub(crate) mod thread;
pub(crate) mod turns;
pub(crate) mod work;
pub(crate) mod worker;
