//! Seed 003: two-phase transactions of one update each, and how far the subscriber falls behind.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use pgoutput::Lsn;
use testbed::{Cluster, wait_until};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, lsn};
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
    let load = format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i");
    let servers = live::prepare(bench, SCHEMA, &load)?;
    outcome.settings = servers.settings().to_owned();
    outcome.notes.push(
        "pgapace holds prepared transactions in memory and applies them at COMMIT PREPARED".into(),
    );
    let duration = Duration::from_secs(bench.scale.of(60, 1));
    let connections = if bench.quick { 4 } else { CONNECTIONS };
    let native = format!("{}, two_phase = true", native_options(servers.binaries().major()));
    let options = Options { native: &native, pgapace: &["--two-phase"], synchronous: false };
    let runners = vec![Runner::Native, Runner::Pgapace];
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        let mut live = Live::start(bench, &servers, runner, options)?;
        let worked = bench
            .clock
            .time(Phase::Run, || work(bench, &servers, &mut live, runner, duration, connections))?;
        let (share, usage) = match worked.stopped_at {
            None => (1.0, live.finish(outcome)?),
            Some(share) => {
                outcome.notes.push(format!(
                    "{} was stopped {:.0} s after the load began, with {:.1} % of it applied",
                    runner.name(),
                    worked.seconds,
                    share * 100.0
                ));
                (share, live.abandon()?)
            }
        };
        let rate = worked.transactions as f64 * share / worked.seconds;
        let run = Run::new(runner, rate, worked.seconds, usage);
        Ok(Run { curve: worked.curve, projected_from: worked.stopped_at, ..run })
    })?;
    outcome.conclude(Direction::MoreIsBetter);
    live::give_back(bench, servers)?;
    Ok(outcome)
}

/// What was done while the lag was looked at.
struct Worked {
    transactions: u64,
    /// Until the subscriber was in step again, or was no longer waited for.
    seconds: f64,
    /// The share of the load's WAL that was applied then.
    stopped_at: Option<f64>,
    curve: Vec<(f64, f64)>,
}

fn work(
    bench: &Bench,
    environment: &Environment,
    live: &mut Live<'_>,
    runner: Runner,
    duration: Duration,
    connections: u64,
) -> Result<Worked> {
    if runner == Runner::Native {
        // Its slot becomes a two-phase one only after the copy.
        let enabled = "SELECT bool_and(subtwophasestate = 'e') FROM pg_subscription";
        wait_until(Duration::from_secs(60), "two_phase to be enabled", || {
            Ok(environment.target.query_one_text(ROUND, enabled)? == "t")
        })?;
    }
    let (stop, transactions) = (AtomicBool::new(false), AtomicU64::new(0));
    let start = position(environment)?;
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
            watched = live.look().and_then(|()| sample(live));
            thread::sleep(LOOK);
        }
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().map_err(|_| anyhow!("a client panicked"))??;
        }
        watched
    });
    loaded?;
    let end = position(environment)?;
    let arrived = live.catch_up_within(bench.limit, &mut sample)?;
    let seconds = started.elapsed().as_secs_f64();
    let behind = if arrived { 0.0 } else { live.lag()?.unwrap_or(0.0) };
    curve.push((seconds, behind));
    let written = end.0.saturating_sub(start.0).max(1) as f64;
    let stopped_at = (!arrived).then(|| (1.0 - behind / written).clamp(0.0, 1.0));
    Ok(Worked { transactions: transactions.into_inner(), seconds, stopped_at, curve })
}

/// How far the publisher's WAL goes.
fn position(environment: &Environment) -> Result<Lsn> {
    let mut client = environment.publisher.connect(DATABASE)?;
    lsn(&mut client, "SELECT pg_current_wal_lsn()::text")
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
