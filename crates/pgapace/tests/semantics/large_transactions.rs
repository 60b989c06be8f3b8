//! Transactions that are applied in parts.

use std::time::Duration;

use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions, wait_while_running};

/// A transaction of several parts is no longer completely in memory, so the publisher sends it
/// again.
#[test]
fn a_conflict_inside_a_large_transaction_rolls_it_back() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--memory-limit".to_owned(), "16".to_owned()];
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql("INSERT INTO t VALUES (70000, 'in the way')");
        case.publisher.sql("INSERT INTO t VALUES (0, 'before')");
        case.publisher
            .sql("INSERT INTO t SELECT g, repeat('v', 50) FROM generate_series(1, 90000) g");
        case.publisher.sql("INSERT INTO t VALUES (-1, 'after')");
        case.run().expect(9, &["23505", "INSERT on public.t", "key (id)=(70000)"]);
        assert_eq!(case.subscriber.rows("SELECT id FROM t ORDER BY id").join(","), "0,70000");
        case.subscriber.sql("DELETE FROM t WHERE id = 70000");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// Large transactions in parts. The last part may be empty or of another kind than the first. No
/// part is committed before all parts are checked.
#[test]
fn missing_rows_of_large_transactions_are_counted() {
    on_versions(&[(15, 18)], |mut case| {
        case.tool.args = vec!["--memory-limit".to_owned(), "16".to_owned()];
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v text); \
             CREATE TABLE h (id int PRIMARY KEY); \
             CREATE TABLE f (a int, tags int[]); ALTER TABLE f REPLICA IDENTITY FULL",
        );
        case.subscriber.sql(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
             CREATE TRIGGER after AFTER INSERT ON h FOR EACH ROW EXECUTE FUNCTION nothing(); \
             ALTER TABLE h ENABLE ALWAYS TRIGGER after",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 32768) g; \
             INSERT INTO f SELECT g, ARRAY[g] FROM generate_series(1, 3) g",
        );
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id = 100");
        let missing =
            |case: &Case| -> u64 { case.statistic("update_missing").parse().expect("a number") };
        let transactions = [
            // Exactly one part, followed by an empty one.
            "UPDATE t SET v = 'one'",
            // A single change that fills a part.
            "UPDATE t SET v = repeat('x', 5000000) WHERE id = 100",
            // First changes that can be set-based, then a table whose triggers run code.
            "UPDATE t SET v = 'two'; UPDATE t SET v = 'three'; INSERT INTO h VALUES (1)",
        ];
        let mut expected = 0;
        for (sql, added) in transactions.into_iter().zip([1, 1, 2]) {
            case.publisher.sql(sql);
            let log = case.run_until_current();
            expected += added;
            assert_eq!(missing(&case), expected, "{sql}: {log}");
            assert!(log.contains("(id)=(100)"), "{sql}: {log}");
        }
        case.publisher.sql("DELETE FROM t WHERE id = 100");
        case.run_until_current();
        case.expect_equal(&["t", "h", "f"]);
    });
}

/// Parts of a transaction without changes to apply, and updates that cannot be set-based.
#[test]
fn large_transactions_that_cannot_be_set_based() {
    on_versions(&[(15, 18)], |case| {
        case.replicate("CREATE TABLE kept (id int PRIMARY KEY)");
        case.both(
            "CREATE TABLE late (id int PRIMARY KEY, v text); \
             CREATE TABLE f (a int, tags int[]); ALTER TABLE f REPLICA IDENTITY FULL",
        );
        // The table is copied at its first change, and the copy contains all changes.
        case.publisher.sql(
            "INSERT INTO late SELECT g, 'late' FROM generate_series(1, 150000) g; \
             INSERT INTO f SELECT 1, ARRAY[g] FROM generate_series(1, 20) g",
        );
        case.run_until_current();
        case.expect_equal(&["late", "f"]);
        case.publisher.sql(
            "DO $$ BEGIN FOR i IN 1..1700 LOOP UPDATE f SET a = i; END LOOP; \
             INSERT INTO kept VALUES (1); END $$",
        );
        case.run_until_current();
        case.expect_equal(&["late", "f", "kept"]);
    });
}

/// A user deletes rows that a part in the middle changes, and keeps it waiting while the next part is ready.
/// Only the part that misses them is applied again: its other rows, of a table without a key, are there once.
#[test]
fn a_part_that_misses_rows_is_applied_again_before_the_next() {
    on_versions(&[(15, 18)], |mut case| {
        case.tool.args = vec!["--memory-limit".to_owned(), "16".to_owned()];
        case.replicate("CREATE TABLE t (id int); CREATE TABLE u (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO u SELECT g, 'v' FROM generate_series(1, 1000) g");
        case.run_until_current();
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; DELETE FROM u WHERE id <= 10"));
        // Parts have 32768 changes. What the second one waits for is at its end.
        case.publisher.sql(
            "BEGIN; INSERT INTO t SELECT generate_series(1, 65000); UPDATE u SET v = 'second'; \
             INSERT INTO t SELECT generate_series(65001, 66000); \
             DELETE FROM u WHERE id BETWEEN 6 AND 20; COMMIT",
        );
        let mut process = case.start();
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND application_name LIKE 'pgapace%' AND datname = current_database()";
        must(wait_while_running(&mut process, "a part to wait for the user", PATIENCE, || {
            Ok(case.subscriber.value(waits) == "1")
        }));
        // Nothing tells whether the next part is sent: that takes a tenth of this.
        std::thread::sleep(Duration::from_secs(2));
        must(user.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        let log = case.stop(process);
        let missing = case.statistic("update_missing || '|' || delete_missing");
        assert_eq!(missing, "10|5", "{log}");
        case.expect_equal(&["t"]);
        let rows = "SELECT count(*), sum(id), sum(length(v)) FROM u WHERE id > 10";
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
    });
}
