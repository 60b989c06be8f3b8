//! Rows that an update or delete does not find are counted, and recorded if they are few.

use std::fmt::Write as _;

use super::counted::{conflicts, counted, in_every_mode, transactions};
use crate::support::{Case, on_versions};

/// Rows that an update or delete does not find. Without a rule all are counted, but only recorded
/// if they are few. With a rule all are recorded.
#[test]
fn missing_rows_are_counted_and_recorded() {
    in_every_mode(|mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t SELECT g, 0 FROM generate_series(1, 500) g");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id <= 400");
        transactions(
            &case,
            &["UPDATE t SET v = 1 WHERE id IN (1, 401)", "DELETE FROM t WHERE id IN (2, 402)"],
        );
        case.run_until_current();
        assert_eq!(counted(&case), "delete_missing=1 update_missing=1");
        let few =
            ["update_missing skip f UPDATE t (id)=(1)", "delete_missing skip f DELETE t (id)=(2)"];
        assert_eq!(conflicts(&case), few);
        case.publisher.sql("UPDATE t SET v = 2 WHERE id BETWEEN 101 AND 400");
        case.run_until_current();
        assert_eq!(counted(&case), "delete_missing=1 update_missing=301");
        let recorded = conflicts(&case).len();
        assert!((3..302).contains(&recorded), "{recorded} are recorded");
        case.tool.args.extend(["--on-conflict", "update_missing=skip"].map(str::to_owned));
        case.publisher.sql("UPDATE t SET v = 3 WHERE id BETWEEN 101 AND 400");
        case.run_until_current();
        assert_eq!(counted(&case), "delete_missing=1 update_missing=601");
        assert_eq!(conflicts(&case).len(), recorded + 300);
    });
}

/// Values come in binary format, or as text with `--binary=off`.
#[test]
fn keys_are_recorded_as_text_in_both_formats() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate(
            "CREATE TABLE t (n numeric(10,2), d date, c time, l timestamp, z timestamptz, u uuid, i inet, b boolean, \
             PRIMARY KEY (n, d, c, l, z, u, i, b))",
        );
        let key = "'-1.50', '2024-02-29', '12:00:00.5', '2024-01-02 03:04:05', '0044-03-15 00:00:00+00 BC', \
            '01234567-89ab-cdef-0123-456789abcdef', '10.0.0.1/8', true";
        for format in ["auto", "off"] {
            case.tool.args = vec![format!("--binary={format}")];
            case.publisher.sql(&format!("INSERT INTO t VALUES ({key})"));
            case.run_until_current();
            case.subscriber.sql("DELETE FROM t");
            case.publisher.sql("DELETE FROM t");
            case.run_until_current();
        }
        let values = key.replace('\'', "").replace("true", "t");
        let expected =
            format!("delete_missing skip f DELETE t (n, d, c, l, z, u, i, b)=({values})");
        assert_eq!(conflicts(&case), [expected.as_str(), &expected]);
    });
}

/// Some of many transactions look for rows that are missing. Their groups stay sets: only the first is
/// executed again. Every change of a missing row is counted, up to its next insert. Many small groups of several
/// workers keep their places too, and take no row for missing that a group before inserts.
#[test]
fn groups_with_missing_rows_are_not_taken_apart() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let args: &[&str] = match case.publisher.major() {
            18 => &["--workers", "4", "--group-transactions", "30"],
            _ => &["--workers", "2"],
        };
        case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v int, w text); \
             CREATE TABLE two (a text, b numeric, v int, PRIMARY KEY (a, b))",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT g, 0, 'w' FROM generate_series(1, 1000) g; \
             INSERT INTO two SELECT g, g, 0 FROM generate_series(1, 100) g",
        );
        case.run_until_current();
        case.subscriber
            .sql("DELETE FROM t WHERE id % 10 = 1; DELETE FROM two WHERE v = 0 AND b % 5 = 1");
        change_rows_of_which_some_are_missing(&case, "UPDATE two SET v = i WHERE b = i");
        let two = case.publisher.value("SELECT sum(v) FROM two WHERE b % 5 <> 1");
        assert_eq!(case.subscriber.value("SELECT sum(v) FROM two"), two);
        let apart: u64 = case.statistic("fallbacks").parse().expect("a number");
        assert_eq!(apart, 0, "no group is applied by rows");
    });
}

/// Changes rows 1 to 1000 of `t`, of which one in ten is missing, and with `other` 100 rows of another table, of which one in
/// five is. Expects the rows of `t` and the counts.
fn change_rows_of_which_some_are_missing(case: &Case, other: &str) {
    // 800 updates twice, of which 80 + 80 find nothing; 100 deletes, of which 10; 20 rows are deleted and
    // inserted again, of which 2 are missing, and then updated.
    case.publisher.sql(&format!(
        "DO $$ BEGIN \
           FOR i IN 1..800 LOOP \
             UPDATE t SET v = i WHERE id = i; UPDATE t SET v = v + 1 WHERE id = i; \
             IF i <= 100 THEN {other}; END IF; \
             IF i > 780 THEN \
               DELETE FROM t WHERE id = i; INSERT INTO t VALUES (i, -i, 'again'); \
               UPDATE t SET w = 'more' WHERE id = i; \
             END IF; \
             COMMIT; \
           END LOOP; \
           FOR i IN 901..1000 LOOP DELETE FROM t WHERE id = i; COMMIT; END LOOP; \
         END $$",
    ));
    case.run_until_current();
    assert_eq!(counted(case), "delete_missing=12 update_missing=180");
    let found = "SELECT count(*), sum(v), string_agg(w, '' ORDER BY id) FROM t WHERE id % 10 <> 1 OR w <> 'w'";
    assert_eq!(case.subscriber.rows(found), case.publisher.rows(found));
    assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "812");
}

