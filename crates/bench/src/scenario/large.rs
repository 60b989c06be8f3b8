//! Seed 001: one large insert, until the COMMIT that waits for the subscriber returns.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::bench::Bench;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, Live, Options, set};
use crate::workload::Workload;

const ROWS: u64 = 5_000_000;
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, a int, b text)";

pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Vec<Outcome>> {
    let memories: &[&str] = if bench.quick { &["64kB"] } else { &["64kB", "1MB", "64MB"] };
    memories.iter().map(|memory| measure_memory(bench, workload, memory)).collect()
}

fn measure_memory(bench: &Bench, workload: &Workload, memory: &str) -> Result<Outcome> {
    let servers = bench.servers(&Vec::new(), &Vec::new())?;
    let mut outcome = bench.outcome(workload, "time to the end of COMMIT", "s");
    outcome.workload = format!("{}-{memory}", workload.name);
    outcome.settings = format!("{}; logical_decoding_work_mem={memory}", servers.settings());
    outcome.notes.push("pgapace does not stream transactions yet: it begins at the COMMIT".into());
    let rows = bench.scale.of(ROWS, 1000);
    live::create(&servers, SCHEMA, "")?;
    set(&servers.publisher, "logical_decoding_work_mem", memory)?;
    let mut runners = vec![Runner::Alone, Runner::Native, Runner::Pgapace];
    if bench.quick {
        runners.remove(0);
    }
    for round in 1..=bench.rounds {
        if round > 1 {
            runners.reverse();
        }
        for runner in &runners {
            servers.publisher.sql(DATABASE, "TRUNCATE t")?;
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let native =
                format!("{}, synchronous_commit = on", native_options(servers.binaries().major()));
            let options = Options { native: &native, synchronous: true, ..Options::default() };
            let (seconds, usage) = match runner {
                Runner::Alone => insert(&servers, rows).map(|s| (s, Usage::default())),
                _ => attached(bench, &servers, *runner, options, rows),
            }
            .with_context(|| format!("round {round} of {} failed", runner.name()))?;
            outcome.rounds.push(Run {
                runner: *runner,
                round,
                value: seconds,
                seconds,
                projected_from: None,
                usage,
                curve: Vec::new(),
            });
        }
    }
    outcome.parity = Some(true);
    outcome.conclude(Direction::LessIsBetter);
    set(&servers.publisher, "logical_decoding_work_mem", "64MB")?;
    live::clean(&servers)?;
    Ok(outcome)
}

fn attached(
    bench: &Bench,
    environment: &Environment,
    runner: Runner,
    options: Options<'_>,
    rows: u64,
) -> Result<(f64, Usage)> {
    let mut live = Live::start(bench, environment, runner, options)?;
    live.look()?;
    let seconds = insert(environment, rows)?;
    live.catch_up(|_| Ok(()))?;
    Ok((seconds, live.finish()?))
}

/// The insert and its COMMIT, which waits for whoever is synchronous.
fn insert(environment: &Environment, rows: u64) -> Result<f64> {
    let mut client = environment.publisher.connect(DATABASE)?;
    client.batch_execute("SET synchronous_commit = on")?;
    let started = Instant::now();
    client.batch_execute(&format!(
        "INSERT INTO t SELECT i, i, 'row ' || i FROM generate_series(1, {rows}) i"
    ))?;
    Ok(started.elapsed().as_secs_f64())
}
