//! Seed 000: how fast the publisher is when its commits wait for the subscriber.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::workload::tpcb::{Load, Script, TpcbOptions};
use testbed::{Cluster, Stop};

use crate::bench::Bench;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, Live, Options, set};
use crate::scenario::standby::{self, STANDBY};
use crate::workload::{Workload, tpcb};

const CLIENTS: usize = 40;
/// Lets caches and connections settle.
const WARM_UP: Duration = Duration::from_secs(1);

pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Vec<Outcome>> {
    let modes: &[&str] = if bench.quick { &["remote_apply"] } else { &["on", "remote_apply"] };
    modes.iter().map(|mode| measure_mode(bench, workload, mode)).collect()
}

fn measure_mode(bench: &Bench, workload: &Workload, mode: &str) -> Result<Outcome> {
    let mut servers = bench.servers(&Vec::new(), &Vec::new())?;
    let mut outcome = bench.outcome(workload, "publisher's rate", "tx/s");
    outcome.workload = format!("{}-{}", workload.name, mode.replace('_', "-"));
    outcome.settings = format!("{}; synchronous_commit={mode}", servers.settings());
    let (branches, seconds) = (bench.scale.of(10, 1), bench.scale.of(15, 1));
    live::create(&servers, tpcb::SCHEMA, &tpcb::load(branches * 100_000, branches))?;
    let duration = Duration::from_secs(seconds);
    let mut standby = servers.own().map(standby::create).transpose()?;
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    if !bench.quick {
        runners.splice(0..0, [Runner::Alone, Runner::Physical]);
    }
    for round in 1..=bench.rounds {
        if round > 1 {
            runners.reverse();
        }
        for runner in &runners {
            servers.publisher.sql(DATABASE, "VACUUM")?;
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            let measured = match (runner, &mut standby) {
                (Runner::Physical, Some(standby)) => {
                    physical(&servers, standby, mode, duration).map(|r| (r, Usage::default()))
                }
                (Runner::Alone, _) => rate(&servers, mode, duration).map(|r| (r, Usage::default())),
                // Which of its settings is better depends on what the publisher waits for.
                (Runner::Native, _) => {
                    let major = servers.binaries().major();
                    let with = |commit: &str| {
                        let native =
                            format!("{}, synchronous_commit = {commit}", native_options(major));
                        let options = Options { native: &native, ..Options::default() };
                        attached(bench, &servers, *runner, options, mode, duration)
                    };
                    let (on, off) = (with("on")?, with("off")?);
                    Ok(if on.0 >= off.0 { on } else { off })
                }
                _ => attached(bench, &servers, *runner, Options::default(), mode, duration),
            };
            let (value, usage) =
                measured.with_context(|| format!("round {round} of {} failed", runner.name()))?;
            outcome.rounds.push(Run {
                runner: *runner,
                round,
                value,
                seconds: duration.as_secs_f64(),
                projected_from: None,
                usage,
                curve: Vec::new(),
            });
        }
    }
    outcome.parity = Some(true);
    if let Some(rate) = outcome.median_of(Runner::Physical) {
        outcome.notes.push(format!("a physical standby: {rate:.0} tx/s"));
    }
    outcome.conclude(Direction::MoreIsBetter);
    live::clean(&servers)?;
    Ok(outcome)
}

/// The publisher's rate with a synchronous subscriber.
fn attached(
    bench: &Bench,
    environment: &Environment,
    runner: Runner,
    options: Options<'_>,
    mode: &str,
    duration: Duration,
) -> Result<(f64, Usage)> {
    let options = Options { synchronous: true, ..options };
    let mut live = Live::start(bench, environment, runner, options)?;
    let rate = rate(environment, mode, duration)?;
    live.catch_up(|_| Ok(()))?;
    Ok((rate, live.finish()?))
}

/// The publisher's rate with a synchronous physical standby.
fn physical(
    environment: &Environment,
    standby: &mut Cluster,
    mode: &str,
    duration: Duration,
) -> Result<f64> {
    standby::start(environment, standby)?;
    set(&environment.publisher, "synchronous_standby_names", STANDBY)?;
    let rate = rate(environment, mode, duration);
    set(&environment.publisher, "synchronous_standby_names", "")?;
    standby.stop(Stop::Fast)?;
    rate
}

/// Transactions per second of the clients.
fn rate(environment: &Environment, mode: &str, duration: Duration) -> Result<f64> {
    let conninfo = format!(
        "{} options='-c synchronous_commit={mode}'",
        environment.publisher.conninfo(DATABASE)
    );
    let options = |duration| TpcbOptions {
        script: Script::SimpleUpdate,
        duration: Some(duration),
        reconnect: false,
        ..TpcbOptions::default()
    };
    Load::start(&conninfo, CLIENTS, options(WARM_UP.min(duration)))?.wait()?;
    let summary = Load::start(&conninfo, CLIENTS, options(duration))?.wait()?;
    ensure!(
        summary.stats.failures == 0,
        "the load failed: {}",
        summary.last_failure.unwrap_or_default()
    );
    Ok(summary.stats.tps())
}
