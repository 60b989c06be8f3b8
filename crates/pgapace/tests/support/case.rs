//! A test with databases of its own on servers that it shares with other tests.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;
use testbed::program::Process;
use testbed::workload::random_dml::RandomSchema;
use testbed::{TableName, compare};

use super::database::texts;
use super::{
    Database, Finished, PATIENCE, Tool, must, servers, wait_for_event, wait_while_running,
};

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
        must(wait_for_event(&mut process, "streaming", PATIENCE));
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
        must(wait_while_running(process, &format!("apply to reach {end}"), PATIENCE, || {
            Ok(self.publisher.value(&sql) == "1")
        }));
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

    /// Drops the slots of subscriptions whose names begin with that of the case: its servers are shared.
    pub(crate) fn drop_slots_of_its_subscriptions(&self) {
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE starts_with(slot_name, '{}_') AND NOT active",
            self.tool.name
        );
        let _ = self.publisher.cluster.sql("postgres", &sql);
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // For the rest of this process the slot would retain WAL, the databases would use memory,
        // and the replication origins would count against the limit (1000 on these servers).
        let Ok(mut publisher) = self.publisher.cluster.connect("postgres") else { return };
        let Ok(mut subscriber) = self.subscriber.cluster.connect("postgres") else { return };
        self.publisher.free(&mut publisher);
        self.subscriber.free(&mut subscriber);
        let origins = texts(
            &mut subscriber,
            &format!(
                "SELECT o.roname FROM pg_replication_origin o, pg_database d \
                 WHERE d.datname = '{}' AND starts_with(o.roname, 'pgapace_' || d.oid || '_')",
                self.subscriber.name
            ),
        );
        let drop =
            |database: &Database<'_>| format!("DROP DATABASE {} WITH (FORCE)", database.name);
        let _ = publisher.batch_execute(&drop(&self.publisher));
        let _ = subscriber.batch_execute(&drop(&self.subscriber));
        for origin in origins {
            let sql = format!("SELECT pg_replication_origin_drop('{origin}')");
            let _ = subscriber.batch_execute(&sql);
        }
    }
}
