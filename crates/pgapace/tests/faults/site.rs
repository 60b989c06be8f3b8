//! A site: publisher and subscriber servers of one test, which may kill them, and pgapace between
//! them.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use testbed::compare::{TableName, expect_equal};
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::workload::{ledger, tpcb};
use testbed::{Cluster, Error, Pair, Program, Result, wait_until};

/// The name of the database on both sides.
pub(crate) const DB: &str = "postgres";
/// The name of the subscription, its slot and its application_name.
pub(crate) const NAME: &str = "sub";
/// A time limit for a loaded machine; only a fault exceeds it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// Number of the ledger's tables of entries.
const ENTRY_TABLES: usize = 3;

/// Two servers, a publication `pub`, and a directory for logs.
pub(crate) struct Site {
    pub(crate) publisher: Cluster,
    pub(crate) subscriber: Cluster,
    directory: tempfile::TempDir,
    spawned: Cell<u32>,
}

impl Site {
    /// Starts two servers with these settings.
    pub(crate) fn start(publisher: &[(&str, &str)], subscriber: &[(&str, &str)]) -> Result<Self> {
        let pair = Pair::start_with(
            18,
            18,
            |builder| publisher.iter().fold(builder, |b, (name, value)| b.setting(*name, *value)),
            |builder| subscriber.iter().fold(builder, |b, (name, value)| b.setting(*name, *value)),
        )?;
        Self::of(pair)
    }

    pub(crate) fn of(pair: Pair) -> Result<Self> {
        Ok(Self {
            publisher: pair.publisher,
            subscriber: pair.subscriber,
            directory: tempfile::tempdir()?,
            spawned: Cell::new(0),
        })
    }

    /// Runs DDL on both sides and publishes all tables.
    pub(crate) fn tables(&self, ddl: &str) -> Result<()> {
        self.publisher.sql(DB, ddl)?;
        self.subscriber.sql(DB, ddl)?;
        self.publisher.sql(DB, "CREATE PUBLICATION pub FOR ALL TABLES")
    }

    /// Two servers of 18 with a published table `t`, to which the role `secretive` connects by TCP with a
    /// password.
    pub(crate) fn with_password(password: &str) -> Result<Self> {
        let hba = ["host all secretive 127.0.0.1/32 scram-sha-256"];
        let site = Self::of(Pair::start_with(18, 18, |b| b.hba(hba), |b| b.hba(hba))?)?;
        let role = format!("CREATE ROLE secretive LOGIN SUPERUSER PASSWORD '{password}'");
        site.publisher.sql(DB, &role)?;
        site.subscriber.sql(DB, &role)?;
        site.tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        Ok(site)
    }

    /// Runs DDL on both sides and publishes these tables too.
    pub(crate) fn tables_beside(&self, ddl: &str, names: &str) -> Result<()> {
        self.publisher.sql(DB, ddl)?;
        self.subscriber.sql(DB, ddl)?;
        self.publisher.sql(DB, &format!("ALTER PUBLICATION pub ADD TABLE {names}"))
    }

    /// Creates the ledger and pgbench tables on both sides and fills them on the publisher.
    pub(crate) fn load_tables(&self) -> Result<()> {
        let mut publisher = self.publisher.connect(DB)?;
        ledger::create(&mut publisher, ENTRY_TABLES)?;
        tpcb::create_tables(&mut publisher, 1)?;
        let mut subscriber = self.subscriber.connect(DB)?;
        ledger::create_schema(&mut subscriber, ENTRY_TABLES)?;
        tpcb::create_schema(&mut subscriber)?;
        // The history table has no key, so its duplicates show changes that were applied twice.
        let names: Vec<String> = load_tables().iter().map(ToString::to_string).collect();
        publisher
            .batch_execute(&format!("CREATE PUBLICATION pub FOR TABLE {}", names.join(", ")))?;
        Ok(())
    }

    /// `pgapace run` between the two servers.
    pub(crate) fn program(&self) -> Program {
        self.program_between(&self.publisher.conninfo(DB), &self.subscriber.conninfo(DB))
    }

