//! Benchmarks: `cargo run --release -p bench -- tpcb --server 18 --regime cpu`.
//!
//! Every result is a ratio within one run on one machine, between the native subscription, pgapace,
//! and the raw drain as the upper limit. The bench drives servers and programs as external
//! processes. From the workspace it uses only the crates that pgapace itself uses.
#![forbid(unsafe_code)]

mod bench;
mod citus;
mod clock;
mod drain;
mod elsewhere;
mod environment;
mod measure;
mod options;
mod outcome;
mod raw;
mod regime;
mod report;
mod round;
mod scenario;
mod seeds;
mod walsenders;
mod watch;
mod workload;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;

use crate::bench::{Bench, find_program, results_directory, worker_arguments};
use crate::clock::Clock;
use crate::options::{Cli, Command, Conditions, MeasureArgs};
use crate::report::{json, markdown, terminal};
use crate::workload::{Scale, Workload};

/// The source tree of this binary.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// The scale of `--quick`.
const QUICK_SCALE: f64 = 0.001;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Drain(args)) => drain::run(&args),
        Some(Command::Walsenders(args)) => walsenders::run(&args),
        Some(Command::Citus(args)) => citus::run(&args),
        Some(Command::Seeds(args)) => random(&args),
        None => measure(&cli.measure),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &MeasureArgs) -> Result<()> {
    args.check()?;
    if args.list {
        for workload in workload::ALL {
            println!("{:<22} {}", workload.name, workload.about);
        }
        return Ok(());
    }
    let mut failures = Vec::new();
    if args.conditions.quick || !args.workloads.is_empty() {
        let outcomes = run(args, &args.selected()?, &mut failures)?;
        if let Some(path) = &args.json {
            json::write(path, &outcomes)?;
        }
    }
    if args.report {
        let docs = args.docs.clone().unwrap_or_else(|| Path::new(SOURCES).join("docs"));
        markdown::write(&results(args)?, &docs)?;
        println!("wrote {}", docs.join("benchmarks.md").display());
    }
    if !failures.is_empty() {
        bail!("{} failed", failures.join(", "));
    }
    Ok(())
}

/// Finds the programs, and starts nothing yet.
fn bench(conditions: &Conditions) -> Result<Bench> {
    let (program, program_version) = find_program(conditions.pgapace.as_deref())?;
    let mut arguments = worker_arguments(&program, conditions.workers)?;
    arguments.extend(conditions.pgapace_args.split_whitespace().map(str::to_owned));
    if conditions.quick {
        println!("quick: only checks that the tables are equal; the figures are not meaningful");
    }
    let binaries = testbed::servers::find_or_fetch(conditions.server)?;
    Ok(Bench {
        binaries,
        regime: conditions.regime,
        rounds: if conditions.quick { 1 } else { conditions.rounds },
        scale: Scale(if conditions.quick { QUICK_SCALE } else { conditions.scale }),
        limit: conditions.native_limit,
        quick: conditions.quick,
        raw: !conditions.quick,
        program,
        program_version,
        workers: conditions.workers,
        arguments,
        idle: RefCell::default(),
        clock: Clock::default(),
    })
}

fn random(args: &seeds::SeedsArgs) -> Result<()> {
    args.conditions.check()?;
    let bench = Bench { raw: false, ..bench(&args.conditions)? };
    seeds::run(args, &bench)
}

/// The directory of results.
fn results(args: &MeasureArgs) -> Result<PathBuf> {
    args.results.clone().map_or_else(results_directory, Ok)
}

/// Measures every workload; after a failed workload the others are still measured.
fn run(
    args: &MeasureArgs,
    workloads: &[Workload],
    failures: &mut Vec<&'static str>,
) -> Result<Vec<outcome::Outcome>> {
    let bench = bench(&args.conditions)?;
    let results = results(args)?;
    let mut outcomes = Vec::new();
    for workload in workloads {
        let began = Instant::now();
        match scenario::measure(&bench, workload) {
            Ok(mut measured) => {
                if let Some(first) = measured.first_mut() {
                    first.seconds = began.elapsed().as_secs_f64();
                    first.phases = bench.clock.take();
                }
                if measured.iter().any(|outcome| outcome.parity == Some(false)) {
                    failures.push(workload.name);
                }
                if outcomes.is_empty()
                    && let Some(first) = measured.first()
                {
                    terminal::print_head(first);
                }
                measured.iter().for_each(terminal::print_line);
                if !args.conditions.quick {
                    json::keep(&results, &measured)?;
                }
                outcomes.extend(measured);
            }
            Err(error) => {
                eprintln!("{}: {error:#}", workload.name);
                failures.push(workload.name);
                bench.clock.take();
            }
        }
    }
    terminal::print_times(&outcomes);
    Ok(outcomes)
}
