//! Few sessions of the publisher that wait for each commit: the leader reads the stream and executes their
//! groups itself, and leaves both to the other threads when something goes wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Pair, Result, Stop};

use crate::support::{DB, NAME, PATIENCE, Site, explain, wait_for_log, wait_while_running};

const SESSIONS: i64 = 3;

/// Counts its own row up, and looks each time whether the subscriber has it when COMMIT returns.
fn count(
    (mut publisher, mut subscriber): (testbed::postgres::Client, testbed::postgres::Client),
    session: i64,
    (ends, commits): (&AtomicBool, &AtomicI64),
) -> std::result::Result<(), String> {
    let text = |e: testbed::postgres::Error| explain(&e);
    let settings = "SET statement_timeout = '60s'; SET synchronous_commit = remote_apply";
    publisher.batch_execute(settings).map_err(text)?;
    for number in 1.. {
        if ends.load(Ordering::Relaxed) {
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
        commits.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Waits for that many commits from now on.
fn wait_for_commits(run: &mut Process, commits: &AtomicI64, more: i64) -> Result<()> {
    let before = commits.load(Ordering::Relaxed);
    wait_while_running(run, "commits that wait", PATIENCE, || {
        Ok(commits.load(Ordering::Relaxed) >= before + more)
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
        site.publish_tables("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)")?;
        site.publisher
            .sql(DB, &format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {SESSIONS}) i"))?;
        let program = site.program().args(["--log-level", "debug"]);
        let mut run = site.spawn_streaming(&program)?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let mut run = site.spawn_streaming(&program)?;
        let (ends, commits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
        let sessions: Vec<_> = (1..=SESSIONS)
            .map(|session| {
                let clients = (site.publisher.connect(DB)?, site.subscriber.connect(DB)?);
                let (ends, commits) = (Arc::clone(&ends), Arc::clone(&commits));
                Ok(std::thread::spawn(move || count(clients, session, (&ends, &commits))))
            })
            .collect::<Result<_>>()?;
        wait_for_log(&mut run, "the leader reads the stream itself", PATIENCE)?;
        for round in 1..=3 {
            wait_for_commits(&mut run, &commits, 50)?;
            // Its session is lost while the leader has it.
            let apply = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                         WHERE application_name LIKE 'pgapace%apply%'";
            site.subscriber.sql(DB, apply)?;
            wait_for_commits(&mut run, &commits, 50)?;
            // The group must wait for longer than the leader does.
            let mut user = site.subscriber.connect(DB)?;
            user.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
            let waits = "SELECT count(*) > 0 FROM pg_locks \
                         WHERE NOT granted AND clock_timestamp() - waitstart > '20 ms'";
            wait_while_running(&mut run, "a group to wait", PATIENCE, || {
                Ok(site.subscriber.query_one_text(DB, waits)? == "t")
            })?;
            user.batch_execute("COMMIT")?;
            wait_for_commits(&mut run, &commits, 50)?;
            // A transaction that is spooled, and then applied in parts.
            let large = format!(
                "SET statement_timeout = '60s'; \
                 INSERT INTO t SELECT -{round}00000 - i, i FROM generate_series(1, 20000) i"
            );
            site.publisher.sql(DB, &large)?;
            wait_for_commits(&mut run, &commits, 50)?;
            // The connection is lost while the leader reads it.
            let walsender = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots";
            site.publisher.sql(DB, walsender)?;
        }
        wait_for_commits(&mut run, &commits, 50)?;
        run.kill9()?;
        let mut run = site.spawn_streaming(&program)?;
        wait_for_commits(&mut run, &commits, 50)?;
        ends.store(true, Ordering::Relaxed);
        for session in sessions {
            assert_eq!(session.join().expect("a session panicked"), Ok(()), "{}", run.log());
        }
        site.expect_equal(&[TableName::from("t")])?;
        // A publisher that shuts down waits for the answer of a subscription that has everything.
        site.publisher.stop(Stop::Fast)?;
    }
    Ok(())
}
