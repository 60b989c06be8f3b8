//! Which row a change finds, and its result.

use crate::support::{VERSIONS, on_versions};

#[test]
fn copy_insert_update_delete() {
    on_versions(&VERSIONS, |case| {
        let ddl = "CREATE TABLE t (id int PRIMARY KEY, v text)";
        case.both(ddl);
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 10) g");
        case.run_until_current();
        case.expect_equal(&["t"]);
        case.publisher.sql(
            "INSERT INTO t VALUES (11, 'streamed'); UPDATE t SET v = 'changed' WHERE id < 4; \
             UPDATE t SET id = 40 WHERE id = 4; DELETE FROM t WHERE id = 5",
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!(case.statistic("inserts || '|' || updates || '|' || deletes"), "1|4|1");
    });
}

/// Immediate unique constraints are checked row by row, so changes must be applied in stream order.
#[test]
fn chains_of_unique_values_are_applied_in_stream_order() {
    on_versions(&VERSIONS, |case| {
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, w text, UNIQUE (w, u)); \
             CREATE TABLE d (id int PRIMARY KEY, u int UNIQUE DEFERRABLE INITIALLY DEFERRED); \
             CREATE TABLE x (id int PRIMARY KEY, r int4range, EXCLUDE USING gist (r WITH &&))",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT g, g, 'w' FROM generate_series(1, 60) g; \
             INSERT INTO d SELECT g, g FROM generate_series(1, 60) g; \
             INSERT INTO x SELECT g, int4range(g * 10, g * 10 + 10) FROM generate_series(1, 9) g;",
        );
        case.run_until_current();
        case.publisher.sql(
            "DELETE FROM t WHERE id = 51; UPDATE t SET u = 51 WHERE id = 50; \
             UPDATE t SET u = 50 WHERE id = 49; UPDATE t SET u = -1 WHERE id = 10; \
             UPDATE t SET u = 10 WHERE id = 11; UPDATE t SET u = 11 WHERE id = 10; \
             UPDATE d SET u = 61 - u; DELETE FROM x WHERE id = 5; \
             UPDATE x SET r = int4range(40, 60) WHERE id = 4",
        );
        // Each row takes the key of the next one.
        case.publisher.sql(
            "DELETE FROM t WHERE id = 60; UPDATE t SET id = 60 WHERE id = 59; \
             UPDATE t SET id = 59 WHERE id = 58; INSERT INTO t VALUES (58, 1000, 'new')",
        );
        case.run_until_current();
        case.expect_equal(&["t", "d", "x"]);
    });
}

#[test]
fn delete_then_insert_of_the_same_key() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        let mut sql = String::from("INSERT INTO t VALUES (1, 'first');");
        for round in 0..20 {
            sql += &format!(
                "DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'round {round}'); \
                 UPDATE t SET v = v || '!' WHERE id = 1; UPDATE t SET id = 2; UPDATE t SET id = 1;"
            );
        }
        case.publisher.sql(&format!("BEGIN; {sql} COMMIT; TRUNCATE t; {sql}"));
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn missing_rows_are_counted_and_logged_with_their_key() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (a int, \"B b\" text, v text, PRIMARY KEY (a, \"B b\")); \
             CREATE TABLE f (v text, n int); ALTER TABLE f REPLICA IDENTITY FULL",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql(
            "INSERT INTO t SELECT g, 'key ' || g, 'v' FROM generate_series(1, 9) g; \
             INSERT INTO f SELECT 'v', g FROM generate_series(1, 9) g",
        );
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE a IN (2, 3, 4); DELETE FROM f WHERE n = 5");
        case.publisher.sql(
            "BEGIN; UPDATE t SET v = 'new' WHERE a < 3; DELETE FROM t WHERE a = 3; COMMIT; \
             UPDATE t SET a = 44 WHERE a = 4; DELETE FROM f WHERE n = 5; UPDATE f SET n = 66 WHERE n = 6",
        );
        let log = case.run_until_current();
        let line = |conflict: &str, key: &str| {
            assert!(
                log.lines().any(|line| line.contains(conflict) && line.contains(key)),
                "no {conflict} of {key}:\n{log}"
            );
        };
        line("update_missing", "(a, B b)=(2, key 2)");
        line("delete_missing", "(a, B b)=(3, key 3)");
        line("update_missing", "(a, B b)=(4, key 4)");
        line("delete_missing", "(v, n)=(v, 5)");
        assert!(log.contains("public.t") && log.contains("public.f"), "{log}");
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "2|2");
        // All other changes are applied.
        let rows = "SELECT count(*) FILTER (WHERE v = 'new') || '|' || count(*) FROM t";
        assert_eq!(case.subscriber.value(rows), "1|6");
    });
}

