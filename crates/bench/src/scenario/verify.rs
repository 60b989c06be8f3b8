//! Comparing a table on both servers, with one pair of sessions, beside a running process.
//!
//! The upper limit is one `COPY … TO STDOUT` of the table as text on each server, both at the same time.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testbed::postgres::{Client, NoTls};
use testbed::program::Process;
use testbed::{Program, wait_until};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, PUBLICATION};
use crate::measure::{Meter, Role};
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::{expect_success, run_pgapace};
use crate::scenario::tablesync::{create, sample_processes};
use crate::workload::tablesync::Tables;
use crate::workload::{Scale, Workload};

const DATABASE: &str = "bench";
const BASE: &str = "bench_base";
const ROUND: &str = "bench_round";
const NAME: &str = "pgapace";
const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(600);
/// Sessions of the verb, on either server.
const READERS: &str = "SELECT pid FROM pg_stat_activity \
     WHERE datname = current_database() AND application_name LIKE 'pgapace%'";

pub(crate) fn measure(bench: &Bench, workload: &Workload, asked: Tables) -> Result<Outcome> {
    let megabytes = Scale(bench.scale.0.min(1.0)).of(asked.megabytes, 1);
    let tables = Tables { megabytes: if bench.quick { 1 } else { megabytes }, ..asked };
    let servers = bench.servers(&[], &[])?;
    let mut outcome = bench.outcome(workload, "time to compare", "s");
    outcome.settings = servers.settings().to_owned();
    if tables != asked {
        outcome.notes.push(format!("at this scale: {tables}"));
    }
    let mut process = bench.clock.time(Phase::Prepare, || prepare(bench, &servers, tables))?;
    let runners = vec![Runner::Copy, Runner::Pgapace];
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        if runner == Runner::Copy {
            return bench.clock.time(Phase::Run, || copy_out(&servers, tables));
        }
        let run = bench.clock.time(Phase::Run, || verify(bench, &servers))?;
        outcome.compared(runner, &[]);
        Ok(run)
    })?;
    process.terminate()?;
    process.wait(PATIENCE)?;
    servers.drop_slot(DATABASE, NAME)?;
    outcome.conclude(Direction::LessIsBetter);
    bench.give_back(servers, DATABASE, &[ROUND, BASE])?;
    Ok(outcome)
}

/// Copies the table, and starts the process beside which it is compared.
fn prepare(bench: &Bench, servers: &Environment, tables: Tables) -> Result<Process> {
    create(&servers.publisher, DATABASE, tables, true)?;
    create(&servers.subscriber, BASE, tables, false)?;
    let publication = format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES");
    servers.publisher.sql(DATABASE, &publication)?;
    servers.reset_subscriber(BASE, ROUND)?;
    let process = run_pgapace(servers, bench, [DATABASE, ROUND], NAME, &[])?;
    let ready = "SELECT coalesce((SELECT phase = 'streaming' FROM pgapace.subscription), false)";
    wait_until(PATIENCE, "the copy", || {
        // Until the process has created it, there is no such table.
        Ok(servers.subscriber.query_one_text(ROUND, ready).is_ok_and(|text| text == "t"))
    })?;
    servers.subscriber.sql(ROUND, "VACUUM (FREEZE, ANALYZE)")?;
    Ok(process)
}

/// Reads the table on both servers at the same time, and discards the rows.
fn copy_out(servers: &Environment, tables: Tables) -> Result<Run> {
    let sides = [
        (Role::Walsender, servers.publisher.conninfo_tcp(DATABASE)),
        (Role::Apply, servers.subscriber_for_pgapace(ROUND)),
    ];
    let meter = Mutex::new(Meter::default());
    let sampled = || meter.lock().unwrap_or_else(PoisonError::into_inner);
    let started = Instant::now();
    let read = &|role: Role, conninfo: &str| -> Result<()> {
        let mut client = Client::connect(conninfo, NoTls)?;
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
        sampled().watch(role, u32::try_from(pid)?);
        for number in 0..tables.number {
            let mut rows = client.copy_out(&format!("COPY t{number} TO STDOUT"))?;
            io::copy(&mut rows, &mut io::sink()).context("cannot copy a table out")?;
        }
        // The backend ends with the session.
        sampled().sample();
        Ok(())
    };
    std::thread::scope(|scope| {
        let both =
            sides.each_ref().map(|(role, conninfo)| scope.spawn(move || read(*role, conninfo)));
        both.into_iter()
            .try_for_each(|side| side.join().map_err(|_| anyhow::anyhow!("reading panicked"))?)
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let usage = sampled().usage();
    Ok(Run::new(Runner::Copy, seconds, seconds, usage))
}

/// Time of `pgapace verify`, from start to exit.
fn verify(bench: &Bench, servers: &Environment) -> Result<Run> {
    let mut control = servers.subscriber.connect(ROUND)?;
    let mut publisher = servers.publisher.connect(DATABASE)?;
    let mut meter = Meter::default();
    let started = Instant::now();
    let mut process = Program::new(&bench.program)
        .args(["verify", "--log-level=warn", "--publication", PUBLICATION, "--name", NAME])
        .args(["--publisher", &servers.publisher_for_pgapace(DATABASE)])
        .args(["--subscriber", &servers.subscriber_for_pgapace(ROUND)])
        .args(["--jobs", "1"])
        .in_own_session()
        .spawn_logged(servers.log_file("verify.log"))?;
    meter.watch(Role::Program, process.pid());
    let mut sampled_at = started;
    while process.is_running() {
        meter.sample();
        if sampled_at.elapsed() >= SAMPLE_INTERVAL {
            sampled_at = Instant::now();
            sample_processes(&mut meter, &mut control, &mut publisher, READERS)?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let seconds = started.elapsed().as_secs_f64();
    // It fails if anything differs.
    expect_success(&mut process, &mut meter)?;
    Ok(Run::new(Runner::Pgapace, seconds, seconds, meter.usage()))
}
