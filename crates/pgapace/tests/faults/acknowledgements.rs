//! Nothing is acknowledged that a crash could lose.

use std::collections::HashSet;

use testbed::compare::TableName;
use testbed::program::Program;
use testbed::{Result, Stop};

use super::status::DDL;
use crate::support::{DB, NAME, PATIENCE, Site, lsn, one_or_all, wait_while_running};

/// Changes that were applied but not acknowledged are sent again to the next run. It must not
/// acknowledge them before they arrive, because the publisher would remove WAL that it still reads.
#[test]
fn nothing_is_acknowledged_ahead_of_the_stream() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables(DDL)?;
        let mut run = site.spawn_streaming(&site.program())?;
        site.wait_until_applied(&mut run)?;
        // While changes of a table are deferred, no later position is acknowledged.
        let late = "CREATE TABLE late (id int PRIMARY KEY)";
        site.subscriber.sql(DB, late)?;
        let mut copying = site.subscriber.connect(DB)?;
        copying.batch_execute("BEGIN; LOCK TABLE late IN SHARE MODE")?;
        site.publisher.sql(DB, late)?;
        site.publisher.sql(DB, "INSERT INTO late VALUES (1)")?;
        let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        wait_while_running(&mut run, "the copy to wait", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, waits)? != "0")
        })?;
        for part in 0..20 {
            let rows = "repeat(md5(i::text), 30) FROM generate_series(1, 5000) i";
            site.publisher.sql(DB, &format!("INSERT INTO t SELECT {part} * 5000 + i, {rows}"))?;
            site.publisher.sql(DB, "CHECKPOINT")?;
        }
        let end = lsn(&site.publisher_lsn()?)?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        assert!(site.confirmed()? < end, "all of it is acknowledged: the test has no effect");
        copying.batch_execute("COMMIT")?;
        expect_no_acknowledgement_ahead(&site, &site.program(), end)?;
        site.expect_equal(&[TableName::from("t"), TableName::from("late")])?;
    }
    Ok(())
}

/// The same for changes that were applied beyond a gap: the first transaction of the next run
/// closes the gap, but the rest must be sent again first.
#[test]
fn nothing_beyond_a_gap_is_acknowledged_ahead_of_the_stream() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables(DDL)?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (-1, 'a')")?;
        let program = site.program().args(["--workers", "4", "--preserve-commit-order=false"]);
        let mut run = site.spawn_streaming(&program)?;
        site.wait_until_applied(&mut run)?;
        let mut holder = site.subscriber.connect(DB)?;
        holder.batch_execute("BEGIN; SELECT FROM t WHERE id = -1 FOR UPDATE")?;
        site.publisher.sql(DB, "UPDATE t SET v = 'blocked' WHERE id = -1")?;
        let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        wait_while_running(&mut run, "the update to wait", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, waits)? != "0")
        })?;
        for part in 0..40 {
            // Larger transactions would be applied in parts, and only as the oldest.
            let rows = "repeat(md5(i::text), 60) FROM generate_series(1, 1000) i";
            site.publisher.sql(DB, &format!("INSERT INTO t SELECT {part} * 1000 + i, {rows}"))?;
            site.publisher.sql(DB, "CHECKPOINT")?;
        }
        let end = lsn(&site.publisher_lsn()?)?;
        // Some transactions wait on the session of the blocked one.
        let applied = "SELECT count(*) >= 20000 FROM t WHERE id > 0";
        wait_while_running(&mut run, "others to be applied", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, applied)? == "t")
        })?;
        run.kill9()?;
        assert_eq!(site.subscriber.query_one_text(DB, "SELECT v FROM t WHERE id = -1")?, "a");
        holder.batch_execute("ROLLBACK")?;
        expect_no_acknowledgement_ahead(&site, &program, end)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// Runs with one stream until everything up to `end` is acknowledged. The acknowledged position
/// never passes the received one.
fn expect_no_acknowledgement_ahead(site: &Site, program: &Program, end: u64) -> Result<()> {
    let mut run = site.spawn(program)?;
    let positions = format!(
        "SELECT pid, sent_lsn, flush_lsn FROM pg_stat_replication \
         WHERE application_name = '{NAME}' AND flush_lsn IS NOT NULL"
    );
    let mut seen = HashSet::new();
    wait_while_running(&mut run, "all of it to be acknowledged", PATIENCE, || {
        for row in site.publisher.query_texts(DB, &positions)? {
            let position = |i: usize| lsn(row[i].as_deref().unwrap_or_default());
            let (sent, flush) = (position(1)?, position(2)?);
            assert!(flush <= sent, "flush {flush:X} is beyond {sent:X}, which was sent");
            seen.insert(row[0].clone());
        }
        site.publisher.sql(DB, "CHECKPOINT")?;
        Ok(site.confirmed()? >= end)
    })?;
    assert_eq!(seen.len(), 1, "one stream: {}", run.log());
    Ok(())
}

/// When a commit has returned on the publisher, it is durable on the subscriber. Either the worker
/// commits synchronously, if a flush is fast, or the durability session makes it durable.
#[test]
fn acknowledged_commits_of_a_synchronous_publisher_survive_a_crash() -> Result<()> {
    for slow in [false, true] {
        let mut lazy = vec![("wal_writer_delay", "10s"), ("wal_writer_flush_after", "2GB")];
        if slow {
            lazy.extend([("commit_delay", "5000"), ("commit_siblings", "0"), ("fsync", "on")]);
        }
        let mut site = Site::start(&[], &lazy)?;
        site.publish_tables(DDL)?;
        let mut run = site.spawn_streaming(&site.program())?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let mut told = 0;
        for workers in ["1", "4"] {
            let mut run = site.spawn_streaming(&site.program().args(["--workers", workers]))?;
            let mut client = site.publisher.connect(DB)?;
            client.batch_execute("SET statement_timeout = '60s'")?;
            for _ in 0..20 {
                told += 1;
                client.batch_execute(&format!("INSERT INTO t VALUES ({told}, 'x')"))?;
            }
            run.kill9()?;
            site.subscriber.restart(Stop::Immediate)?;
            let rows = site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?;
            assert_eq!(rows, told.to_string(), "slow: {slow}, workers: {workers}");
        }
        // The transactions between them are applied.
        let run = site.spawn_streaming(&site.program())?;
        site.publisher.sql(DB, "SET statement_timeout = '60s'; INSERT INTO t VALUES (0, 'y')")?;
        site.expect_equal(&[TableName::from("t")]).inspect_err(|_| eprintln!("{}", run.log()))?;
    }
    Ok(())
}
