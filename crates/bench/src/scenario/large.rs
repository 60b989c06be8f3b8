//! Seed 001: one large insert, until the COMMIT that waits for the subscriber returns.

use std::time::Instant;

use anyhow::Result;

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, Live, Options, set};
use crate::workload::Workload;

const ROWS: u64 = 5_000_000;
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, a int, b text)";
const MEMORY: &str = "logical_decoding_work_mem";

pub(crate) fn measure(bench: &Bench, workload: &Workload, memory: &str) -> Result<Outcome> {
    let servers = live::prepare(bench, SCHEMA, "")?;
    let mut outcome = bench.outcome(workload, "time to the end of COMMIT", "s");
    outcome.settings = servers.settings().to_owned();
    let rows = bench.scale.of(ROWS, 1000);
    let usual = servers.publisher.query_one_text(DATABASE, &format!("SHOW {MEMORY}"))?;
    set(&servers.publisher, MEMORY, memory)?;
    let native = format!("{}, synchronous_commit = on", native_options(bench.binaries.major()));
    let options = Options { native: &native, synchronous: true, ..Options::default() };
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    if !bench.quick {
        runners.insert(0, Runner::Alone);
    }
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        bench.clock.time(Phase::Reset, || servers.publisher.sql(DATABASE, "TRUNCATE t"))?;
        let insert = || bench.clock.time(Phase::Run, || insert(&servers, rows));
        if runner == Runner::Alone {
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let seconds = insert()?;
            return Ok(Run::new(runner, seconds, seconds, Usage::default()));
        }
        let mut live = Live::start(bench, &servers, runner, options)?;
        live.look()?;
        let seconds = insert()?;
        live.catch_up(|_| Ok(()))?;
        Ok(Run::new(runner, seconds, seconds, live.finish(outcome)?))
    })?;
    outcome.conclude(Direction::LessIsBetter);
    set(&servers.publisher, MEMORY, &usual)?;
    live::give_back(bench, servers)?;
    Ok(outcome)
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
