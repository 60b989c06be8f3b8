//! A subscriber that follows a publisher under load: native or pgapace, starting with the initial
//! copy.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pgoutput::Lsn;
use testbed::compare::{compare_tables, published_tables};
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Cluster, wait_until};

use crate::bench::Bench;
use crate::clock::Phase;
use crate::environment::{Environment, MARKER, PUBLICATION};
use crate::measure::{Meter, Role, Usage};
use crate::outcome::{Outcome, Runner};
use crate::round::run_pgapace;
use crate::watch::watch_processes;

/// The publisher's database.
pub(crate) const DATABASE: &str = "bench";
/// The database with the subscriber's empty tables.
pub(crate) const BASE: &str = "bench_base";
/// The subscriber's database in the run.
pub(crate) const ROUND: &str = "bench_round";
/// The name of the subscription, its slot, and its entry in `synchronous_standby_names`.
pub(crate) const NAME: &str = "bench_subscriber";

/// The size from which the publisher streams transactions.
pub(crate) const MEMORY: &str = "logical_decoding_work_mem";

/// Interval of samples under load, long enough not to disturb the run.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
/// Limit for the initial copy.
const START_PATIENCE: Duration = Duration::from_secs(600);
/// Limit for catching up after the load.
const CATCH_UP_PATIENCE: Duration = Duration::from_secs(1800);
/// Limit for the exit of pgapace, which first applies everything it has received.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// Options of a subscriber.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Options<'a> {
    /// Additional options of CREATE SUBSCRIPTION.
    pub(crate) native: &'a str,
    /// Additional arguments of `pgapace run`.
    pub(crate) pgapace: &'a [&'a str],
    /// Whether the publisher's commits wait for the subscriber.
    pub(crate) synchronous: bool,
}

/// Positions in the publisher's WAL at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Positions {
    pub(crate) written: Lsn,
    /// The position up to which the walsender has sent.
    pub(crate) sent: Lsn,
    pub(crate) applied: Lsn,
}

impl Positions {
    /// The lag in bytes.
    pub(crate) fn behind(self) -> f64 {
        self.written.0.saturating_sub(self.applied.0) as f64
    }

    /// Bytes that the walsender has neither decoded nor sent.
    pub(crate) fn unsent(self) -> f64 {
        self.written.0.saturating_sub(self.sent.0) as f64
    }
}

/// A running subscriber.
pub(crate) struct Live<'a> {
    bench: &'a Bench,
    environment: &'a Environment,
    runner: Runner,
    process: Option<Process>,
    meter: Meter,
    publisher: Client,
    subscriber: Client,
}

/// Starts servers with the tables on both sides, filled on the publisher, and the publication.
pub(crate) fn prepare(bench: &Bench, schema: &str, load: &str) -> Result<Environment> {
    let environment = bench.servers(&[], &[])?;
    bench.clock.time(Phase::Prepare, || create(&environment, schema, load))?;
    Ok(environment)
}

/// Cleans the servers for the next workload.
pub(crate) fn give_back(bench: &Bench, environment: Environment) -> Result<()> {
    bench.give_back(environment, DATABASE, &[ROUND, BASE])
}