/// Unchanged out-of-line (TOAST) values are not sent.
#[test]
fn unchanged_toast_values_are_kept() {
    on_versions(&VERSIONS, |case| {
        let big = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 200) g)";
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, big text, v int, other text, nothing text); \
             ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
             CREATE TABLE only_big (id int PRIMARY KEY, big text); \
             ALTER TABLE only_big ALTER big SET STORAGE EXTERNAL; \
             CREATE TABLE f (big text, v int); ALTER TABLE f ALTER big SET STORAGE EXTERNAL; \
             ALTER TABLE f REPLICA IDENTITY FULL; \
             CREATE TABLE k (big text PRIMARY KEY, v int, more text); \
             ALTER TABLE k ALTER big SET STORAGE EXTERNAL; ALTER TABLE k ALTER more SET STORAGE EXTERNAL",
        );
        case.publish("FOR ALL TABLES");
        let rows = |from: i32| {
            format!(
                "INSERT INTO t SELECT g, {big} || g, 0, {big} FROM generate_series({from}, {from} + 5) g; \
                 INSERT INTO only_big SELECT g, {big} FROM generate_series({from}, {from} + 5) g; \
                 INSERT INTO f SELECT {big}, g / 2 FROM generate_series({from}, {from} + 5) g; \
                 INSERT INTO k SELECT repeat('x', 2600) || g, g, {big} FROM generate_series({from}, {from} + 5) g;"
            )
        };
        case.publisher.sql(&rows(0));
        case.run_until_current();
        case.publisher.sql(&rows(100));
        case.publisher.sql(
            "UPDATE t SET v = 1; UPDATE t SET id = id + 50 WHERE id < 3; \
             UPDATE t SET big = 'short' WHERE id = 4; UPDATE t SET big = big || 'x', other = NULL WHERE id = 5; \
             UPDATE only_big SET big = big; UPDATE only_big SET id = 77 WHERE id = 1; \
             UPDATE f SET v = v + 10 WHERE ctid IN (SELECT min(ctid) FROM f GROUP BY v); \
             DELETE FROM f WHERE ctid = (SELECT max(ctid) FROM f); \
             UPDATE k SET v = v + 1000; UPDATE k SET big = 'y' || big WHERE v = 1001; \
             DELETE FROM k WHERE v = 1002",
        );
        case.run_until_current();
        case.expect_equal(&["t", "only_big", "f", "k"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// Changes of a parent table affect only its own rows, not those of its inheritance children.
#[test]
fn inheritance_children_are_not_touched() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE parent (id int PRIMARY KEY, v text); \
             CREATE TABLE child (extra text, PRIMARY KEY (id)) INHERITS (parent); \
             CREATE TABLE full_parent (v text); CREATE TABLE full_child () INHERITS (full_parent); \
             ALTER TABLE full_parent REPLICA IDENTITY FULL; ALTER TABLE full_child REPLICA IDENTITY FULL",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql(
            "INSERT INTO parent SELECT g, 'p' FROM generate_series(1, 6) g; \
             INSERT INTO child SELECT g, 'c', 'x' FROM generate_series(1, 6) g; \
             INSERT INTO full_parent VALUES ('a'), ('b'); INSERT INTO full_child VALUES ('a'), ('b')",
        );
        case.run_until_current();
        let tables = ["parent", "child", "full_parent", "full_child"];
        case.expect_equal(&tables);
        case.publisher.sql(
            "UPDATE ONLY parent SET v = 'only' WHERE id = 1; DELETE FROM ONLY parent WHERE id = 2; \
             UPDATE parent SET v = 'both' WHERE id = 3; UPDATE child SET v = 'child' WHERE id = 4; \
             UPDATE ONLY full_parent SET v = 'A' WHERE v = 'a'; DELETE FROM ONLY full_parent WHERE v = 'b'; \
             DELETE FROM full_child WHERE v = 'a'",
        );
        case.run_until_current();
        case.expect_equal(&tables);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.publisher.sql("TRUNCATE ONLY parent");
        case.run_until_current();
        case.expect_equal(&tables);
        case.publisher.sql("INSERT INTO parent VALUES (1, 'again')");
        case.publisher.sql("TRUNCATE parent");
        case.run_until_current();
        case.expect_equal(&tables);
    });
}

