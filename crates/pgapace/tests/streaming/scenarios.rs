//! Single transactions: subtransactions, their rollback, DDL, and all kinds of changes.

use super::{TRIGGERS, each, expect_streamed, on_triggers, streaming_case};
use crate::support::Case;

const TABLE: &str = "CREATE TABLE test_tab (a int PRIMARY KEY, b text)";

/// Rows of about 100 bytes.
fn rows(from: u32, to: u32) -> String {
    format!(
        "INSERT INTO test_tab SELECT i, repeat(md5(i::text), 3) FROM generate_series({from}, {to}) i;"
    )
}

fn changes(from: u32, to: u32) -> String {
    format!(
        "{} UPDATE test_tab SET b = md5(b) WHERE mod(a, 2) = 0; \
         DELETE FROM test_tab WHERE mod(a, 3) = 0;",
        rows(from, to)
    )
}

/// Runs transactions once while pgapace runs, and once while it does not.
fn replicates(case: &Case, transactions: impl Fn(u32) -> Vec<String>) {
    case.replicate(TABLE);
    case.publisher.sql("INSERT INTO test_tab VALUES (1, 'foo'), (2, 'bar')");
    let mut process = case.start();
    for sql in transactions(10_000) {
        case.publisher.sql(&sql);
    }
    case.wait_until_applied(&mut process);
    case.expect_equal(&["test_tab"]);
    case.stop(process);
    for sql in transactions(50_000) {
        case.publisher.sql(&sql);
    }
    case.run_until_current();
    case.expect_equal(&["test_tab"]);
    expect_streamed(case);
}

/// As in PostgreSQL's test 016: all subtransactions commit.
#[test]
fn released_savepoints_are_applied() {
    on_triggers(|case| {
        replicates(&case, |from| {
            let mut sql = format!("BEGIN; {}", changes(from, from + 500));
            for level in 1..5 {
                let start = from + level * 1000;
                sql += &format!("SAVEPOINT s{level}; {}", changes(start, start + 500));
            }
            vec![
                sql + "COMMIT",
                "INSERT INTO test_tab VALUES (-1, 'small') \
                 ON CONFLICT (a) DO UPDATE SET b = excluded.b || test_tab.b"
                    .to_owned(),
            ]
        });
    });
}

/// As in PostgreSQL's test 018: subtransactions and a whole transaction are rolled back, also
/// across nesting levels.
#[test]
fn rolled_back_savepoints_are_not_applied() {
    on_triggers(|case| {
        replicates(&case, |from| {
            let (a, b, c, d) = (from, from + 1000, from + 2000, from + 3000);
            vec![
                format!(
                    "BEGIN; {} SAVEPOINT s1; {} SAVEPOINT s2; {} ROLLBACK TO s1; {} COMMIT",
                    rows(a, a + 500),
                    rows(b, b + 500),
                    rows(c, c + 500),
                    rows(d, d + 500)
                ),
                // The inner savepoint is released, and then rolled back with the outer one.
                format!(
                    "BEGIN; {} SAVEPOINT s1; {} SAVEPOINT s2; {} RELEASE s2; {} ROLLBACK TO s1; {} \
                     SAVEPOINT s3; {} RELEASE s3; COMMIT",
                    rows(a + 5000, a + 5500),
                    rows(b + 5000, b + 5500),
                    rows(c + 5000, c + 5500),
                    rows(d + 5000, d + 5500),
                    rows(a + 9000, a + 9500),
                    changes(a + 10_000, a + 10_500),
                ),
                format!("BEGIN; {} ROLLBACK", rows(a + 11_000, a + 15_000)),
                // All changes are rolled back, but the transaction commits.
                format!(
                    "BEGIN; SAVEPOINT s1; {} ROLLBACK TO s1; COMMIT",
                    rows(a + 16_000, a + 18_000)
                ),
                format!(
                    "BEGIN; {} TRUNCATE test_tab; {} COMMIT",
                    rows(a + 20_000, a + 21_000),
                    rows(a, a + 2000)
                ),
            ]
        });
    });
}

/// Many subtransactions, most of them rolled back.
#[test]
fn many_rolled_back_savepoints_are_not_applied() {
    on_triggers(|case| {
        replicates(&case, |from| {
            vec![format!(
                "DO $$ BEGIN FOR i IN {from}..{from} + 1500 LOOP \
                   BEGIN \
                     INSERT INTO test_tab VALUES (i, repeat('x', 100)); \
                     IF i % 10 <> 0 THEN RAISE EXCEPTION 'undone'; END IF; \
                   EXCEPTION WHEN raise_exception THEN NULL; END; \
                   INSERT INTO test_tab VALUES (i + 10000, repeat('y', 100)); \
                 END LOOP; END $$"
            )]
        });
    });
}

