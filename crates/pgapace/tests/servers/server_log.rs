//! In normal operation no statement of pgapace causes a log line of level WARNING or above on
//! either server. A DBA who monitors these logs sees only real problems.

use testbed::program::Process;
use testbed::{Cluster, Pair, Program, Result};

use crate::support::{DB, PATIENCE, Site, expect_exit, pgapace, wait_while_running};

const DDL: &str = "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); \
    CREATE TABLE keyless (v int); ALTER TABLE keyless REPLICA IDENTITY FULL; \
    CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000000); \
    CREATE TABLE wide (id int PRIMARY KEY, a numeric DEFAULT 1, b timestamptz DEFAULT now()); \
    CREATE INDEX ON wide (a); CREATE SEQUENCE free";

const PUBLISHER_ROLE: &str = "CREATE ROLE source LOGIN REPLICATION; \
    GRANT SELECT ON ALL TABLES IN SCHEMA public TO source; \
    GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO source; \
    ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO source";

/// The privileges that the documentation requires, without those for replication origins.
const SUBSCRIBER_ROLE: &str = "CREATE ROLE sink LOGIN; GRANT CREATE ON DATABASE postgres TO sink; \
    GRANT SET ON PARAMETER session_replication_role TO sink; \
    GRANT USAGE ON SCHEMA public TO sink; \
    GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA public TO sink; \
    GRANT UPDATE, SELECT ON ALL SEQUENCES IN SCHEMA public TO sink; \
    ALTER DEFAULT PRIVILEGES IN SCHEMA public \
      GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON TABLES TO sink";

/// The two servers, the roles of pgapace, and the positions in the servers' logs.
struct Watched {
    site: Site,
    publisher: String,
    subscriber: String,
    read: [usize; 2],
    /// Lines of level WARNING and above, with the preceding action.
    found: Vec<String>,
}

impl Watched {
    fn start(major: u16, plain_roles: bool) -> Result<Self> {
        // Large transactions are streamed and applied while they are open.
        let publisher = |b: testbed::ClusterBuilder| {
            b.setting("autovacuum", "off").setting("logical_decoding_work_mem", "64kB")
        };
        let subscriber = |b: testbed::ClusterBuilder| b.setting("autovacuum", "off");
        let site = Site::of(Pair::start_with(major, major, publisher, subscriber)?)?;
        site.publish_tables(DDL)?;
        site.publisher.sql(
            DB,
            "INSERT INTO t (v) SELECT 'x' FROM generate_series(1, 1000); \
             INSERT INTO keyless SELECT generate_series(1, 10); SELECT nextval('free'); \
             INSERT INTO parted SELECT i, 'p' FROM generate_series(1, 1000) i; \
             INSERT INTO wide (id) SELECT generate_series(1, 1000)",
        )?;
        let (mut publisher, mut subscriber) =
            (site.publisher.conninfo(DB), site.subscriber.conninfo(DB));
        if plain_roles {
            site.publisher.sql(DB, PUBLISHER_ROLE)?;
            site.subscriber.sql(DB, SUBSCRIBER_ROLE)?;
            publisher = publisher.replace("user=postgres", "user=source");
            subscriber = subscriber.replace("user=postgres", "user=sink");
        }
        let read = [log(&site.publisher).len(), log(&site.subscriber).len()];
        Ok(Self { site, publisher, subscriber, read, found: Vec::new() })
    }

    fn verb(&self, verb: &str) -> Program {
        pgapace(verb)
            .args(["--publisher", &self.publisher, "--subscriber", &self.subscriber])
            .args(["--publication", "pub", "--name", "sub"])
    }

    /// Runs a verb to its end and checks the logs of the servers.
    fn finish(&mut self, verb: &str, more: &[&str], code: i32) -> Result<()> {
        let mut run = self.site.spawn(&self.verb(verb).args(more))?;
        expect_exit(&mut run, code, &[])?;
        self.look(&format!("{verb} {}", more.join(" ")));
        Ok(())
    }

