//! One run of one program over a backlog.
//!
//! The native subscription and pgapace are timed in the same way: from ENABLE, or from the start of
//! the process, until the last transaction of the backlog is visible on the subscriber.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pgoutput::Lsn;
use testbed::Program;
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::replay::ReplayServer;
use testbed::servers::ServerBinaries;

use crate::bench::Bench;
use crate::environment::{Environment, PUBLICATION};
use crate::measure::{Meter, Role};
use crate::outcome::Runner;
use crate::raw::{self, Drained, End, Source};
use crate::watch::{Finished, Watch};

/// Interval of checks whether pgapace has ended.
const POLL: Duration = Duration::from_millis(10);
/// Limit for the exit of pgapace, which ends once all changes are durable, shortly after they are
/// visible.
const EXIT_PATIENCE: Duration = Duration::from_secs(120);
/// A backlog, and the databases between which it is replayed.
#[derive(Debug)]
pub(crate) struct Replay<'a> {
    pub(crate) environment: &'a Environment,
    /// The publisher's database.
    pub(crate) database: &'a str,
    /// The subscriber's database, created again in every round.
    pub(crate) subscriber: &'a str,
    pub(crate) start: Lsn,
    pub(crate) end: Lsn,
    /// Whether transactions are sent at PREPARE. A copy of a slot has two_phase off. The first
    /// start of its stream with that option turns it on, from its current position.
    pub(crate) two_phase: bool,
    /// Whether transactions are sent while they run.
    pub(crate) streaming: bool,
    /// Arguments of pgapace that the workload requires.
    pub(crate) arguments: &'a [&'a str],
    /// Longer runs are stopped and projected.
    pub(crate) limit: Duration,
    pub(crate) bench: &'a Bench,
    /// In front of the publisher in regime `elsewhere`.
    pub(crate) elsewhere: Option<&'a ReplayServer>,
}

impl Replay<'_> {
    /// The raw drain with pgapace's receiver.
    pub(crate) fn receiver(&self, binary: bool) -> Result<Drained> {
        self.environment.copy_slot(self.database, "by_receiver")?;
        let drained = raw::by_receiver(&self.source("by_receiver", binary), drop)?;
        self.environment.drop_slot(self.database, "by_receiver")?;
        Ok(drained)
    }

    /// The raw drain with `pg_recvlogical`.
    pub(crate) fn recvlogical(&self, tool: &ServerBinaries) -> Result<Drained> {
        self.environment.copy_slot(self.database, "by_recvlogical")?;
        let drained = raw::by_recvlogical(&self.source("by_recvlogical", true), tool)?;
        self.environment.drop_slot(self.database, "by_recvlogical")?;
        Ok(drained)
    }

    fn source<'a>(&'a self, slot: &'a str, binary: bool) -> Source<'a> {
        Source {
            publisher: &self.environment.publisher,
            database: self.database,
            slot,
            publication: PUBLICATION,
            binary,
            two_phase: self.two_phase,
            streaming: self.streaming,
            end: End::At(self.end),
        }
    }

    /// Copies the slot for a run of a subscriber.
    pub(crate) fn copy_slot(&self, name: &str) -> Result<()> {
        self.environment.copy_slot(self.database, name)?;
        if let Some(server) = self.elsewhere {
            server.forget_slots();
            if self.two_phase {
                raw::turn_on_two_phase(&self.source(name, true))?;
                self.environment.wait_until_free(self.database, name)?;
            }
        }
        Ok(())
    }

    /// Creates the native subscription, which is not enabled yet, and its slot.
    pub(crate) fn create_native(&self, runner: Runner) -> Result<Client> {
        let environment = self.environment;
        self.copy_slot("native")?;
        let publisher = match self.elsewhere {
            Some(server) => server.conninfo(self.database),
            None => environment.publisher_for_native(self.database),
        };
        let mut control = environment.subscriber.connect(self.subscriber)?;
        control
            .batch_execute(&format!(
                "CREATE SUBSCRIPTION native CONNECTION '{}' PUBLICATION {PUBLICATION} WITH \
                 (create_slot = false, slot_name = native, copy_data = false, enabled = false, \
                 {}{})",
                publisher.replace('\'', "''"),
                options_of(runner, environment.binaries().major()),
                if self.two_phase { ", two_phase = true" } else { "" },
            ))
            .context("cannot create the native subscription")?;
        Ok(control)
    }

    /// The native subscription, with its fastest options or with streaming = on.
    pub(crate) fn native(&self, runner: Runner) -> Result<Finished> {
        let environment = self.environment;
        let mut control = self.create_native(runner)?;
        let mut watch = Watch::new(
            self,
            "native",
            "SELECT pid FROM pg_stat_subscription WHERE subname = 'native' AND pid IS NOT NULL",
        )?;
        let mut meter = self.meter();
        let started = Instant::now();
        control.batch_execute("ALTER SUBSCRIPTION native ENABLE")?;
        let counts_errors = environment.binaries().major() >= 15;
        let finished = watch.follow(started, &mut meter, || {
            if !counts_errors {
                return Ok(());
            }
            let sql = "SELECT coalesce(sum(apply_error_count), 0)::bigint \
                       FROM pg_stat_subscription_stats WHERE subname = 'native'";
            let errors: i64 = control.query_one(sql, &[])?.get(0);
            ensure!(
                errors == 0,
                "the native subscription fails:\n{}",
                environment.subscriber.log_tail()
            );
            Ok(())
        })?;
        self.expect_two_phase("native")?;
        // This also drops the slot.
        control.batch_execute("DROP SUBSCRIPTION native").context("cannot drop it")?;
        Ok(finished)
    }

    /// A meter for a run.
    fn meter(&self) -> Meter {
        let mut meter = Meter::default();
        if self.elsewhere.is_some() {
            meter.watch_replayer();
        }
        meter
    }

    /// Starts pgapace as a user would, with its slot.
    pub(crate) fn start_pgapace(&self) -> Result<Process> {
        let until = format!("--until={}", self.end);
        let mut arguments =
            vec!["--slot=pgapace", "--create-slot=false", "--copy-data=false", &until];
        if self.two_phase {
            arguments.push("--two-phase");
        }
        arguments.extend(self.arguments);
        let publisher = match self.elsewhere {
            Some(server) => server.conninfo(self.database),
            None => self.environment.publisher_for_pgapace(self.database),
        };
        spawn_pgapace(
            self.environment,
            self.bench,
            [&publisher, &self.environment.subscriber_for_pgapace(self.subscriber)],
            "pgapace",
            &arguments,
        )
    }

    /// Runs pgapace.
    pub(crate) fn pgapace(&self) -> Result<Finished> {
        self.copy_slot("pgapace")?;
        let mut watch = Watch::new(
            self,
            "pgapace",
            "SELECT pid FROM pg_stat_activity \
             WHERE datname = current_database() AND application_name LIKE 'pgapace %'",
        )?;
        let mut meter = self.meter();
        let started = Instant::now();
        let mut process = self.start_pgapace()?;
        meter.watch(Role::Program, process.pid());
        let mut finished = watch.follow(started, &mut meter, || {
            // It exits by itself only after the marker, or with an error.
            match process.status() {
                Some(status) if !status.success() => {
                    bail!("pgapace ended with {status}:\n{}", process.log())
                }
                _ => Ok(()),
            }
        })?;
        if finished.stopped_at.is_some() {
            process.kill9()?;
        } else {
            expect_success(&mut process, &mut meter)?;
            finished.usage = meter.usage();
        }
        self.expect_two_phase("pgapace")?;
        self.environment.drop_slot(self.database, "pgapace")?;
        Ok(finished)
    }

    /// Checks that the slot was read with the intended two_phase option.
    fn expect_two_phase(&self, slot: &str) -> Result<()> {
        let sql = format!(
            "SELECT two_phase = {} FROM pg_replication_slots WHERE slot_name = '{slot}'",
            self.two_phase
        );
        let as_meant = self.environment.publisher.query_one_text(self.database, &sql)? == "t";
        ensure!(as_meant, "slot {slot} was not read with two_phase = {}", self.two_phase);
        Ok(())
    }
}

