//! pgapace: applies PostgreSQL logical replication from outside the servers.
//!
//! A change travels `publisher/receiver` → `pgoutput` → `engine` → `apply/worker` →
//! `subscriber/statement` → commit → `engine::progress` → `publisher/feedback`; see ARCHITECTURE.md.
#![forbid(unsafe_code)]

mod apply;
mod barrier;
mod both_servers;
mod check;
mod cli;
mod config;
mod connecting;
mod encoding_error;
mod error;
mod file_size_limit;
mod hand_over;
mod http;
mod lag;
mod login_role;
mod lost_answers;
mod membership;
mod native;
mod observe;
mod pooler;
mod printable;
mod process;
mod product;
mod publisher;
mod recording;
mod repair;
mod report;
mod retried;
mod same_database;
mod scoped_thread;
mod sequences;
mod spool;
mod sqlstate;
mod standby_names;
mod stopping;
mod subscriber;
mod subscription;
mod switchover;
mod systemd;
mod table_name;
mod tablesync;
mod top;
mod two_phase;
mod verify;
mod whatif;

fn main() -> std::process::ExitCode {
    // Before there are threads, and large buffers.
    malloc::return_large_blocks();
    file_size_limit::let_writes_fail();
    cli::main()
}
