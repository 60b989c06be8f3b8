//! Apply groups and their net changes: rows, conflicts and counters are the same as when each
//! transaction is applied individually.

use std::fmt::Write as _;

use crate::support::{Case, VERSIONS, must, on_versions};

/// Runs each statement as a separate transaction, in one round trip.
pub(super) fn transactions(case: &Case, statements: impl IntoIterator<Item = String>) {
    let mut sql = String::new();
    for statement in statements {
        write!(sql, "BEGIN; {statement}; COMMIT; ").expect("a string");
    }
    case.publisher.sql(&sql);
}

/// A table of ten rows, of which row `missing` does not exist on the subscriber, before a backlog.
pub(super) fn ten_rows(case: &Case, missing: &str) {
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int, w text)");
    case.publisher.sql("INSERT INTO t SELECT g, 0, 'w' FROM generate_series(1, 10) g");
    case.run_until_current();
    case.subscriber.sql(&format!("DELETE FROM t WHERE id IN ({missing})"));
}

/// The number of subscriber transactions for a backlog of 200 transactions of the publisher.
pub(super) fn subscriber_transactions(case: &mut Case, args: &[&str]) -> u64 {
    case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
    transactions(case, (0..200).map(|n| format!("UPDATE t SET v = {n} WHERE id = {}", n % 7)));
    let count = "SELECT count(DISTINCT xmin::text) FROM h";
    case.subscriber.sql("TRUNCATE h");
    transactions(case, (0..200).map(|n| format!("INSERT INTO h VALUES ({n})")));
    case.run_until_current();
    case.expect_equal(&["t"]);
    case.publisher.sql("DELETE FROM h");
    let transactions = case.subscriber.value(count);
    case.run_until_current();
    transactions.parse().expect("a number")
}

#[test]
fn a_backlog_becomes_few_subscriber_transactions() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE h (n int PRIMARY KEY)",
        );
        case.publisher.sql("INSERT INTO t SELECT g, 0 FROM generate_series(0, 6) g");
        case.run_until_current();
        let mut transactions = |args: &[&str]| subscriber_transactions(&mut case, args);
        // Explicit, because the whole suite can also run with PGAPACE_APPLY_MODE=row.
        let auto = ["--apply-mode", "auto"];
        assert!(transactions(&auto) < 100);
        assert_eq!(transactions(&[auto[0], auto[1], "--group-transactions", "1"]), 200);
        assert!(transactions(&["--apply-mode", "row"]) < 100);
        assert_eq!(transactions(&["--apply-mode", "row", "--group-transactions", "1"]), 200);
        assert!(transactions(&[auto[0], auto[1], "--group-transactions", "10"]) >= 20);
    });
}

/// Both unique indexes of the progress begin with the subscription. If statistics say that the table has
/// one row, plans must not read all rows of the subscription by the other index.
#[test]
fn progress_is_found_by_its_primary_key() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        case.run_until_current();
        case.subscriber.sql(
            "DELETE FROM pgapace.progress WHERE lsn < (SELECT max(lsn) FROM pgapace.progress); \
             ALTER TABLE pgapace.progress SET (autovacuum_enabled = false)",
        );
        case.subscriber.sql("VACUUM (FULL, ANALYZE) pgapace.progress");
        assert_eq!(
            case.subscriber
                .value("SELECT reltuples FROM pg_class WHERE oid = 'pgapace.progress'::regclass"),
            "1"
        );
        let scans = "SELECT sum(idx_scan) FROM pg_stat_user_indexes \
            WHERE schemaname = 'pgapace' AND relname = 'progress' AND indexrelname ~ 'predecessor'";
        let before = case.subscriber.value(scans);
        transactions(&case, (1..50).map(|n| format!("UPDATE t SET v = {n}")));
        case.tool.args = ["--group-transactions", "1"].map(str::to_owned).to_vec();
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!(case.subscriber.value(scans), before);
    });
}

/// All transactions before the conflict are committed and none after it, and the conflict is
/// reported.
#[test]
fn a_conflict_inside_a_group_stops_at_its_transaction() {
    on_versions(&VERSIONS, |case| {
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE other (id int PRIMARY KEY)",
        );
        case.subscriber.sql("INSERT INTO t VALUES (30, -1)");
        transactions(&case, (1..=50).map(|n| {
            format!("INSERT INTO t VALUES ({n}, 0); UPDATE t SET v = {n}; INSERT INTO other VALUES ({n})")
        }));
        case.run().expect(9, &["23505", "INSERT on public.t", "key (id)=(30)", "commit LSN"]);
        assert_eq!(
            case.subscriber.value("SELECT count(*) || '|' || max(v) FILTER (WHERE id < 30) FROM t"),
            "30|29"
        );
        assert_eq!(case.subscriber.value("SELECT max(id) FROM other"), "29");
        case.subscriber.sql("DELETE FROM t WHERE id = 30");
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
        let counted = case.statistic("transactions || '|' || inserts || '|' || updates");
        assert_eq!(counted, "50|100|1275");
    });
}

/// A row that is inserted and deleted within a group still causes a conflict if it already exists.
#[test]
fn a_row_inserted_and_deleted_in_a_group_still_conflicts() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
        transactions(&case, (1..=20).map(|n| format!("INSERT INTO t VALUES ({n}, 0)")));
        transactions(&case, (1..=20).map(|n| format!("DELETE FROM t WHERE id = {n}")));
        case.run_until_current();
        case.expect_equal(&["t"]);
        transactions(&case, (1..=20).map(|n| format!("INSERT INTO t VALUES ({n}, 0)")));
        transactions(&case, (1..=20).map(|n| format!("DELETE FROM t WHERE id = {n}")));
        case.subscriber.sql("INSERT INTO t VALUES (7, 7)");
        case.run().expect(9, &["23505", "INSERT on public.t", "key (id)=(7)"]);
        assert_eq!(
            case.subscriber.value("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"),
            "1,2,3,4,5,6,7"
        );
        case.subscriber.sql("DELETE FROM t WHERE id = 7");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// Each change of a missing row is counted and reported, even if several of them have one net
