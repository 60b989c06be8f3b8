//! Command line options.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, Parser, Subcommand};

use crate::citus;
use crate::drain;
use crate::regime::Regime;
use crate::seeds;
use crate::walsenders;
use crate::workload::{self, Workload};

/// Measures pgapace against the native subscription and the publisher's limits.
#[derive(Debug, Parser)]
#[command(name = "bench", version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure how fast a publisher can be read, by pg_recvlogical and by pgapace's receiver, and
    /// how fast the received changes are decoded
    Drain(drain::DrainArgs),
    /// Measure what several walsenders for parts of one publication would give: their streams are
    /// merged into the same transactions again
    Walsenders(walsenders::WalsendersArgs),
    /// Measure how fast a Citus coordinator is fed, by the number of apply workers; needs
    /// PGAPACE_CITUS_BIN, the directory of a server with Citus
    Citus(citus::CitusArgs),
    /// Measure random workloads, one for each seed: a ratio that is far below the others shows a
    /// weakness that no workload of the list has
    Seeds(seeds::SeedsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Workloads to measure, or all; see --list
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workloads: Vec<String>,

    /// List the workloads
    #[arg(long)]
    pub(crate) list: bool,

    #[command(flatten)]
    pub(crate) conditions: Conditions,

    /// Also write the results to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Write docs/benchmarks.md and its plots from all stored results
    #[arg(long)]
    pub(crate) report: bool,

    /// Directory of the report [default: docs of this source tree]
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) docs: Option<PathBuf>,

    /// Directory of the results [default: bench in the build directory]
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) results: Option<PathBuf>,
}

/// The conditions under which programs are compared, and how often.
#[derive(Debug, Args)]
pub(crate) struct Conditions {
    /// Regime: cpu, disk, slow-commit:5ms, cold or rtt:5ms
    #[arg(long, default_value = "cpu")]
    pub(crate) regime: Regime,

    /// Major version of both servers
    #[arg(long, default_value_t = 18)]
    pub(crate) server: u16,

    /// Number of pgapace's apply workers, or auto
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_workers)]
    pub(crate) workers: u32,

    /// Additional arguments of `pgapace run`, separated by spaces
    #[arg(long, value_name = "ARGUMENTS", default_value = "", allow_hyphen_values = true)]
    pub(crate) pgapace_args: String,

    /// The pgapace to measure [default: the one in this program's directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) pgapace: Option<PathBuf>,

    /// Number of rounds; the median is the result
    #[arg(long, default_value_t = 3)]
    pub(crate) rounds: usize,

    /// Multiplies the size of every workload
    #[arg(long, default_value_t = 1.0)]
    pub(crate) scale: f64,

    /// Stop a run after this time (600s, 10m) and project its result
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    pub(crate) native_limit: Duration,

    /// Run every workload (or the given ones) at a tiny scale, one round, and only compare the
    /// tables
    #[arg(long)]
    pub(crate) quick: bool,
}

impl Conditions {
    /// Checks that the options are consistent.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be at least 1");
        ensure!(self.scale > 0.0 && self.scale <= 1000.0, "--scale must be positive");
        Ok(())
    }
}

impl MeasureArgs {
    /// Checks that the options are consistent.
    pub(crate) fn check(&self) -> Result<()> {
        self.conditions.check()?;
        if self.workloads.is_empty() && !self.conditions.quick && !self.list && !self.report {
            bail!("give the workloads to measure, or all; --list shows them");
        }
        Ok(())
    }

    /// The selected workloads.
    pub(crate) fn selected(&self) -> Result<Vec<Workload>> {
        let scale = if self.conditions.quick { 0.0 } else { self.conditions.scale };
        if self.workloads.iter().any(|name| name == "all") {
            return workload::select(&[], scale);
        }
        workload::select(&self.workloads, scale)
    }
}

/// Zero stands for auto.
fn parse_workers(text: &str) -> Result<u32, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(0),
        (_, Ok(number)) if number > 0 => Ok(number),
        _ => Err("a number of workers is auto, or 1 or more".into()),
    }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(number), _) => (number, 1),
        (None, Some(number)) => (number, 60),
        (None, None) => (text, 1),
    };
    match number.parse::<u64>() {
        Ok(number) if number > 0 => Ok(Duration::from_secs(number.saturating_mul(unit))),
        _ => Err("a time is 600s or 10m".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
        let cli = Cli::parse_from(["bench", "tpcb", "hot", "--regime", "rtt:5ms"]);
        assert_eq!(cli.measure.workloads, ["tpcb", "hot"]);
        assert!(cli.measure.check().is_ok());
        assert!(Cli::parse_from(["bench", "drain", "--rounds", "1"]).command.is_some());
        assert!(Cli::parse_from(["bench"]).measure.check().is_err());
        assert!(Cli::try_parse_from(["bench", "hot", "--workers", "0"]).is_err());
        assert_eq!(
            Cli::parse_from(["bench", "hot", "--workers", "auto"]).measure.conditions.workers,
            0
        );
        assert_eq!(Cli::parse_from(["bench", "hot"]).measure.conditions.workers, 1);
        let cli = Cli::parse_from(["bench", "hot", "--pgapace-args", "--log-level=debug --x=1"]);
        assert_eq!(cli.measure.conditions.pgapace_args, "--log-level=debug --x=1");
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse_time("30s"), Ok(Duration::from_secs(30)));
        assert!(parse_time("0").is_err());
        assert!(parse_time("h").is_err());
    }
}
