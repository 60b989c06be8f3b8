//! Shared test support: servers, a database on each side, and the program between them.

// Every test folder uses only a part of it.
#![allow(dead_code)]

pub(crate) mod native;
pub(crate) mod random_load;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Display;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tempfile::TempDir;
use testbed::postgres::{Client, SimpleQueryMessage};
use testbed::program::Process;
use testbed::servers::find_or_fetch;
use testbed::workload::random_dml::RandomSchema;
use testbed::{Cluster, Program, TableName, compare, wait_until};

/// Time limit for actions that take only moments on a healthy system.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The versions that differ most: the oldest and the newest, alone and combined.
pub(crate) const VERSIONS: [(u16, u16); 3] = [(15, 15), (18, 18), (15, 18)];

/// Runs a test's body on each of these pairs of versions (publisher, subscriber).
pub(crate) fn on_versions(versions: &[(u16, u16)], body: impl Fn(Case)) {
    for (publisher, subscriber) in versions {
        body(Case::new(*publisher, *subscriber));
    }
}

/// A publisher and a subscriber that all tests of this process share, each with its own databases.
/// Guardian processes stop them after the end of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPair {
    pub(crate) publisher: &'static Cluster,
    pub(crate) subscriber: &'static Cluster,
}

/// The shared servers of these versions, started on first use.
pub(crate) fn servers(publisher_major: u16, subscriber_major: u16) -> SharedPair {
    SharedPair {
        publisher: cluster("publisher", publisher_major),
        subscriber: cluster("subscriber", subscriber_major),
    }
}

fn cluster(role: &'static str, major: u16) -> &'static Cluster {
    type Started = HashMap<(&'static str, u16), &'static Mutex<Option<&'static Cluster>>>;
    static CLUSTERS: Mutex<Option<Started>> = Mutex::new(None);
    // Servers of different versions start concurrently.
    let slot = *CLUSTERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_with(HashMap::new)
        .entry((role, major))
        .or_insert_with(|| Box::leak(Box::default()));
    let mut started = slot.lock().unwrap_or_else(PoisonError::into_inner);
    started.get_or_insert_with(|| {
        let binaries = find_or_fetch(major).unwrap_or_else(|error| panic!("{error}"));
        let mut builder = Cluster::builder(&binaries).name(format!("{role} {major}"));
        if role == "subscriber" {
            builder = builder.setting("track_commit_timestamp", "on");
        }
        let cluster = builder
            .setting("max_wal_senders", "200")
            .setting("max_connections", "400")
            .setting("max_wal_size", "256MB")
            .setting("min_wal_size", "32MB")
            .setting("autovacuum", "off")
            .setting("wal_retrieve_retry_interval", "100ms")
            .start()
            .unwrap_or_else(|error| panic!("{error}"));
        Box::leak(Box::new(cluster))
    })
}

/// A database of a cluster, with a session for queries and changes.
pub(crate) struct Database<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) name: String,
    client: RefCell<Client>,
}

impl<'a> Database<'a> {
    /// Creates a database. `options` follow the name, for example `ENCODING 'LATIN1'`.
    pub(crate) fn create(cluster: &'a Cluster, name: &str, options: &str) -> Self {
        must(cluster.sql("postgres", &format!("CREATE DATABASE {name} {options}")));
        let client = RefCell::new(must(cluster.connect(name)));
        Self { cluster, name: name.to_owned(), client }
    }

    /// Runs statements, as one transaction unless they contain transaction control.
    #[track_caller]
    pub(crate) fn sql(&self, sql: &str) {
        if let Err(error) = self.client.borrow_mut().batch_execute(sql) {
            panic!("{}: {}\n{sql}", self.cluster.name(), explain(&error));
        }
    }

    /// The rows of a query as text, with columns separated by `|` and NULL as `∅`.
    #[track_caller]
    pub(crate) fn rows(&self, sql: &str) -> Vec<String> {
        let messages =
            self.client.borrow_mut().simple_query(sql).unwrap_or_else(|error| {
                panic!("{}: {}\n{sql}", self.cluster.name(), explain(&error))
            });
        let row_text = |message: &SimpleQueryMessage| match message {
            SimpleQueryMessage::Row(row) => {
                let fields: Vec<_> = (0..row.len()).map(|i| row.get(i).unwrap_or("∅")).collect();
                Some(fields.join("|"))
            }
            _ => None,
        };
        messages.iter().filter_map(row_text).collect()
    }

    /// The only row of a query.
    #[track_caller]
    pub(crate) fn value(&self, sql: &str) -> String {
        let mut rows = self.rows(sql);
        assert_eq!(rows.len(), 1, "{sql}");
        rows.remove(0)
    }