/// change.
#[test]
fn missing_rows_are_counted_one_by_one() {
    let changes = || {
        (1..=10)
            .flat_map(|n| {
                [
                    format!("UPDATE t SET v = v + 1 WHERE id = {n}"),
                    format!("UPDATE t SET v = v + 1, w = 'changed' WHERE id = {n}"),
                ]
            })
            .chain((9..=10).map(|n| format!("DELETE FROM t WHERE id = {n}")))
            .chain([
                "DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 5, 'back')".to_owned(),
                "UPDATE t SET id = 20 WHERE id = 2".to_owned(),
                "UPDATE t SET v = 3 WHERE id = 20".to_owned(),
            ])
    };
    on_versions(&VERSIONS, |mut case| {
        ten_rows(&case, "1, 2, 3, 10");
        for mode in ["auto", "row"] {
            case.tool.args = vec!["--apply-mode".to_owned(), mode.to_owned()];
            let count = || -> Vec<i64> {
                case.statistic("update_missing || ',' || t.delete_missing || ',' || t.updates")
                    .split(',')
                    .map(|number| number.parse().expect("a number"))
                    .collect()
            };
            let before = count();
            transactions(&case, changes());
            let log = case.run_until_current();
            let added: Vec<_> = count().iter().zip(&before).map(|(a, b)| a - b).collect();
            assert_eq!(added, [10, 2, 22], "{mode}: {log}");
            assert!(log.contains("update_missing") && log.contains("delete_missing"), "{log}");
            assert!(log.contains("(id)=(3)"), "{log}");
            assert_eq!(
                case.subscriber
                    .rows("SELECT id || ':' || v || ':' || w FROM t ORDER BY id")
                    .join(" "),
                "1:5:back 4:2:changed 5:2:changed 6:2:changed 7:2:changed 8:2:changed",
                "{mode}"
            );
            // Start again for the other mode.
            case.both(
                "DELETE FROM t; \
                 INSERT INTO t SELECT g, 0, 'w' FROM generate_series(1, 10) g",
            );
            case.subscriber.sql("DELETE FROM t");
            case.run_until_current();
            case.subscriber.sql("DELETE FROM t WHERE id IN (1, 2, 3, 10)");
        }
    });
}

/// An unchanged TOAST column keeps its value, whichever change of the group has set it.
#[test]
fn unchanged_toast_values_keep_their_value_in_a_group() {
    on_versions(&VERSIONS, |case| {
        let ddl = "CREATE TABLE t (id int PRIMARY KEY, v int, a text, b text); \
                   ALTER TABLE t ALTER a SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL";
        case.replicate(ddl);
        transactions(
            &case,
            (1..=20).map(|n| {
                format!("INSERT INTO t VALUES ({n}, 0, repeat('a', 5000), repeat('b', 5000))")
            }),
        );
        case.run_until_current();
        transactions(
            &case,
            (1..=20).flat_map(|n| {
                [
                    format!("UPDATE t SET v = 1 WHERE id = {n}"),
                    format!("UPDATE t SET a = repeat('{n}', 3000) WHERE id = {n} AND id % 2 = 0"),
                    format!("UPDATE t SET v = 2 WHERE id = {n}"),
                    format!("UPDATE t SET b = NULL WHERE id = {n} AND id % 3 = 0"),
                    format!("UPDATE t SET v = 3 WHERE id = {n} AND id % 5 = 0"),
                ]
            }),
        );
        transactions(
            &case,
            (21..=40).flat_map(|n| {
                [
                    format!("INSERT INTO t VALUES ({n}, 0, repeat('a', 5000), repeat('b', 5000))"),
                    format!("UPDATE t SET v = 1 WHERE id = {n}"),
                    format!("DELETE FROM t WHERE id = {n} AND id % 4 = 0"),
                    format!(
                        "INSERT INTO t SELECT {n}, 7, repeat('c', 5000), 'short' WHERE {n} % 4 = 0"
                    ),
                    format!("UPDATE t SET v = 8 WHERE id = {n}"),
                ]
            }),
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A row of a table without a key is equal on the subscriber and not identical, and a set-based statement does not take
/// it. Only that transaction is applied individually.
#[test]
fn a_transaction_that_cannot_be_set_based_is_applied_alone() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--apply-mode=auto".to_owned()];
        case.replicate("CREATE TABLE t (id int, v numeric); ALTER TABLE t REPLICA IDENTITY FULL");
        case.publisher.sql("INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = 0.00 WHERE id = 778");
        let before: u64 = must(case.statistic("groups").parse());
        let mut client = case.publisher.connect();
        for number in 1..=2000 {
            let id = number % 1000 + 1;
            must(client.batch_execute(&format!("UPDATE t SET v = v + 1 WHERE id = {id}")));
        }
        case.run_until_current();
        case.expect_equal(&["t"]);
        let groups = must(case.statistic("groups").parse::<u64>()) - before;
        assert!(groups < 200, "{groups} subscriber transactions for 2000");
        assert_ne!(case.statistic("fallbacks"), "0", "it was possible after all");
    });
}
