//! What the servers are and what they see of us: poolers, servers that only look like PostgreSQL,
//! and the lines that our statements leave in their logs.

mod citus;
mod lookalikes;
mod pooler;
mod quiet_log;
