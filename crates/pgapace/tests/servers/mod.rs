//! Kinds of servers (connection poolers, servers that resemble PostgreSQL, schemas of other users in the search
//! path), and the log lines that pgapace's statements cause.

mod citus;
mod lookalikes;
mod pooler;
mod search_path;
mod server_log;
