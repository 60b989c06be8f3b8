//! Fencing: statements of an earlier run that are still on their way cannot commit after another
//! run has begun.

use std::thread::sleep;
use std::time::Duration;

use testbed::compare::TableName;
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Result, wait_until};

use crate::support::{
    DB, PATIENCE, Site, Tool, expect_exit, signal, wait_for_log, wait_while_running,
};

/// One table with a key, and one without, which shows changes that were applied twice.
fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE log (v int)")?;
    site.publisher.sql(DB, "INSERT INTO t SELECT i, 0 FROM generate_series(1, 10) i")?;
    Ok(site)
}

fn tables() -> [TableName; 2] {
    [TableName::from("t"), TableName::from("log")]
}

/// Transactions that all update row 1 and insert a row into the log.
fn write(site: &Site, count: i32) -> Result<()> {
    let mut client = site.publisher.connect(DB)?;
    for i in 1..=count {
        client.batch_execute(&format!(
            "BEGIN; INSERT INTO log VALUES ({i}); UPDATE t SET v = v + 1 WHERE id = 1; COMMIT"
        ))?;
    }
    Ok(())
}

/// A session of the subscriber that locks row 1.
fn hold(site: &Site) -> Result<Client> {
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE")?;
    Ok(holder)
}

fn waits_for_lock(site: &Site) -> Result<bool> {
    let sql = "SELECT count(*) FROM pg_stat_activity \
               WHERE application_name = 'pgapace sub apply' AND wait_event_type = 'Lock'";
    Ok(site.subscriber.query_one_text(DB, sql)? == "1")
}

fn wait_for_block(site: &Site, run: &mut Process) -> Result<()> {
    wait_while_running(run, "apply to wait for the lock", PATIENCE, || waits_for_lock(site))
}

#[test]
fn a_run_killed_while_its_commit_waits_cannot_commit_later() -> Result<()> {
    let site = site()?;
    let mut first = site.spawn_streaming(&site.program())?;
    let mut holder = hold(&site)?;
    write(&site, 5)?;
    wait_for_block(&site, &mut first)?;
    first.kill9()?;
    // The old backend has statements and a COMMIT in its socket, and waits for the lock. The new
    // run terminates the old backend without waiting for the lock. Then its own backend waits at
    // the same place.
    let mut second = site.spawn_streaming(&site.program())?;
    wait_for_block(&site, &mut second)?;
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut second)?;
    site.expect_equal(&tables())?;
    Ok(())
}

#[test]
fn a_lock_released_while_the_next_run_starts_lets_nothing_commit_twice() -> Result<()> {
    let site = site()?;
    let mut run = site.spawn_streaming(&site.program())?;
    for round in 0..6 {
        let mut holder = hold(&site)?;
        write(&site, 20)?;
        wait_for_block(&site, &mut run)?;
        run.kill9()?;
        run = site.spawn(&site.program())?;
        // From before the new run's first connection until after it has fenced the old one.
        sleep(Duration::from_millis(round * 15));
        holder.batch_execute("COMMIT")?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&tables())?;
    }
    Ok(())
}

#[test]
fn a_second_process_is_refused_unless_it_takes_over() -> Result<()> {
    let site = site()?;
    let mut first = site.spawn_streaming(&site.program())?;
    let mut second = site.spawn(&site.program().args(["--busy-timeout", "1"]))?;
    expect_exit(
        &mut second,
        8,
        &["the subscription is run by another process: backend", "--take-over"],
    )?;
    assert!(first.is_running(), "{}", first.log());
    // The process that runs it has had no error.
    site.tool().finish("status", &["--check"]).expect(0, &[]);
    let errors = "SELECT count(last_error) FROM pgapace.stat_subscription";
    assert_eq!(site.subscriber.query_one_text(DB, errors)?, "0");
    write(&site, 3)?;
    site.wait_until_applied(&mut first)?;

    let mut third = site.spawn_streaming(&site.program().arg("--take-over"))?;
    // The first process tries to reconnect until its time limit expires.
    write(&site, 3)?;
    site.wait_until_applied(&mut third)?;
    assert!(third.is_running());
    site.expect_equal(&tables())
}

/// The same while tables are copied: the refusal is of the other process, whatever becomes of the first one.
#[test]
fn a_process_that_is_refused_leaves_no_error_of_a_copy() -> Result<()> {
    let site = site()?;
    let (mut holder, mut first) = site.spawn_copying(&site.program())?;
    let mut second = site.spawn(&site.program().args(["--busy-timeout", "1"]))?;
    expect_exit(&mut second, 8, &["the subscription is run by another process: backend"])?;
    let errors = "SELECT count(last_error) FROM pgapace.stat_subscription";
    assert_eq!(site.subscriber.query_one_text(DB, errors)?, "0");
    first.kill9()?;
    holder.batch_execute("ROLLBACK")?;
    let status = site.tool().finish("status", &[]);
    status.expect(0, &[]);
    assert!(!status.stdout.contains("last error"), "{}", status.stdout);
    Ok(())
}