fn create(environment: &Environment, schema: &str, load: &str) -> Result<()> {
    let schema = format!("CREATE TABLE {MARKER} (id serial PRIMARY KEY); {schema}");
    environment.publisher.create_database(DATABASE)?;
    environment.publisher.sql(DATABASE, &schema).context("cannot make the tables")?;
    environment.publisher.sql(DATABASE, load).context("cannot fill the tables")?;
    environment.publisher.sql(DATABASE, "VACUUM (FREEZE, ANALYZE)")?;
    environment
        .publisher
        .sql(DATABASE, &format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"))?;
    environment.subscriber.create_database(BASE)?;
    Ok(environment.subscriber.sql(BASE, &schema)?)
}

/// Changes a server setting that requires no restart.
pub(crate) fn set(cluster: &Cluster, name: &str, value: &str) -> Result<()> {
    cluster.sql("postgres", &format!("ALTER SYSTEM SET {name} = '{value}'"))?;
    cluster.sql("postgres", "SELECT pg_reload_conf()")?;
    let sql = format!(
        "SELECT setting = '{value}' FROM pg_file_settings WHERE name = '{name}' \
                       ORDER BY seqno DESC LIMIT 1"
    );
    wait_until(STOP_PATIENCE, format!("{name} to be set"), || {
        Ok(cluster.query_one_text("postgres", &sql)? == "t")
    })?;
    // By now, existing sessions have also received the signal.
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}

impl<'a> Live<'a> {
    /// Starts a subscriber with empty tables and waits until it streams.
    pub(crate) fn start(
        bench: &'a Bench,
        environment: &'a Environment,
        runner: Runner,
        options: Options<'_>,
    ) -> Result<Self> {
        bench.clock.time(Phase::Reset, || {
            environment.publisher.sql(DATABASE, "VACUUM")?;
            environment.publisher.sql(DATABASE, "CHECKPOINT")?;
            Self::attach(bench, environment, runner, options)
        })
    }

    fn attach(
        bench: &'a Bench,
        environment: &'a Environment,
        runner: Runner,
        options: Options<'_>,
    ) -> Result<Self> {
        environment.reset_subscriber(BASE, ROUND)?;
        let names = if options.synchronous { NAME } else { "" };
        // Set first, because pgapace reads it at startup.
        set(&environment.publisher, "synchronous_standby_names", names)?;
        let mut live = Self {
            bench,
            environment,
            runner,
            process: None,
            meter: Meter::default(),
            publisher: environment.publisher.connect(DATABASE)?,
            subscriber: environment.subscriber.connect(ROUND)?,
        };
        if runner.is_native() {
            live.subscriber
                .batch_execute(&format!(
                    "CREATE SUBSCRIPTION {NAME} CONNECTION '{}' PUBLICATION {PUBLICATION} \
                     WITH ({})",
                    environment.publisher_for_native(DATABASE).replace('\'', "''"),
                    options.native
                ))
                .context("cannot create the native subscription")?;
        } else {
            let databases = [DATABASE, ROUND];
            let process = run_pgapace(environment, bench, databases, NAME, options.pgapace)?;
            live.meter.watch(Role::Program, process.pid());
            live.process = Some(process);
        }
        live.wait_until_streaming()?;
        Ok(live)
    }

    fn wait_until_streaming(&mut self) -> Result<()> {
        let started = Instant::now();
        loop {
            let copied = !self.runner.is_native()
                || self
                    .subscriber
                    .query_one(
                        "SELECT NOT EXISTS (SELECT 1 FROM pg_subscription_rel \
                                            WHERE srsubstate <> 'r')",
                        &[],
                    )?
                    .get(0);
            let streaming: bool = self
                .publisher
                .query_one(
                    "SELECT EXISTS (SELECT 1 FROM pg_stat_replication \
                                    WHERE application_name = $1 AND state = 'streaming')",
                    &[&NAME],
                )?
                .get(0);
            if copied && streaming {
                return Ok(());
            }
            self.check()?;
            ensure!(
                started.elapsed() < START_PATIENCE,
                "{} did not start to stream:\n{}",
                self.runner.name(),
                self.environment.subscriber.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Samples the processes; returns an error if the subscriber has failed.
    pub(crate) fn sample_processes(&mut self) -> Result<()> {
        self.check()?;
        watch_processes(
            &mut self.meter,
            [&mut self.publisher, &mut self.subscriber],
            NAME,
            if self.runner.is_native() {
                "SELECT pid FROM pg_stat_subscription WHERE pid IS NOT NULL"
            } else {
                "SELECT pid FROM pg_stat_activity \
                 WHERE datname = current_database() AND application_name LIKE 'pgapace %'"
            },
        )?;
        self.meter.sample();
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process {
            ensure!(process.is_running(), "pgapace ended:\n{}", process.log());
        }
        Ok(())
    }

    /// The positions of the publisher's WAL and of the subscriber, if it is connected and has
    /// reported its position.
    pub(crate) fn positions(&mut self) -> Result<Option<Positions>> {
        let sql = "SELECT pg_current_wal_lsn()::text, sent_lsn::text, replay_lsn::text \
                   FROM pg_stat_replication \
                   WHERE application_name = $1 AND replay_lsn IS NOT NULL";
        let Some(row) = self.publisher.query_opt(sql, &[&NAME])? else { return Ok(None) };
        let position = |column| {
            let text: &str = row.get(column);
            text.parse::<Lsn>().with_context(|| format!("{text} is not a valid LSN"))
        };
        Ok(Some(Positions { written: position(0)?, sent: position(1)?, applied: position(2)? }))
    }

    /// Bytes of WAL that the publisher has written and the subscriber has not applied.
    pub(crate) fn lag(&mut self) -> Result<Option<f64>> {
        Ok(self.positions()?.map(|positions| positions.behind()))
    }

    /// Waits until all transactions committed so far are visible on the subscriber, after making
    /// commits asynchronous. Calls `idle` repeatedly.
    pub(crate) fn catch_up(&mut self, idle: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        let arrived = self.catch_up_within(CATCH_UP_PATIENCE, idle)?;
        ensure!(
            arrived,
            "{} does not catch up:\n{}",
            self.runner.name(),
            self.environment.subscriber.log_tail()
        );
        Ok(())
    }

    /// Like [`catch_up`](Self::catch_up), but returns false after `limit`.
    pub(crate) fn catch_up_within(
        &mut self,
        limit: Duration,
        mut idle: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<bool> {
        set(&self.environment.publisher, "synchronous_standby_names", "")?;
        let sql = format!("INSERT INTO {MARKER} DEFAULT VALUES RETURNING id");
        let marker: i32 = self.publisher.query_one(&sql, &[])?.get(0);
        let arrived = format!("SELECT count(*) FROM {MARKER} WHERE id = $1");
        let started = Instant::now();
        let mut sampled_at = started;
        while self.subscriber.query_one(&arrived, &[&marker])?.get::<_, i64>(0) == 0 {
            if sampled_at.elapsed() >= SAMPLE_INTERVAL {
                sampled_at = Instant::now();
                self.sample_processes()?;
                idle(self)?;
            }
            if started.elapsed() > limit {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(true)
    }

    /// Stops the subscriber, compares its tables, and removes its objects.
    pub(crate) fn finish(mut self, outcome: &mut Outcome) -> Result<Usage> {
        self.sample_processes()?;
        let differences = self.bench.clock.time(Phase::Compare, || {
            let tables = published_tables(&mut self.publisher, PUBLICATION)?;
            compare_tables(&mut self.publisher, &mut self.subscriber, &tables)
        })?;
        let differences: Vec<_> = differences.iter().map(ToString::to_string).collect();
        outcome.compared(self.runner, &differences);
        let usage = self.meter.usage();
        let bench = self.bench;
        bench.clock.time(Phase::Reset, || self.remove())?;
        Ok(usage)
    }

    /// Stops a subscriber that still lags, without comparing its tables.
    pub(crate) fn abandon(mut self) -> Result<Usage> {
        self.sample_processes()?;
        let usage = self.meter.usage();
        let bench = self.bench;
        bench.clock.time(Phase::Reset, || {
            if let Some(mut process) = self.process.take() {
                process.kill9()?;
            } else {
                self.subscriber.batch_execute(&format!("DROP SUBSCRIPTION {NAME}"))?;
            }
            self.environment.drop_slot(DATABASE, NAME)?;
            drop(self.subscriber);
            self.environment.drop_subscriber(ROUND)
        })?;
        Ok(usage)
    }

    fn remove(mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.terminate()?;
            process.wait(STOP_PATIENCE)?;
        } else {
            self.subscriber.batch_execute(&format!("DROP SUBSCRIPTION {NAME}"))?;
        }
        self.environment.drop_slot(DATABASE, NAME)?;
        drop(self.subscriber);
        self.environment.drop_subscriber(ROUND)
    }
}
