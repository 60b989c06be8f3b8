//! Ranges, multiranges and text search vectors in binary format: with a key and without one, one row and many at a time.

use crate::support::on_versions;

/// Columns, and the values of row `i`: empty, without a bound, with exclusive and inclusive bounds, NULL.
const COLUMNS: &str =
    "r int4range, n numrange, s tstzrange, d daterange, m nummultirange, v tsvector, a tstzrange[]";
const VALUES: &str = "\
    CASE i % 4 WHEN 0 THEN 'empty' WHEN 1 THEN int4range(i, NULL) WHEN 2 THEN int4range(i, i + 5, '(]') END, \
    CASE i % 3 WHEN 0 THEN numrange(NULL, 1.50 + i, '()') WHEN 1 THEN numrange(i, i + 1.00, '[]') END, \
    tstzrange('2026-01-01 00:00:00.000001+03', CASE i % 2 WHEN 0 THEN 'infinity'::timestamptz END, '()'), \
    CASE WHEN i % 5 > 0 THEN daterange('2026-01-01'::date + i, NULL) END, \
    nummultirange(numrange(i, i + 1.0), numrange(i + 2, NULL, '()')), \
    CASE i % 4 WHEN 0 THEN '' WHEN 1 THEN 'odd:3A,7 ''it''''s'':2B ä' WHEN 2 THEN 'word' || i || ':16383C' END::tsvector, \
    CASE i % 3 WHEN 0 THEN '{}' WHEN 1 THEN ARRAY['empty', NULL, tstzrange(NULL, '2026-01-01 00:00:00+00')] END";

#[test]
fn values_arrive_in_binary_format() {
    on_versions(&[(14, 18), (18, 14), (18, 18)], |case| {
        case.both(&format!(
            "CREATE TABLE keyed (id int PRIMARY KEY, {COLUMNS}); \
             CREATE TABLE bag (id int, {COLUMNS}); ALTER TABLE bag REPLICA IDENTITY FULL; \
             CREATE INDEX ON bag (id); \
             CREATE TABLE period (during numrange PRIMARY KEY, v int); \
             CREATE TABLE words (v tsvector PRIMARY KEY, n int)"
        ));
        case.publish("FOR ALL TABLES");
        for table in ["keyed", "bag"] {
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT i, {VALUES} FROM generate_series(1, 40) i"
            ));
        }
        let tables = ["keyed", "bag", "period", "words"];
        case.run_until_current();
        case.expect_equal(&tables);
        for table in ["keyed", "bag"] {
            let set = "(r, n, s, d, m, v, a) = (SELECT * FROM (SELECT id + 1 AS i) i, \
                       LATERAL (SELECT VALUES) v (r, n, s, d, m, v, a))";
            let set = set.replace("SELECT * FROM", "SELECT v.* FROM").replace("VALUES", VALUES);
            case.publisher.sql(&format!(
                "INSERT INTO {table} SELECT i, {VALUES} FROM generate_series(41, 80) i; \
                 UPDATE {table} SET {set} WHERE id < 60; \
                 INSERT INTO {table} SELECT i, {VALUES} FROM generate_series(81, 82) i; \
                 DELETE FROM {table} WHERE id % 7 = 0"
            ));
            case.publisher.sql(&format!("UPDATE {table} SET {set} WHERE id = 3"));
            case.publisher.sql(&format!("DELETE FROM {table} WHERE id = 5"));
        }
        case.publisher.sql(
            "INSERT INTO period SELECT numrange(i, i + 0.50), i FROM generate_series(1, 20) i; \
             INSERT INTO words SELECT ('w:' || i || 'A x' || i)::tsvector, i FROM generate_series(1, 20) i; \
             UPDATE period SET v = -v WHERE v < 15; UPDATE words SET n = -n WHERE n < 15",
        );
        case.publisher.sql(
            "UPDATE period SET during = numrange(v + 100, NULL) WHERE v = 20; \
             DELETE FROM period WHERE v > 17; DELETE FROM words WHERE n > 17",
        );
        case.run_until_current();
        case.expect_equal(&tables);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        assert_eq!(case.subscriber.value("SELECT format FROM pgapace.subscription"), "binary");
        case.tool.finish("verify", &[]).expect(0, &[]);
    });
}