/// An error of a start before the slot was created is over when it is there.
#[test]
fn an_error_of_a_start_is_over_when_a_later_one_copies() -> Result<()> {
    let site = Site::start(&[("max_replication_slots", "1")], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.publisher.sql(DB, "SELECT pg_create_physical_replication_slot('other')")?;
    let mut first = site.spawn(&site.program())?;
    let errors = "SELECT count(last_error) FROM pgapace.stat_subscription";
    wait_until(PATIENCE, "the error", || {
        let recorded = site.subscriber.query_one_text(DB, errors);
        Ok(recorded.is_ok_and(|count| count == "1"))
    })?;
    first.kill9()?;
    site.publisher.sql(DB, "SELECT pg_drop_replication_slot('other')")?;
    let (mut holder, mut run) = site.spawn_copying(&site.program())?;
    assert_eq!(site.subscriber.query_one_text(DB, errors)?, "0");
    holder.batch_execute("ROLLBACK")?;
    site.wait_until_applied(&mut run)
}

/// A switchover and the lag read the publications that the running process has.
#[test]
fn a_process_that_is_refused_leaves_the_recorded_publications() -> Result<()> {
    let site = site()?;
    site.publisher.sql(DB, "CREATE PUBLICATION other FOR TABLE log")?;
    let mut first = site.spawn_streaming(&site.program())?;
    let other = Tool { publications: "other".to_owned(), ..site.tool() }.program("run");
    let mut second = site.spawn(&other.clone().args(["--busy-timeout", "1"]))?;
    expect_exit(&mut second, 8, &["the subscription is run by another process"])?;
    let recorded = "SELECT publications FROM pgapace.subscription";
    assert_eq!(site.subscriber.query_one_text(DB, recorded)?, "{pub}");
    first.terminate()?;
    expect_exit(&mut first, 0, &[])?;
    let mut third = site.spawn_streaming(&other)?;
    assert_eq!(site.subscriber.query_one_text(DB, recorded)?, "{other}");
    third.terminate()?;
    expect_exit(&mut third, 0, &[])
}

#[test]
fn a_frozen_process_commits_nothing_after_a_take_over() -> Result<()> {
    let site = site()?;
    let mut frozen = site.spawn_streaming(&site.program().args(["--busy-timeout", "1"]))?;
    let mut holder = hold(&site)?;
    write(&site, 50)?;
    wait_for_block(&site, &mut frozen)?;
    frozen.freeze()?;
    // The session of the frozen process waits with all its statements, and its socket stays open.
    // Its walsender cannot send the end of the stream, because the socket is full.
    write(&site, 50)?;
    site.publisher.sql(DB, "INSERT INTO log SELECT 0 FROM generate_series(1, 20000)")?;
    let mut next = site.spawn_streaming(&site.program().arg("--take-over"))?;
    wait_for_block(&site, &mut next)?;
    let before = site.progress()?;
    frozen.thaw()?;
    // While the row is locked nothing can be applied; a commit would change the progress.
    expect_exit(&mut frozen, 8, &["run by another process"])?;
    assert_eq!(site.progress()?, before);
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut next)?;
    site.expect_equal(&tables())?;
    assert!(next.is_running());
    let count = "SELECT count(*) FROM log";
    wait_until(PATIENCE, "all rows", || Ok(site.subscriber.query_one_text(DB, count)? == "20100"))
}

/// The server cuts application_name: the sessions of a frozen process are found by what is left of it.
#[test]
fn a_take_over_ends_the_sessions_of_a_subscription_with_a_long_name() -> Result<()> {
    let site = site()?;
    let name = "s".repeat(50);
    let program = Tool { name: name.clone(), ..site.tool() }.program("run");
    let mut frozen = site.spawn_streaming(&program)?;
    let sessions = format!(
        "SELECT coalesce(string_agg(pid::text, ',' ORDER BY pid), '') FROM pg_stat_activity \
         WHERE application_name = 'pgapace {name} dura'"
    );
    let of_frozen = site.subscriber.query_one_text(DB, &sessions)?;
    assert_ne!(of_frozen, "");
    frozen.freeze()?;
    let mut next = site.spawn_streaming(&program.arg("--take-over"))?;
    let left =
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY ('{{{of_frozen}}}'::int[])");
    wait_while_running(&mut next, "the end of the old sessions", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &left)? == "0")
    })
}

/// A run fails while a backend of its own is suspended, and the next one waits for its end.
fn waits_for_own_session(purpose: &str, message: &str) -> Result<()> {
    let site = site()?;
    let mut run = site.spawn_streaming(&site.program().args(["--busy-timeout", "1"]))?;
    let session = format!(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgapace sub {purpose}' LIMIT 1"
    );
    let backend = site.subscriber.query_one_text(DB, &session)?;
    signal(&backend, "-STOP")?;
    site.publisher.sql(DB, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")?;
    write(&site, 3)?;
    wait_for_log(&mut run, &format!("{message}: backend {backend} "), PATIENCE)?;
    signal(&backend, "-CONT")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&tables())
}

#[test]
fn a_control_session_that_does_not_end_is_waited_for() -> Result<()> {
    waits_for_own_session(
        "control",
        "the control session of an earlier run of this process did not end",
    )
}

/// It lasts as long as the wait for such sessions.
#[test]
fn an_apply_session_that_does_not_end_is_waited_for() -> Result<()> {
    waits_for_own_session("apply", "sessions of an earlier run did not end within 60s")
}
