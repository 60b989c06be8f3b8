//! A test with servers of its own, which it may configure, restart and kill.

use std::cell::Cell;

use testbed::compare::{TableName, expect_equal};
use testbed::network::Network;
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::workload::{ledger, tpcb};
use testbed::{Cluster, ClusterBuilder, Error, Pair, Program, Result};

use super::load::{ENTRY_TABLES, load_tables};
use super::{PATIENCE, Tool, lsn, wait_for_event, wait_while_running};

/// The name of the database on both sides.
pub(crate) const DB: &str = "postgres";
/// The name of the subscription, its slot and its application_name.
pub(crate) const NAME: &str = "sub";

/// Two servers, a publication `pub`, and a directory for logs.
pub(crate) struct Site {
    pub(crate) publisher: Cluster,
    pub(crate) subscriber: Cluster,
    directory: tempfile::TempDir,
    spawned: Cell<u32>,
}

impl Site {
    /// Starts two servers of version 18 with these settings.
    pub(crate) fn start(publisher: &[(&str, &str)], subscriber: &[(&str, &str)]) -> Result<Self> {
        let pair = Pair::start_with(
            18,
            18,
            |builder| publisher.iter().fold(builder, |b, (name, value)| b.setting(*name, *value)),
            |builder| subscriber.iter().fold(builder, |b, (name, value)| b.setting(*name, *value)),
        )?;
        Self::of(pair)
    }

    /// Starts two servers of these versions with the usual settings.
    pub(crate) fn new(publisher_major: u16, subscriber_major: u16) -> Result<Self> {
        Self::of(Pair::start(publisher_major, subscriber_major)?)
    }

    /// Starts two servers of version 18 that the machines of a network reach.
    pub(crate) fn over(network: &Network) -> Result<Self> {
        let reached = |builder: ClusterBuilder| builder.listen_tcp("*").hba([network.hba()]);
        Self::of(Pair::start_with(18, 18, reached, reached)?)
    }

    /// With servers that the test has started.
    pub(crate) fn of(pair: Pair) -> Result<Self> {
        Ok(Self {
            publisher: pair.publisher,
            subscriber: pair.subscriber,
            directory: tempfile::tempdir()?,
            spawned: Cell::new(0),
        })
    }

    /// Runs DDL on both sides and publishes all tables.
    pub(crate) fn publish_tables(&self, ddl: &str) -> Result<()> {
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
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        Ok(site)
    }

    /// Runs DDL on both sides and publishes these tables too.
    pub(crate) fn publish_more_tables(&self, ddl: &str, names: &str) -> Result<()> {
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

    /// The program between the two servers as they are now; a test may replace them.
    pub(crate) fn tool(&self) -> Tool {
        Tool::new(self.publisher.conninfo(DB), self.subscriber.conninfo(DB), NAME)
    }

    /// `pgapace run` between the two servers.
    pub(crate) fn program(&self) -> Program {
        often_reporting(&self.tool())
    }

    /// `pgapace run` with these connection strings.
    pub(crate) fn program_between(&self, publisher: &str, subscriber: &str) -> Program {
        often_reporting(&Tool::new(publisher.to_owned(), subscriber.to_owned(), NAME))
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

    /// Starts the program, whose first copy of table `t` waits for a lock of the session that is returned.
    pub(crate) fn spawn_copying(&self, program: &Program) -> Result<(Client, Process)> {
        let mut holder = self.subscriber.connect(DB)?;
        holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
        let mut run = self.spawn(program)?;
        let copying = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'";
        wait_while_running(&mut run, "the copy", PATIENCE, || {
            Ok(self.subscriber.query_one_text(DB, copying)? == "1")
        })?;
        Ok((holder, run))
    }

    /// Waits for so many seconds, with checkpoints of the publisher, each of which invalidates idle slots.
    pub(crate) fn pass_idle_limit(&self, run: &mut Process, seconds: u32) -> Result<()> {
        let until = format!("SELECT clock_timestamp() + interval '{seconds} s'");
        let until = self.publisher.query_one_text(DB, &until)?;
        let over = format!("SELECT clock_timestamp() > '{until}'");
        wait_while_running(run, "the limit to pass", PATIENCE, || {
            self.publisher.sql(DB, "CHECKPOINT")?;
            Ok(self.publisher.query_one_text(DB, &over)? == "t")
        })
    }

    /// The end of the publisher's WAL.
    pub(crate) fn publisher_lsn(&self) -> Result<String> {
        self.publisher.query_one_text(DB, "SELECT pg_current_wal_flush_lsn()")
    }

    /// Waits until a running process has applied everything that the publisher has committed. The
    /// progress rows tell, because the publisher may have lost what it was told before a crash. Rows of tables that
    /// catch up have numbers below 0.
    pub(crate) fn wait_until_applied(&self, run: &mut Process) -> Result<()> {
        let end = self.publisher_lsn()?;
        let sql = format!(
            "SELECT count(*) FROM pgapace.progress WHERE subscription > 0 AND lsn >= '{end}'"
        );
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
        lsn(&self
            .subscriber
            .query_one_text(DB, "SELECT max(lsn) FROM pgapace.progress WHERE subscription > 0")?)
    }
}

/// `pgapace run` that reports its positions every second, for tests that wait for them.
fn often_reporting(tool: &Tool) -> Program {
    tool.program("run").env("PGAPACE_STATUS_INTERVAL", "1")
}
