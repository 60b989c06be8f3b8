//! `pgapace demo`: two servers, a live load and a comparison. Nothing is left behind.
#![forbid(unsafe_code)]

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::servers::{ServerBinaries, find_or_fetch, newest_local};
use testbed::workload::tpcb::{self, Load, TpcbOptions};
use testbed::{Cluster, Pair, Program, compare};

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

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The comparison found rows that differ.
    #[error("the tables differ")]
    TablesDiffer,
    /// The subscriber does not catch up.
    #[error("the subscriber makes no progress; {left} bytes are missing; the log says:\n{log}")]
    Stuck {
        /// WAL that the subscriber has not confirmed, in bytes.
        left: i64,
        /// The log of pgapace.
        log: String,
    },
    /// pgapace exited.
    #[error("pgapace exited unexpectedly; its log says:\n{0}")]
    Exited(String),
    /// The user stopped the demo.
    #[error("the demo was interrupted")]
    Interrupted,
    /// A server or the load failed.
    #[error(transparent)]
    Server(#[from] testbed::Error),
    /// A query of the demo failed.
    #[error(transparent)]
    Query(#[from] testbed::postgres::Error),
    /// A file cannot be made.
    #[error("cannot create a directory for the log: {0}")]
    Directory(#[from] std::io::Error),
}

type Result<T, E = DemoError> = std::result::Result<T, E>;

/// Arguments of the verb.
///
/// Example: pgapace demo --duration 30 --clients 8 --publisher-version 15 --subscriber-version 18
#[derive(Debug, Args)]
pub struct DemoArgs {
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

/// Runs the demo of `program`, which is pgapace. `stop` says whether the user asked for the end.
///
/// # Errors
///
/// If a server, the load or the program fails, and if the tables differ at the end.
pub fn run(args: &DemoArgs, program: &Path, stop: &dyn Fn() -> bool) -> Result<()> {
    let publisher = binaries(args.publisher_version)?;
    let subscriber = match args.subscriber_version {
        Some(major) => binaries(Some(major))?,
        None => publisher.clone(),
    };
    line(&format!(
        "Starting a publisher (PostgreSQL {}) and a subscriber (PostgreSQL {}) ...",
        publisher.version(),
        subscriber.version()
    ));
    let pair = Pair::from_builders(
        Cluster::builder(&publisher).name("publisher").keep(args.keep),
        Cluster::builder(&subscriber).name("subscriber").keep(args.keep),
    )?;
    let mut demo = Demo::prepare(&pair, args, program)?;
    demo.replicate(args, stop)?;
    let equal = demo.compare()?;
    demo.stop(args.keep)?;
    if args.keep {
        for cluster in [&pair.publisher, &pair.subscriber] {
            line(&format!("Kept {}", cluster.data_dir().display()));
        }
    }
    if equal {
        line("The tables are equal.");
        return Ok(());
    }
    Err(DemoError::TablesDiffer)
}

fn binaries(major: Option<u16>) -> Result<ServerBinaries> {
    let found = match major {
        Some(major) => find_or_fetch(major),
        None => newest_local().map_or_else(|| find_or_fetch(DEFAULT_MAJOR), Ok),
    };
    Ok(found?)
}

struct Demo<'a> {
    pair: &'a Pair,
    publisher: Client,
    subscriber: Client,
    process: Process,
    _logs: tempfile::TempDir,
}

impl<'a> Demo<'a> {
    /// Tables and publication on one side, empty tables on the other, pgapace in between.
    fn prepare(pair: &'a Pair, args: &DemoArgs, program: &Path) -> Result<Self> {
        line(&format!("Filling pgbench's tables, scale {} ...", args.scale));
        for cluster in [&pair.publisher, &pair.subscriber] {
            cluster.create_database(DATABASE)?;
        }
        let mut publisher = pair.publisher.connect(DATABASE)?;
        let mut subscriber = pair.subscriber.connect(DATABASE)?;
        tpcb::create_tables(&mut publisher, args.scale)?;
        tpcb::create_schema(&mut subscriber)?;
        pair.publisher
            .sql(DATABASE, &format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"))?;
        let logs = tempfile::tempdir()?;
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
        line(&format!("Running: pgapace {}", shown.join(" ")));
        let process = Program::new(program).args(arguments).spawn_logged(&log)?;
        Ok(Self { pair, publisher, subscriber, process, _logs: logs })
    }

    /// Load, then the wait until the subscriber has all of it.
    fn replicate(&mut self, args: &DemoArgs, stop: &dyn Fn() -> bool) -> Result<()> {
        let mut display = Display::new();
        self.wait_for_the_stream(&mut display, stop)?;
        let load = Load::start(
            &self.pair.publisher.conninfo(DATABASE),
            usize::from(args.clients),
            TpcbOptions {
                duration: Some(Duration::from_secs(args.duration)),
                ..TpcbOptions::default()
            },
        )?;
        let mut lags = Vec::new();
        while load.is_running() && !stop() {
            std::thread::sleep(LOOK);
            let lag = self.lag()?;
            let stats = load.stats();
            display.show(format!(
                "{:>6.0} tps on the publisher   {:>9} transactions   lag {:>8}, {:.1} s",
                stats.tps(),
                stats.transactions,
                size(lag.bytes),
                lag.seconds
            ));
            lags.push(lag);
        }
        let summary = load.stop()?;
        interrupted(stop)?;
        let drained = self.wait_for_the_end(&mut display, stop)?;
        display.bar.finish_and_clear();
        let stats = summary.stats;
        let worst = lags.iter().fold(Lag::default(), |worst, lag| Lag {
            bytes: worst.bytes.max(lag.bytes),
            seconds: worst.seconds.max(lag.seconds),
        });
        line(&format!(
            "Load: {} transactions in {:.1} s ({:.0} tps) from {} clients, {} failed",
            stats.transactions,
            stats.elapsed.as_secs_f64(),
            stats.tps(),
            args.clients,
            stats.failures
        ));
        line(&format!(
            "Replication: largest lag {} and {:.1} s; level {:.1} s after the load ended",
            size(worst.bytes),
            worst.seconds,
            drained.as_secs_f64()
        ));
        Ok(())
    }

    fn wait_for_the_stream(
        &mut self,
        display: &mut Display,
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        display.show("copying the tables".to_owned());
        loop {
            interrupted(stop)?;
            self.expect_running()?;
            let streaming = self.publisher.query_opt(
                "SELECT 1 FROM pg_stat_replication WHERE application_name = $1 \
                     AND state = 'streaming'",
                &[&SUBSCRIPTION],
            )?;
            if streaming.is_some() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until everything written so far is durable on the subscriber.
    fn wait_for_the_end(
        &mut self,
        display: &mut Display,
        stop: &dyn Fn() -> bool,
    ) -> Result<Duration> {
        let started = Instant::now();
        let mut best = (i64::MAX, Instant::now());
        let goal: String =
            self.publisher.query_one("SELECT pg_current_wal_lsn()::text", &[])?.get(0);
        loop {
            interrupted(stop)?;
            self.expect_running()?;
            let left: i64 = self
                .publisher
                .query_one(
                    &format!(
                        "SELECT coalesce(max(pg_wal_lsn_diff('{goal}', flush_lsn)), 1)::int8 \
                         FROM pg_stat_replication WHERE application_name = $1"
                    ),
                    &[&SUBSCRIPTION],
                )?
                .get(0);
            if left <= 0 {
                return Ok(started.elapsed());
            }
            if left < best.0 {
                best = (left, Instant::now());
            } else if best.1.elapsed() > STUCK {
                return Err(DemoError::Stuck { left, log: self.log() });
            }
            display.show(format!("the load has ended, {} to go", size(left)));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn lag(&mut self) -> Result<Lag> {
        self.expect_running()?;
        let row = self.publisher.query_opt(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::int8, \
                 coalesce(extract(epoch FROM replay_lag), 0)::float8 \
                 FROM pg_stat_replication WHERE application_name = $1 AND replay_lsn IS NOT NULL",
            &[&SUBSCRIPTION],
        )?;
        Ok(row.map_or(Lag::default(), |row| Lag { bytes: row.get(0), seconds: row.get(1) }))
    }

    fn compare(&mut self) -> Result<bool> {
        let differences =
            compare::compare_tables(&mut self.publisher, &mut self.subscriber, &tpcb::tables())?;
        for table in tpcb::tables() {
            let checksum = compare::table_checksum(&mut self.subscriber, &table)?;
            let difference = differences.iter().find(|d| d.table == table);
            line(&match difference {
                None => format!("  {table}: equal, {} rows", checksum.rows),
                Some(difference) => format!("  {difference}"),
            });
        }
        Ok(differences.is_empty())
    }

    fn stop(&mut self, keep: bool) -> Result<()> {
        self.process.terminate()?;
        let status = self.process.wait(Duration::from_secs(30))?;
        if keep {
            line(&self.log());
        }
        if status.success() {
            return Ok(());
        }
        Err(DemoError::Exited(self.log()))
    }

    fn expect_running(&mut self) -> Result<()> {
        if self.process.is_running() {
            return Ok(());
        }
        Err(DemoError::Exited(self.log()))
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
            line(&text);
        }
    }
}

fn interrupted(stop: &dyn Fn() -> bool) -> Result<()> {
    if stop() { Err(DemoError::Interrupted) } else { Ok(()) }
}

/// Writes a line to standard output. A reader that went away (`| head`) is no error.
fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn size(bytes: i64) -> HumanBytes {
    HumanBytes(u64::try_from(bytes).unwrap_or(0))
}
