//! The first new change after a crash of the publisher.
//!
//! A slot is saved at checkpoints and when its restart position moves. After a crash it falls back
//! to its saved position, although the subscriber had acknowledged more. A transaction that stays
//! open keeps the restart position where it is, so the slot falls back by the same WAL in every
//! run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::Cluster;
use testbed::compare::{compare_tables, published_tables};
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, MARKER, PUBLICATION};
use crate::measure::{Meter, Role, Usage};
use crate::outcome::{Direction, Outcome, Run, Runner};
use crate::round::{native_options, run_pgapace};
use crate::scenario::live::{self, BASE, DATABASE, NAME, ROUND};
use crate::workload::{Workload, resume};

/// Limit for each step of a run.
const PATIENCE: Duration = Duration::from_secs(600);
/// Interval of queries for the new change.
const POLL: Duration = Duration::from_millis(10);

pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Outcome> {
    let mut servers = live::prepare(bench, resume::SCHEMA, "")?;
    let mut outcome = bench.outcome(workload, "restart to the first new change", "s");
    outcome.settings = servers.settings().to_owned();
    let bytes = resume::bytes(bench.scale);
    servers.publisher.sql(DATABASE, &resume::write(bytes))?;
    let runners = vec![Runner::Native, Runner::Pgapace];
    bench.alternate(&mut outcome, runners, |outcome, runner| {
        bench.clock.time(Phase::Reset, || {
            servers.publisher.sql(DATABASE, &format!("TRUNCATE t, {MARKER}"))?;
            servers.reset_subscriber(BASE, ROUND)
        })?;
        let mut subscriber = Subscriber::start(bench, &servers, runner)?;
        let resumed = bench.clock.time(Phase::Run, || {
            // Ends with the crash.
            let _open = acknowledge(&servers)?;
            crash_and_resume(&mut servers.publisher, &servers.subscriber, &mut subscriber)
        })?;
        outcome.notes.push(format!(
            "{}: the crash set the slot back by {:.0} MB",
            runner.name(),
            resumed.set_back / f64::from(1 << 20)
        ));
        let differences = bench.clock.time(Phase::Compare, || {
            let mut publisher = servers.publisher.connect(DATABASE)?;
            let tables = published_tables(&mut publisher, PUBLICATION)?;
            compare_tables(&mut publisher, &mut servers.subscriber.connect(ROUND)?, &tables)
        })?;
        let differences: Vec<_> = differences.iter().map(ToString::to_string).collect();
        outcome.compared(runner, &differences);
        let usage = subscriber.usage();
        bench.clock.time(Phase::Reset, || subscriber.remove(&servers))?;
        Ok(Run::new(runner, resumed.seconds, resumed.seconds, usage))
    })?;
    outcome.conclude(Direction::LessIsBetter);
    live::give_back(bench, servers)?;
    Ok(outcome)
}

/// A running native subscription or pgapace.
struct Subscriber {
    process: Option<Process>,
    meter: Meter,
}

impl Subscriber {
    /// Starts it and waits until it streams.
    fn start(bench: &Bench, servers: &Environment, runner: Runner) -> Result<Self> {
        let mut subscriber = Self { process: None, meter: Meter::default() };
        if runner.is_native() {
            let sql = format!(
                "CREATE SUBSCRIPTION {NAME} CONNECTION '{}' PUBLICATION {PUBLICATION} WITH ({})",
                servers.publisher_for_native(DATABASE).replace('\'', "''"),
                native_options(servers.binaries().major())
            );
            servers.subscriber.sql(ROUND, &sql).context("cannot create the subscription")?;
        } else {
            let process = run_pgapace(servers, bench, [DATABASE, ROUND], NAME, &[])?;
            subscriber.meter.watch(Role::Program, process.pid());
            subscriber.process = Some(process);
        }
        new_change(&servers.publisher, 1)?;
        subscriber.wait_for(&servers.subscriber, 1)?;
        if runner.is_native() {
            // The change may have come with the copy of its table, while another is still copied.
            let ready = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'";
            let mut client = servers.subscriber.connect(ROUND)?;
            let started = Instant::now();
            while client.query_one(ready, &[])?.get::<_, i64>(0) > 0 {
                ensure!(started.elapsed() < PATIENCE, "a table does not become ready");
                std::thread::sleep(POLL);
            }
        }
        Ok(subscriber)
    }

