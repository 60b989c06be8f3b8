//! Tables that cannot be copied, or that change while others are copied.

use testbed::compare::TableName;
use testbed::{Pair, Result, wait_until};

use crate::support::small_disk::SmallDisk;
use crate::support::{
    DB, PATIENCE, Site, VERSIONS, expect_exit, must, on_versions, one_or_all, wait_for_event,
    wait_for_log, wait_while_running,
};
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};

/// The subscriber rejects a row: the error names its table and line, and the other tables are
/// copied.
#[test]
fn a_row_that_the_subscriber_rejects_is_named() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE TABLE good (id int PRIMARY KEY); INSERT INTO good SELECT generate_series(1, 100); \
             CREATE TABLE also_good (id int PRIMARY KEY, v text); INSERT INTO also_good SELECT i, repeat('x', 500) FROM generate_series(1, 5000) i; \
             CREATE TABLE bad (id int PRIMARY KEY); INSERT INTO bad SELECT generate_series(1, 100); \
             CREATE TABLE empty (id int PRIMARY KEY)",
        );
        case.subscriber.sql(
            "CREATE TABLE good (id int PRIMARY KEY); CREATE TABLE also_good (id int PRIMARY KEY, v text); \
             CREATE TABLE bad (id int PRIMARY KEY CHECK (id <> 42)); CREATE TABLE empty (id int PRIMARY KEY)",
        );
        case.publish("FOR ALL TABLES");
        case.run().expect(9, &["public.bad", "line 42", "The other tables are copied"]);
        let copied = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM pgapace.relation WHERE sync_lsn IS NOT NULL";
        assert_eq!(case.subscriber.value(copied), "also_good empty good");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM bad"), "0");
        // Changes that the publisher commits meanwhile are applied exactly once.
        case.publisher.sql("INSERT INTO good VALUES (1000); UPDATE bad SET id = 43000 WHERE id = 43; INSERT INTO empty VALUES (1)");
        case.subscriber.sql("ALTER TABLE bad DROP CONSTRAINT bad_id_check");
        case.run_until_current();
        case.expect_equal(&["good", "also_good", "bad", "empty"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// One table is rewritten and another dropped after the snapshot but before their copies. The
/// rewritten table appears empty in the snapshot.
#[test]
fn tables_rewritten_after_the_snapshot_are_copied_again() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-workers=1".to_owned()];
        case.both(
            "CREATE TABLE first (id int PRIMARY KEY, v text); CREATE TABLE rewritten (id int PRIMARY KEY, v text); \
             CREATE TABLE split (id int PRIMARY KEY, v text); \
             CREATE TABLE dropped (id int PRIMARY KEY, v text); CREATE TABLE truncated (id int PRIMARY KEY, v text); \
             CREATE TABLE last (id int PRIMARY KEY, v text)",
        );
        for (table, rows) in [
            ("first", 20_000),
            ("rewritten", 5_000),
            ("split", 9_000),
            ("dropped", 5_000),
            ("truncated", 5_000),
            ("last", 10),
        ] {
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT i, md5(i::text) FROM generate_series(1, {rows}) i"
            ));
        }
        case.publish("FOR ALL TABLES");
        // The largest table is copied first, and waits.
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute("BEGIN; LOCK TABLE first IN SHARE MODE"));
        std::thread::scope(|scope| {
            let run = scope.spawn(|| case.tool.run());
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'pgapace%' \
                           AND datname = current_database()";
            let mut look = case.subscriber.connect();
            must(wait_until(PATIENCE, "the copy to wait", || {
                Ok(look.query_one(waiting, &[])?.get::<_, i64>(0) > 0)
            }));
            let mut publisher = case.publisher.connect();
            must(publisher.batch_execute(
                "ALTER TABLE rewritten ALTER v TYPE varchar(50) USING v || '!'; DROP TABLE dropped; TRUNCATE truncated",
            ));
            must(publisher.batch_execute("VACUUM FULL split"));
            must(publisher.batch_execute("INSERT INTO truncated VALUES (1, 'after')"));
            must(holder.batch_execute("COMMIT"));
            let finished = run.join().unwrap_or_else(|_| panic!("the run panicked"));
            finished.expect(0, &["event=\"table_copy_repeated\""]);
        });
        case.expect_equal(&["first", "rewritten", "split", "truncated", "last"]);
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM rewritten WHERE v LIKE '%!'"),
            "5000"
        );
    });
}

/// The session that holds the snapshot is terminated, and a table of which no part is copied yet is
/// rewritten, so that it appears empty under the snapshot.
#[test]
fn a_split_table_is_copied_again_that_is_rewritten_after_the_snapshot_is_lost() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let args = ["--copy-workers=1", "--copy-split-size=1", "--indexes-after=false"];
        case.tool.args = args.map(str::to_owned).into();
        for (table, rows) in [("first", 60_000), ("rewritten", 40_000), ("dropped", 30_000)] {
            case.both(&format!("CREATE TABLE {table} (id int PRIMARY KEY, v text)"));
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT i, md5(i::text) FROM generate_series(1, {rows}) i"
            ));
        }
        case.publish("FOR ALL TABLES");
        let mut locked = holder(&case, "BEGIN; LOCK TABLE first IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("run"));
        wait_for_a_waiter(&case, &mut process, "relation");
        let split = "SELECT count(*) FROM pgapace.relation WHERE parts > 1";
        assert_eq!(case.subscriber.value(split), "3");
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
             WHERE application_name = '{}' AND state = 'idle in transaction' \
               AND backend_type = 'walsender'",
            case.tool.name
        );
        assert_eq!(case.publisher.value(&end), "1");
        case.publisher.sql("ALTER TABLE rewritten ALTER v TYPE varchar(50); DROP TABLE dropped");
        must(locked.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "rewritten"]);
        case.stop(process);
    });
}