/// As in PostgreSQL's tests 017 and 019: columns are added in large and small transactions, and in
/// subtransactions that are rolled back.
#[test]
fn ddl_inside_streamed_transactions() {
    on_triggers(|case| {
        case.both(TABLE);
        case.subscriber.sql(
            "ALTER TABLE test_tab ADD COLUMN c int, ADD COLUMN d int, ADD COLUMN e int, \
             ADD COLUMN f int",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let mut process = case.start();
        let wide = |from: u32, columns: &str, values: &str| {
            format!(
                "INSERT INTO test_tab (a, b{columns}) SELECT i, repeat(md5(i::text), 3){values} \
                 FROM generate_series({from}, {from} + 700) i;"
            )
        };
        let mut client = case.publisher.connect();
        each(
            &mut client,
            &[
                "BEGIN; INSERT INTO test_tab VALUES (3, md5('3')); \
                 ALTER TABLE test_tab ADD COLUMN c int; SAVEPOINT s1; \
                 INSERT INTO test_tab VALUES (4, md5('4'), -4); COMMIT",
                &format!(
                    "BEGIN; {} ALTER TABLE test_tab ADD COLUMN d int; {} SAVEPOINT s1; \
                     ALTER TABLE test_tab ADD COLUMN e int; {} SAVEPOINT s2; {} COMMIT",
                    wide(1000, "", ""),
                    wide(2000, ", c, d", ", -i, -i"),
                    wide(3000, ", c, d, e", ", -i, -i, -i"),
                    wide(4000, ", c, d, e", ", -i, -i, -i")
                ),
                "INSERT INTO test_tab VALUES (5, md5('5'), 5, 5, 5)",
                // The column exists for a while, and is then rolled back.
                &format!(
                    "BEGIN; {} SAVEPOINT s1; ALTER TABLE test_tab ADD COLUMN f int; {} \
                     ROLLBACK TO s1; {} COMMIT",
                    wide(5000, "", ""),
                    wide(6000, ", f", ", -i"),
                    wide(7000, ", e", ", -i")
                ),
                "INSERT INTO test_tab VALUES (6, md5('6'), 6, 6, 6)",
                &format!(
                    "BEGIN; ALTER TABLE test_tab ADD COLUMN f int; {} ROLLBACK",
                    wide(8000, ", f", ", -i")
                ),
                "INSERT INTO test_tab VALUES (7, md5('7'), 7, 7, 7)",
                "ALTER TABLE test_tab ADD COLUMN f int",
                &wide(9000, ", f", ", i"),
            ],
        );
        case.wait_until_applied(&mut process);
        case.expect_equal(&["test_tab"]);
        case.stop(process);
        expect_streamed(&case);
    });
}

/// As in PostgreSQL's test 015: additional columns on the subscriber, and unchanged TOAST values.
#[test]
fn all_kinds_of_changes_are_streamed() {
    on_triggers(|case| {
        case.publisher.sql("CREATE TABLE test_tab (a int PRIMARY KEY, b text, w bytea)");
        case.subscriber.sql(
            "CREATE TABLE test_tab (w bytea, c timestamptz DEFAULT now(), a int PRIMARY KEY, \
             b text, d bigint DEFAULT 999)",
        );
        case.both("ALTER TABLE test_tab ALTER COLUMN w SET STORAGE EXTERNAL");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let mut process = case.start();
        case.publisher.sql(
            "BEGIN; \
             INSERT INTO test_tab SELECT i, md5(i::text), decode(repeat(md5(i::text), 100), 'hex') \
               FROM generate_series(1, 2000) i; \
             UPDATE test_tab SET b = b || a WHERE a % 2 = 0; \
             UPDATE test_tab SET a = a + 10000 WHERE a % 5 = 0; \
             UPDATE test_tab SET w = w || w WHERE a % 7 = 0; \
             DELETE FROM test_tab WHERE a % 3 = 0; COMMIT",
        );
        case.wait_until_applied(&mut process);
        let sum =
            "SELECT count(*), md5(string_agg(a || b || md5(w), ',' ORDER BY a)) FROM test_tab";
        assert_eq!(case.subscriber.rows(sum), case.publisher.rows(sum));
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM test_tab WHERE c IS NULL OR d <> 999"),
            "0"
        );
        case.stop(process);
        expect_streamed(&case);
    });
}

/// With `--streaming off` the publisher retains large transactions until they commit.
#[test]
fn streaming_off_receives_transactions_after_their_commit() {
    for (publisher, subscriber, trigger) in TRIGGERS {
        let mut case = streaming_case(publisher, subscriber, trigger);
        case.tool.args.extend(["--streaming", "off"].map(str::to_owned));
        case.replicate(TABLE);
        case.publisher.sql(&format!("BEGIN; SAVEPOINT s; {} COMMIT", changes(1, 3000)));
        case.run_until_current();
        case.expect_equal(&["test_tab"]);
        let sql = format!(
            "SELECT stream_count FROM pg_stat_replication_slots WHERE slot_name = '{}'",
            case.tool.name
        );
        assert_eq!(case.publisher.value(&sql), "0");
    }
}
