//! Stops: regular ones, stops during the initial copy, and `--until`.

use std::time::{Duration, Instant};

use testbed::compare::TableName;
use testbed::program::{Process, events};
use testbed::{Proxy, Result, Stop, wait_until};

use crate::support::{
    DB, Load, PATIENCE, Site, UnreadPipe, expect_exit, lsn, random_pause, wait_for_event,
    wait_for_events, wait_while_running,
};

/// Checks that everything that is applied is acknowledged: slot and progress are equal.
fn expect_acknowledged(site: &Site) -> Result<()> {
    let (confirmed, progress) = (site.confirmed()?, site.progress()?);
    assert_eq!(format!("{confirmed:X}"), format!("{progress:X}"), "confirmed and progress");
    Ok(())
}

#[test]
fn signals_stop_the_run_under_load() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, 300.0)?;
    for round in 0..4 {
        let mut run = site.spawn_streaming(&site.program())?;
        // The load has begun to be applied, or is applied again.
        let before = site.progress().unwrap_or_default();
        wait_while_running(&mut run, "more to be applied", PATIENCE, || {
            Ok(site.progress()? > before)
        })?;
        let started = Instant::now();
        if round % 2 == 0 {
            run.terminate()?;
        } else {
            run.interrupt()?;
        }
        expect_exit(&mut run, 0, &["all applied transactions are durable and acknowledged"])?;
        assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
        expect_acknowledged(&site)?;
    }
    // `--until` is reached while the load continues.
    let last = "SELECT max(id) FROM ledger_header";
    let number = |text: String| text.parse::<i64>().unwrap_or(-1);
    let before = number(site.publisher.query_one_text(DB, last)?);
    let goal = site.publisher_lsn()?;
    let mut run = site.spawn(&site.program().args(["--until", &goal]))?;
    expect_exit(&mut run, 0, &[])?;
    let applied = number(site.subscriber.query_one_text(DB, last)?);
    assert!(
        applied >= before,
        "applied up to {applied}, {before} was committed before the --until position"
    );
    expect_acknowledged(&site)?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    expect_acknowledged(&site)?;
    load.stop()?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal_load()
}

#[test]
fn until_is_reached_only_when_changes_are_durable() -> Result<()> {
    let lazy = [("wal_writer_delay", "10s"), ("wal_writer_flush_after", "2GB")];
    let mut site = Site::start(&[], &lazy)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut next = 0;
    for _ in 0..4 {
        next += 100;
        site.publisher
            .sql(DB, &format!("INSERT INTO t SELECT generate_series({next}, {next} + 99)"))?;
        let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
        expect_exit(&mut run, 0, &[])?;
        site.subscriber.restart(Stop::Immediate)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    // pgapace waits for an `--until` position that the publisher has not reached yet.
    let goal = site.publisher.query_one_text(DB, "SELECT pg_current_wal_flush_lsn() + 20000")?;
    let mut run = site.spawn_streaming(&site.program().args(["--until", &goal]))?;
    assert!(run.wait_timeout(Duration::from_millis(1500)).is_none(), "too early");
    site.publisher.sql(DB, "INSERT INTO t SELECT generate_series(10000, 10010)")?;
    assert!(lsn(&site.publisher_lsn()?)? < lsn(&goal)?, "this one is before the --until position");
    // The position lies within this transaction, which therefore commits after it.
    site.publisher.sql(DB, "INSERT INTO t SELECT generate_series(20000, 23000)")?;
    expect_exit(&mut run, 0, &[])?;
    let rows = "SELECT count(*) FROM t WHERE id BETWEEN 10000 AND 10010";
    assert_eq!(site.subscriber.query_one_text(DB, rows)?, "11");
    // Stopping before the `--until` position is not a success.
    let mut run = site.spawn_streaming(&site.program().args(["--until", "FF/0"]))?;
    run.terminate()?;
    expect_exit(&mut run, 11, &["stopped before the goal"])
}

fn copy_site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    // A slow copy: rows are inserted slowly on the subscriber.
    site.publisher.sql(
        DB,
        "CREATE TABLE wide (id int PRIMARY KEY, v text);
         INSERT INTO wide SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 100000) i;
         ALTER PUBLICATION pub ADD TABLE wide",
    )?;
    site.subscriber.sql(DB, "CREATE TABLE wide (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

/// The pids of the subscriber's sessions in COPY, as `{pid,…}`.
fn copying(site: &Site) -> Result<String> {
    let sessions = "SELECT coalesce(array_agg(pid), '{}')::text FROM pg_stat_progress_copy";
    site.subscriber.query_one_text(DB, sessions)
}

/// Starts the program and waits until it copies. Sessions of a killed process may still exist and
/// do not count.
fn spawn_copying(site: &Site) -> Result<Process> {
    let left = copying(site)?;
    let mut run = site.spawn(&site.program())?;
    let own = format!(
        "SELECT exists (SELECT FROM pg_stat_progress_copy WHERE pid <> ALL ('{left}'::int[]))::text"
    );
    wait_while_running(&mut run, "the copy to begin", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &own)? == "true")
    })?;
    Ok(run)
}