/// The fastest options of the native subscription.
pub(crate) fn native_options(major: u16) -> &'static str {
    match major {
        16.. => "binary = true, streaming = parallel, origin = any",
        _ => "binary = true, streaming = on",
    }
}

/// The options of this mode of the native subscription.
pub(crate) fn options_of(runner: Runner, major: u16) -> &'static str {
    match runner {
        Runner::NativeOn => "binary = true, streaming = on, origin = any",
        _ => native_options(major),
    }
}

/// The modes of the native subscription: both modes for large transactions, if the version has two.
pub(crate) fn natives(bench: &Bench) -> Vec<Runner> {
    if bench.binaries.major() >= 16 && !bench.quick {
        vec![Runner::NativeOn, Runner::Native]
    } else {
        vec![Runner::Native]
    }
}

/// Starts pgapace between two databases.
pub(crate) fn run_pgapace(
    environment: &Environment,
    bench: &Bench,
    [publisher, subscriber]: [&str; 2],
    name: &str,
    arguments: &[&str],
) -> Result<Process> {
    let publisher = environment.publisher_for_pgapace(publisher);
    let subscriber = environment.subscriber_for_pgapace(subscriber);
    spawn_pgapace(environment, bench, [&publisher, &subscriber], name, arguments)
}

/// Starts pgapace between two addresses.
fn spawn_pgapace(
    environment: &Environment,
    bench: &Bench,
    [publisher, subscriber]: [&str; 2],
    name: &str,
    arguments: &[&str],
) -> Result<Process> {
    Ok(Program::new(&bench.program)
        .args(["run", "--log-level=warn", "--publication", PUBLICATION, "--name", name])
        .args(["--publisher", publisher])
        .args(["--subscriber", subscriber])
        .args(arguments)
        .args(&bench.arguments)
        .in_own_session()
        .spawn_logged(environment.log_file("pgapace.log"))?)
}

/// Waits until pgapace exits by itself, and samples its processes.
pub(crate) fn expect_success(process: &mut Process, meter: &mut Meter) -> Result<()> {
    let deadline = Instant::now() + EXIT_PATIENCE;
    while process.is_running() {
        ensure!(Instant::now() < deadline, "pgapace does not end:\n{}", process.log());
        meter.sample();
        std::thread::sleep(POLL);
    }
    match process.status() {
        Some(status) if !status.success() => {
            bail!("pgapace ended with {status}:\n{}", process.log())
        }
        _ => Ok(()),
    }
}
