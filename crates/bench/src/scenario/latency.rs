//! Latency of single transactions on idle servers.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::Environment;
use crate::outcome::{Direction, Outcome, Run, Runner, percentile};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, Live, Options, ROUND};
use crate::workload::Workload;

const ROWS: i64 = 1000;
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, value bigint)";
/// Number of warm-up transactions, which fill the caches of both sides and are not counted.
const FIRST: usize = 10;
/// Pause before the next transaction, so that both sides are idle.
const REST: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns two outcomes: the median and the 95th percentile.
pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Vec<Outcome>> {
    let load = format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i");
    let servers = live::prepare(bench, SCHEMA, &load)?;
    let mut medians = bench.outcome(workload, "commit to visible, median", "ms");
    medians.settings = servers.settings().to_owned();
    let samples = usize::try_from(bench.scale.of(200, if bench.quick { 5 } else { 100 }))?;
    medians.notes.push(format!("{samples} transactions in every round"));
    let native = native_options(bench.binaries.major());
    let options = Options { native, ..Options::default() };
    let mut slow = Vec::new();
    bench.alternate(&mut medians, vec![Runner::Native, Runner::Pgapace], |outcome, runner| {
        let mut live = Live::start(bench, &servers, runner, options)?;
        live.sample_processes()?;
        let started = Instant::now();
        let times = bench.clock.time(Phase::Run, || sample(&servers, samples))?;
        let seconds = started.elapsed().as_secs_f64();
        live.catch_up(|_| Ok(()))?;
        let usage = live.finish(outcome)?;
        let run = |share| {
            let value = percentile(times.clone(), share).unwrap_or(0.0);
            Run::new(runner, value, seconds, usage)
        };
        slow.push(run(0.95));
        Ok(run(0.5))
    })?;
    let mut slowest = Outcome {
        workload: format!("{}-p95", workload.name),
        metric: "commit to visible, 95 %".into(),
        rounds: slow,
        notes: Vec::new(),
        ..medians.clone()
    };
    for (slow, median) in slowest.rounds.iter_mut().zip(&medians.rounds) {
        slow.round = median.round;
    }
    medians.conclude(Direction::LessIsBetter);
    slowest.conclude(Direction::LessIsBetter);
    live::give_back(bench, servers)?;
    Ok(vec![medians, slowest])
}

/// Milliseconds from sending COMMIT until a query on the subscriber sees the row, for one
/// transaction after the other.
fn sample(environment: &Environment, samples: usize) -> Result<Vec<f64>> {
    let mut publisher = environment.publisher.connect(DATABASE)?;
    let mut subscriber = environment.subscriber.connect(ROUND)?;
    let update = publisher.prepare("UPDATE t SET value = $1 WHERE id = $2")?;
    let visible = subscriber.prepare("SELECT value FROM t WHERE id = $1")?;
    let mut times = Vec::with_capacity(samples);
    for (number, value) in (0..FIRST + samples).zip(1_i64..) {
        let id = i32::try_from(1 + value * 37 % ROWS)?;
        thread::sleep(REST);
        let mut transaction = publisher.transaction()?;
        transaction.execute(&update, &[&value, &id])?;
        let sent = Instant::now();
        transaction.commit()?;
        // The query is repeated without a pause.
        while subscriber.query_one(&visible, &[&id])?.get::<_, i64>(0) != value {
            ensure!(sent.elapsed() < PATIENCE, "a transaction does not arrive");
        }
        if number >= FIRST {
            times.push(sent.elapsed().as_secs_f64() * 1000.0);
        }
    }
    Ok(times)
}