/// The same without a key: a change looks for a whole row, and so does each change behind it.
#[test]
fn groups_with_missing_rows_of_a_table_without_a_key_are_not_taken_apart() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let args: &[&str] = match case.publisher.major() {
            18 => &["--workers", "4", "--group-transactions", "30"],
            _ => &["--workers", "2"],
        };
        case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        case.replicate(
            "CREATE TABLE t (id int, v int, w text); CREATE INDEX ON t (id); \
             CREATE TABLE money (amount numeric, v int)",
        );
        case.publisher.sql(
            "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE money REPLICA IDENTITY FULL; \
             INSERT INTO t SELECT g, 0, 'w' FROM generate_series(1, 1000) g; \
             INSERT INTO money SELECT g + 0.50, 0 FROM generate_series(1, 100) g",
        );
        case.run_until_current();
        case.subscriber
            .sql("DELETE FROM t WHERE id % 10 = 1; DELETE FROM money WHERE trunc(amount) % 5 = 1");
        change_rows_of_which_some_are_missing(
            &case,
            "UPDATE money SET v = i WHERE amount = i + 0.5",
        );
        let money = case.publisher.value("SELECT sum(v) FROM money WHERE trunc(amount) % 5 <> 1");
        assert_eq!(case.subscriber.value("SELECT sum(v) FROM money"), money);
        assert_eq!(case.statistic("fallbacks"), "0", "no group is applied by rows");
    });
}

/// Some rows are equal or become equal, so that a change may find another one. In every mode the same rows are left,
/// the same changes are counted, and the same are recorded, in the order of the publisher.
#[test]
fn missing_rows_of_which_others_are_equal() {
    let mut first: Option<(Vec<String>, String, Vec<String>)> = None;
    let each = |case: Case| {
        case.replicate("CREATE TABLE t (id int, n numeric, v text)");
        case.publisher.sql(
            "ALTER TABLE t REPLICA IDENTITY FULL; \
             INSERT INTO t SELECT g, 1.0, 'v' FROM generate_series(1, 18) g, generate_series(1, 2)",
        );
        case.run_until_current();
        // One of two equal rows, both, one of them is spelled otherwise, or what a row would become is there already.
        case.subscriber.sql(
            "DELETE FROM t WHERE ctid IN (SELECT min(ctid) FROM t GROUP BY id HAVING id % 6 = 1); \
             DELETE FROM t WHERE id % 6 = 2; \
             UPDATE t SET n = 1.00 WHERE ctid IN (SELECT min(ctid) FROM t GROUP BY id HAVING id % 6 = 3); \
             DELETE FROM t WHERE id % 6 = 4; INSERT INTO t SELECT g, 1.0, 'w' FROM generate_series(4, 18, 6) g",
        );
        let mut sql = String::new();
        for id in 1..=18 {
            let one = format!("ctid = (SELECT min(ctid) FROM t WHERE id = {id})");
            let _ = write!(
                sql,
                "BEGIN; UPDATE t SET v = 'w' WHERE {one}; COMMIT; \
                 BEGIN; UPDATE t SET v = 'x' WHERE id = {id} AND v = 'w'; \
                 UPDATE t SET n = 1.00 WHERE {one}; COMMIT; "
            );
            let _ = match id % 3 {
                0 => write!(sql, "DELETE FROM t WHERE {one};"),
                1 => write!(sql, "INSERT INTO t VALUES ({id}, 1.0, 'v');"),
                _ => Ok(()),
            };
        }
        case.publisher.sql(&sql);
        case.run_until_current();
        let rows = case.subscriber.rows("SELECT id, concat(n), v FROM t ORDER BY 1, 2, 3");
        let found = (rows, counted(&case), conflicts(&case));
        match &first {
            Some(first) => assert_eq!(found, *first, "{:?}", case.tool.args),
            None => first = Some(found),
        }
    };
    let each = std::cell::RefCell::new(each);
    let modes: [&[&str]; 4] = [
        &["--apply-mode", "row", "--workers", "1"],
        &["--workers", "1"],
        &["--workers", "4", "--group-transactions", "9"],
        &["--workers", "2"],
    ];
    for mode in modes {
        on_versions(&[(15, 15), (18, 18)], |mut case| {
            case.tool.args = mode.iter().map(|arg| (*arg).to_owned()).collect();
            each.borrow_mut()(case);
        });
    }
}
