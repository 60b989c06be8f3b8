//! `pgapace demo`: two servers, a live load, a comparison; nothing is left behind.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::servers::{ServerBinaries, find_or_fetch, newest_local};
use testbed::workload::tpcb::{self, Load, TpcbOptions};
use testbed::{Cluster, Pair, Program, compare};

use crate::cli::output;
use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;

/// Fetched when no server is installed.
const DEFAULT_MAJOR: u16 = 18;
const DATABASE: &str = "demo";
const SUBSCRIPTION: &str = "demo";
const PUBLICATION: &str = "demo";
const LOOK: Duration = Duration::from_millis(250);
/// A subscriber that gets no further for this long is stuck.
const STUCK: Duration = Duration::from_secs(60);
/// Between two lines where the display is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Example: pgapace demo --duration 30 --clients 8 --publisher-version 15 --subscriber-version 18
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Seconds of load
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    duration: u64,

    /// Sessions that write on the publisher
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=80))]
    clients: u16,

    /// Size: 100 000 accounts each, as pgbench's scale
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    scale: u32,

    /// Major version of the publisher [default: the newest installed, else 18 is fetched]
    #[arg(long, value_name = "MAJOR")]
    publisher_version: Option<u16>,

    /// Major version of the subscriber [default: as the publisher]
    #[arg(long, value_name = "MAJOR")]
    subscriber_version: Option<u16>,

    /// Keep both servers' directories, with the logs
    #[arg(long)]
    keep: bool,
}

/// Runs the demo. It fails unless the tables are equal at the end.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals()?;
    let publisher = binaries(args.publisher_version)?;
    let subscriber = match args.subscriber_version {
        Some(major) => binaries(Some(major))?,
        None => publisher.clone(),
    };
    output::line(&format!(
        "Starting a publisher (PostgreSQL {}) and a subscriber (PostgreSQL {}) ...",
        publisher.version(),
        subscriber.version()
    ));
    let pair = Pair::from_builders(
        Cluster::builder(&publisher).name("publisher").keep(args.keep),
        Cluster::builder(&subscriber).name("subscriber").keep(args.keep),
    )
    .map_err(|e| failed(&e))?;
    let mut demo = Demo::prepare(&pair, args)?;
    demo.replicate(args, &shutdown)?;
    let equal = demo.compare()?;
    demo.stop(args.keep)?;
    if args.keep {
        for cluster in [&pair.publisher, &pair.subscriber] {
            output::line(&format!("Kept {}", cluster.data_dir().display()));
        }
    }
    if equal {
        output::line("The tables are equal.");
        return Ok(());
    }
    Err(Failure::new(Class::Apply, "the tables differ"))
}

fn binaries(major: Option<u16>) -> Result<ServerBinaries> {
    let found = match major {
        Some(major) => find_or_fetch(major),
        None => newest_local().map_or_else(|| find_or_fetch(DEFAULT_MAJOR), Ok),
    };
    found.map_err(|e| failed(&e))
}

struct Demo<'a> {
    pair: &'a Pair,
    publisher: Client,
    subscriber: Client,
    process: Process,
    _logs: Scratch,
}

/// A directory for the log of the program under demonstration.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, "cannot remove the scratch directory");
        }
    }
}

