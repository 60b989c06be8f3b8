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
use testbed::servers::ServerBinaries;

use crate::bench::Bench;
use crate::environment::{Environment, MARKER, PUBLICATION};
use crate::measure::{Meter, Role, Usage};
use crate::outcome::Runner;
use crate::raw::{self, Drained, End, Source};

/// Interval of queries for the marker on the subscriber.
const POLL: Duration = Duration::from_millis(10);
/// Interval of progress samples and checks for new processes.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Limit for the exit of pgapace, which ends once all changes are durable, shortly after they are
/// visible.
const EXIT_PATIENCE: Duration = Duration::from_secs(120);
/// A run without any applied transaction at its limit gets this multiple of the limit.
const PATIENCE: u32 = 3;
/// A run without progress for this time has failed, regardless of its limit.
const STALLED: Duration = Duration::from_secs(1200);

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
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Time to the end in seconds, or to the last progress of a stopped run.
    pub(crate) seconds: f64,
    /// Set if the limit was reached: the share of the backlog that had been applied.
    pub(crate) stopped_at: Option<f64>,
    pub(crate) usage: Usage,
    /// The applied share over time.
    pub(crate) curve: Vec<(f64, f64)>,
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

    /// The native subscription, with its fastest options or with streaming = on.
    pub(crate) fn native(&self, runner: Runner) -> Result<Finished> {
        let environment = self.environment;
        environment.copy_slot(self.database, "native")?;
        let mut control = environment.subscriber.connect(self.subscriber)?;
        control
            .batch_execute(&format!(
                "CREATE SUBSCRIPTION native CONNECTION '{}' PUBLICATION {PUBLICATION} WITH \
                 (create_slot = false, slot_name = native, copy_data = false, enabled = false, \
                 {}{})",
                environment.publisher_for_native(self.database).replace('\'', "''"),
                options_of(runner, environment.binaries().major()),
                if self.two_phase { ", two_phase = true" } else { "" },
            ))
            .context("cannot create the native subscription")?;
        let mut watch = Watch::new(
            self,
            "native",
            "SELECT pid FROM pg_stat_subscription WHERE subname = 'native' AND pid IS NOT NULL",
        )?;
        let started = Instant::now();
        control.batch_execute("ALTER SUBSCRIPTION native ENABLE")?;
        let counts_errors = environment.binaries().major() >= 15;
        let finished = watch.follow(started, &mut Meter::default(), || {
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

    /// Runs pgapace as a user would.
    pub(crate) fn pgapace(&self) -> Result<Finished> {
        self.environment.copy_slot(self.database, "pgapace")?;
        let mut watch = Watch::new(
            self,
            "pgapace",
            "SELECT pid FROM pg_stat_activity \
             WHERE datname = current_database() AND application_name LIKE 'pgapace %'",
        )?;
        let mut meter = Meter::default();
        let until = format!("--until={}", self.end);
        let mut arguments =
            vec!["--slot=pgapace", "--create-slot=false", "--copy-data=false", &until];
        if self.two_phase {
            arguments.push("--two-phase");
        }
        arguments.extend(self.arguments);
        let started = Instant::now();
        let mut process = run_pgapace(
            self.environment,
            self.bench,
            [self.database, self.subscriber],
            "pgapace",
            &arguments,
        )?;
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
    Ok(Program::new(&bench.program)
        .args(["run", "--log-level=warn", "--publication", PUBLICATION, "--name", name])
        .args(["--publisher", &environment.publisher_for_pgapace(publisher)])
        .args(["--subscriber", &environment.subscriber_for_pgapace(subscriber)])
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

/// Observes a run through SQL.
struct Watch<'a> {
    publisher: Client,
    subscriber: Client,
    slot: &'static str,
    /// Query for the subscriber's processes that apply changes.
    appliers: &'static str,
    start: Lsn,
    end: Lsn,
    limit: Duration,
    environment: &'a Environment,
}

impl<'a> Watch<'a> {
    fn new(replay: &Replay<'a>, slot: &'static str, appliers: &'static str) -> Result<Self> {
        Ok(Self {
            publisher: replay.environment.publisher.connect(replay.database)?,
            subscriber: replay.environment.subscriber.connect(replay.subscriber)?,
            slot,
            appliers,
            start: replay.start,
            end: replay.end,
            limit: replay.limit,
            environment: replay.environment,
        })
    }

    /// Follows a run until the marker arrives or the limit is reached. `check` returns an error
    /// when the run has failed.
    fn follow(
        &mut self,
        started: Instant,
        meter: &mut Meter,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Finished> {
        let marker = self.subscriber.prepare(&format!("SELECT count(*) FROM {MARKER}"))?;
        let mut curve = vec![(0.0, 0.0)];
        let mut sampled_at = started;
        let mut progressed = Duration::ZERO;
        loop {
            let arrived = self.subscriber.query_one(&marker, &[])?.get::<_, i64>(0) > 0;
            let elapsed = started.elapsed();
            meter.sample();
            if arrived {
                self.sample_processes(meter)?;
                meter.sample();
                curve.push((elapsed.as_secs_f64(), 1.0));
                return Ok(self.finished(elapsed, None, meter, curve));
            }
            if sampled_at.elapsed() >= SAMPLE_INTERVAL {
                sampled_at = Instant::now();
                check()?;
                self.sample_processes(meter)?;
                let share = self.share()?;
                if curve.last().is_none_or(|(_, last)| share > *last) {
                    progressed = elapsed;
                }
                curve.push((elapsed.as_secs_f64(), share));
                // Transactions and apply groups become visible as a whole, so only the time of the
                // latest one is meaningful. If none is visible, the run gets more time.
                if elapsed >= self.limit && (share > 0.0 || elapsed >= self.limit * PATIENCE) {
                    return Ok(self.finished(progressed, Some(share), meter, curve));
                }
                ensure!(
                    elapsed - progressed < STALLED.max(self.limit * PATIENCE),
                    "nothing was applied for {:?}:\n{}",
                    elapsed - progressed,
                    self.environment.subscriber.log_tail()
                );
            }
            std::thread::sleep(POLL);
        }
    }

    fn finished(
        &self,
        elapsed: Duration,
        stopped_at: Option<f64>,
        meter: &Meter,
        curve: Vec<(f64, f64)>,
    ) -> Finished {
        Finished { seconds: elapsed.as_secs_f64(), stopped_at, usage: meter.usage(), curve }
    }

    fn sample_processes(&mut self, meter: &mut Meter) -> Result<()> {
        let clients = [&mut self.publisher, &mut self.subscriber];
        watch_processes(meter, clients, self.slot, self.appliers)
    }

    /// The share of the backlog's WAL that is applied. All transactions of a backlog are of the
    /// same kind, so this is also the share of transactions.
    fn share(&mut self) -> Result<f64> {
        let recorded = "SELECT to_regclass('pgapace.progress') IS NOT NULL";
        let sql = if self.subscriber.query_one(recorded, &[])?.get(0) {
            "SELECT coalesce((SELECT lsn FROM pgapace.progress \
                              ORDER BY subscription DESC, lsn DESC LIMIT 1), '0/0')::text"
        } else {
            "SELECT coalesce(max(remote_lsn), '0/0')::text FROM pg_replication_origin_status"
        };
        let applied = crate::environment::lsn(&mut self.subscriber, sql)?;
        let length = self.end.0.saturating_sub(self.start.0).max(1);
        Ok((applied.0.saturating_sub(self.start.0) as f64 / length as f64).min(1.0))
    }
}

/// Watches the walsender of a slot and the subscriber processes that a query returns.
pub(crate) fn watch_processes(
    meter: &mut Meter,
    [publisher, subscriber]: [&mut Client; 2],
    slot: &str,
    appliers: &str,
) -> Result<()> {
    let senders = "SELECT active_pid FROM pg_replication_slots \
                   WHERE slot_name::text = $1 AND active_pid IS NOT NULL";
    for row in publisher.query(senders, &[&slot])? {
        watch_row(meter, Role::Walsender, row.get(0));
    }
    for row in subscriber.query(appliers, &[])? {
        watch_row(meter, Role::Apply, row.get(0));
    }
    Ok(())
}

pub(crate) fn watch_row(meter: &mut Meter, role: Role, pid: i32) {
    if let Ok(pid) = u32::try_from(pid) {
        meter.watch(role, pid);
    }
}