#[test]
fn stops_during_the_first_copy_leave_no_slot() -> Result<()> {
    let site = copy_site()?;
    let load = Load::start(&site.publisher, 100.0)?;
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..5 {
        let mut run = spawn_copying(&site)?;
        random_pause(&mut random, 0..400);
        run.kill9()?;
    }
    let mut run = spawn_copying(&site)?;
    let started = Instant::now();
    run.terminate()?;
    expect_exit(&mut run, 0, &["stopped during table sync"])?;
    assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
    wait_until(PATIENCE, "the copy's session to end", || Ok(copying(&site)? == "{}"))?;

    let mut run = site.spawn(&site.program())?;
    wait_for_event(&mut run, "streaming", PATIENCE)?;
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("wide")])?;
    site.expect_equal_load()?;
    // No slot of the attempts remains on the publisher.
    let slots = "SELECT string_agg(slot_name, ' ') FROM pg_replication_slots";
    assert_eq!(site.publisher.query_one_text(DB, slots)?, "sub");
    Ok(())
}

/// A lock on the subscriber does not prevent a stop.
#[test]
fn a_stop_does_not_wait_for_a_lock() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    let mut holder = site.subscriber.connect(DB)?;
    let waiting = "SELECT count(*) FROM pg_stat_activity \
                   WHERE application_name LIKE 'pgapace%' AND wait_event_type = 'Lock'";
    let wait_for_lock = |run: &mut Process| {
        wait_while_running(run, "a session to wait for the lock", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, waiting)? == "1")
        })
    };
    // During the initial copy.
    holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
    let mut run = site.spawn(&site.program())?;
    wait_for_lock(&mut run)?;
    run.terminate()?;
    let started = Instant::now();
    expect_exit(&mut run, 0, &["stopped during table sync"])?;
    holder.batch_execute("COMMIT")?;
    // During apply: running statements get some time, unless the user repeats the signal.
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    wait_for_lock(&mut run)?;
    run.terminate()?;
    assert!(run.wait_timeout(Duration::from_secs(1)).is_none(), "it ended at once");
    run.terminate()?;
    expect_exit(&mut run, 0, &["stopped before the transaction in hand could be ended"])?;
    assert!(started.elapsed() < Duration::from_secs(20), "took {:?}", started.elapsed());
    holder.batch_execute("COMMIT")?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t")])
}

/// Another process runs the subscription: the start waits for it, and for nothing else after a signal.
#[test]
fn a_stop_does_not_wait_for_the_owner() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let _owner = site.spawn_streaming(&site.program())?;
    let mut run = site.spawn(&site.program().args(["--busy-timeout", "600"]))?;
    // What a start tries ten times a second, in vain as long as it does not have the lock. The owner's session has
    // long done something else.
    let asks = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace sub control' \
                AND query LIKE '%SET epoch = epoch + 1%'";
    wait_while_running(&mut run, "the start to ask for the lock", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, asks)? != "0")
    })?;
    run.terminate()?;
    let started = Instant::now();
    expect_exit(&mut run, 0, &[])?;
    assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
    Ok(())
}

/// The start waits for a lock of a user, which nothing interrupts.
#[test]
fn a_second_signal_ends_a_start_that_waits() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    run.terminate()?;
    expect_exit(&mut run, 0, &["acknowledged=true"])?;
    let mut user = site.subscriber.connect(DB)?;
    user.batch_execute("BEGIN; LOCK TABLE pgapace.subscription")?;
    let mut run = site.spawn(&site.program())?;
    let waits = "SELECT count(*) FROM pg_locks WHERE relation = 'pgapace.subscription'::regclass \
                 AND NOT granted";
    wait_while_running(&mut run, "the start to wait for the lock", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? != "0")
    })?;
    for signals in 1..=2 {
        run.terminate()?;
        wait_for_events(&mut run, "stop_requested", signals, PATIENCE)?;
    }
    expect_exit(&mut run, 11, &["stopped_at_once"])?;
    user.batch_execute("COMMIT")?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])
}

/// The publisher cannot be told of what is durable.
#[test]
fn a_stop_says_whether_the_publisher_was_told() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let proxy = Proxy::in_front_of(&site.publisher)?;
    let program = site.program_between(&proxy.conninfo(DB), &site.subscriber.conninfo(DB));
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    proxy.freeze();
    run.terminate()?;
    expect_exit(&mut run, 0, &["event=\"stopped\"", "acknowledged=false", "was not told"])?;
    proxy.unfreeze();
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &["acknowledged=true"])?;
    site.expect_equal(&[TableName::from("t")])
}

/// A service that reads the log may hang.
#[test]
fn a_process_whose_log_nobody_reads_applies_and_stops() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let directory = tempfile::tempdir()?;
    let log = UnreadPipe::full(&directory.path().join("log"))?;
    let mut run = site.program().spawn_logged(log.path())?;
    for id in 1..=2 {
        site.publisher.sql(DB, &format!("INSERT INTO t VALUES ({id})"))?;
        let applied = format!("SELECT count(*) FROM t WHERE id = {id}");
        wait_until(PATIENCE, "a row to be copied, and one to be applied", || {
            Ok(site.subscriber.query_one_text(DB, &applied)? == "1")
        })?;
    }
    run.terminate()?;
    assert!(run.wait_timeout(PATIENCE).is_some(), "it still runs");
    assert_eq!(run.exit_code(), Some(0));

    // A reader that goes on gets all lines.
    let mut log = UnreadPipe::full(&directory.path().join("another"))?;
    let mut run = site.program().spawn_logged(log.path())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (3)")?;
    wait_until(PATIENCE, "another row to be applied", || {
        Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")? == "3")
    })?;
    let mut said = log.read()?;
    run.terminate()?;
    assert!(run.wait_timeout(PATIENCE).is_some(), "it still runs");
    assert_eq!(run.exit_code(), Some(0));
    said.push_str(&log.read()?);
    for event in ["streaming", "stop_requested"] {
        assert_eq!(events(&said, event), 1, "{event}: {said}");
    }
    Ok(())
}
