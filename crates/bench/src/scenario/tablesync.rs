//! The first run of a subscription: creating it, copying its tables, and catching up.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use testbed::Cluster;
use testbed::compare::{compare_tables, published_tables};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, PUBLICATION};
use crate::measure::{Meter, Role, Usage};
use crate::outcome::{Direction, Outcome, Run, Runner, project};
use crate::regime::ServerSettings;
use crate::round::{expect_success, native_options, run_pgapace};
use crate::scenario::live::set;
use crate::watch::watch_row;
use crate::workload::tablesync::Tables;
use crate::workload::{Scale, Workload};

const DATABASE: &str = "bench";
const BASE: &str = "bench_base";
const ROUND: &str = "bench_round";
const SYNC_WORKERS: &str = "max_sync_workers_per_subscription";
/// Default of the server.
const DEFAULT_WORKERS: u32 = 2;
const MOST_WORKERS: u32 = 4;
const POLL: Duration = Duration::from_millis(10);
/// A long interval, because querying thousands of tables takes CPU time from the copy.
const POLL_MANY: Duration = Duration::from_millis(200);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
/// Tables per CREATE TABLE batch: each table holds a lock until the end of the transaction.
const TABLES_AT_ONCE: u64 = 500;
/// A run without visible progress at its limit gets this multiple of the limit.
const PATIENCE: u32 = 3;
/// From this number, tables count as many at every scale.
const MANY: u64 = 1000;

/// At a small scale tables are smaller, and fewer if there are thousands; a quick run has few.
fn scaled(tables: Tables, bench: &Bench) -> Tables {
    if bench.quick {
        return Tables { number: tables.number.min(10), megabytes: tables.megabytes.min(1) };
    }
    let smaller = |size: u64, min: u64| Scale(bench.scale.0.min(1.0)).of(size, min.min(size));
    Tables { number: smaller(tables.number, MANY), megabytes: smaller(tables.megabytes, 1) }
}

