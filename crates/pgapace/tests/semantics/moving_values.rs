//! Unique values that move between rows: swapped, rotated, freed and taken, inside one transaction and from
//! one to the next.

use std::fmt::Write;

use crate::support::{Case, VERSIONS, on_versions};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, w text UNIQUE, v text)";

/// Each worker count, and one large transaction in many parts.
fn with_workers(case: &mut Case, workers: &str) {
    let args = [
        "--apply-mode",
        "auto",
        "--workers",
        workers,
        "--memory-limit",
        "16",
        "--streaming",
        "off",
    ];
    case.tool.args = args.map(str::to_owned).into();
}

fn fill(case: &Case, rows: u32) {
    case.publisher.sql(&format!(
        "TRUNCATE t; INSERT INTO t SELECT g, g, 'w' || g, repeat('v', 100) FROM generate_series(1, {rows}) g"
    ));
}

/// Transactions that move values between rows `a`, `b` and `c`.
fn moves(sql: &mut String, n: u32, (a, b, c): (u32, u32, u32)) {
    let _ = match n % 4 {
        // Two rows swap.
        0 => write!(
            sql,
            "BEGIN; UPDATE t SET u = -u WHERE id = {a}; \
             UPDATE t x SET u = -y.u FROM t y WHERE x.id = {b} AND y.id = {a}; \
             UPDATE t SET u = (SELECT abs(o.u) FROM o WHERE o.id = {b}) WHERE id = {a}; COMMIT; "
        ),
        // Three rotate.
        1 => write!(
            sql,
            "BEGIN; UPDATE t SET w = w || '-' WHERE id IN ({a}, {b}, {c}); \
             UPDATE t x SET w = (SELECT o.w FROM o WHERE o.id = \
               CASE x.id WHEN {a} THEN {b} WHEN {b} THEN {c} ELSE {a} END) WHERE id IN ({a}, {b}, {c}); \
             COMMIT; "
        ),
        // One is freed, and taken by the next transaction.
        2 => write!(
            sql,
            "BEGIN; UPDATE t SET w = 'free' || {n} WHERE id = {a}; COMMIT; \
             BEGIN; UPDATE t SET w = (SELECT o.w FROM o WHERE o.id = {a}) WHERE id = {b}; COMMIT; "
        ),
        // A row is deleted, and another one has its values.
        _ => write!(
            sql,
            "BEGIN; DELETE FROM t WHERE id = {a}; \
             INSERT INTO t SELECT 1000000 + {n}, o.u, o.w, 'new' FROM o WHERE o.id = {a}; \
             DELETE FROM t WHERE id = 1000000 + {n}; INSERT INTO t SELECT * FROM o WHERE o.id = {a}; COMMIT; "
        ),
    };
}

/// Many transactions, which read the values before them from `o`.
fn write(case: &Case, transactions: u32, rows: u32) {
    case.publisher.sql("DROP TABLE IF EXISTS o; CREATE UNLOGGED TABLE o AS TABLE t; ALTER TABLE o ADD PRIMARY KEY (id)");
    for from in (0..transactions).step_by(100) {
        let mut sql = String::new();
        for n in from..(from + 100).min(transactions) {
            let row = |step: u32| (n * 7 + step * 13) % rows + 1;
            let places = (row(0), row(1), row(2));
            // The query reads the state before the transaction.
            let _ = write!(
                sql,
                "INSERT INTO o SELECT * FROM t WHERE id IN ({0}, {1}, {2}) \
                 ON CONFLICT (id) DO UPDATE SET u = excluded.u, w = excluded.w, v = excluded.v; ",
                places.0, places.1, places.2
            );
            moves(&mut sql, n, places);
            let _ = write!(sql, "BEGIN; UPDATE t SET v = 'v{n}' WHERE id = {}; COMMIT; ", row(3));
        }
        case.publisher.sql(&sql);
    }
}

#[test]
fn values_that_move_from_transaction_to_transaction() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate(TABLE);
        for workers in ["1", "4"] {
            with_workers(&mut case, workers);
            fill(&case, 500);
            case.run_until_current();
            write(&case, 600, 500);
            case.run_until_current();
            case.expect_equal(&["t"]);
        }
    });
}

