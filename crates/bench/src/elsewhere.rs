//! Regime `elsewhere`: recordings of the backlog, and the cost of a run without the publisher.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::replay::{Recording, ReplayServer, Request};

use crate::outcome::{Outcome, Run, Runner, median};
use crate::round::Replay;
use crate::workload::Backlog;

/// The slot that is recorded.
const SLOT: &str = "recording";
/// Limit for the time until a subscriber asks for its stream.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval of checks whether it has asked.
const POLL: Duration = Duration::from_millis(20);

/// Records the stream that each of these runners asks for. A runner shows its request by starting,
/// which is refused as long as there is no recording. Returns a note for the report.
pub(crate) fn record(
    replay: &Replay<'_>,
    server: &ReplayServer,
    runners: &[Runner],
    reset: &dyn Fn() -> Result<()>,
) -> Result<String> {
    let mut known: Vec<Request> = Vec::new();
    let mut sizes = Vec::new();
    for runner in runners {
        reset()?;
        let asked = ask(replay, server, *runner)
            .with_context(|| format!("{} did not ask for a stream", runner.name()))?;
        for request in asked {
            if known.contains(&request) {
                continue;
            }
            replay.environment.copy_slot(replay.database, SLOT)?;
            let publisher = &replay.environment.publisher;
            let recording = Recording::record(publisher, SLOT, &request, replay.end.0)?;
            replay.environment.drop_slot(replay.database, SLOT)?;
            sizes.push(format!("{} {:.1} MB", runner.name(), recording.bytes() as f64 / 1e6));
            server.add(recording);
            known.push(request);
        }
    }
    Ok(format!("recorded: {}", sizes.join(", ")))
}

/// Starts a runner until it has asked for a stream, or has got a recorded one.
fn ask(replay: &Replay<'_>, server: &ReplayServer, runner: Runner) -> Result<Vec<Request>> {
    let streams = server.streams();
    let started = Instant::now();
    let asked = |running: &mut dyn FnMut() -> Result<()>| loop {
        let refused = server.refused();
        if !refused.is_empty() || server.streams() > streams {
            return Ok(refused);
        }
        running()?;
        ensure!(started.elapsed() < PATIENCE, "it took more than {PATIENCE:?}");
        std::thread::sleep(POLL);
    };
    if runner.is_native() {
        let mut control = replay.create_native(runner)?;
        control.batch_execute("ALTER SUBSCRIPTION native ENABLE")?;
        let refused = asked(&mut || Ok(()))?;
        control.batch_execute("ALTER SUBSCRIPTION native DISABLE")?;
        control.batch_execute("DROP SUBSCRIPTION native")?;
        return Ok(refused);
    }
    replay.copy_slot("pgapace")?;
    let mut process = replay.start_pgapace()?;
    let refused = asked(&mut || {
        // It may end because of the refusal.
        ensure!(process.is_running() || server.has_refused(), "pgapace ended:\n{}", process.log());
        Ok(())
    })?;
    process.kill9()?;
    replay.environment.drop_slot(replay.database, "pgapace")?;
    Ok(refused)
}

/// Notes on the CPU time of each side for a transaction, or for a row.
pub(crate) fn cpu_notes(outcome: &Outcome, backlog: &Backlog) -> Vec<String> {
    let unit = backlog.unit_name();
    let note = |runner: Runner| {
        let mean = |of: &dyn Fn(&Run) -> f64| {
            let whole = |run: &&Run| run.runner == runner && run.projected_from.is_none();
            let runs = outcome.rounds.iter().filter(whole);
            median(runs.map(|run| of(run) * 1e6 / backlog.units as f64).collect())
        };
        let applier = mean(&|run| run.usage.apply_cpu)?;
        let replayer = mean(&|run| run.usage.replayer_cpu)?;
        let appliers = if runner.is_native() {
            format!("apply worker {applier:.2}")
        } else {
            let program = mean(&|run| run.usage.program_cpu)?;
            format!(
                "backends {applier:.2}, pgapace {program:.2}, together {:.2}",
                applier + program
            )
        };
        let name = runner.name();
        Some(format!("{name}: CPU µs per {unit}: {appliers}; replay server {replayer:.2}"))
    };
    [Runner::NativeOn, Runner::Native, Runner::Pgapace].into_iter().filter_map(note).collect()
}
