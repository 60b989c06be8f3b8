//! Measurements: `cargo run --release -p bench -- drain`.
//!
//! Every figure is a ratio within one run on one machine. The bench drives servers and programs
//! from outside; of the workspace it uses what the program itself is built on.
#![forbid(unsafe_code)]

mod drain;

use clap::{Parser, Subcommand};

/// Measures pgapace against the publisher's limits.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// How fast a publisher can be read, by pg_recvlogical and by our receiver, and how fast what
    /// was read is decoded
    Drain(drain::DrainArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Drain(args) => drain::run(&args),
    }
}