    /// Whether this extension is available on the server.
    pub(crate) fn offers(&self, extension: &str) -> bool {
        let sql = "SELECT count(*) FROM pg_available_extensions WHERE name = ";
        self.value(&format!("{sql}'{extension}'")) == "1"
    }

    /// The server's major version.
    pub(crate) fn major(&self) -> u16 {
        self.cluster.binaries().major()
    }

    pub(crate) fn conninfo(&self) -> String {
        self.cluster.conninfo(&self.name)
    }

    /// Opens another session.
    pub(crate) fn connect(&self) -> Client {
        must(self.cluster.connect(&self.name))
    }
}

/// The result of a finished run.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The exit code; none if a signal ended the program.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    /// Standard error: the log and the last error.
    pub(crate) log: String,
}

impl Finished {
    /// Asserts the exit code, and that the log contains all of these texts.
    #[track_caller]
    pub(crate) fn expect(&self, code: i32, named: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{}", self.log);
        for text in named {
            assert!(self.log.contains(text), "the log does not contain {text:?}:\n{}", self.log);
        }
        self
    }
}

/// The program with the options of one subscription. It does not reference a cluster, so that a
/// test can stop and start servers meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct Tool {
    pub(crate) publisher: String,
    pub(crate) subscriber: String,
    /// Name of the subscription and its slot.
    pub(crate) name: String,
    /// The publications, separated by commas.
    pub(crate) publications: String,
    /// Additional arguments of `run`.
    pub(crate) args: Vec<String>,
}

impl Tool {
    /// For publication `pub`.
    pub(crate) fn new(publisher: String, subscriber: String, name: &str) -> Self {
        let (name, publications) = (name.to_owned(), "pub".to_owned());
        Self { publisher, subscriber, name, publications, args: Vec::new() }
    }

    /// A verb with the options of the subscription.
    pub(crate) fn program(&self, verb: &str) -> Program {
        Program::new(env!("CARGO_BIN_EXE_pgapace"))
            .arg(verb)
            .args(["--publisher", &self.publisher])
            .args(["--subscriber", &self.subscriber])
            .args(["--name", &self.name])
            .args(["--publication", &self.publications])
            .args(&self.args)
    }

