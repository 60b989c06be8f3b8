//! Few sessions of the publisher that wait for each commit: the leader reads the stream and executes their
//! groups itself, and leaves both to the other threads when something goes wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{ClusterBuilder, Pair, Program, Result, Stop};

use crate::support::{DB, NAME, PATIENCE, Site, explain, wait_for_log, wait_while_running};

const SESSIONS: i64 = 3;
/// On an idle machine the leader reads the stream itself within a fraction of a second.
const LEADS_WITHIN: Duration = Duration::from_secs(15);

/// Tells the sessions to end, and counts their commits for the test.
#[derive(Default)]
struct Counter {
    ends: AtomicBool,
    commits: AtomicI64,
}

impl Counter {
    /// Counts the session's own row up, and looks each time whether the subscriber has it when COMMIT returns.
    fn count(
        &self,
        session: i64,
        (mut publisher, mut subscriber): (testbed::postgres::Client, testbed::postgres::Client),
    ) -> std::result::Result<(), String> {
        let text = |e: testbed::postgres::Error| explain(&e);
        let settings = "SET statement_timeout = '60s'; SET synchronous_commit = remote_apply";
        publisher.batch_execute(settings).map_err(text)?;
        for number in 1.. {
            if self.ends.load(Ordering::Relaxed) {
                break;
            }
            let update = format!(
                "BEGIN; INSERT INTO t VALUES ({session} + {SESSIONS} * {number}, 0); \
                 UPDATE t SET v = {number} WHERE id = {session}; COMMIT"
            );
            publisher.batch_execute(&update).map_err(text)?;
            let there = "SELECT v FROM t WHERE id = $1";
            let there: i64 = subscriber.query_one(there, &[&session]).map_err(text)?.get(0);
            if there != number {
                return Err(format!("{number} is committed, and the subscriber has {there}"));
            }
            self.commits.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Sessions of the publisher that count rows of table `t` up, each in transactions that wait for pgapace.
struct Sessions {
    counter: Arc<Counter>,
    threads: Vec<JoinHandle<std::result::Result<(), String>>>,
}

impl Sessions {
    /// Starts them, and the program that they wait for.
    fn start(site: &mut Site, program: &Program) -> Result<(Self, Process)> {
        site.publish_tables("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)")?;
        site.publisher
            .sql(DB, &format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {SESSIONS}) i"))?;
        let mut run = site.spawn_streaming(program)?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let run = site.spawn_streaming(program)?;
        let counter = Arc::<Counter>::default();
        let threads = (1..=SESSIONS)
            .map(|session| {
                let clients = (site.publisher.connect(DB)?, site.subscriber.connect(DB)?);
                let counter = Arc::clone(&counter);
                Ok(std::thread::spawn(move || counter.count(session, clients)))
            })
            .collect::<Result<_>>()?;
        Ok((Self { counter, threads }, run))
    }

    /// Waits until they have committed some fifty times more.
    fn go_on(&self, run: &mut Process) -> Result<()> {
        let commits = || self.counter.commits.load(Ordering::Relaxed);
        let before = commits();
        wait_while_running(run, "commits that wait", PATIENCE, || Ok(commits() >= before + 50))
    }

    /// Ends them, and compares the tables.
    fn finish(self, site: &Site, run: &Process, tables: &[TableName]) -> Result<()> {
        self.counter.ends.store(true, Ordering::Relaxed);
        for session in self.threads {
            assert_eq!(session.join().expect("a session panicked"), Ok(()), "{}", run.log());
        }
        site.expect_equal(tables)
    }
}

/// Waits until the group waits for a lock, for longer than the leader waits for the group.
fn wait_for_a_lock(site: &Site, run: &mut Process) -> Result<()> {
    let waits = "SELECT count(*) > 0 FROM pg_locks \
                 WHERE NOT granted AND clock_timestamp() - waitstart > '20 ms'";
    wait_while_running(run, "a group to wait", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "t")
    })
}

#[test]
fn commits_that_wait_are_there_whatever_happens() -> Result<()> {
    for major in [14, 18] {
        let mut site = Site::of(Pair::start_with(
            major,
            major,
            |builder| builder.setting("logical_decoding_work_mem", "64kB"),
            |builder| builder,
        )?)?;
        let program = site.program().args(["--log-level", "debug"]);
        let (sessions, mut run) = Sessions::start(&mut site, &program)?;
        // On a machine so busy that commits are rare, it does not: then the rest is tried without.
        let _ = wait_for_log(&mut run, "the leader reads the stream itself", LEADS_WITHIN);
        for round in 1..=3 {
            sessions.go_on(&mut run)?;
            // Its session is lost while the leader has it.
            let apply = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                         WHERE application_name LIKE 'pgapace%apply%'";
            site.subscriber.sql(DB, apply)?;
            sessions.go_on(&mut run)?;
            // The group must wait for longer than the leader does.
            let mut user = site.subscriber.connect(DB)?;
            user.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
            wait_for_a_lock(&site, &mut run)?;
            user.batch_execute("COMMIT")?;
            sessions.go_on(&mut run)?;
            // A transaction that is spooled, and then applied in parts.
            let large = format!(
                "SET statement_timeout = '60s'; \
                 INSERT INTO t SELECT -{round}00000 - i, i FROM generate_series(1, 20000) i"
            );
            site.publisher.sql(DB, &large)?;
            sessions.go_on(&mut run)?;
            // The connection is lost while the leader reads it.
            let walsender = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots";
            site.publisher.sql(DB, walsender)?;
        }
        sessions.go_on(&mut run)?;
        run.kill9()?;
        let mut run = site.spawn_streaming(&program)?;
        sessions.go_on(&mut run)?;
        sessions.finish(&site, &run, &[TableName::from("t")])?;
        // A publisher that shuts down waits for the answer of a subscription that has everything.
        site.publisher.stop(Stop::Fast)?;
    }
    Ok(())
}

/// A server that accepts TLS.
fn with_tls(builder: ClusterBuilder) -> ClusterBuilder {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()])
        .expect("a certificate of its own");
    builder
        .setting("ssl", "on")
        .setting("ssl_cert_file", "server.crt")
        .setting("ssl_key_file", "server.key")
        .file("server.crt", certified.cert.pem())
        .file("server.key", certified.signing_key.serialize_pem())
}

