//! Rows without a key that are all alike: as many are written as are missing or extra.

use super::recorded;
use crate::support::{Case, on_versions};

/// Log lines, of which the subscriber has one more than the publisher, which has 40 000.
fn log_lines(case: &Case) {
    case.both("CREATE TABLE t (level int, msg text)");
    case.publisher.sql("INSERT INTO t SELECT 1, 'it''s well' FROM generate_series(1, 40000)");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.subscriber.sql("INSERT INTO t VALUES (1, 'it''s well')");
}

/// Rows that are read to be written are locked.
#[track_caller]
fn expect_few_locked(case: &Case) {
    let locked: u32 =
        case.subscriber.value("SELECT count(*) FROM t WHERE xmax::text <> '0'").parse().unwrap();
    assert!(locked < 10, "{locked} rows of 40000 were read to delete one");
    case.expect_equal(&["t"]);
}

#[test]
fn a_repair_reads_as_many_copies_as_it_deletes() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        log_lines(&case);
        case.tool.finish("verify", &[]).expect(18, &["1 row differs"]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        expect_few_locked(&case);
        assert_eq!(recorded(&case), "0");
    });
}

#[test]
fn a_rebase_reads_as_many_copies_as_it_deletes() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        log_lines(&case);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        expect_few_locked(&case);
    });
}

#[test]
fn copies_of_several_rows_are_missing_or_extra() {
    on_versions(&super::VERSIONS, |case| {
        // The text of b is not what the publisher sends, and c has texts that are equal and differ.
        let other = "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
                     CREATE TYPE mood AS ENUM ('ok'); CREATE DOMAIN short AS varchar(9)";
        case.both(other);
        case.publisher.sql(
            "CREATE TABLE t (a int, b numeric, c text COLLATE blind, m mood[], d short); \
             INSERT INTO t SELECT i % 3, nullif(i % 2, 1) + 0.00, CASE i % 3 WHEN 0 THEN 'A' WHEN 1 THEN 'a' END, '{ok,NULL}', 'o''k' \
             FROM generate_series(1, 600) i; CREATE TABLE own AS SELECT a, c, m, d FROM t",
        );
        case.subscriber.sql(
            "CREATE TABLE t (a int, b numeric(6, 1), c text COLLATE blind, m mood[], d short, n int DEFAULT 7); \
             CREATE TABLE own (a int, c text COLLATE blind, m mood[], d short, n int GENERATED ALWAYS AS IDENTITY)",
        );
        case.publish("FOR TABLE t, own");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        case.subscriber.sql(
            "DELETE FROM t WHERE a = 0; INSERT INTO t SELECT a, b, upper(c), m, d FROM t WHERE a = 1; \
             DELETE FROM own WHERE a = 0 AND n % 2 = 0; INSERT INTO own SELECT a, upper(c), m, d FROM own WHERE a = 1",
        );
        case.tool.finish("verify", &[]).expect(18, &[]);
        let planned = case.tool.finish("repair", &["--dry-run", "--table", "own"]);
        planned.expect(18, &[]);
        assert!(planned.stdout.contains("generate_series(1, "), "{}", planned.stdout);
        let repaired = case.tool.finish("repair", &["--delete-extra"]);
        repaired.expect(0, &[]);
        for said in [
            "public.t: 200 inserted, 0 updated, 200 deleted",
            "public.own: 100 inserted, 0 updated, 200 deleted",
        ] {
            assert!(repaired.stdout.contains(said), "{said}: {}", repaired.stdout);
        }
        case.tool.finish("verify", &[]).expect(0, &[]);
        let rows =
            "SELECT a, c COLLATE \"C\", m, d, count(*) FROM own GROUP BY 1, 2, 3, 4 ORDER BY 1, 2";
        assert_eq!(case.publisher.rows(rows), case.subscriber.rows(rows));
        assert_eq!(case.subscriber.value("SELECT count(DISTINCT n) FROM t"), "1");
    });
}