pub(crate) fn measure(bench: &Bench, workload: &Workload, asked: Tables) -> Result<Outcome> {
    let tables = scaled(asked, bench);
    let servers = servers(bench)?;
    let mut outcome = bench.outcome(workload, "time to copy", "s");
    outcome.settings = servers.settings().to_owned();
    if tables != asked {
        outcome.notes.push(format!("at this scale: {tables}"));
    }
    bench.clock.time(Phase::Prepare, || {
        create(&servers.publisher, DATABASE, tables, true)?;
        create(&servers.subscriber, BASE, tables, false)?;
        let publication = format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES");
        anyhow::Ok(servers.publisher.sql(DATABASE, &publication)?)
    })?;
    let mut runners = vec![Runner::Native, Runner::Pgapace];
    if !bench.quick {
        runners.insert(0, Runner::Copy);
        if tables.megabytes > 0 {
            runners.insert(1, Runner::Pipe);
        }
    }
    // The native subscription runs with the server's default and with as many workers as pgapace.
    // The first round decides which one is faster.
    let mut better = None;
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        bench.clock.time(Phase::Reset, || servers.publisher.sql(DATABASE, "CHECKPOINT"))?;
        if runner == Runner::Copy {
            let seconds = bench.clock.time(Phase::Run, || copy_out(&servers, tables))?;
            return Ok(Run::new(runner, seconds, seconds, Usage::default()));
        }
        let reset = || bench.clock.time(Phase::Reset, || servers.reset_subscriber(BASE, ROUND));
        reset()?;
        if runner == Runner::Pipe {
            let seconds = bench.clock.time(Phase::Run, || pipe(&servers, tables))?;
            return Ok(Run::new(runner, seconds, seconds, Usage::default()));
        }
        let with = |workers: u32| {
            set(&servers.subscriber, SYNC_WORKERS, &workers.to_string())?;
            bench.clock.time(Phase::Run, || native(&servers, tables, bench.limit))
        };
        let copied = match (runner, better) {
            (Runner::Native, Some(better)) => with(better)?,
            (Runner::Native, None) if bench.quick => with(DEFAULT_WORKERS)?,
            (Runner::Native, None) => {
                let default = with(DEFAULT_WORKERS)?;
                reset()?;
                let most = with(MOST_WORKERS)?;
                let seconds = |copied: &Copied| copied.projected().unwrap_or(f64::INFINITY);
                let default_is_better = seconds(&default) <= seconds(&most);
                let (name, other, slower, copied) = if default_is_better {
                    (DEFAULT_WORKERS, MOST_WORKERS, seconds(&most), default)
                } else {
                    (MOST_WORKERS, DEFAULT_WORKERS, seconds(&default), most)
                };
                outcome.notes.push(format!(
                    "native with {SYNC_WORKERS} = {name}; with {other}: {slower:.2} s"
                ));
                better = Some(name);
                copied
            }
            _ => bench.clock.time(Phase::Run, || pgapace(&servers, tables, bench))?,
        };
        let mut run = Run::new(runner, copied.seconds, copied.seconds, copied.usage);
        if let Some(share) = copied.stopped_at {
            outcome.notes.push(format!(
                "{} was stopped after {:.0} s with {:.1} % of the tables copied; projected",
                runner.name(),
                copied.seconds,
                share * 100.0
            ));
            run.projected_from = Some(share);
            run.value = copied.projected().unwrap_or(0.0);
            run.seconds = run.value;
            return Ok(run);
        }
        let differences = bench.clock.time(Phase::Compare, || differences(&servers))?;
        outcome.compared(runner, &differences);
        Ok(run)
    })?;
    outcome.conclude(Direction::LessIsBetter);
    if let (Some(pipe), Some(pgapace)) = (outcome.median_of(Runner::Pipe), outcome.pgapace) {
        let times = pipe / pgapace;
        outcome
            .notes
            .push(format!("one COPY pipe takes {pipe:.2} s: pgapace is {times:.2} x as fast"));
    }
    bench.give_back(servers, DATABASE, &[ROUND, BASE])?;
    Ok(outcome)
}

/// Servers with enough slots, locks and workers for every runner.
fn servers(bench: &Bench) -> Result<Environment> {
    // During its copy each table has a slot and a replication origin.
    let settings: ServerSettings =
        vec![("max_replication_slots", "30".into()), ("max_locks_per_transaction", "1024".into())];
    let workers = [
        ("max_logical_replication_workers", (MOST_WORKERS + 4).to_string()),
        ("max_worker_processes", (MOST_WORKERS + 8).to_string()),
    ];
    let subscriber: ServerSettings = settings.iter().cloned().chain(workers).collect();
    bench.servers(&settings, &subscriber)
}

/// Compares the tables that were copied with the publisher's.
fn differences(servers: &Environment) -> Result<Vec<String>> {
    let mut publisher = servers.publisher.connect(DATABASE)?;
    let names = published_tables(&mut publisher, PUBLICATION)?;
    let mut subscriber = servers.subscriber.connect(ROUND)?;
    let differences = compare_tables(&mut publisher, &mut subscriber, &names)?;
    Ok(differences.iter().map(ToString::to_string).collect())
}

/// The result of a first run.
struct Copied {
    seconds: f64,
    /// Set if the limit was reached: the share of tables that had been copied.
    stopped_at: Option<f64>,
    usage: Usage,
}

impl Copied {
    /// The time for all tables; unknown if none was copied before the limit.
    fn projected(&self) -> Option<f64> {
        self.stopped_at.map_or(Some(self.seconds), |share| project(self.seconds, share))
    }
}

