//! NULL is told from each value, whatever stands in its place in the hashes of a row.

use super::{BOTH_WAYS, differences, expect_equal, verify};
use crate::support::on_versions;

/// NULL against the values that stand in its place in one of the two hashes of a row.
#[test]
fn null_is_none_of_the_values_in_its_place() {
    on_versions(&BOTH_WAYS, |case| {
        let columns = "i int, b bigint, t text, y bool, u uuid, n numeric";
        case.both(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, {columns}); CREATE TABLE k ({columns})"
        ));
        let (zero, one) =
            ("00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000001");
        case.publisher.sql(&format!(
            "INSERT INTO t VALUES (1, 0, 0, '', false, '{zero}', 0), (2, 1, 1, '1', true, '{one}', 1); \
             INSERT INTO t SELECT id FROM generate_series(3, 9) id; INSERT INTO k SELECT i, b, t, y, u, n FROM t"
        ));
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        expect_equal(&case, &["k", "t"], &[]);
        for column in ["i", "b", "t", "y", "u", "n"] {
            let before = format!(
                "CREATE TABLE before_t AS TABLE t; CREATE TABLE before_k AS TABLE k; \
                UPDATE t SET {column} = NULL WHERE id < 3; UPDATE k SET {column} = NULL"
            );
            case.subscriber.sql(&before);
            verify(&case, 18, &[]);
            let found = differences(&case);
            let keyed = (1..3).map(|id| format!("t|different|{{\"id\": \"{id}\"}}|{{{column}}}|1"));
            assert!(keyed.clone().all(|row| found.contains(&row)), "{column}: {found:#?}");
            let of = |kind: &str| found.iter().filter(|row| row.starts_with(kind)).count();
            // Two rows of k have become other ones, which are equal only in this column.
            assert_eq!(
                (of("k|missing"), of("k|extra"), found.len()),
                (2, 2, 6),
                "{column}: {found:#?}"
            );
            case.subscriber.sql(
                "TRUNCATE t, k; INSERT INTO t TABLE before_t; INSERT INTO k TABLE before_k; \
                 DROP TABLE before_t, before_k",
            );
        }
    });
}

/// Without a key the sums of a bucket are compared. These rows have the same values in each column, and as many NULLs.
#[test]
fn nulls_that_are_exchanged_between_rows_without_a_key() {
    on_versions(&BOTH_WAYS, |case| {
        case.both("CREATE TABLE t (x int NOT NULL, a int, b int)");
        // A number with which all four rows are in one bucket, by the hash of their order.
        let x = case.publisher.value(
            "SELECT x FROM generate_series(1, 100000) x, (VALUES (NULL, NULL), (0, 1), (NULL, 1), (0, NULL)) v (a, b), \
               hashint4extended(x, 0) h0, hashint4extended((a IS NULL)::int, h0) h1, hashint4extended(coalesce(a, 0), h1) h2, \
               hashint4extended((b IS NULL)::int, h2) h3, hashint4extended(coalesce(b, 0), h3) h4 \
             GROUP BY x HAVING count(DISTINCT h4 & 15) = 1 ORDER BY x LIMIT 1",
        );
        case.publisher.sql(&format!("INSERT INTO t VALUES ({x}, NULL, NULL), ({x}, 0, 1)"));
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        expect_equal(&case, &["t"], &[]);
        case.subscriber.sql("UPDATE t SET b = CASE WHEN a IS NULL THEN 1 END");
        let found = verify(&case, 18, &[]);
        let counts = (&found["tables"][0]["missing"], &found["tables"][0]["extra"]);
        assert_eq!(counts, (&2.into(), &2.into()), "{found:#}");
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}
