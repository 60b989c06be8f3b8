//! Replays one backlog in alternating rounds: raw drain, native subscription, pgapace.

use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use testbed::compare::{Checksum, compare_tables, published_tables, table_checksum};
use testbed::postgres::Client;
use testbed::{Cluster, TableName};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, MARKER, PUBLICATION, SLOT, lsn};
use crate::measure::Usage;
use crate::outcome::{Direction, Outcome, Run, Runner, project};
use crate::raw::tool_with_recvlogical;
use crate::round::{Finished, Replay, natives};
use crate::scenario::live::{MEMORY, set};
use crate::workload::{Backlog, Workload, Write, twophase};

/// The publisher's database.
const DATABASE: &str = "bench";
/// The subscriber's state at the start of the slot; copied for every round.
const BASE: &str = "bench_base";
const ROUND: &str = "bench_round";

pub(crate) fn measure(bench: &Bench, workload: &Workload, backlog: &Backlog) -> Result<Outcome> {
    let mut outcome = bench.outcome(workload, "catch-up rate", backlog.unit);
    let two_phase = matches!(backlog.write, Write::TwoPhase { .. });
    if two_phase && bench.binaries.major() < 15 {
        outcome.notes.push("subscriptions support two_phase since PostgreSQL 15".into());
        return Ok(outcome);
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
    let replay = Replay {
        environment: &servers,
        database: DATABASE,
        subscriber: ROUND,
        start: prepared.start,
        end: prepared.end,
        two_phase,
        streaming: streamed,
        limit: bench.limit,
        bench,
    };
    let tool = tool_with_recvlogical(&bench.binaries);
    let mut runners = if streamed { natives(bench) } else { vec![Runner::Native] };
    runners.push(Runner::Pgapace);
    if !bench.quick {
        runners.splice(0..0, [Runner::Receiver, Runner::ReceiverBinary]);
        if tool.is_some() {
            runners.insert(0, Runner::Recvlogical);
        } else {
            outcome.notes.push("no pg_recvlogical on this machine".into());
        }
    }
    let units = backlog.units as f64;
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        if runner.is_raw() {
            let drained = bench.clock.time(Phase::Run, || match &tool {
                Some(tool) if runner == Runner::Recvlogical => replay.recvlogical(tool),
                _ => replay.receiver(runner == Runner::ReceiverBinary),
            })?;
            let usage = Usage { walsender_cpu: drained.walsender_cpu, ..Usage::default() };
            return Ok(Run::new(runner, units / drained.seconds, drained.seconds, usage));
        }
        bench.clock.time(Phase::Reset, || {
            // The publisher has not changed since the backlog was written and vacuumed.
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            servers.reset_subscriber(BASE, ROUND)
        })?;
        let finished = bench.clock.time(Phase::Run, || match runner {
            Runner::Native | Runner::NativeOn => replay.native(runner),
            _ => replay.pgapace(),
        })?;
        if finished.stopped_at.is_none() {
            let differences =
                bench.clock.time(Phase::Compare, || prepared.differences(&servers))?;
            outcome.compared(runner, &differences);
        }
        let seconds = finished.seconds;
        let mut run = Run::new(runner, units / seconds, seconds, finished.usage);
        apply_limit(&mut run, &finished, units, &mut outcome.notes);
        if workload.name == "tpcb" || two_phase {
            run.curve = finished.curve;
        }
        Ok(run)
    })?;
    outcome.conclude(Direction::MoreIsBetter);
    if let Some(usual) = usual {
        decode_with(&servers, &usual)?;
    }
    bench.give_back(servers, DATABASE, &[ROUND, BASE])?;
    Ok(outcome)
}

/// Sets the publisher's logical_decoding_work_mem and returns the previous value.
fn decode_with(servers: &Environment, memory: &str) -> Result<String> {
    let usual = servers.publisher.query_one_text("postgres", &format!("SHOW {MEMORY}"))?;
    set(&servers.publisher, MEMORY, memory)?;
    Ok(usual)
}

