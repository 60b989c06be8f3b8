//! Kinds of servers (connection poolers, servers that resemble PostgreSQL), and the log lines that
//! pgapace's statements cause.

mod citus;
mod lookalikes;
mod pooler;
mod server_log;