impl Scratch {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("pgapace-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|e| Failure::internal(format!("cannot create {}: {e}", path.display())))?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl<'a> Demo<'a> {
    /// Tables and publication on one side, empty tables on the other, pgapace in between.
    fn prepare(pair: &'a Pair, args: &DemoArgs) -> Result<Self> {
        output::line(&format!("Filling pgbench's tables, scale {} ...", args.scale));
        for cluster in [&pair.publisher, &pair.subscriber] {
            cluster.create_database(DATABASE).map_err(|e| failed(&e))?;
        }
        let mut publisher = pair.publisher.connect(DATABASE).map_err(|e| failed(&e))?;
        let mut subscriber = pair.subscriber.connect(DATABASE).map_err(|e| failed(&e))?;
        tpcb::create_tables(&mut publisher, args.scale).map_err(|e| failed(&e))?;
        tpcb::create_schema(&mut subscriber).map_err(|e| failed(&e))?;
        pair.publisher
            .sql(DATABASE, &format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"))
            .map_err(|e| failed(&e))?;
        let program = std::env::current_exe()
            .map_err(|e| Failure::internal(format!("cannot find the program itself: {e}")))?;
        let logs = Scratch::new()?;
        let log = logs.path().join("pgapace.log");
        let arguments = [
            "run",
            "--publisher",
            &pair.publisher.conninfo(DATABASE),
            "--subscriber",
            &pair.subscriber.conninfo(DATABASE),
            "--publication",
            PUBLICATION,
            "--name",
            SUBSCRIPTION,
        ];
        let shown: Vec<_> = arguments
            .iter()
            .map(|a| if a.contains(' ') { format!("\"{a}\"") } else { (*a).to_owned() })
            .collect();
        output::line(&format!("Running: pgapace {}", shown.join(" ")));
        let process =
            Program::new(program).args(arguments).spawn_logged(&log).map_err(|e| failed(&e))?;
        Ok(Self { pair, publisher, subscriber, process, _logs: logs })
    }

    /// Load, then the wait until the subscriber has all of it.
    fn replicate(&mut self, args: &DemoArgs, shutdown: &Shutdown) -> Result<()> {
        let mut display = Display::new();
        self.wait_for_the_stream(&mut display, shutdown)?;
        let load = Load::start(
            &self.pair.publisher.conninfo(DATABASE),
            usize::from(args.clients),
            TpcbOptions {
                duration: Some(Duration::from_secs(args.duration)),
                ..TpcbOptions::default()
            },
        )
        .map_err(|e| failed(&e))?;
        let mut lags = Vec::new();
        while load.is_running() && !shutdown.requested() {
            std::thread::sleep(LOOK);
            let lag = self.lag()?;
            let stats = load.stats();
            display.show(format!(
                "{:>6.0} tps on the publisher   {:>9} transactions   lag {:>8}, {:.1} s",
                stats.tps(),
                stats.transactions,
                output::size(lag.bytes),
                lag.seconds
            ));
            lags.push(lag);
        }
        let summary = load.stop().map_err(|e| failed(&e))?;
        interrupted(shutdown)?;
        let drained = self.wait_for_the_end(&mut display, shutdown)?;
        display.bar.finish_and_clear();
        let stats = summary.stats;
        let worst = lags.iter().fold(Lag::default(), |worst, lag| Lag {
            bytes: worst.bytes.max(lag.bytes),
            seconds: worst.seconds.max(lag.seconds),
        });
        output::line(&format!(
            "Load: {} transactions in {:.1} s ({:.0} tps) from {} clients, {} failed",
            stats.transactions,
            stats.elapsed.as_secs_f64(),
            stats.tps(),
            args.clients,
            stats.failures
        ));
        output::line(&format!(
            "Replication: largest lag {} and {:.1} s; level {:.1} s after the load ended",
            output::size(worst.bytes),
            worst.seconds,
            drained.as_secs_f64()
        ));
        Ok(())
    }

    fn wait_for_the_stream(&mut self, display: &mut Display, shutdown: &Shutdown) -> Result<()> {
        display.show("copying the tables".to_owned());
        loop {
            interrupted(shutdown)?;
            self.expect_running()?;
            let streaming = self
                .publisher
                .query_opt(
                    "SELECT 1 FROM pg_stat_replication WHERE application_name = $1 \
                     AND state = 'streaming'",
                    &[&SUBSCRIPTION],
                )
                .map_err(|e| Failure::new(Class::Publisher, e.to_string()))?;
            if streaming.is_some() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until everything written so far is durable on the subscriber.
    fn wait_for_the_end(&mut self, display: &mut Display, shutdown: &Shutdown) -> Result<Duration> {
        let started = Instant::now();
        let mut best = (i64::MAX, Instant::now());
        let goal: String = self
            .publisher
            .query_one("SELECT pg_current_wal_lsn()::text", &[])
            .map_err(|e| Failure::new(Class::Publisher, e.to_string()))?
            .get(0);
        loop {
            interrupted(shutdown)?;
            self.expect_running()?;
            let left: i64 = self
                .publisher
                .query_one(
                    &format!(
                        "SELECT coalesce(max(pg_wal_lsn_diff('{goal}', flush_lsn)), 1)::int8 \
                         FROM pg_stat_replication WHERE application_name = $1"
                    ),
                    &[&SUBSCRIPTION],
                )
                .map_err(|e| Failure::new(Class::Publisher, e.to_string()))?
                .get(0);
            if left <= 0 {
                return Ok(started.elapsed());
            }
            if left < best.0 {
                best = (left, Instant::now());
            } else if best.1.elapsed() > STUCK {
                return Err(Failure::new(Class::Apply, "the subscriber gets no further")
                    .detail(format!("{left} bytes are missing; the log says:\n{}", self.log())));
            }
            display.show(format!("the load has ended, {} to go", output::size(left)));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn lag(&mut self) -> Result<Lag> {
        self.expect_running()?;
        let row = self
            .publisher
            .query_opt(
                "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::int8, \
                 coalesce(extract(epoch FROM replay_lag), 0)::float8 \
                 FROM pg_stat_replication WHERE application_name = $1 AND replay_lsn IS NOT NULL",
                &[&SUBSCRIPTION],
            )
            .map_err(|e| Failure::new(Class::Publisher, e.to_string()))?;
        Ok(row.map_or(Lag::default(), |row| Lag { bytes: row.get(0), seconds: row.get(1) }))
    }

    fn compare(&mut self) -> Result<bool> {
        let differences =
            compare::compare_tables(&mut self.publisher, &mut self.subscriber, &tpcb::tables())
                .map_err(|e| failed(&e))?;
        for table in tpcb::tables() {
            let checksum =
                compare::table_checksum(&mut self.subscriber, &table).map_err(|e| failed(&e))?;
            let difference = differences.iter().find(|d| d.table == table);
            output::line(&match difference {
                None => format!("  {table}: equal, {} rows", checksum.rows),
                Some(difference) => format!("  {difference}"),
            });
        }
        Ok(differences.is_empty())
    }

    fn stop(&mut self, keep: bool) -> Result<()> {
        self.process.terminate().map_err(|e| failed(&e))?;
        let status = self.process.wait(Duration::from_secs(30)).map_err(|e| failed(&e))?;
        if keep {
            output::line(&self.log());
        }
        if status.success() {
            return Ok(());
        }
        Err(Failure::new(Class::Internal, format!("pgapace ended with {status}"))
            .detail(self.log()))
    }

    fn expect_running(&mut self) -> Result<()> {
        if self.process.is_running() {
            return Ok(());
        }
        Err(Failure::new(Class::Internal, "pgapace has ended").detail(self.log()))
    }

    fn log(&self) -> String {
        self.process.log()
    }
}

/// How far the subscriber is behind.
#[derive(Debug, Clone, Copy, Default)]
struct Lag {
    bytes: i64,
    seconds: f64,
}

/// One line that changes on a terminal, a line now and then elsewhere.
struct Display {
    bar: ProgressBar,
    last_line: Option<Instant>,
}

impl Display {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner().with_style(
            ProgressStyle::with_template("{spinner} {elapsed_precise}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        Self { bar, last_line: None }
    }

    fn show(&mut self, text: String) {
        if !self.bar.is_hidden() {
            self.bar.set_message(text);
            self.bar.tick();
        } else if self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            output::line(&text);
        }
    }
}

fn interrupted(shutdown: &Shutdown) -> Result<()> {
    if shutdown.requested() {
        return Err(Failure::new(Class::Internal, "the demo was interrupted"));
    }
    Ok(())
}

fn failed(error: &testbed::Error) -> Failure {
    Failure::new(Class::Internal, error.to_string())
}
