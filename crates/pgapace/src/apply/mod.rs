//! From transactions to committed rows: the leader distributes, a worker applies.

pub(crate) mod durability;
pub(crate) mod leader;
pub(crate) mod missing;
pub(crate) mod statement_cache;
pub(crate) mod tables;
pub(crate) mod worker;