pub(super) fn create(cluster: &Cluster, database: &str, tables: Tables, fill: bool) -> Result<()> {
    cluster.create_database(database)?;
    let mut client = cluster.connect(database)?;
    for first in (0..tables.number).step_by(usize::try_from(TABLES_AT_ONCE)?) {
        let mut sql = String::new();
        for number in first..tables.number.min(first + TABLES_AT_ONCE) {
            let _ = write!(sql, "{}", Tables::create(number));
            if fill && tables.rows() > 0 {
                let _ = write!(sql, "{}", Tables::fill(number, tables.rows()));
            }
        }
        client
            .batch_execute(&sql)
            .with_context(|| format!("cannot make the tables on {}", cluster.name()))?;
    }
    client.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
    Ok(())
}

/// Reads every table once on one connection and discards the rows.
fn copy_out(environment: &Environment, tables: Tables) -> Result<f64> {
    let conninfo = environment.publisher.conninfo_tcp(DATABASE);
    let started = Instant::now();
    let mut client = testbed::postgres::Client::connect(&conninfo, testbed::postgres::NoTls)?;
    for number in 0..tables.number {
        let mut rows = client.copy_out(&format!("COPY t{number} TO STDOUT (FORMAT binary)"))?;
        io::copy(&mut rows, &mut io::sink()).context("cannot copy a table out")?;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// Copies one table after the other, as `psql -c 'COPY … TO STDOUT' | psql -c 'COPY … FROM STDIN'`
/// does: one thread reads while another writes.
fn pipe(environment: &Environment, tables: Tables) -> Result<f64> {
    const CHUNK: usize = 64 << 10;
    const CHUNKS: usize = 16;
    let source = environment.publisher.conninfo_tcp(DATABASE);
    let subscriber = environment.subscriber_for_pgapace(ROUND);
    let started = Instant::now();
    let mut subscriber = testbed::postgres::Client::connect(&subscriber, testbed::postgres::NoTls)?;
    std::thread::scope(|scope| {
        let (sender, chunks) = std::sync::mpsc::sync_channel::<Option<Vec<u8>>>(CHUNKS);
        let reader = scope.spawn(move || -> Result<()> {
            let mut client = testbed::postgres::Client::connect(&source, testbed::postgres::NoTls)?;
            for number in 0..tables.number {
                let mut rows =
                    client.copy_out(&format!("COPY t{number} TO STDOUT (FORMAT binary)"))?;
                loop {
                    let mut chunk = Vec::with_capacity(CHUNK);
                    io::Read::take(&mut rows, CHUNK as u64).read_to_end(&mut chunk)?;
                    // After its end the stream must not be read again.
                    let end = chunk.len() < CHUNK;
                    if sender.send(Some(chunk)).is_err() || end {
                        break;
                    }
                }
                if sender.send(None).is_err() {
                    break;
                }
            }
            Ok(())
        });
        for number in 0..tables.number {
            let mut input =
                subscriber.copy_in(&format!("COPY t{number} FROM STDIN (FORMAT binary)"))?;
            while let Ok(Some(chunk)) = chunks.recv() {
                input.write_all(&chunk)?;
            }
            input.finish()?;
        }
        drop(chunks);
        reader.join().map_err(|_| anyhow::anyhow!("reading panicked"))?
    })?;
    Ok(started.elapsed().as_secs_f64())
}

/// Time from CREATE SUBSCRIPTION until every table is ready.
fn native(environment: &Environment, tables: Tables, limit: Duration) -> Result<Copied> {
    let mut control = environment.subscriber.connect(ROUND)?;
    let mut publisher = environment.publisher.connect(DATABASE)?;
    let mut meter = Meter::default();
    let started = Instant::now();
    control
        .batch_execute(&format!(
            "CREATE SUBSCRIPTION native CONNECTION '{}' PUBLICATION {PUBLICATION} \
             WITH (slot_name = native, {})",
            environment.publisher_for_native(DATABASE).replace('\'', "''"),
            native_options(environment.binaries().major()),
        ))
        .context("cannot create the native subscription")?;
    let ready = control.prepare(
        "SELECT coalesce(avg((srsubstate IN ('r', 's'))::int), 1)::float8 FROM pg_subscription_rel",
    )?;
    let poll = if tables.number < 1000 { POLL } else { POLL_MANY };
    let mut sampled_at = started;
    let mut stopped_at = None;
    let seconds = loop {
        let share: f64 = control.query_one(&ready, &[])?.get(0);
        if share >= 1.0 {
            break started.elapsed().as_secs_f64();
        }
        if sampled_at.elapsed() >= SAMPLE_INTERVAL {
            sampled_at = Instant::now();
            sample_processes(&mut meter, &mut control, &mut publisher, NATIVE_WORKERS)?;
            if started.elapsed() > limit {
                stopped_at = Some(share);
                break started.elapsed().as_secs_f64();
            }
        }
        meter.sample();
        std::thread::sleep(poll);
    };
    sample_processes(&mut meter, &mut control, &mut publisher, NATIVE_WORKERS)?;
    meter.sample();
    control.batch_execute("DROP SUBSCRIPTION native").context("cannot drop it")?;
    Ok(Copied { seconds, stopped_at, usage: meter.usage() })
}

const NATIVE_WORKERS: &str =
    "SELECT pid FROM pg_stat_subscription WHERE subname = 'native' AND pid IS NOT NULL";
const PGAPACE_BACKENDS: &str = "SELECT pid FROM pg_stat_activity \
     WHERE datname = current_database() AND application_name LIKE 'pgapace %'";

/// Time of `pgapace run --until current`, from start to exit.
fn pgapace(environment: &Environment, tables: Tables, bench: &Bench) -> Result<Copied> {
    let mut control = environment.subscriber.connect(ROUND)?;
    let mut publisher = environment.publisher.connect(DATABASE)?;
    let mut meter = Meter::default();
    let started = Instant::now();
    let databases = [DATABASE, ROUND];
    // Without ANALYZE, because the native subscription leaves it to a later autovacuum.
    let arguments = ["--until=current", "--analyze=false"];
    let mut process = run_pgapace(environment, bench, databases, "pgapace", &arguments)?;
    meter.watch(Role::Program, process.pid());
    let mut sampled_at = started;
    while process.is_running() {
        meter.sample();
        if sampled_at.elapsed() >= SAMPLE_INTERVAL {
            sampled_at = Instant::now();
            sample_processes(&mut meter, &mut control, &mut publisher, PGAPACE_BACKENDS)?;
            if started.elapsed() > bench.limit {
                let sql = "SELECT count(*) FROM pgapace.relation WHERE copied_rows IS NOT NULL";
                let copied: i64 = control.query_one(sql, &[])?.get(0);
                // Tables copied in one transaction become visible together, so such a run gets more
                // time.
                if copied == 0 && started.elapsed() < bench.limit * PATIENCE {
                    continue;
                }
                let seconds = started.elapsed().as_secs_f64();
                process.kill9()?;
                environment.drop_slot(DATABASE, "pgapace")?;
                let share = copied as f64 / tables.number as f64;
                return Ok(Copied { seconds, stopped_at: Some(share), usage: meter.usage() });
            }
        }
        std::thread::sleep(POLL);
    }
    let seconds = started.elapsed().as_secs_f64();
    expect_success(&mut process, &mut meter)?;
    environment.drop_slot(DATABASE, "pgapace")?;
    Ok(Copied { seconds, stopped_at: None, usage: meter.usage() })
}

/// Samples the walsenders and the processes that apply.
pub(super) fn sample_processes(
    meter: &mut Meter,
    subscriber: &mut testbed::postgres::Client,
    publisher: &mut testbed::postgres::Client,
    appliers: &str,
) -> Result<()> {
    let senders = "SELECT pid FROM pg_stat_activity \
                   WHERE backend_type = 'walsender' OR application_name LIKE 'pgapace%'";
    for row in publisher.query(senders, &[])? {
        watch_row(meter, Role::Walsender, row.get(0));
    }
    for row in subscriber.query(appliers, &[])? {
        watch_row(meter, Role::Apply, row.get(0));
    }
    Ok(())
}
