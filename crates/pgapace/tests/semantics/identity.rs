//! GENERATED ALWAYS AS IDENTITY columns on the subscriber: UPDATE cannot set them, but a change may
//! have to.

use super::first_changes::executions_with;
use crate::support::{VERSIONS, on_versions};

/// A value that TOAST stores out of line.
const BIG: &str = "repeat('big', 2000)";

#[test]
fn generated_always_identity_on_the_subscriber() {
    on_versions(&VERSIONS, |case| {
        let tables = |kind: &str| {
            format!(
                "CREATE TABLE inside (id bigint GENERATED {kind} AS IDENTITY PRIMARY KEY, v text, \
                   big text, u int UNIQUE); \
                 ALTER TABLE inside ALTER big SET STORAGE EXTERNAL; \
                 CREATE TABLE outside (k int PRIMARY KEY, id bigint GENERATED {kind} AS IDENTITY, \
                   v text, big text); \
                 ALTER TABLE outside ALTER big SET STORAGE EXTERNAL; \
                 CREATE TABLE bare (k int PRIMARY KEY, id int GENERATED {kind} AS IDENTITY); \
                 CREATE TABLE alone (id int GENERATED {kind} AS IDENTITY PRIMARY KEY); \
                 CREATE TABLE nokey (id int GENERATED {kind} AS IDENTITY, v text, big text); \
                 ALTER TABLE nokey ALTER big SET STORAGE EXTERNAL; \
                 ALTER TABLE nokey REPLICA IDENTITY FULL; \
                 CREATE TABLE two (k int PRIMARY KEY, a int GENERATED {kind} AS IDENTITY, v text);"
            )
        };
        case.publisher.sql(&tables("BY DEFAULT"));
        case.subscriber.sql(&tables("ALWAYS"));
        case.subscriber.sql(
            "ALTER TABLE inside ADD extra text DEFAULT 'default'; \
             ALTER TABLE outside ADD extra text DEFAULT 'default'",
        );
        case.publish("FOR ALL TABLES");
        let rows = |from: i32| {
            format!(
                "INSERT INTO inside (id, v, big, u) SELECT g, 'v', {BIG}, g FROM generate_series({from}, {from} + 9) g; \
                 INSERT INTO outside (k, id, v, big) SELECT g, g + 5, 'v', {BIG} FROM generate_series({from}, {from} + 9) g; \
                 INSERT INTO bare SELECT g, g FROM generate_series({from}, {from} + 9) g; \
                 INSERT INTO alone SELECT g FROM generate_series({from}, {from} + 9) g; \
                 INSERT INTO nokey SELECT g / 2, 'v', {BIG} FROM generate_series({from}, {from} + 9) g; \
                 INSERT INTO two SELECT g, g, 'v' FROM generate_series({from}, {from} + 9) g;"
            )
        };
        case.publisher.sql(&rows(0));
        case.run_until_current();
        case.subscriber
            .sql("UPDATE inside SET extra = 'local'; UPDATE outside SET extra = 'local'");
        case.publisher.sql(&rows(100));
        case.publisher.sql("ALTER SEQUENCE inside_id_seq RESTART 900");
        case.publisher.sql(
            "UPDATE inside SET v = 'other column' WHERE id = 1; \
             UPDATE inside SET id = 51 WHERE id = 2; \
             UPDATE inside SET id = 52, v = 'both', big = 'small' WHERE id = 3; \
             UPDATE inside SET id = DEFAULT WHERE id = 4; \
             UPDATE inside SET id = 2, u = 22 WHERE id = 5; \
             DELETE FROM inside WHERE id = 6; \
             UPDATE outside SET v = 'same identity' WHERE k = 1; \
             UPDATE outside SET id = 1000 WHERE k = 2; \
             UPDATE outside SET id = 1001, k = 33 WHERE k = 3; \
             UPDATE outside SET k = 44 WHERE k = 4; \
             UPDATE outside SET id = 1002, big = 'small' WHERE k = 5; \
             DELETE FROM outside WHERE k = 6; \
             UPDATE bare SET id = 1000 WHERE k = 1; \
             UPDATE bare SET id = id WHERE k = 2; \
             UPDATE bare SET k = 33 WHERE k = 3; \
             UPDATE bare SET k = 44, id = 44 WHERE k = 4; \
             UPDATE alone SET id = 1000 WHERE id = 1; \
             UPDATE alone SET id = id WHERE id = 2; \
             UPDATE nokey SET v = 'other' WHERE ctid = (SELECT min(ctid) FROM nokey WHERE id = 1); \
             UPDATE nokey SET id = 1000 WHERE ctid = (SELECT min(ctid) FROM nokey WHERE id = 2); \
             DELETE FROM nokey WHERE ctid = (SELECT min(ctid) FROM nokey WHERE id = 3); \
             UPDATE two SET a = 7, v = 'x' WHERE k = 1; UPDATE two SET v = NULL WHERE k = 2",
        );
        case.run_until_current();
        case.expect_equal(&["inside", "outside", "bare", "alone", "nokey", "two"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        // A replaced row keeps its values in columns that the publisher does not have.
        for table in ["inside", "outside"] {
            let sql = format!("SELECT string_agg(DISTINCT extra, ',' ORDER BY extra) FROM {table}");
            assert_eq!(case.subscriber.value(&sql), "default,local", "{table}");
        }
        let kept = "SELECT extra FROM inside WHERE id = 51";
        assert_eq!(case.subscriber.value(kept), "local");

        // A missing row is counted once, even if two statements search it.
        case.subscriber
            .sql("DELETE FROM inside WHERE id = 51; DELETE FROM outside WHERE k IN (1, 2)");
        case.publisher.sql(
            "UPDATE inside SET id = 61 WHERE id = 51; UPDATE outside SET v = 'x' WHERE k = 1; \
             UPDATE outside SET id = 2000 WHERE k = 2; DELETE FROM outside WHERE k = 2",
        );
        let log = case.run_until_current();
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "3|1", "{log}");
    });
}

#[test]
fn generated_always_identity_on_both_sides() {
    on_versions(&[(18, 18)], |case| {
        case.replicate(
            "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); \
             CREATE TABLE p (id int GENERATED ALWAYS AS IDENTITY, region text, v text, \
               PRIMARY KEY (id, region)) PARTITION BY LIST (region); \
             CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a'); \
             CREATE TABLE p_b PARTITION OF p FOR VALUES IN ('b')",
        );
        case.publisher.sql(
            "INSERT INTO t (v) SELECT 'v' FROM generate_series(1, 5); \
             UPDATE t SET v = 'changed' WHERE id = 2; UPDATE t SET id = DEFAULT WHERE id = 3; \
             DELETE FROM t WHERE id = 4",
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// After a first change of an identity column, sets of updates change it too.
#[test]
fn identity_columns_that_change_again_and_again_are_changed_by_sets() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TABLE numbered (k int PRIMARY KEY, a int, n int)");
        case.subscriber.sql(
            "CREATE TABLE numbered (k int PRIMARY KEY, a int, n int GENERATED ALWAYS AS IDENTITY, \
               extra text DEFAULT 'default')",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO numbered SELECT i, 0, i FROM generate_series(1, 2000) i");
        case.run_until_current();
        case.subscriber.sql("UPDATE numbered SET extra = 'local'");
        case.subscriber.sql(&format!(
            "ALTER DATABASE {} SET log_min_duration_statement = 0",
            case.subscriber.name
        ));
        let mut process = case.start();
        case.publisher.sql("UPDATE numbered SET n = -n WHERE k = 1");
        case.wait_until_applied(&mut process);
        let before = executions_with(&case, "\"numbered\"");
        // Each transaction changes a column of all rows, and the identity of some.
        case.publisher.sql(
            "DO $$ BEGIN FOR i IN 1..10 LOOP \
               UPDATE numbered SET a = i, n = CASE WHEN k % 10 = i THEN n + 10000 ELSE n END; \
               COMMIT; END LOOP; END $$",
        );
        case.publisher
            .sql("INSERT INTO numbered VALUES (3000, 0, 1); DELETE FROM numbered WHERE k = 7");
        case.wait_until_applied(&mut process);
        case.stop(process);
        let count = executions_with(&case, "\"numbered\"") - before;
        assert!((1..=200).contains(&count), "{count} statements");
        let rows = "SELECT k, a, n FROM numbered ORDER BY k";
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));
        let kept = "SELECT count(*) FROM numbered WHERE extra <> 'local'";
        assert_eq!(case.subscriber.value(kept), "1");
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}
