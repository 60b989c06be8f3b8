//! Kinds of servers (connection poolers, servers that resemble PostgreSQL, schemas of other users in the search
//! path, thousands of tables, no libxml), and the log lines that pgapace's statements cause.

mod catalogue_plans;
mod citus;
mod libxml;
mod lookalikes;
mod pooler;
mod search_path;
mod server_log;
