//! Crashes while transactions are open, while they are applied from the spool, and under load.

use testbed::compare::TableName;
use testbed::{Result, Stop};

use super::{Trigger, streaming_case};
use crate::support::{
    DB, Load, PATIENCE, Reader, Site, expect_exit, long, must, one_or_all, random_pause,
    wait_while_running,
};
use crate::verbs::json;

const WORK_MEM: (&str, &str) = ("logical_decoding_work_mem", "64kB");

/// Readers of the subscriber see complete transactions in commit order, whatever is killed.
#[test]
fn kill_9_under_load() -> Result<()> {
    let site = Site::start(&[WORK_MEM], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, 150.0)?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(31);
    for _ in 0..if long() { 100 } else { 12 } {
        random_pause(&mut random, 50..900);
        run.kill9()?;
        run = site.spawn(&program)?;
    }
    let written = load.stop()?;
    site.wait_until_applied(&mut run)?;
    let checks = reader.stop()?;
    assert!(checks >= 20 && written >= 100, "{checks} checks, {written} transactions");
    expect_streamed(&site)?;
    site.expect_equal_load()
}

fn expect_streamed(site: &Site) -> Result<()> {
    let streamed = "SELECT sum(stream_count) > 0 FROM pg_stat_replication_slots";
    assert_eq!(site.publisher.query_one_text(DB, streamed)?, "t", "nothing was streamed");
    Ok(())
}

/// All changes are streamed.
#[test]
fn kill_9_under_load_when_all_is_streamed() -> Result<()> {
    let immediate = ("debug_logical_replication_streaming", "immediate");
    let site = Site::start(&[WORK_MEM, immediate], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, 60.0)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(32);
    for _ in 0..if long() { 60 } else { 6 } {
        random_pause(&mut random, 50..900);
        run.kill9()?;
        run = site.spawn(&site.program())?;
    }
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    assert!(reader.stop()? > 0);
    expect_streamed(&site)?;
    site.expect_equal_load()
}

/// Number of workers and commit order change at every start, after a kill. All changes are
/// streamed. Spooled transactions are applied in commit order, or as soon as possible.
#[test]
fn restarts_with_other_workers_and_orders() -> Result<()> {
    let immediate = ("debug_logical_replication_streaming", "immediate");
    let site = Site::start(&[WORK_MEM, immediate], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, 60.0)?;
    let mut random = fastrand::Rng::with_seed(33);
    let mut program = || {
        site.program()
            .args(["--memory-limit", "16", "--workers", &random.u32(1..6).to_string()])
            .arg(format!("--preserve-commit-order={}", random.bool()))
    };
    let mut run = site.spawn_streaming(&program())?;
    let mut pauses = fastrand::Rng::with_seed(34);
    for _ in 0..if long() { 60 } else { 10 } {
        random_pause(&mut pauses, 100..900);
        run.kill9()?;
        run = site.spawn(&program())?;
    }
    load.stop()?;
    run.kill9()?;
    let mut run = site.spawn(&program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    expect_streamed(&site)?;
    site.expect_equal_load()
}

/// pgapace is killed while it applies a transaction from the spool, and while that transaction is
/// open. Both servers are killed as well.
#[test]
fn a_kill_inside_a_streamed_transaction() -> Result<()> {
    let mut site = Site::start(&[WORK_MEM], &[])?;
    site.publish_tables("CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE log (v int)")?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    let rows = |from: u32| {
        format!(
            "INSERT INTO big SELECT i, repeat(md5(i::text), 30) \
             FROM generate_series({from}, {from} + 49999) i"
        )
    };
    let mut session = site.publisher.connect(DB)?;
    session.batch_execute(&format!("BEGIN; INSERT INTO log VALUES (1); {}", rows(1)))?;
    run.kill9()?;
    run = site.spawn_streaming(&program)?;
    session.batch_execute(&format!(
        "{}; UPDATE big SET v = v || id WHERE id % 9 = 0",
        rows(100_000)
    ))?;
    site.publisher.sql(DB, "INSERT INTO log VALUES (2)")?;
    session.batch_execute("COMMIT")?;
    let mut inside = 0;
    for round in 0..3 {
        // Rows that were rolled back stay in the file until VACUUM.
        let size = "SELECT pg_relation_size('big') / 8192";
        let pages = |site: &Site| -> Result<i64> {
            Ok(site.subscriber.query_one_text(DB, size)?.parse().unwrap_or(0))
        };
        let before = pages(&site)?;
        wait_while_running(&mut run, "the transaction to be under way", PATIENCE, || {
            Ok(pages(&site)? > before + 200)
        })?;
        if round == 1 {
            site.subscriber.restart(Stop::Immediate)?;
        } else {
            run.kill9()?;
        }
        let applied = site.subscriber.query_one_text(DB, "SELECT count(*) FROM log WHERE v = 1")?;
        inside += u32::from(applied == "0");
        if round != 1 {
            run = site.spawn_streaming(&program)?;
        }
    }
    assert!(inside > 0, "the transaction had ended each time: the test has no effect");
    site.publisher.restart(Stop::Fast)?;
    wait_while_running(&mut run, "all of it", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM log")? == "2")
    })?;
    site.expect_equal(&["big", "log"].map(TableName::from))
}

/// The walsender fails to find the table of changes that stand between a TRUNCATE that was rolled back and another one.
#[test]
fn a_transaction_that_cannot_be_sent_in_progress_is_sent_after_its_commit() {
    for &major in one_or_all(&[15, 18]) {
        let case = streaming_case(major, major, Trigger::Size);
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        let insert = |from, to| {
            format!("INSERT INTO t SELECT g, repeat('a', 50) FROM generate_series({from}, {to}) g;")
        };
        let (one, all, others) = (insert(1, 1), insert(1, 3000), insert(3001, 6000));
        case.publisher.sql(&format!(
            "BEGIN; {one} SAVEPOINT s; TRUNCATE t; {all} ROLLBACK TO s; {others} TRUNCATE t; {all} COMMIT"
        ));
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        let status = || json(&case.tool.finish("status", &["--json"]))[0].clone();
        let shown = status();
        assert_eq!(shown["streaming"], "off", "{shown:#}");
        assert!(shown["streaming_reason"].to_string().contains("could not map"), "{shown:#}");
        assert_eq!(process.events("streaming_off"), 1, "{}", process.log());
        assert_eq!(process.events("run_failed"), 0, "{}", process.log());
        case.publisher.sql(&format!(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'",
            case.tool.name
        ));
        must(wait_while_running(&mut process, "another run", PATIENCE, || {
            Ok(status()["streaming"] == "parallel")
        }));
        case.stop(process);
        case.expect_equal(&["t"]);
    }
}
