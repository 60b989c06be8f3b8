//! Two-phase transactions with one update each, and the lag of the subscriber.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use pgoutput::Lsn;
use testbed::wait_until;

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, lsn};
use crate::outcome::{Direction, Outcome, Run, Runner, median};
use crate::round::native_options;
use crate::scenario::lag::Lag;
use crate::scenario::live::{self, DATABASE, Live, Options, ROUND, SAMPLE_INTERVAL};
use crate::workload::{Workload, twophase};

const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Outcome> {
    let mut outcome = bench.outcome(workload, "rate until in step", "tx/s");
    if bench.binaries.major() < 15 {
        outcome.notes.push("subscriptions support two_phase since PostgreSQL 15".into());
        return Ok(outcome);
    }
    let servers = live::prepare(bench, twophase::SCHEMA, &twophase::load())?;
    outcome.settings = servers.settings().to_owned();
    outcome.notes.push(
        "pgapace holds prepared transactions in memory and applies them at COMMIT PREPARED".into(),
    );
    let duration = Duration::from_secs(bench.scale.of(60, 1));
    let connections = if bench.quick { 4 } else { twophase::CONNECTIONS };
    let native = format!("{}, two_phase = true", native_options(servers.binaries().major()));
    let options = Options { native: &native, pgapace: &["--two-phase"], synchronous: false };
    let runners = vec![Runner::Native, Runner::Pgapace];
    let (mut slopes, mut unsent) = (Vec::new(), Vec::new());
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        let mut live = Live::start(bench, &servers, runner, options)?;
        let worked = bench
            .clock
            .time(Phase::Run, || work(bench, &servers, &mut live, runner, duration, connections))?;
        slopes.extend(worked.slope.map(|slope| (runner, slope)));
        unsent.extend(worked.unsent.map(|share| (runner, share)));
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
    for runner in [Runner::Native, Runner::Pgapace] {
        let of_runner = |all: &[(Runner, f64)]| {
            let of_runner = all.iter().filter(|(of, _)| *of == runner);
            median(of_runner.map(|(_, value)| *value).collect())
        };
        if let (Some(slope), Some(unsent)) = (of_runner(&slopes), of_runner(&unsent)) {
            outcome.notes.push(format!(
                "{}'s lag grew by {slope:.1} ms in each second of the load (least squares); \
                 {:.0} % of it was WAL that the publisher had not sent yet",
                runner.name(),
                unsent * 100.0
            ));
        }
    }
    outcome.conclude(Direction::MoreIsBetter);
    live::give_back(bench, servers)?;
    Ok(outcome)
}

/// The result of a load.
struct Worked {
    transactions: u64,
    /// Seconds until the subscriber had caught up, or until the wait was given up.
    seconds: f64,
    /// The share of the load's WAL that was applied at that time.
    stopped_at: Option<f64>,
    curve: Vec<(f64, f64)>,
    /// Growth of the lag during the load, in milliseconds per second.
    slope: Option<f64>,
    /// The share of the lag that the publisher had not sent yet.
    unsent: Option<f64>,
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
        // PostgreSQL enables two_phase for its slot only after the copy.
        let enabled = "SELECT bool_and(subtwophasestate = 'e') FROM pg_subscription";
        wait_until(Duration::from_secs(60), "two_phase to be enabled", || {
            Ok(environment.subscriber.query_one_text(ROUND, enabled)? == "t")
        })?;
    }
    let (stop, transactions) = (AtomicBool::new(false), AtomicU64::new(0));
    let start = position(environment)?;
    let mut lag = Lag::from(start);
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
                scope.spawn(move || {
                    twophase::client(&environment.publisher, DATABASE, number, |done| {
                        transactions.fetch_add(u64::from(done > 0), Ordering::Relaxed);
                        !stop.load(Ordering::Relaxed)
                    })
                })
            })
            .collect();
        let mut watched = Ok(());
        while watched.is_ok() && started.elapsed() < duration {
            watched = live.sample_processes().and_then(|()| sample(live)).and_then(|()| {
                if let Some(positions) = live.positions()? {
                    lag.note(started.elapsed(), positions);
                }
                Ok(())
            });
            thread::sleep(SAMPLE_INTERVAL);
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
    Ok(Worked {
        transactions: transactions.into_inner(),
        seconds,
        stopped_at,
        curve,
        slope: lag.slope(),
        unsent: lag.unsent(),
    })
}

/// The end of the publisher's WAL.
fn position(environment: &Environment) -> Result<Lsn> {
    let mut client = environment.publisher.connect(DATABASE)?;
    lsn(&mut client, "SELECT pg_current_wal_lsn()::text")
}