    /// Waits until a change of the publisher is visible.
    fn wait_for(&mut self, subscriber: &Cluster, id: i32) -> Result<()> {
        let mut client = subscriber.connect(ROUND)?;
        let visible = client.prepare(&format!("SELECT count(*) FROM {MARKER} WHERE id = $1"))?;
        let started = Instant::now();
        while client.query_one(&visible, &[&id])?.get::<_, i64>(0) == 0 {
            self.meter.sample();
            if let Some(process) = &mut self.process {
                ensure!(process.is_running(), "pgapace ended:\n{}", process.log());
            }
            let log = || subscriber.log_tail();
            ensure!(started.elapsed() < PATIENCE, "a change does not arrive:\n{}", log());
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn usage(&mut self) -> Usage {
        self.meter.sample();
        self.meter.usage()
    }

    fn remove(self, servers: &Environment) -> Result<()> {
        match self.process {
            Some(mut process) => {
                process.terminate()?;
                process.wait(PATIENCE)?;
            }
            None => servers.subscriber.sql(ROUND, &format!("DROP SUBSCRIPTION {NAME}"))?,
        }
        servers.drop_slot(DATABASE, NAME)?;
        servers.drop_subscriber(ROUND)
    }
}

/// Commits a change that no earlier one of the run resembles.
fn new_change(publisher: &Cluster, id: i32) -> Result<()> {
    Ok(publisher.sql(DATABASE, &format!("INSERT INTO {MARKER} VALUES ({id})"))?)
}

/// Writes WAL and waits until the subscriber has acknowledged all of it. Returns the session of the
/// transaction that stays open.
fn acknowledge(servers: &Environment) -> Result<Client> {
    let publisher = &servers.publisher;
    let mut open = publisher.connect(DATABASE)?;
    open.batch_execute("BEGIN; SELECT pg_current_xact_id()")?;
    // Each checkpoint tells the slot's reader which transactions run. The slot saves this with the
    // next acknowledgement; from then on nothing moves. A commit is acknowledged at once.
    for _ in 0..2 {
        publisher.sql(DATABASE, "CHECKPOINT")?;
        publisher.sql(DATABASE, "INSERT INTO t (body) VALUES ('')")?;
        wait_until_acknowledged(publisher)?;
    }
    publisher.sql(DATABASE, "CALL write_wal()")?;
    wait_until_acknowledged(publisher)?;
    Ok(open)
}

fn wait_until_acknowledged(publisher: &Cluster) -> Result<()> {
    let acknowledged = format!(
        "SELECT confirmed_flush_lsn >= '{}' FROM pg_replication_slots WHERE slot_name = '{NAME}'",
        publisher.query_one_text(DATABASE, "SELECT pg_current_wal_insert_lsn()")?
    );
    Ok(wait_until(PATIENCE, "the WAL to be acknowledged", || {
        Ok(publisher.query_one_text(DATABASE, &acknowledged)? == "t")
    })?)
}

/// The result of one run.
struct Resumed {
    /// From the first new change of the restarted publisher until it is visible.
    seconds: f64,
    /// Acknowledged WAL that the slot has forgotten, in bytes.
    set_back: f64,
}

fn crash_and_resume(
    publisher: &mut Cluster,
    subscriber_server: &Cluster,
    subscriber: &mut Subscriber,
) -> Result<Resumed> {
    let confirmed =
        format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{NAME}'");
    let before = publisher.query_one_text(DATABASE, &confirmed)?;
    publisher.kill9()?;
    publisher.start()?;
    // Before the subscriber acknowledges anything again.
    let distance = format!("SELECT pg_wal_lsn_diff('{before}', ({confirmed}))::text");
    let set_back = publisher.query_one_text(DATABASE, &distance)?;
    let started = Instant::now();
    new_change(publisher, 2)?;
    subscriber.wait_for(subscriber_server, 2)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(Resumed { seconds, set_back: set_back.parse().context("not a number of bytes")? })
}
