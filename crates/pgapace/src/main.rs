//! pgapace: applies PostgreSQL logical replication from outside the servers.
//!
//! A change travels `publisher/receiver` → `pgoutput` → `engine` → `apply/worker` →
//! `target/statement` → commit → `engine::progress` → `publisher/feedback`; see ARCHITECTURE.md.
#![forbid(unsafe_code)]

mod apply;
mod check;
mod cli;
mod config;
mod connecting;
mod error;
mod lag;
mod observe;
mod pooler;
mod product;
mod publisher;
mod spool;
mod stopping;
mod supervisor;
mod sync;
mod target;
mod twophase;

fn main() -> std::process::ExitCode {
    cli::main()
}
