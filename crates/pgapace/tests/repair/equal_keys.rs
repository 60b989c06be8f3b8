//! Keys that are equal to the server and have other texts: the row is updated, and keeps columns of the subscriber.

use super::recorded;
use crate::support::{Case, on_versions};

/// What the subscriber has in its own column, and rows that are equal byte for byte.
#[track_caller]
fn expect_kept(case: &Case) {
    for (table, key) in [("scaled", "k"), ("named", "k COLLATE \"C\""), ("pairs", "a, k")] {
        let kept = format!("SELECT count(*) FROM {table} WHERE mine = 'kept'");
        assert_eq!(case.subscriber.value(&kept), "300", "{table}");
        let rows = format!("SELECT {key}, v FROM {table} ORDER BY 1, 2");
        assert_eq!(case.publisher.rows(&rows), case.subscriber.rows(&rows));
    }
}

#[test]
fn a_row_whose_key_has_another_text_keeps_columns_of_the_subscriber() {
    on_versions(&super::VERSIONS, |case| {
        case.both(
            "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
             CREATE TABLE scaled (k numeric PRIMARY KEY, v int); CREATE TABLE named (k text COLLATE blind PRIMARY KEY, v int); \
             CREATE TABLE pairs (a int, k numeric, v int, PRIMARY KEY (k, a))",
        );
        case.subscriber.sql(
            "ALTER TABLE scaled ADD mine text; ALTER TABLE named ADD mine text; ALTER TABLE pairs ADD mine text",
        );
        case.publisher.sql(
            "INSERT INTO scaled SELECT i + 0.00, i FROM generate_series(1, 300) i; INSERT INTO pairs SELECT v, k, v FROM scaled; \
             INSERT INTO named SELECT 'Name ' || v, v FROM scaled",
        );
        case.publish("FOR TABLE scaled, named, pairs");
        case.run_until_current();
        case.subscriber.sql(
            "UPDATE scaled SET mine = 'kept'; UPDATE named SET mine = 'kept'; UPDATE pairs SET mine = 'kept'",
        );
        let damage = "UPDATE scaled SET k = k + 0.000 WHERE v % 3 = 0; UPDATE named SET k = upper(k), v = 0 WHERE v % 3 = 0; \
                      UPDATE pairs SET k = k + 0.0000 WHERE v % 3 = 0";
        for batch in ["3", "500"] {
            case.subscriber.sql(damage);
            case.tool.finish("verify", &[]).expect(18, &[]);
            let repaired = case.tool.finish("repair", &["--batch", batch]);
            repaired.expect(0, &[]);
            let said = "public.scaled: 0 inserted, 100 updated, 0 deleted";
            assert!(repaired.stdout.contains(said), "{}", repaired.stdout);
            assert_eq!(recorded(&case), "0");
            expect_kept(&case);
        }
        case.subscriber.sql(damage);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        expect_kept(&case);
        case.tool.finish("verify", &[]).expect(0, &[]);
    });
}

/// The publisher tells keys apart that are equal to the subscriber. A row that both have is not changed into another one.
#[test]
fn a_row_that_is_equal_is_left_alone_where_the_publisher_tells_more_keys_apart() {
    on_versions(&super::VERSIONS, |mut case| {
        case.publisher.sql("CREATE TABLE t (k text PRIMARY KEY, v int)");
        case.subscriber.sql(
            "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
             CREATE TABLE t (k text COLLATE blind PRIMARY KEY, v int, mine text DEFAULT 'kept')",
        );
        case.publisher.sql("INSERT INTO t SELECT 'A' || i, i FROM generate_series(1, 5) i");
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t VALUES ('a1', 100)");
        case.tool.args = vec!["--on-conflict=insert_exists=skip".to_owned()];
        case.run_until_current();
        case.tool.args.clear();
        let rows = || case.subscriber.rows("SELECT k, v, mine FROM t ORDER BY v");
        let before = rows();
        case.tool.finish("verify", &[]).expect(18, &[]);
        for args in [&[][..], &["--delete-extra"]] {
            let repaired = case.tool.finish("repair", args);
            assert_ne!(repaired.code, Some(0), "{}", repaired.stdout);
            assert!(repaired.log.contains("23505"), "{}", repaired.log);
            assert_eq!(rows(), before);
        }
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        let rebased = case.tool.finish("rebase", &[]);
        assert_ne!(rebased.code, Some(0), "{}", rebased.log);
        assert_eq!(rows(), before);
    });
}

/// Rows of a key of several columns are read by several queries, of which more than one finds a row.
#[test]
fn many_rows_whose_keys_have_other_texts_are_found_once() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.replicate("CREATE TABLE t (a int, k numeric, v int, PRIMARY KEY (a, k))");
        case.subscriber.sql("ALTER TABLE t ADD mine text DEFAULT 'kept'");
        case.publisher.sql("INSERT INTO t SELECT i, i + 0.00, i FROM generate_series(1, 2500) i");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET k = k + 0.0000");
        case.tool.finish("verify", &[]).expect(18, &["5000 rows differ"]);
        let repaired = case.tool.finish("repair", &["--batch", "5000"]);
        repaired.expect(0, &[]);
        let said = "public.t: 0 inserted, 2500 updated, 0 deleted";
        assert!(repaired.stdout.contains(said), "{}", repaired.stdout);
        let rows = "SELECT a, k, v FROM t ORDER BY 1";
        assert_eq!(case.publisher.rows(rows), case.subscriber.rows(rows));
        let kept = "SELECT count(*) FROM t WHERE mine = 'kept'";
        assert_eq!(case.subscriber.value(kept), "2500");
    });
}
