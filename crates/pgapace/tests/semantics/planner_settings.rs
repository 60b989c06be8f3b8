//! Plans of the statements, and settings of the planner that the role or the database has.

use crate::support::{Case, PATIENCE, must, on_versions};

/// Settings that leave the planner only bad plans if they are off, because pgapace turns others off.
const OFF: [&[&str]; 4] = [
    &["enable_indexscan", "enable_bitmapscan"],
    &["enable_tidscan"],
    &["enable_nestloop"],
    &["enable_indexscan", "enable_bitmapscan", "enable_tidscan", "enable_nestloop"],
];
const ROWS: usize = 2000;

/// How many rows sequential scans of a table have read when so many updates of both are counted.
fn read_by_scans(case: &Case, updates: usize, table: &str) -> usize {
    let number = |sql: &str| case.subscriber.value(sql).parse::<usize>().expect("a number");
    let counted = "SELECT sum(n_tup_upd) FROM pg_stat_user_tables WHERE relname IN ('t', 'f')";
    must(testbed::wait_until(PATIENCE, "the statistics of the updates", || {
        Ok(number(counted) >= updates)
    }));
    number(&format!("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = '{table}'"))
}

#[test]
fn tables_are_not_scanned_whatever_plans_the_role_allows() {
    on_versions(&[(14, 14), (15, 15), (18, 18)], |mut case| {
        case.tool.args = vec!["--workers=1".to_owned()];
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v int); \
             CREATE TABLE f (a int, tags int[], v int); ALTER TABLE f REPLICA IDENTITY FULL",
        );
        case.publisher.sql(&format!(
            "INSERT INTO t SELECT g, 0 FROM generate_series(1, {ROWS}) g; \
             INSERT INTO f SELECT g, ARRAY[g], 0 FROM generate_series(1, {ROWS}) g"
        ));
        case.run_until_current();
        let name = &case.subscriber.name;
        for (settings, round) in OFF.iter().zip(1..) {
            for setting in *settings {
                case.subscriber.sql(&format!("ALTER DATABASE {name} SET {setting} = off"));
            }
            case.publisher.sql("UPDATE t SET v = v + 1; UPDATE f SET v = v + 1 WHERE a <= 100");
            case.run_until_current();
            let updates = round * (ROWS + 100);
            assert_eq!(read_by_scans(&case, updates, "t"), 0, "{settings:?}");
            // Without a key, one scan finds all rows of a set.
            let read = read_by_scans(&case, updates, "f");
            assert!(read <= round * ROWS, "{settings:?}: {read} rows of table f were read");
            case.subscriber.sql(&format!("ALTER DATABASE {name} RESET ALL"));
        }
        case.expect_equal(&["t", "f"]);
    });
}

/// A hash table of all rows takes several times as long as so many lookups.
#[test]
fn rows_without_a_key_are_found_by_an_index_of_the_subscriber() {
    on_versions(&[(14, 14), (18, 18)], |case| {
        case.replicate(
            "CREATE TABLE f (id int, v text, n int); CREATE INDEX by_id ON f (id); \
             ALTER TABLE f REPLICA IDENTITY FULL",
        );
        case.publisher
            .sql("INSERT INTO f SELECT g, md5(g::text), g FROM generate_series(1, 300000) g");
        case.run_until_current();
        case.subscriber.sql("ANALYZE f");
        case.publisher.sql("DELETE FROM f WHERE id % 10 = 0");
        case.publisher.sql("UPDATE f SET n = n + 1 WHERE id % 10 = 1");
        case.run_until_current();
        must(testbed::wait_until(PATIENCE, "lookups in the index", || {
            let lookups = "SELECT idx_scan >= 50000 FROM pg_stat_user_indexes \
                           WHERE indexrelname = 'by_id'";
            Ok(case.subscriber.value(lookups) == "t")
        }));
        case.expect_equal(&["f"]);
    });
}