/// While a copy waits, nothing uses the session that holds the snapshot but the look at the slot.
#[test]
fn a_copy_ends_when_the_session_that_holds_the_snapshot_is_lost() {
    on_versions(&[(15, 15)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        let mut locked = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("run"));
        wait_for_a_waiter(&case, &mut process, "relation");
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
             WHERE application_name = '{}' AND backend_type = 'walsender'",
            case.tool.name
        );
        assert_eq!(case.publisher.value(&end), "1");
        let lost = "the session that holds the snapshot was lost";
        must(wait_for_log(&mut process, lost, PATIENCE));
        must(locked.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}

/// The subscriber's disk is full: the error names the table, the other tables are copied, and
/// pgapace retries until there is space.
#[test]
fn a_full_disk_of_the_subscriber_is_retried() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        let data = site.subscriber.query_one_text(DB, "SHOW data_directory")?;
        let Some(disk) = SmallDisk::mount(&data, 8) else { return Ok(()) };
        let ddl = "CREATE TABLE large (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY, v text)";
        site.publish_tables(ddl)?;
        site.publisher.sql(
            DB,
            "INSERT INTO large SELECT i, repeat('x', 500) FROM generate_series(1, 40000) i; \
             INSERT INTO small SELECT i, repeat('x', 500) FROM generate_series(1, 1000) i",
        )?;
        let place = format!("CREATE TABLESPACE tight LOCATION '{}'", disk.path().display());
        site.subscriber.sql(DB, &place)?;
        site.subscriber.sql(DB, "ALTER TABLE large SET TABLESPACE tight")?;
        // One worker: the large table is copied first.
        let mut run = site.spawn(&site.program().args(["--copy-workers", "1"]))?;
        wait_for_log(&mut run, "53100", PATIENCE)?;
        let copied =
            "SELECT string_agg(table_name, ' ') FROM pgapace.relation WHERE sync_lsn IS NOT NULL";
        let mut look = site.subscriber.connect(DB)?;
        wait_until(PATIENCE, "the other table to be copied", || {
            let copied: Option<String> = look.query_one(copied, &[])?.get(0);
            Ok(copied.as_deref() == Some("small"))
        })?;
        assert!(run.log().contains("public.large"), "{}", run.log());
        assert!(run.log().contains("Make room"), "{}", run.log());
        disk.grow();
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        site.publisher.sql(DB, "UPDATE large SET v = 'y' WHERE id < 100")?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("large"), TableName::from("small")])?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        // Drop these before the file system is unmounted.
        site.subscriber.sql(DB, "DROP TABLE large")?;
        site.subscriber.sql(DB, "DROP TABLESPACE tight")?;
    }
    Ok(())
}

/// The slot retains WAL while tables are copied, and the publisher limits it. A warning shows the
/// remaining size. If the slot exceeds the limit, the copy is useless and the run ends.
#[test]
fn a_slot_near_its_wal_limit_is_reported() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let limit = |builder: testbed::ClusterBuilder| {
            builder.setting("max_slot_wal_keep_size", "96MB").setting("max_wal_size", "64MB")
        };
        let site = Site::of(Pair::start_with(major, major, limit, |subscriber| subscriber)?)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        site.publisher.sql(DB, "INSERT INTO t SELECT generate_series(1, 1000)")?;
        let mut holder = site.subscriber.connect(DB)?;
        holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
        let mut run = site.spawn(&site.program())?;
        let mut look = site.subscriber.connect(DB)?;
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'";
        wait_while_running(&mut run, "the copy to wait", PATIENCE, || {
            Ok(look.query_one(waiting, &[])?.get::<_, i64>(0) > 0)
        })?;
        let wal = |megabytes: u32| {
            site.publisher.sql(
                DB,
                &format!(
                    "SELECT count(pg_logical_emit_message(false, 'fill', repeat('x', 1 << 20))) \
                     FROM generate_series(1, {megabytes})"
                ),
            )
        };
        wal(84)?;
        wait_for_event(&mut run, "slot_near_limit", PATIENCE)?;
        assert!(run.log().contains("lost_after="), "{}", run.log());
        wal(80)?;
        site.publisher.sql(DB, "CHECKPOINT")?;
        expect_exit(
            &mut run,
            7,
            &["was invalidated during table sync", "SET max_slot_wal_keep_size"],
        )?;
    }
    Ok(())
}

/// `status` says why no run can go on. A rebase keeps the rows that were copied.
#[test]
fn a_slot_that_is_dropped_ends_the_copy_and_a_rebase_goes_on() {
    on_versions(&[(14, 18), (18, 14)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 1000)");
        case.publish("FOR ALL TABLES");
        let mut lock = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let mut run = case.tool.start(case.log_file("copy"));
        wait_for_a_waiter(&case, &mut run, "relation");
        let name = &case.tool.name;
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
        let hint = "pgapace rebase creates a new slot";
        must(expect_exit(&mut run, 7, &["was dropped during table sync", hint]));
        must(lock.batch_execute("COMMIT"));
        let status = case.tool.finish("status", &[]).stdout;
        assert!(status.contains("does not exist on the publisher"), "{status}");
        assert!(status.contains(hint), "{status}");
        case.tool.finish("rebase", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}