/// Only the transaction that moves values is applied otherwise: the parts of a large one that do not stay
/// as they are, and the run goes on.
#[test]
fn values_that_move_inside_a_large_transaction() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate(TABLE);
        for workers in ["1", "4"] {
            with_workers(&mut case, workers);
            fill(&case, 40_000);
            case.run_until_current();
            case.publisher.sql(
                "BEGIN; UPDATE t SET v = 'a'; \
                 UPDATE t SET u = -1 WHERE id = 20000; UPDATE t SET u = 20000 WHERE id = 20001; \
                 UPDATE t SET u = 20001 WHERE id = 20000; UPDATE t SET v = v || 'b'; COMMIT",
            );
            case.run_until_current();
            case.expect_equal(&["t"]);
        }
        // A row that is missing in the middle of a large transaction is skipped, and nothing else.
        case.subscriber.sql("DELETE FROM t WHERE id = 30000");
        case.publisher.sql("UPDATE t SET v = 'c'");
        case.run_until_current();
        let missing = "SELECT count(*) || '|' || count(*) FILTER (WHERE v = 'c') FROM t";
        assert_eq!(case.subscriber.value(missing), "39999|39999");
        assert_eq!(case.statistic("update_missing"), "1");
    });
}

/// A unique index of one leaf partition, and rows that move to another leaf with their values.
#[test]
fn values_that_move_inside_partitions() {
    on_versions(&VERSIONS, |mut case| {
        with_workers(&mut case, "4");
        case.replicate(
            "CREATE TABLE t (id int, p int, u int, v text, PRIMARY KEY (id, p)) PARTITION BY LIST (p); \
             CREATE TABLE one PARTITION OF t FOR VALUES IN (1); CREATE UNIQUE INDEX ON one (u); \
             CREATE TABLE two PARTITION OF t FOR VALUES IN (2); CREATE UNIQUE INDEX ON two (u)",
        );
        case.publisher
            .sql("INSERT INTO t SELECT g, g % 2 + 1, g, 'v' FROM generate_series(1, 200) g");
        case.run_until_current();
        let mut sql = String::new();
        for n in (1..=196).step_by(2) {
            let _ = write!(
                sql,
                "BEGIN; UPDATE t SET u = -1 WHERE id = {n}; UPDATE t SET u = {n} WHERE id = {n} + 2; \
                 UPDATE t SET u = (SELECT max(u) + 1 FROM t) WHERE id = {n}; COMMIT; \
                 UPDATE t SET p = 3 - p WHERE id = {n} + 3; UPDATE t SET v = v || {n} WHERE id < 50; "
            );
        }
        case.publisher.sql(&sql);
        case.run_until_current();
        case.expect_equal(&["one", "two"]);
    });
}

/// Without a key, a row is found by all of its old values. Some values are NULL, and some rows are equal.
#[test]
fn values_that_move_between_rows_without_a_key() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate("CREATE TABLE t (b int, u int, v text); CREATE UNIQUE INDEX ON t (u)");
        case.publisher.sql("ALTER TABLE t REPLICA IDENTITY FULL");
        for workers in ["1", "4"] {
            with_workers(&mut case, workers);
            case.publisher.sql(
                "TRUNCATE t; INSERT INTO t SELECT g, g, 'v' FROM generate_series(1, 300) g; \
                 INSERT INTO t SELECT 0, NULL, 'equal' FROM generate_series(1, 300)",
            );
            case.run_until_current();
            let before = case.statistic("fallbacks");
            // Two rows swap, one of several equal rows takes a value that another one frees, or inserts and deletes do.
            case.publisher.sql(
                "DO $$ DECLARE a int; x int; y int; BEGIN \
                   FOR i IN 1..300 LOOP \
                     a := 1 + (i * 17) % 299; \
                     SELECT u INTO x FROM t WHERE b = a; SELECT u INTO y FROM t WHERE b = a + 1; \
                     UPDATE t SET u = NULL WHERE b = a; UPDATE t SET u = x WHERE b = a + 1; \
                     UPDATE t SET u = y WHERE b = a; \
                     UPDATE t SET v = v || i WHERE b = 1 + i % 300; \
                     IF i % 5 = 0 THEN \
                       UPDATE t SET u = 1000 + i WHERE b = a; \
                       UPDATE t SET u = y WHERE ctid = (SELECT min(ctid) FROM t WHERE u IS NULL); \
                       COMMIT; \
                       DELETE FROM t WHERE u = y; UPDATE t SET u = y WHERE b = a; \
                       INSERT INTO t VALUES (0, NULL, 'equal'); \
                     END IF; \
                     COMMIT; \
                   END LOOP; \
                 END $$",
            );
            case.run_until_current();
            case.expect_equal(&["t"]);
            assert_eq!(case.statistic("fallbacks"), before, "no group is applied by rows");
            assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        }
    });
}
