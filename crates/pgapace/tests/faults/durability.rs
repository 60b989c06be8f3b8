//! The session that makes commits durable waits: for a synchronous standby of the subscriber, or for a lock. And commits
//! of the publisher that are not durable yet.

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Pair, Result};

use crate::support::{DB, NAME, PATIENCE, Site, expect_exit, wait_for_event, wait_while_running};

pub(super) fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    Ok(site)
}

/// Waits until a query returns this.
pub(super) fn subscriber_says(
    site: &Site,
    run: &mut Process,
    what: &str,
    sql: &str,
    value: &str,
) -> Result<()> {
    wait_while_running(
        run,
        what,
        PATIENCE,
        || Ok(site.subscriber.query_one_text(DB, sql)? == value),
    )
}

/// A table that has caught up, and a transaction that is prepared, are acknowledged when the standby has them. Both
/// happen while nothing else is to be made durable, and apply goes on.
#[test]
fn what_ends_a_hold_is_not_acknowledged_without_a_synchronous_standby() -> Result<()> {
    let mut site = site()?;
    let program =
        site.program().args(["--refresh-interval=1", "--two-phase", "--two-phase-hold=0"]);
    let mut run = site.spawn_streaming(&program)?;
    let ddl = "CREATE TABLE late (id int PRIMARY KEY)";
    let mut subscriber = site.subscriber.connect(DB)?;
    subscriber.batch_execute(ddl)?;
    subscriber.batch_execute("BEGIN; LOCK TABLE late IN SHARE MODE")?;
    site.publisher.sql(DB, &format!("{ddl}; INSERT INTO late VALUES (1)"))?;
    let copying =
        "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'late'::regclass";
    subscriber_says(&site, &mut run, "the copy to wait", copying, "t")?;
    site.publisher.sql(DB, "INSERT INTO late VALUES (2); INSERT INTO t VALUES (1)")?;
    let end = site.publisher_lsn()?;
    let durable = format!(
        "SELECT c.lsn >= '{end}' AND d.transactions >= c.transactions FROM pgapace.stat_stage c \
         CROSS JOIN pgapace.stat_stage d WHERE c.stage = 'committed' AND d.stage = 'durable'"
    );
    subscriber_says(
        &site,
        &mut run,
        "the changes of the other table to be durable",
        &durable,
        "t",
    )?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    subscriber.batch_execute("ROLLBACK")?;
    wait_for_event(&mut run, "table_caught_up", PATIENCE)?;
    site.publisher.sql(DB, "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'x'")?;
    subscriber_says(
        &site,
        &mut run,
        "it to be prepared",
        "SELECT count(*) FROM pg_prepared_xacts",
        "1",
    )?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (3)")?;
    subscriber_says(&site, &mut run, "what follows to be applied", "SELECT count(*) FROM t", "2")?;
    let told = format!(
        "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'sub' AND write_lsn >= '{}'",
        site.publisher_lsn()?
    );
    let flushed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'sub'";
    let acknowledged = format!("SELECT ({flushed}) >= '{end}'");
    wait_while_running(&mut run, "the publisher to be told", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, &told)? == "1")
    })?;
    assert_eq!(site.publisher.query_one_text(DB, &acknowledged)?, "f");
    site.subscriber.set("synchronous_standby_names", "")?;
    wait_while_running(&mut run, "it to be acknowledged", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, &acknowledged)? == "t")
    })?;
    site.publisher.sql(DB, "COMMIT PREPARED 'x'")?;
    site.wait_until_applied(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t"), TableName::from("late")])
}

/// The subscriber's synchronous standby is gone. Nothing is acknowledged, and everything else goes on, also after a
/// kill, as natively.
#[test]
fn apply_goes_on_without_a_synchronous_standby() -> Result<()> {
    let mut site = site()?;
    let program = site.program().arg("--refresh-interval=1");
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (0)")?;
    site.wait_until_applied(&mut run)?;
    site.subscriber.sql(DB, "DELETE FROM t")?;
    site.tool().finish("verify", &[]).expect(18, &[]);
    site.subscriber.set("synchronous_standby_names", "absent")?;
    // Commits of this session do not wait.
    let mut subscriber = site.subscriber.connect(DB)?;
    subscriber.batch_execute("SET synchronous_commit = local")?;
    let there = |run: &mut Process, table: &str, rows: u32| {
        let count = format!("SELECT count(*) = {rows} FROM {table}");
        wait_while_running(run, "rows to be applied", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, &count)? == "t")
        })
    };
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    let end = site.publisher_lsn()?;
    wait_for_event(&mut run, "synchronous_standby_wait", PATIENCE)?;
    there(&mut run, "t", 1)?;
    // A table is added, and the leader records that.
    let ddl = "CREATE TABLE late (id int PRIMARY KEY)";
    subscriber.batch_execute(ddl)?;
    site.publisher.sql(DB, &format!("{ddl}; INSERT INTO late VALUES (1), (2)"))?;
    there(&mut run, "late", 2)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    there(&mut run, "t", 2)?;
    // Statistics are written, and verbs are heard.
    let told = "SELECT count(*) FROM pgapace.event WHERE event = 'synchronous_standby_wait'";
    wait_while_running(&mut run, "the event to be written", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, told)? == "1")
    })?;
    // Ten seconds after the flush began, monitoring is told that nothing is acknowledged.
    wait_while_running(&mut run, "status --check to name the wait", PATIENCE, || {
        let checked = site.tool().finish("status", &["--check"]);
        if checked.code == Some(0) {
            return Ok(false);
        }
        checked.expect(14, &["a synchronous standby of the subscriber does not answer"]);
        Ok(true)
    })?;
    // The session that waits does not notice that its process is gone.
    run.kill9()?;
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (3)")?;
    there(&mut run, "t", 3)?;
    assert!(!run.log().contains("retry_in_ms"), "{}", run.log());
    // A repair holds the stream, and waits for the standby when the stream goes on.
    let mut repair = site.spawn(&site.tool().program("repair"))?;
    there(&mut run, "t", 4)?;
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
                 AND application_name LIKE '% apply' AND query LIKE '%emit_message%'";
    wait_while_running(&mut repair, "the repair to wait for the standby", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "1")
    })?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (4)")?;
    there(&mut run, "t", 5)?;
    let flushed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'sub'";
    let acknowledged = format!("SELECT ({flushed}) >= '{end}'");
    assert_eq!(site.publisher.query_one_text(DB, &acknowledged)?, "f");
    site.subscriber.set("synchronous_standby_names", "")?;
    wait_while_running(&mut run, "it to be acknowledged", PATIENCE, || {
        Ok(site.publisher.query_one_text(DB, &acknowledged)? == "t")
    })?;
    expect_exit(&mut repair, 0, &["event=\"rows_repaired\""])?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t"), TableName::from("late")])
}