    /// Checks the lines that either server has logged since the last check.
    fn look(&mut self, after: &str) {
        let logs = [log(&self.site.publisher), log(&self.site.subscriber)];
        for (log, read) in logs.iter().zip(&mut self.read) {
            let loud = |line: &&str| {
                ["WARNING:  ", "ERROR:  ", "FATAL:  ", "PANIC:  "]
                    .iter()
                    .any(|level| line.contains(level))
            };
            let lines = log[*read..].lines().filter(loud);
            self.found.extend(lines.map(|line| format!("after {after}: {line}")));
            *read = log.len();
        }
    }

    fn wait_until_ready(&self, run: &mut Process, table: &str) -> Result<()> {
        let sql = format!(
            "SELECT count(*) FROM pgapace.relation WHERE table_name = '{table}' \
             AND state = 'ready' AND requested IS NULL"
        );
        wait_while_running(run, &format!("{table} to be ready"), PATIENCE, || {
            Ok(self.site.subscriber.query_one_text(DB, &sql)? == "1")
        })
    }

    fn change(&self) -> Result<()> {
        self.site.publisher.sql(
            DB,
            "INSERT INTO t (v) VALUES ('a'), ('b'); UPDATE t SET v = 'c' WHERE v = 'a'; \
             DELETE FROM t WHERE v = 'b'; UPDATE keyless SET v = v + 100 WHERE v < 5; \
             UPDATE parted SET v = v || '.' WHERE id % 10 = 0; TRUNCATE wide; \
             INSERT INTO wide (id) SELECT generate_series(1, 1000)",
        )?;
        self.site
            .publisher
            .sql(DB, "INSERT INTO t (v) SELECT repeat('y', 100) FROM generate_series(1, 20000)")
    }
}

fn log(cluster: &Cluster) -> String {
    String::from_utf8_lossy(&std::fs::read(cluster.log_file()).unwrap_or_default()).into_owned()
}

fn normal_operation(major: u16, plain_roles: bool) -> Result<()> {
    let mut watched = Watched::start(major, plain_roles)?;
    // Before pgapace has created anything.
    watched.finish("status", &[], 0)?;
    watched.finish("check", &[], 0)?;
    watched.finish("drop", &["--if-exists"], 0)?;
    watched.finish("run", &["--until", "current"], 0)?;
    watched.change()?;
    watched.finish("run", &["--until", "current"], 0)?;

    let mut run = watched.site.spawn_streaming(&watched.verb("run"))?;
    watched.change()?;
    watched.site.wait_until_applied(&mut run)?;
    watched.look("changes");
    watched.site.subscriber.sql(DB, "CREATE TABLE later (id int PRIMARY KEY)")?;
    watched.site.publisher.sql(DB, "CREATE TABLE later (id int PRIMARY KEY)")?;
    watched.site.publisher.sql(DB, "INSERT INTO later SELECT generate_series(1, 100)")?;
    watched.wait_until_ready(&mut run, "later")?;
    watched.finish("resync", &["t"], 0)?;
    watched.wait_until_ready(&mut run, "t")?;
    watched.finish("refresh", &[], 0)?;
    watched.finish("status", &[], 0)?;
    watched.finish("check", &[], 0)?;
    watched.site.wait_until_applied(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    watched.look("the end of a run");

    watched.finish("sequences", &[], 0)?;
    watched.finish("prepared", &[], 0)?;
    watched.change()?;
    watched.finish("run", &["--until", "current", "--two-phase"], 0)?;
    watched.finish("status", &["--json"], 0)?;
    watched.finish("drop", &[], 0)?;
    watched.finish("drop", &["--if-exists"], 0)?;

    // The program must not query a slot that does not exist.
    watched.site.subscriber.sql(DB, "TRUNCATE t, keyless, parted, wide, later")?;
    watched.finish("run", &["--until", "current"], 0)?;
    watched.site.publisher.sql(DB, "SELECT pg_drop_replication_slot('sub')")?;
    watched.finish("drop", &[], 0)?;
    assert!(watched.found.is_empty(), "{:#?}", watched.found);
    Ok(())
}

#[test]
fn a_superuser_leaves_no_errors_in_the_logs() -> Result<()> {
    normal_operation(15, false)?;
    normal_operation(18, false)
}

#[test]
fn plain_roles_leave_no_errors_in_the_logs() -> Result<()> {
    normal_operation(15, true)?;
    normal_operation(18, true)
}
