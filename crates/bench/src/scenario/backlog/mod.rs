//! Replays one backlog in alternating rounds: raw drain, native subscription, pgapace.

mod prepare;
mod tenths;
mod user;

use anyhow::Result;
use testbed::replay::ReplayServer;
use testbed::servers::ServerBinaries;

use self::prepare::{Prepared, prepare};
use self::user::UserSession;
use crate::bench::Bench;
use crate::clock::Phase;
use crate::elsewhere;
use crate::environment::Environment;
use crate::measure::Usage;
use crate::outcome::{Outcome, Run, Runner, project};
use crate::raw::tool_with_recvlogical;
use crate::regime::Regime;
use crate::round::{Replay, natives};
use crate::scenario::live::{MEMORY, set};
use crate::watch::Finished;
use crate::workload::{Backlog, User, Workload, Write};

/// The publisher's database.
const DATABASE: &str = "bench";
/// The subscriber's state at the start of the slot; copied for every round.
const BASE: &str = "bench_base";
const ROUND: &str = "bench_round";

/// Returns the result, and for a workload with an old snapshot also how the rate has changed.
pub(crate) fn measure(
    bench: &Bench,
    workload: &Workload,
    backlog: &Backlog,
) -> Result<Vec<Outcome>> {
    let mut outcome = bench.outcome(workload, backlog.metric(), backlog.unit);
    let two_phase = matches!(backlog.write, Write::TwoPhase { .. });
    if two_phase && bench.binaries.major() < 15 {
        outcome.notes.push("subscriptions support two_phase since PostgreSQL 15".into());
        return Ok(vec![outcome]);
    }
    // A slow subscriber must reach the limit of the bench, which projects its result. With its
    // default the publisher would terminate the walsender of a worker that is busy for a minute.
    let publisher_settings = [("wal_sender_timeout", "0".to_owned())];
    let servers = bench.servers(&publisher_settings, &backlog.subscriber_settings)?;
    outcome.settings = servers.settings().to_owned();
    outcome.changes = Some(backlog.changes);
    let streamed = backlog.streamed_from.is_some();
    let usual = backlog.streamed_from.map(|memory| decode_with(&servers, memory)).transpose()?;
    let prepared = bench.clock.time(Phase::Prepare, || prepare(&servers, backlog))?;
    let server = match bench.regime {
        Regime::Elsewhere => Some(ReplayServer::in_front_of(&servers.publisher)?),
        _ => None,
    };
    let replay = Replay {
        environment: &servers,
        database: DATABASE,
        subscriber: ROUND,
        start: prepared.start,
        end: prepared.end,
        two_phase,
        streaming: streamed,
        arguments: backlog.pgapace,
        limit: bench.limit,
        bench,
        elsewhere: server.as_ref(),
    };
    let tool = tool_with_recvlogical(&bench.binaries);
    let mut runners = if streamed { natives(bench) } else { vec![Runner::Native] };
    runners.push(Runner::Pgapace);
    if let Some(server) = &server {
        let reset = || servers.reset_subscriber(BASE, ROUND);
        let note = bench
            .clock
            .time(Phase::Prepare, || elsewhere::record(&replay, server, &runners, &reset))?;
        outcome.notes.push(note);
    } else if bench.raw {
        runners.splice(0..0, [Runner::Receiver, Runner::ReceiverBinary]);
        if tool.is_some() {
            runners.insert(0, Runner::Recvlogical);
        } else {
            outcome.notes.push("no pg_recvlogical on this machine".into());
        }
    }
    let old_snapshot = backlog.user == User::KeepsSnapshot;
    let mut tenths = tenths::Tenths::default();
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        if runner.is_raw() {
            return drain(bench, backlog, &replay, runner, tool.as_ref());
        }
        let finished = apply(bench, backlog, &replay, runner, outcome, &prepared)?;
        let seconds = finished.seconds;
        let mut run = Run::new(runner, backlog.value(seconds), seconds, finished.usage);
        apply_limit(&mut run, &finished, backlog, &mut outcome.notes);
        if old_snapshot {
            tenths.add(runner, &finished.curve);
        }
        if workload.name == "tpcb" || two_phase || old_snapshot {
            run.curve = finished.curve;
        }
        Ok(run)
    })?;
    outcome.conclude(backlog.direction());
    if server.is_some() {
        outcome.notes.extend(elsewhere::cpu_notes(&outcome, backlog));
    }
    if let Some(usual) = usual {
        decode_with(&servers, &usual)?;
    }
    bench.give_back(servers, DATABASE, &[ROUND, BASE])?;
    let later = old_snapshot.then(|| tenths.outcome(bench, workload, &outcome));
    Ok([Some(outcome), later].into_iter().flatten().collect())
}