#[test]
fn tables_change_and_the_program_pauses_while_commits_wait() -> Result<()> {
    for major in [14, 18] {
        let mut site = Site::of(Pair::start_with(
            major,
            major,
            |builder| with_tls(builder).setting("wal_sender_timeout", "2s"),
            with_tls,
        )?)?;
        let required = |conninfo: String| format!("{conninfo} sslmode=require");
        let (publisher, subscriber) =
            (required(site.publisher.conninfo_tcp(DB)), required(site.subscriber.conninfo_tcp(DB)));
        let program = site.program_between(&publisher, &subscriber).args(["--log-level", "debug"]);
        let (sessions, mut run) = Sessions::start(&mut site, &program)?;
        let encrypted = "SELECT count(*) > 0 AND bool_and(ssl) FROM pg_stat_ssl \
                         JOIN pg_stat_activity USING (pid) WHERE application_name ~ '^(sub|pgapace)'";
        for server in [&site.publisher, &site.subscriber] {
            assert_eq!(server.query_one_text(DB, encrypted)?, "t");
        }
        // A column that the prepared statements do not have yet.
        for server in [&site.subscriber, &site.publisher] {
            server.sql(DB, "ALTER TABLE t ADD note text DEFAULT 'new'")?;
            sessions.go_on(&mut run)?;
        }
        site.publisher.sql(DB, "ALTER TABLE t REPLICA IDENTITY FULL")?;
        sessions.go_on(&mut run)?;
        // The leader waits for a table that is altered, and for one whose index is built.
        for locks in ["ALTER TABLE t ADD CHECK (v >= 0)", "CREATE INDEX ON t (v)"] {
            let mut user = site.subscriber.connect(DB)?;
            user.batch_execute(&format!("BEGIN; {locks}"))?;
            wait_for_a_lock(&site, &mut run)?;
            user.batch_execute("COMMIT")?;
            sessions.go_on(&mut run)?;
        }
        // A table that is copied meanwhile, and one that is truncated.
        for sql in ["CREATE TABLE u (id int PRIMARY KEY)", "CREATE TABLE w (id int PRIMARY KEY)"] {
            site.subscriber.sql(DB, sql)?;
            site.publisher.sql(DB, sql)?;
        }
        site.publisher.sql(DB, "INSERT INTO u SELECT generate_series(1, 1000)")?;
        wait_while_running(&mut run, "a new table to be copied", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM u")? == "1000")
        })?;
        sessions.go_on(&mut run)?;
        site.publisher
            .sql(DB, "INSERT INTO w VALUES (1); TRUNCATE u, w; INSERT INTO u VALUES (1)")?;
        sessions.go_on(&mut run)?;
        // The publisher gives up a program that is paused while it has the connection.
        run.freeze()?;
        wait_while_running(&mut run, "the walsender to end", PATIENCE, || {
            let active = format!(
                "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{NAME}' AND active"
            );
            Ok(site.publisher.query_one_text(DB, &active)? == "0")
        })?;
        run.thaw()?;
        sessions.go_on(&mut run)?;
        sessions.finish(&site, &run, &["t", "u", "w"].map(TableName::from))?;
        run.interrupt()?;
        run.wait(PATIENCE)?;
    }
    Ok(())
}