    /// Runs a verb to its end.
    pub(crate) fn finish(&self, verb: &str, args: &[&str]) -> Finished {
        let output = must(self.program(verb).args(args).output());
        Finished {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            log: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// `run --until current` with any result.
    pub(crate) fn run(&self) -> Finished {
        self.finish("run", &["--until", "current"])
    }

    /// `run --until current` that must succeed. Returns the log.
    #[track_caller]
    pub(crate) fn run_until_current(&self) -> String {
        let finished = self.run();
        finished.expect(0, &[]);
        finished.log
    }

    /// Starts `run` with this log file.
    pub(crate) fn start(&self, log: PathBuf) -> Process {
        must(self.program("run").spawn_logged(log))
    }
}

/// One test on one pair of versions: a new database on each side, and a subscription between them.
pub(crate) struct Case {
    pub(crate) publisher: Database<'static>,
    pub(crate) subscriber: Database<'static>,
    pub(crate) tool: Tool,
    directory: TempDir,
}

impl Case {
    pub(crate) fn new(publisher_major: u16, subscriber_major: u16) -> Self {
        Self::with_databases(publisher_major, subscriber_major, "", "")
    }

    /// With options of CREATE DATABASE on either side.
    pub(crate) fn with_databases(
        publisher_major: u16,
        subscriber_major: u16,
        publisher_options: &str,
        subscriber_options: &str,
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let name = format!("case{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let pair = servers(publisher_major, subscriber_major);
        let publisher = Database::create(pair.publisher, &name, publisher_options);
        let subscriber = Database::create(pair.subscriber, &name, subscriber_options);
        let tool = Tool::new(publisher.conninfo(), subscriber.conninfo(), &name);
        let directory = TempDir::new().expect("a temporary directory");
        Self { publisher, subscriber, tool, directory }
    }

    /// Runs SQL on both sides, the publisher first.
    #[track_caller]
    pub(crate) fn both(&self, sql: &str) {
        self.publisher.sql(sql);
        self.subscriber.sql(sql);
    }

    /// Creates the publication `pub`.
    #[track_caller]
    pub(crate) fn publish(&self, what: &str) {
        self.publisher.sql(&format!("CREATE PUBLICATION pub {what}"));
    }

    /// Creates the same tables on both sides, publishes all tables, and makes the (empty) copy.
    #[track_caller]
    pub(crate) fn replicate(&self, ddl: &str) {
        self.both(ddl);
        self.publish("FOR ALL TABLES");
        self.run_until_current();
    }

    /// Creates a random schema, which may differ between the sides, and publishes its tables.
    #[track_caller]
    pub(crate) fn publish_random(&self, schema: &RandomSchema) {
        self.publisher.sql(&schema.publisher_ddl);
        self.subscriber.sql(&schema.subscriber_ddl);
        self.publisher.sql(&schema.publication_ddl("pub"));
    }

    /// `run --until current` with any result.
    pub(crate) fn run(&self) -> Finished {
        self.tool.run()
    }

    /// `run --until current` that must succeed. Returns the log.
    #[track_caller]
    pub(crate) fn run_until_current(&self) -> String {
        self.tool.run_until_current()
    }

    /// The path of a process's log file.
    pub(crate) fn log_file(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.log"))
    }

    /// Starts `run` and waits until it streams.
    #[track_caller]
    pub(crate) fn start(&self) -> Process {
        let log = self.log_file(&self.tool.name);
        let _ = std::fs::remove_file(&log);
        let mut process = self.tool.start(log);
        let streams = wait_until(PATIENCE, "pgapace to stream", || {
            if !process.is_running() {
                panic!("pgapace ended:\n{}", process.log());
            }
            Ok(process.events("streaming") > 0)
        });
        streams.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
        process
    }

    /// Waits until a running process has applied everything that the publisher has committed.
    #[track_caller]
    pub(crate) fn wait_until_applied(&self, process: &mut Process) {
        let end = self.publisher.value("SELECT pg_current_wal_lsn()");
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{}' AND replay_lsn >= '{end}'",
            self.tool.name
        );
        let applied = wait_until(PATIENCE, "pgapace to catch up", || {
            if !process.is_running() {
                panic!("pgapace ended:\n{}", process.log());
            }
            Ok(self.publisher.value(&sql) == "1")
        });
        applied.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    }

    /// Stops a running process with SIGTERM, and expects success.
    #[track_caller]
    pub(crate) fn stop(&self, mut process: Process) -> String {
        must(process.terminate());
        let status = must(process.wait(PATIENCE));
        assert!(status.success(), "{status}:\n{}", process.log());
        process.log()
    }

    /// Asserts that tables contain the same rows on both sides. Names are `schema.table` or
    /// `table`, unquoted.
    #[track_caller]
    pub(crate) fn expect_equal(&self, tables: &[&str]) {
        let names: Vec<TableName> = tables.iter().map(|name| TableName::from(*name)).collect();
        let equal = compare::expect_equal(
            &mut self.publisher.client.borrow_mut(),
            &mut self.subscriber.client.borrow_mut(),
            &names,
        );
        if let Err(error) = equal {
            panic!(
                "{} to {}: {error}",
                self.publisher.cluster.name(),
                self.subscriber.cluster.name()
            );
        }
    }

    /// A column of `pgapace.stat_subscription` on the subscriber.
    #[track_caller]
    pub(crate) fn statistic(&self, column: &str) -> String {
        self.subscriber.value(&format!(
            "SELECT t.{column} FROM pgapace.stat_subscription t JOIN pgapace.subscription s \
             ON s.id = t.subscription WHERE s.name = '{}'",
            self.tool.name
        ))
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // For the rest of this process the slot would retain WAL, the databases would use memory,
        // and the replication origins would count against the limit (1000 on these servers).
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name = '{}' AND NOT active",
            self.tool.name
        );
        let _ = self.publisher.cluster.sql("postgres", &sql);
        let origins = format!(
            "SELECT o.roname FROM pg_replication_origin o, pg_database d \
             WHERE d.datname = '{}' AND starts_with(o.roname, 'pgapace_' || d.oid || '_')",
            self.subscriber.name
        );
        let origins = self.subscriber.cluster.query_texts("postgres", &origins).unwrap_or_default();
        for database in [&self.publisher, &self.subscriber] {
            let sql = format!("DROP DATABASE {} WITH (FORCE)", database.name);
            let _ = database.cluster.sql("postgres", &sql);
        }
        for origin in origins.into_iter().flatten().flatten() {
            let sql = format!("SELECT pg_replication_origin_drop('{origin}')");
            let _ = self.subscriber.cluster.sql("postgres", &sql);
        }
    }
}

/// Prints that a test is skipped, directly to stderr, because the output of passing tests is
/// captured.
pub(crate) fn skipped(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
}

/// The seeds of `PGAPACE_TEST_SEEDS` (`10..20`) instead of these.
pub(crate) fn seeds(usual: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("PGAPACE_TEST_SEEDS") else { return usual };
    let (first, last) = text.split_once("..").expect("FIRST..LAST");
    first.parse().expect("a number")..last.parse().expect("a number")
}

/// The value, or a panic with the error's text.
#[track_caller]
pub(crate) fn must<T, E: Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn explain(error: &testbed::postgres::Error) -> String {
    match error.as_db_error() {
        Some(said) => {
            format!("{} ({}) {}", said.message(), said.code().code(), said.detail().unwrap_or(""))
        }
        None => error.to_string(),
    }
}