/// Where commits of the publisher wait, apply sessions commit synchronously. They do not wait for a standby that the subscriber
/// gets then, nor does a run that ends because the publisher waits no more.
#[test]
fn apply_goes_on_when_the_subscriber_gets_a_synchronous_standby() -> Result<()> {
    let mut site = site()?;
    site.publisher.set("synchronous_standby_names", NAME)?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    // Clients that do not wait.
    for id in 2..=4 {
        let insert = format!("SET synchronous_commit = local; INSERT INTO t VALUES ({id})");
        site.publisher.sql(DB, &insert)?;
    }
    let end = site.publisher_lsn()?;
    let applied = "SELECT count(*) FROM t";
    subscriber_says(&site, &mut run, "the rows to be applied", applied, "4")?;
    site.publisher.set("synchronous_standby_names", "")?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (5)")?;
    wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (6)")?;
    subscriber_says(&site, &mut run, "later rows to be applied", applied, "6")?;
    wait_for_event(&mut run, "synchronous_standby_wait", PATIENCE)?;
    let flushed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'sub'";
    let acknowledged = format!("SELECT ({flushed}) >= '{end}'");
    assert_eq!(site.publisher.query_one_text(DB, &acknowledged)?, "f");
    assert!(!run.log().contains("retry_in_ms"), "{}", run.log());
    site.subscriber.set("synchronous_standby_names", "")?;
    site.wait_until_applied(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t")])
}

/// A first run creates a slot, which the publisher keeps. So its record waits for the standby, and the log says so.
/// The heartbeat of its copy does not wait: another process would take it for dead, and the copy would be lost.
#[test]
fn a_first_run_that_waits_for_a_standby_says_so() -> Result<()> {
    let mut site = site()?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    let (mut holder, mut run) = site.spawn_copying(&site.program())?;
    site.subscriber.set("synchronous_standby_names", "absent")?;
    let another = "SET synchronous_commit = local; INSERT INTO pgapace.member (id, host, process, waits_for, beat_at) \
                   VALUES ('another.1', 'another', 1, '{sub}', now() + interval '1 hour')";
    site.subscriber.sql(DB, another)?;
    let beats = "SELECT coalesce(max(beat), 0) FROM pgapace.owner WHERE stage = 'copying'";
    let before = site.subscriber.query_one_text(DB, beats)?;
    let beaten = format!("SELECT ({beats}) > {before} + 2");
    wait_while_running(&mut run, "the copy to beat", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, &beaten)? == "t")
    })?;
    holder.batch_execute("ROLLBACK")?;
    wait_for_event(&mut run, "synchronous_standby_wait", PATIENCE)?;
    assert!(run.log().contains("control session"), "{}", run.log());
    site.subscriber.set("synchronous_standby_names", "")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

/// The WAL writer flushes such commits later, and not the records of an open transaction behind them.
#[test]
fn until_current_includes_commits_that_are_not_flushed() -> Result<()> {
    for major in [14, 18] {
        let pair = Pair::start_with(major, major, |b| b.setting("wal_writer_delay", "10s"), |b| b)?;
        let site = Site::of(pair)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        site.tool().run_until_current();
        let mut asynchronous = site.publisher.connect(DB)?;
        asynchronous.batch_execute("SET synchronous_commit = off")?;
        let mut open = site.publisher.connect(DB)?;
        for id in 1..=3 {
            asynchronous.batch_execute(&format!("INSERT INTO t VALUES ({id})"))?;
            if id == 3 {
                open.batch_execute("BEGIN; INSERT INTO t VALUES (0)")?;
            }
            site.tool().run_until_current();
            let applied = site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?;
            assert_eq!(applied, id.to_string(), "on {major}");
        }
    }
    Ok(())
}
