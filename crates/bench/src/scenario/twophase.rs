//! Seed 003: two-phase transactions of one update each, and how far the subscriber falls behind.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use testbed::{Cluster, wait_until};

use crate::bench::Bench;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, LOOK, Live, Options, ROUND};
use crate::workload::Workload;

const CONNECTIONS: u64 = 80;
const ROWS: u64 = 100_000;
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, value bigint)";
const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Outcome> {
    let mut outcome = bench.outcome(workload, "rate until in step", "tx/s");
    if bench.binaries.major() < 15 {
        outcome.notes.push("subscriptions have two_phase from 15 on".into());
        return Ok(outcome);
    }
    let servers = bench.servers(&Vec::new(), &Vec::new())?;
    outcome.settings = servers.settings().to_owned();
    outcome.notes.push(
        "pgapace holds prepared transactions in memory and applies them at COMMIT PREPARED".into(),
    );
    let load = format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i");
    live::create(&servers, SCHEMA, &load)?;
    let duration = Duration::from_secs(bench.scale.of(60, 1));
    let connections = if bench.quick { 4 } else { CONNECTIONS };
    let native = format!("{}, two_phase = true", native_options(servers.binaries().major()));
    let options = Options { native: &native, pgapace: &["--two-phase"], synchronous: false };
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    for round in 1..=bench.rounds {
        if round > 1 {
            runners.reverse();
        }
        for runner in &runners {
            servers.publisher.sql(DATABASE, "VACUUM")?;
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let run = attached(bench, &servers, *runner, options, duration, connections)
                .with_context(|| format!("round {round} of {} failed", runner.name()))?;
            outcome.rounds.push(Run { round, ..run });
        }
    }
    outcome.parity = Some(true);
    outcome.conclude(Direction::MoreIsBetter);
    live::clean(&servers)?;
    Ok(outcome)
}

fn attached(
    bench: &Bench,
    environment: &Environment,
    runner: Runner,
    options: Options<'_>,
    duration: Duration,
    connections: u64,
) -> Result<Run> {
    let mut live = Live::start(bench, environment, runner, options)?;
    if runner == Runner::Native {
        // Its slot becomes a two-phase one only after the copy.
        let enabled = "SELECT bool_and(subtwophasestate = 'e') FROM pg_subscription";
        wait_until(Duration::from_secs(60), "two_phase to be enabled", || {
            Ok(environment.target.query_one_text(ROUND, enabled)? == "t")
        })?;
    }
    let (stop, transactions) = (AtomicBool::new(false), AtomicU64::new(0));
    let started = Instant::now();
    let mut curve = vec![(0.0, 0.0)];
    let mut sampled = started;
    let mut sample = |live: &mut Live<'_>| {
        if sampled.elapsed() >= SECOND {
            sampled = Instant::now();
            if let Some(lag) = live.lag()? {
                curve.push((started.elapsed().as_secs_f64(), lag));
            }
        }
        anyhow::Ok(())
    };
    let loaded = thread::scope(|scope| {
        let (stop, transactions) = (&stop, &transactions);
        let clients: Vec<_> = (0..connections)
            .map(|number| {
                scope.spawn(move || client(&environment.publisher, number, stop, transactions))
            })
            .collect();
        let mut watched = Ok(());
        while watched.is_ok() && started.elapsed() < duration {
            watched = live.look().and_then(|()| sample(&mut live));
            thread::sleep(LOOK);
        }
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().map_err(|_| anyhow!("a client panicked"))??;
        }
        watched
    });
    loaded?;
    live.catch_up(&mut sample)?;
    let seconds = started.elapsed().as_secs_f64();
    curve.push((seconds, 0.0));
    let usage: Usage = live.finish()?;
    Ok(Run {
        runner,
        round: 0,
        value: transactions.into_inner() as f64 / seconds,
        seconds,
        projected_from: None,
        usage,
        curve,
    })
}

/// One connection's transactions, one after the other.
fn client(
    publisher: &Cluster,
    number: u64,
    stop: &AtomicBool,
    transactions: &AtomicU64,
) -> Result<()> {
    let mut client = publisher.connect(DATABASE)?;
    let mut next = number;
    while !stop.load(Ordering::Relaxed) {
        // All over the table, and no two connections at one row: their remainders differ.
        next = (next + CONNECTIONS * 617) % (ROWS / CONNECTIONS * CONNECTIONS);
        client.batch_execute(&format!(
            "BEGIN; UPDATE t SET value = value + 1 WHERE id = {}; PREPARE TRANSACTION 'c{number}'",
            next + 1
        ))?;
        client.batch_execute(&format!("COMMIT PREPARED 'c{number}'"))?;
        transactions.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
