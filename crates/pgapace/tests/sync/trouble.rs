//! Tables that cannot be copied, or that change while others are.

use std::time::Duration;

use crate::support::{PATIENCE, VERSIONS, must, on_versions};
use testbed::wait_until;

/// A row that the target does not take: its table and line are named, the other tables are copied.
#[test]
fn a_row_that_the_target_rejects() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE TABLE good (id int PRIMARY KEY); INSERT INTO good SELECT generate_series(1, 100); \
             CREATE TABLE also_good (id int PRIMARY KEY, v text); INSERT INTO also_good SELECT i, repeat('x', 500) FROM generate_series(1, 5000) i; \
             CREATE TABLE bad (id int PRIMARY KEY); INSERT INTO bad SELECT generate_series(1, 100); \
             CREATE TABLE empty (id int PRIMARY KEY)",
        );
        case.target.sql(
            "CREATE TABLE good (id int PRIMARY KEY); CREATE TABLE also_good (id int PRIMARY KEY, v text); \
             CREATE TABLE bad (id int PRIMARY KEY CHECK (id <> 42)); CREATE TABLE empty (id int PRIMARY KEY)",
        );
        case.publish("FOR ALL TABLES");
        case.run().expect(9, &["public.bad", "line 42", "The other tables are copied"]);
        let copied = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM pgapace.relation WHERE gate_lsn IS NOT NULL";
        assert_eq!(case.target.value(copied), "also_good empty good");
        assert_eq!(case.target.value("SELECT count(*) FROM bad"), "0");
        // What is published meanwhile is there in the end, once.
        case.publisher.sql("INSERT INTO good VALUES (1000); UPDATE bad SET id = 43000 WHERE id = 43; INSERT INTO empty VALUES (1)");
        case.target.sql("ALTER TABLE bad DROP CONSTRAINT bad_id_check");
        case.run_until_current();
        case.expect_equal(&["good", "also_good", "bad", "empty"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// A table that is rewritten, and one that is dropped, between the snapshot and their turn. To the
/// snapshot the rewritten one looks empty.
#[test]
fn tables_that_change_while_others_are_copied() {
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
        // The largest table comes first, and waits.
        let mut holder = case.target.connect();
        must(holder.batch_execute("BEGIN; LOCK TABLE first IN SHARE MODE"));
        std::thread::scope(|scope| {
            let run = scope.spawn(|| case.tool.run());
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'pgapace%' \
                           AND datname = current_database()";
            let mut look = case.target.connect();
            must(wait_until(PATIENCE, "the copy to wait", || {
                Ok(look.query_one(waiting, &[])?.get::<_, i64>(0) > 0)
            }));
            let mut publisher = case.publisher.connect();
            must(publisher.batch_execute(
                "ALTER TABLE rewritten ALTER v TYPE varchar(50) USING v || '!'; DROP TABLE dropped; TRUNCATE truncated",
            ));
            must(publisher.batch_execute("VACUUM FULL split"));
            must(publisher.batch_execute("INSERT INTO truncated VALUES (1, 'after')"));
            std::thread::sleep(Duration::from_millis(100));
            must(holder.batch_execute("COMMIT"));
            let finished = run.join().unwrap_or_else(|_| panic!("the run panicked"));
            finished.expect(0, &["copied under another snapshot"]);
        });
        case.expect_equal(&["first", "rewritten", "split", "truncated", "last"]);
        assert_eq!(case.target.value("SELECT count(*) FROM rewritten WHERE v LIKE '%!'"), "5000");
    });
}