/// REPLICA IDENTITY FULL with all kinds of subscriber tables: a primary key, a unique index, an
/// index with NULLs, no index, and additional columns.
#[test]
fn replica_identity_full_finds_exactly_one_row() {
    on_versions(&VERSIONS, |case| {
        let tables = ["pk", "uniq", "nullable", "partial", "expression", "nothing", "extra"];
        for table in tables {
            case.both(&format!("CREATE TABLE {table} (a int, b text, c float8)"));
            case.publisher.sql(&format!("ALTER TABLE {table} REPLICA IDENTITY FULL"));
        }
        case.subscriber.sql(
            "ALTER TABLE pk ADD PRIMARY KEY (a); \
             ALTER TABLE uniq ALTER a SET NOT NULL, ALTER b SET NOT NULL; CREATE UNIQUE INDEX ON uniq (a, b); \
             CREATE UNIQUE INDEX ON nullable (a); \
             CREATE UNIQUE INDEX ON partial (a) WHERE b IS NOT NULL; \
             CREATE UNIQUE INDEX ON expression ((a + 0), (coalesce(b, 'null')), c); \
             ALTER TABLE extra ADD own text DEFAULT 'own'",
        );
        case.publish("FOR ALL TABLES");
        let rows = |from: i32| {
            let mut sql = String::new();
            for table in ["pk", "uniq", "nullable", "partial", "expression"] {
                sql += &format!(
                    "INSERT INTO {table} SELECT g, 'b' || g, 1 FROM generate_series({from}, {from} + 9) g;"
                );
            }
            // These tables contain several equal rows, with NULL and NaN.
            for table in ["nothing", "extra"] {
                sql += &format!(
                    "INSERT INTO {table} SELECT CASE WHEN g % 2 = 0 THEN {from} END, \
                       CASE WHEN g % 3 = 0 THEN 'b' END, \
                       (CASE g % 3 WHEN 0 THEN 'NaN' WHEN 1 THEN NULL ELSE '1' END)::float8 \
                     FROM generate_series(1, 24) g;"
                );
            }
            sql + &format!(
                "INSERT INTO nullable VALUES (NULL, 'one', {from}), (NULL, 'one', {from}), (NULL, NULL, {from}); \
                 INSERT INTO partial VALUES (1, NULL, {from}), (1, NULL, {from});"
            )
        };
        case.publisher.sql(&rows(0));
        case.run_until_current();
        case.publisher.sql(&rows(100));
        for table in tables {
            for (number, change) in [
                "UPDATE {} SET b = 'changed', c = 7",
                "DELETE FROM {}",
                "UPDATE {} SET a = a + 500, b = b || '!'",
            ]
            .iter()
            .enumerate()
            {
                // Change every fifth of these rows in physical order, one at a time.
                let change = change.replace("{}", table);
                case.publisher.sql(&format!(
                    "DO $$ DECLARE row_id tid; BEGIN \
                       FOR row_id IN SELECT ctid FROM (SELECT ctid, row_number() OVER (ORDER BY ctid) AS n \
                         FROM {table}) t WHERE n % 7 = {number} LOOP \
                         {change_at}; END LOOP; END $$",
                    change_at = format_args!("{change} WHERE ctid = row_id"),
                ));
            }
        }
        case.publisher.sql(
            "UPDATE nullable SET b = 'only one' WHERE ctid = (SELECT min(ctid) FROM nullable WHERE b = 'one'); \
             DELETE FROM nullable WHERE ctid = (SELECT max(ctid) FROM nullable WHERE b = 'one')",
        );
        case.run_until_current();
        case.expect_equal(&tables);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM extra WHERE own IS NULL"), "0");
    });
}
