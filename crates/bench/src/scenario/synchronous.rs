//! The publisher's transaction rate while its commits wait for the subscriber.

use std::time::Duration;

use anyhow::{Result, ensure};
use testbed::workload::tpcb::{Load, Script, TpcbOptions};
use testbed::{Cluster, Stop};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::native_options;
use crate::scenario::live::{self, DATABASE, Live, Options, set};
use crate::scenario::standby::{self, STANDBY};
use crate::workload::{Workload, tpcb};

/// The sessions of the publisher.
#[derive(Clone, Copy)]
struct Waiting<'a> {
    /// Their synchronous_commit.
    mode: &'a str,
    clients: usize,
}

/// Time to warm up caches and connections.
const WARM_UP: Duration = Duration::from_millis(500);

pub(crate) fn measure(bench: &Bench, workload: &Workload, clients: usize) -> Result<Vec<Outcome>> {
    let branches = bench.scale.of(10, 1);
    let mut servers =
        live::prepare(bench, tpcb::SCHEMA, &tpcb::load(branches * 100_000, branches))?;
    let mut standby = if bench.quick {
        None
    } else {
        Some(bench.clock.time(Phase::Servers, || standby::create(&mut servers))?)
    };
    let modes: &[&str] = if bench.quick { &["remote_apply"] } else { &["on", "remote_apply"] };
    let measured = modes
        .iter()
        .map(|mode| {
            measure_mode(bench, workload, &servers, standby.as_mut(), Waiting { mode, clients })
        })
        .collect::<Result<Vec<_>>>()?;
    drop(standby);
    servers.drop_slot("postgres", STANDBY)?;
    live::give_back(bench, servers)?;
    Ok(measured)
}

fn measure_mode(
    bench: &Bench,
    workload: &Workload,
    servers: &Environment,
    mut standby: Option<&mut Cluster>,
    waiting: Waiting<'_>,
) -> Result<Outcome> {
    let mut outcome = bench.outcome(workload, "publisher's rate", "tx/s");
    outcome.workload = format!("{}-{}", workload.name, waiting.mode.replace('_', "-"));
    outcome.settings = servers.settings().to_owned();
    let duration = Duration::from_secs(bench.scale.of(15, 2));
    let with = |outcome: &mut Outcome, runner, options| {
        let options = Options { synchronous: true, ..options };
        let mut live = Live::start(bench, servers, runner, options)?;
        let rate = rate(bench, servers, waiting, duration)?;
        live.catch_up(|_| Ok(()))?;
        anyhow::Ok((rate, live.finish(outcome)?))
    };
    let native = |commit: &str| {
        format!("{}, synchronous_commit = {commit}", native_options(bench.binaries.major()))
    };
    let (on, off) = (native("on"), native("off"));
    let native = |native| Options { native, ..Options::default() };
    // Which synchronous_commit of the native subscription is faster depends on what the publisher
    // waits for. The first round decides for all.
    let mut better = None;
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    if !bench.quick {
        runners.splice(0..0, [Runner::Alone, Runner::Physical]);
    }
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        let (rate, usage) = match (runner, &mut standby, better) {
            (Runner::Alone, ..) => {
                servers.publisher.sql(DATABASE, "CHECKPOINT")?;
                (rate(bench, servers, waiting, duration)?, Usage::default())
            }
            (Runner::Physical, Some(standby), _) => {
                (physical(bench, servers, standby, waiting, duration)?, Usage::default())
            }
            (Runner::Native, _, Some(better)) => with(outcome, runner, better)?,
            (Runner::Native, ..) => {
                let runs =
                    [with(outcome, runner, native(&on))?, with(outcome, runner, native(&off))?];
                let [with_on, with_off] = runs;
                let on_is_better = with_on.0 >= with_off.0;
                let (name, other) = if on_is_better { ("on", "off") } else { ("off", "on") };
                let slower = with_on.0.min(with_off.0);
                outcome.notes.push(format!(
                    "native with synchronous_commit = {name}; with {other}: {slower:.0} tx/s"
                ));
                better = Some(native(if on_is_better { &on } else { &off }));
                if on_is_better { with_on } else { with_off }
            }
            _ => with(outcome, runner, Options::default())?,
        };
        Ok(Run::new(runner, rate, duration.as_secs_f64(), usage))
    })?;
    if let Some(rate) = outcome.median_of(Runner::Physical) {
        outcome.notes.push(format!("a physical standby: {rate:.0} tx/s"));
    }
    outcome.conclude(Direction::MoreIsBetter);
    Ok(outcome)
}

/// The publisher's rate with a synchronous physical standby.
fn physical(
    bench: &Bench,
    environment: &Environment,
    standby: &mut Cluster,
    waiting: Waiting<'_>,
    duration: Duration,
) -> Result<f64> {
    bench.clock.time(Phase::Reset, || standby::start(environment, standby))?;
    set(&environment.publisher, "synchronous_standby_names", STANDBY)?;
    let rate = rate(bench, environment, waiting, duration);
    set(&environment.publisher, "synchronous_standby_names", "")?;
    standby.stop(Stop::Fast)?;
    rate
}

/// Runs the clients and returns their transactions per second.
fn rate(
    bench: &Bench,
    environment: &Environment,
    Waiting { mode, clients }: Waiting<'_>,
    duration: Duration,
) -> Result<f64> {
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
    let load = |duration| Load::start(&conninfo, clients, options(duration))?.wait();
    bench.clock.time(Phase::Reset, || load(WARM_UP))?;
    let summary = bench.clock.time(Phase::Run, || load(duration))?;
    ensure!(
        summary.stats.failures == 0,
        "the load failed: {}",
        summary.last_failure.unwrap_or_default()
    );
    Ok(summary.stats.tps())
}
