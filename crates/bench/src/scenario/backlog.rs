//! The same backlog in alternating rounds: raw drain, native subscription, pgapace.

use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use testbed::compare::{Checksum, expect_equal, published_tables, table_checksum};
use testbed::postgres::Client;
use testbed::{Cluster, TableName};

use crate::bench::Bench;
use crate::environment::{Environment, MARKER, PUBLICATION, SLOT, lsn};
use crate::outcome::{Direction, Outcome, Run, Runner, project};
use crate::raw::tool_with_recvlogical;
use crate::round::{Finished, Replay};
use crate::workload::{Backlog, Workload};

/// The database of the publisher.
const DATABASE: &str = "bench";
/// The state of the target at the slot; copied for every round.
const BASE: &str = "bench_base";
const ROUND: &str = "bench_round";

pub(crate) fn measure(bench: &Bench, workload: &Workload, backlog: &Backlog) -> Result<Outcome> {
    let servers = bench.servers(&Vec::new(), &backlog.target_settings)?;
    let mut outcome = bench.outcome(workload, "catch-up rate", backlog.unit);
    outcome.settings = servers.settings().to_owned();
    let prepared = prepare(&servers, backlog)?;
    let replay = Replay {
        environment: &servers,
        database: DATABASE,
        target: ROUND,
        start: prepared.start,
        end: prepared.end,
        limit: bench.limit,
        program: &bench.program,
    };
    let tool = tool_with_recvlogical(&bench.binaries);
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    if !bench.quick {
        runners.insert(0, Runner::Receiver);
        if tool.is_some() {
            runners.insert(0, Runner::Recvlogical);
        } else {
            outcome.notes.push("no pg_recvlogical on this machine".into());
        }
    }
    let units = backlog.units as f64;
    for round in 1..=bench.rounds {
        // Reversed in every other round, so that drift hits all alike.
        if round > 1 {
            runners.reverse();
        }
        for runner in runners.clone() {
            if runner.is_raw() {
                let seconds = match &tool {
                    Some(tool) if runner == Runner::Recvlogical => replay.recvlogical(tool)?,
                    _ => replay.receiver()?,
                };
                outcome.rounds.push(run(runner, round, units, seconds));
                continue;
            }
            servers.publisher.sql(DATABASE, "VACUUM")?;
            servers.publisher.sql(DATABASE, "CHECKPOINT")?;
            servers.reset_target(BASE, ROUND)?;
            let finished = match runner {
                Runner::Native => replay.native(),
                _ => replay.pgapace(),
            };
            let finished =
                finished.with_context(|| format!("round {round} of {} failed", runner.name()))?;
            if finished.stopped_at.is_none() {
                prepared.expect_parity(&servers).with_context(|| {
                    format!("after round {round} of {} on {}", runner.name(), workload.name)
                })?;
                outcome.parity = Some(true);
            } else {
                // It would end the same way every time.
                runners.retain(|other| *other != runner);
            }
            let mut run = run(runner, round, units, finished.seconds);
            apply_limit(&mut run, &finished, units, &mut outcome.notes);
            run.usage = finished.usage;
            if workload.name == "tpcb" {
                run.curve = finished.curve;
            }
            outcome.rounds.push(run);
        }
    }
    outcome.conclude(Direction::MoreIsBetter);
    servers.clean(DATABASE, &[ROUND, BASE])?;
    Ok(outcome)
}

fn run(runner: Runner, round: usize, units: f64, seconds: f64) -> Run {
    Run {
        runner,
        round,
        value: units / seconds,
        seconds,
        projected_from: None,
        usage: crate::measure::Usage::default(),
        curve: Vec::new(),
    }
}

/// Projects a run that was stopped.
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

/// A backlog in its slot.
struct Prepared {
    start: pgoutput::Lsn,
    end: pgoutput::Lsn,
    tables: Vec<(TableName, Checksum)>,
}

impl Prepared {
    /// Fails when the tables of the round are not the publisher's.
    fn expect_parity(&self, environment: &Environment) -> Result<()> {
        let mut target = environment.target.connect(ROUND)?;
        for (table, expected) in &self.tables {
            if table_checksum(&mut target, table)? == *expected {
                continue;
            }
            let mut publisher = environment.publisher.connect(DATABASE)?;
            let table = std::slice::from_ref(table);
            expect_equal(&mut publisher, &mut target, table)?;
            bail!("the checksums of {} differ", table[0]);
        }
        Ok(())
    }
}

/// Makes tables on both sides, then the slot, then the backlog.
fn prepare(environment: &Environment, backlog: &Backlog) -> Result<Prepared> {
    let (mut publisher, base) = thread::scope(|scope| {
        let base = scope.spawn(|| tables(&environment.target, BASE, backlog));
        let publisher = tables(&environment.publisher, DATABASE, backlog);
        let base = base.join().map_err(|_| anyhow!("filling the target panicked"))?;
        anyhow::Ok((publisher?, base?))
    })?;
    // A template must have no sessions.
    drop(base);
    publisher
        .batch_execute(&format!(
            "CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES;
             CREATE PROCEDURE write_backlog() LANGUAGE plpgsql AS $$ {} $$;
             SET synchronous_commit = off",
            backlog.write
        ))
        .context("cannot create the publication and the procedure of the backlog")?;
    publisher.query_one("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&SLOT])?;
    let start = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    // The same choices at every run.
    publisher.query_one("SELECT setseed(0.42)", &[])?;
    publisher.batch_execute("CALL write_backlog()").context("cannot write the backlog")?;
    publisher.batch_execute(&format!("INSERT INTO {MARKER} VALUES (1)"))?;
    let end = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    // One statement each: VACUUM refuses the transaction that several statements would share.
    publisher.batch_execute("VACUUM")?;
    publisher.batch_execute("CHECKPOINT")?;
    let tables = published_tables(&mut publisher, PUBLICATION)?
        .into_iter()
        .map(|table| Ok((table.clone(), table_checksum(&mut publisher, &table)?)))
        .collect::<Result<_>>()?;
    Ok(Prepared { start, end, tables })
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