/// Reads the backlog without applying it.
fn drain(
    bench: &Bench,
    backlog: &Backlog,
    replay: &Replay<'_>,
    runner: Runner,
    tool: Option<&ServerBinaries>,
) -> Result<Run> {
    let drained = bench.clock.time(Phase::Run, || match tool {
        Some(tool) if runner == Runner::Recvlogical => replay.recvlogical(tool),
        _ => replay.receiver(runner == Runner::ReceiverBinary),
    })?;
    let usage = Usage { walsender_cpu: drained.walsender_cpu, ..Usage::default() };
    Ok(Run::new(runner, backlog.value(drained.seconds), drained.seconds, usage))
}

/// Applies the backlog to a new copy of the subscriber, and compares the tables.
fn apply(
    bench: &Bench,
    backlog: &Backlog,
    replay: &Replay<'_>,
    runner: Runner,
    outcome: &mut Outcome,
    prepared: &Prepared,
) -> Result<Finished> {
    let servers = replay.environment;
    bench.clock.time(Phase::Reset, || {
        // The publisher has not changed since the backlog was written and vacuumed.
        servers.publisher.sql(DATABASE, "CHECKPOINT")?;
        servers.reset_subscriber(BASE, ROUND)
    })?;
    let user = UserSession::begin(backlog.user, &servers.subscriber, ROUND)?;
    let finished = bench.clock.time(Phase::Run, || match runner {
        Runner::Native | Runner::NativeOn => replay.native(runner),
        _ => replay.pgapace(),
    })?;
    user.end()?;
    if finished.stopped_at.is_none() {
        let differences = bench.clock.time(Phase::Compare, || {
            let mut differences = prepared.differences(servers)?;
            if let Some(check) = &backlog.check
                && servers.subscriber.query_one_text(ROUND, check)? != "t"
            {
                differences.push(format!("not true on the subscriber: {check}"));
            }
            anyhow::Ok(differences)
        })?;
        outcome.compared(runner, &differences);
    }
    Ok(finished)
}

/// Sets the publisher's logical_decoding_work_mem and returns the previous value.
fn decode_with(servers: &Environment, memory: &str) -> Result<String> {
    let usual = servers.publisher.query_one_text("postgres", &format!("SHOW {MEMORY}"))?;
    set(&servers.publisher, MEMORY, memory)?;
    Ok(usual)
}

/// Projects a stopped run.
fn apply_limit(run: &mut Run, finished: &Finished, backlog: &Backlog, notes: &mut Vec<String>) {
    let Some(share) = finished.stopped_at else { return };
    let (name, seconds) = (run.runner.name(), finished.seconds);
    run.projected_from = Some(share);
    match project(seconds, share) {
        Some(projected) => {
            run.seconds = projected;
            run.value = backlog.value(projected);
            notes.push(format!(
                "{name} was stopped at its limit; projected from {:.2} % applied in {seconds:.0} s",
                share * 100.0
            ));
        }
        None => {
            run.value = 0.0;
            notes.push(format!("{name} had applied no transaction when it was stopped"));
        }
    }
}