/// Projects a stopped run.
fn apply_limit(run: &mut Run, finished: &Finished, units: f64, notes: &mut Vec<String>) {
    let Some(share) = finished.stopped_at else { return };
    let (name, seconds) = (run.runner.name(), finished.seconds);
    run.projected_from = Some(share);
    match project(seconds, share) {
        Some(projected) => {
            run.seconds = projected;
            run.value = units / projected;
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

/// A backlog in a slot.
struct Prepared {
    start: pgoutput::Lsn,
    end: pgoutput::Lsn,
    tables: Vec<(TableName, Checksum)>,
}

impl Prepared {
    /// The differences between the tables of the round and the publisher's.
    fn differences(&self, environment: &Environment) -> Result<Vec<String>> {
        let mut subscriber = environment.subscriber.connect(ROUND)?;
        let mut all = Vec::new();
        for (table, expected) in &self.tables {
            if table_checksum(&mut subscriber, table)? == *expected {
                continue;
            }
            let mut publisher = environment.publisher.connect(DATABASE)?;
            let table = std::slice::from_ref(table);
            let differences = compare_tables(&mut publisher, &mut subscriber, table)?;
            ensure!(!differences.is_empty(), "the checksums of {} differ", table[0]);
            all.extend(differences.iter().map(ToString::to_string));
        }
        Ok(all)
    }
}

/// Creates the tables on both sides, then the slot, then the backlog.
fn prepare(environment: &Environment, backlog: &Backlog) -> Result<Prepared> {
    let (mut publisher, base) = thread::scope(|scope| {
        let base = scope.spawn(|| tables(&environment.subscriber, BASE, backlog));
        let publisher = tables(&environment.publisher, DATABASE, backlog);
        let base = base.join().map_err(|_| anyhow!("filling the subscriber panicked"))?;
        anyhow::Ok((publisher?, base?))
    })?;
    // A template database must not have sessions.
    drop(base);
    publisher
        .batch_execute(&format!(
            "CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES; SET synchronous_commit = off"
        ))
        .context("cannot create the publication")?;
    publisher.query_one("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&SLOT])?;
    let start = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    write(environment, &mut publisher, backlog).context("cannot write the backlog")?;
    publisher.batch_execute(&format!("INSERT INTO {MARKER} VALUES (1)"))?;
    let end = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    // One statement each, because VACUUM cannot run in the transaction that several statements
    // would share.
    publisher.batch_execute("VACUUM")?;
    publisher.batch_execute("CHECKPOINT")?;
    let tables = published_tables(&mut publisher, PUBLICATION)?
        .into_iter()
        .map(|table| Ok((table.clone(), table_checksum(&mut publisher, &table)?)))
        .collect::<Result<_>>()?;
    Ok(Prepared { start, end, tables })
}

fn write(environment: &Environment, publisher: &mut Client, backlog: &Backlog) -> Result<()> {
    match &backlog.write {
        Write::Procedure(body) => {
            publisher.batch_execute(&format!(
                "CREATE PROCEDURE write_backlog() LANGUAGE plpgsql AS $$ {body} $$"
            ))?;
            // The same random numbers in every run.
            publisher.query_one("SELECT setseed(0.42)", &[])?;
            publisher.batch_execute("CALL write_backlog()")?;
        }
        Write::TwoPhase { each } => thread::scope(|scope| {
            let clients: Vec<_> = (0..twophase::CONNECTIONS)
                .map(|number| {
                    scope.spawn(move || {
                        twophase::client(&environment.publisher, DATABASE, number, |n| n < *each)
                    })
                })
                .collect();
            clients
                .into_iter()
                .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
        })?,
    }
    Ok(())
}

fn tables(cluster: &Cluster, database: &str, backlog: &Backlog) -> Result<Client> {
    cluster.create_database(database)?;
    let mut client = cluster.connect(database)?;
    let context = || format!("cannot make the tables on {}", cluster.name());
    client
        .batch_execute(&format!("CREATE TABLE {MARKER} (id int PRIMARY KEY); {}", backlog.schema))
        .with_context(context)?;
    client.batch_execute(&backlog.load).with_context(context)?;
    client.batch_execute("VACUUM (FREEZE, ANALYZE)").with_context(context)?;
    Ok(client)
}