    /// `pgapace run` with these connection strings.
    pub(crate) fn program_between(&self, publisher: &str, subscriber: &str) -> Program {
        pgapace("run")
            .args(["--publisher", publisher, "--subscriber", subscriber])
            .args(["--publication", "pub", "--name", NAME])
            .env("PGAPACE_STATUS_INTERVAL", "1")
    }

    /// Starts a program with its own log.
    pub(crate) fn spawn(&self, program: &Program) -> Result<Process> {
        let number = self.spawned.get();
        self.spawned.set(number + 1);
        program.spawn_logged(self.directory.path().join(format!("run-{number}.log")))
    }

    /// Starts a program and waits until it streams.
    pub(crate) fn spawn_streaming(&self, program: &Program) -> Result<Process> {
        let mut run = self.spawn(program)?;
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        Ok(run)
    }

    /// The end of the publisher's WAL.
    pub(crate) fn publisher_lsn(&self) -> Result<String> {
        self.publisher.query_one_text(DB, "SELECT pg_current_wal_flush_lsn()")
    }

    /// Waits until everything that the publisher has committed is applied.
    pub(crate) fn catch_up(&self, run: &mut Process) -> Result<()> {
        let end = self.publisher_lsn()?;
        let sql = format!("SELECT count(*) FROM pgapace.progress WHERE lsn >= '{end}'");
        wait_while_running(run, &format!("progress to reach {end}"), PATIENCE, || {
            Ok(self.subscriber.query_one_text(DB, &sql)? != "0")
        })
    }

    /// Checks that these tables are equal on both sides.
    pub(crate) fn expect_equal(&self, tables: &[TableName]) -> Result<()> {
        expect_equal(&mut self.publisher.connect(DB)?, &mut self.subscriber.connect(DB)?, tables)
    }

    /// Checks that the tables of the load are equal and consistent.
    pub(crate) fn expect_equal_load(&self) -> Result<()> {
        self.expect_equal(&load_tables())?;
        let sums = "SELECT (SELECT coalesce(sum(delta), 0) FROM pgbench_history) = ALL (ARRAY[ \
                    (SELECT sum(abalance) FROM pgbench_accounts), \
                    (SELECT sum(tbalance) FROM pgbench_tellers), \
                    (SELECT sum(bbalance) FROM pgbench_branches)])";
        assert_eq!(self.subscriber.query_one_text(DB, sums)?, "t", "pgbench sums");
        let mut subscriber = self.subscriber.connect(DB)?;
        ledger::check(&mut subscriber).map_err(|violation| Error::other(violation.to_string()))?;
        Ok(())
    }

    /// The slot's confirmed_flush_lsn.
    pub(crate) fn confirmed(&self) -> Result<u64> {
        lsn(&self.publisher.query_one_text(
            DB,
            &format!(
                "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{NAME}'"
            ),
        )?)
    }

    /// The highest progress on the subscriber.
    pub(crate) fn progress(&self) -> Result<u64> {
        lsn(&self.subscriber.query_one_text(DB, "SELECT max(lsn) FROM pgapace.progress")?)
    }
}

/// The program under test.
pub(crate) fn pgapace(verb: &str) -> Program {
    let mut program = Program::new(env!("CARGO_BIN_EXE_pgapace"));
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy().into_owned();
        if name.starts_with("PG") {
            program = program.env_remove(name);
        }
    }
    program.env("NO_COLOR", "1").arg(verb)
}

/// The tables that the load changes.
pub(crate) fn load_tables() -> Vec<TableName> {
    ledger::tables(ENTRY_TABLES).into_iter().chain(tpcb::tables()).collect()
}

/// Both workloads together.
pub(crate) struct Load {
    ledger: ledger::Writer,
    tpcb: tpcb::Load,
}

impl Load {
    /// Starts both workloads on the publisher, each with at most `rate` transactions per second.
    pub(crate) fn start(publisher: &Cluster, rate: f64) -> Result<Self> {
        let conninfo = publisher.conninfo(DB);
        let options = ledger::WriterOptions {
            seed: 1,
            rate: Some(rate),
            large_every: 100,
            large_entries: 2000,
            ..Default::default()
        };
        let ledger = ledger::Writer::start_with(&conninfo, 2, options)?;
        let options = tpcb::TpcbOptions { seed: 2, rate: Some(rate), ..Default::default() };
        let tpcb = tpcb::Load::start(&conninfo, 2, options)?;
        Ok(Self { ledger, tpcb })
    }

    /// Stops both workloads and returns the number of transactions that the ledger committed.
    pub(crate) fn stop(self) -> Result<u64> {
        self.tpcb.stop()?;
        self.ledger.stop()
    }
}

/// Checks the ledger on the subscriber repeatedly: a prefix of the commit order with complete
/// transactions.
pub(crate) struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::result::Result<u64, ledger::Violation>>>,
}

/// The thread ends with its test, also when the test fails.
impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Reader {
    pub(crate) fn start(subscriber: &Cluster) -> Self {
        let conninfo = subscriber.conninfo(DB);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut sound = 0;
            while !stopped.load(Ordering::Relaxed) {
                let Ok(mut client) = Client::connect(&conninfo, testbed::postgres::NoTls) else {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                };
                while !stopped.load(Ordering::Relaxed) {
                    match ledger::check(&mut client) {
                        Ok(_) => sound += 1,
                        // The subscriber is unavailable.
                        Err(ledger::Violation::Unreadable(_)) => break,
                        Err(violation) => return Err(violation),
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            Ok(sound)
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops and returns how often the ledger was consistent.
    pub(crate) fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(0) };
        thread.join().map_err(|_| Error::other("the reader panicked"))?.map_err(|violation| {
            Error::other(format!("a reader of the subscriber saw: {violation}"))
        })
    }
}

/// Parses an LSN such as `16/B374D848`.
pub(crate) fn lsn(text: &str) -> Result<u64> {
    let parsed = text.split_once('/').and_then(|(high, low)| {
        let part = |text| u64::from_str_radix(text, 16).ok();
        Some(part(high)? << 32 | part(low)?)
    });
    parsed.ok_or_else(|| Error::other(format!("{text:?} is no LSN")))
}

/// Waits for a condition; fails if the program ends first.
pub(crate) fn wait_while_running(
    run: &mut Process,
    what: &str,
    timeout: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let mut ended = false;
    let waited = wait_until(timeout, what, || {
        if condition()? {
            return Ok(true);
        }
        ended = !run.is_running();
        Ok(ended)
    });
    if ended || waited.is_err() {
        let why = waited.err().map_or_else(|| "the program ended".to_owned(), |e| e.to_string());
        return Err(Error::other(format!("{what}: {why}\n{}", log_tail(run))));
    }
    Ok(())
}

/// Waits until the log contains this event.
pub(crate) fn wait_for_event(run: &mut Process, event: &str, timeout: Duration) -> Result<()> {
    wait_for_log(run, &format!("event=\"{event}\""), timeout)
}

/// Waits until a line of the log contains this text.
pub(crate) fn wait_for_log(run: &mut Process, text: &str, timeout: Duration) -> Result<()> {
    let path = run.log_file().to_path_buf();
    wait_while_running(run, &format!("log line {text:?}"), timeout, || {
        Ok(String::from_utf8_lossy(&std::fs::read(&path)?).contains(text))
    })
}

/// Waits for the end of the program and checks its exit code and messages.
pub(crate) fn expect_exit(run: &mut Process, code: i32, messages: &[&str]) -> Result<()> {
    run.wait(PATIENCE)?;
    let log = run.log();
    assert_eq!(run.exit_code(), Some(code), "exit code; log:\n{}", log_tail(run));
    for message in messages {
        assert!(log.contains(message), "no {message:?} in:\n{}", log_tail(run));
    }
    Ok(())
}

/// Whether tests run many rounds.
pub(crate) fn long() -> bool {
    std::env::var("PGAPACE_TEST_LONG").is_ok_and(|value| value == "1")
}

fn log_tail(run: &Process) -> String {
    let log = run.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
