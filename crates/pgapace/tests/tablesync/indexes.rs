//! Indexes of empty tables are built after the rows are copied.

use std::process::Command;

use testbed::program::events;
use testbed::wait_until;

use crate::support::{Database, PATIENCE, VERSIONS, must, on_versions};
use crate::verbs::json;

/// More rows than the minimum for this method.
pub(super) const ROWS: u32 = 60_000;

pub(super) fn fill(publisher: &Database<'_>, table: &str) {
    publisher.sql(&format!(
        "INSERT INTO {table} SELECT i, i + {ROWS}, md5(i::text) || md5(i::text) \
         FROM generate_series(1, {ROWS}) i"
    ));
}

/// The catalogue entries of columns, constraints and indexes, and the output of pg_dump if it is
/// installed.
pub(super) fn schema(database: &Database<'_>) -> Vec<String> {
    let mut known = database.rows(
        "SELECT a.attrelid::regclass::text, a.attname, a.attnotnull, a.attstattarget \
         FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind <> 'i' AND a.attnum > 0 ORDER BY 1, 2",
    );
    known.extend(database.rows(
        "SELECT k.conrelid::regclass::text, k.conname, k.contype, pg_get_constraintdef(k.oid), k.condeferrable, \
           k.condeferred, k.convalidated, k.conislocal, k.coninhcount, k.connoinherit, k.conindid::regclass, \
           obj_description(k.oid, 'pg_constraint') \
         FROM pg_constraint k WHERE k.connamespace = 'public'::regnamespace ORDER BY 1, 2",
    ));
    known.extend(database.rows(
        "SELECT i.indrelid::regclass::text, i.indexrelid::regclass::text, pg_get_indexdef(c.oid), i.indisprimary, \
           i.indisunique, i.indisexclusion, i.indimmediate, i.indisclustered, i.indisreplident, i.indisvalid, \
           c.reloptions, c.reltablespace, c.relowner, obj_description(c.oid, 'pg_class') \
         FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid \
         WHERE c.relnamespace = 'public'::regnamespace ORDER BY 1, 2",
    ));
    let binaries = database.cluster.binaries();
    if binaries.has("pg_dump") {
        let output = must(
            Command::new(binaries.bin("pg_dump"))
                .args(["--schema-only", "--exclude-schema=pgapace", "--dbname"])
                .arg(database.conninfo())
                .output(),
        );
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // pg_dump adds a random key to each dump, as protection against injected meta-commands.
        let lines = text.lines().filter(|line| !line.contains("restrict "));
        known.extend(lines.map(str::to_owned));
    }
    known
}

#[track_caller]
pub(super) fn expect_schema(database: &Database<'_>, before: &[String]) {
    let now = schema(database);
    let changed: Vec<_> = now.iter().filter(|line| !before.contains(line)).collect();
    assert!(now == before, "{changed:#?}");
}

/// Names and OIDs of the tables' indexes.
pub(super) fn oids(database: &Database<'_>) -> Vec<String> {
    database.rows(
        "SELECT c.relname, c.oid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid \
         WHERE i.indrelid::regclass::text LIKE 't%' ORDER BY 1",
    )
}

/// Names of the indexes that were created again.
pub(super) fn recreated(before: &[String], after: &[String]) -> Vec<String> {
    let names = |rows: &[String]| -> Vec<String> {
        rows.iter().map(|row| row.split('|').next().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(names(before), names(after));
    let new: Vec<_> = after.iter().filter(|row| !before.contains(row)).cloned().collect();
    names(&new)
}

/// Only indexes that can be recreated identically are dropped. Indexes with additional properties
/// or dependent objects stay.
#[test]
fn indexes_are_recreated_exactly() {
    on_versions(&VERSIONS, |case| {
        let columns = "(id int PRIMARY KEY, n int NOT NULL, v text)";
        for table in ["t_plain", "t_more", "t_referenced", "t_identity", "t_heir"] {
            case.both(&format!("CREATE TABLE {table} {columns}"));
            fill(&case.publisher, table);
        }
        case.publisher.sql(
            "CREATE TABLE t_part (id int, n int, v text, PRIMARY KEY (id, n)) PARTITION BY RANGE (id); \
             CREATE TABLE t_part1 PARTITION OF t_part DEFAULT",
        );
        case.subscriber.sql(
            "CREATE TABLE t_part (id int, n int, v text, PRIMARY KEY (id, n)) PARTITION BY RANGE (id); \
             CREATE TABLE t_part1 PARTITION OF t_part DEFAULT; CREATE INDEX t_part1_kept ON t_part1 (v); \
             CREATE TABLE t_inherited (); ALTER TABLE t_heir INHERIT t_inherited",
        );
        fill(&case.publisher, "t_part");
        case.subscriber.sql(
            "CREATE UNIQUE INDEX t_more_desc ON t_more (n DESC NULLS LAST, id) INCLUDE (v) WITH (fillfactor = 70); \
             ALTER TABLE t_more ADD CONSTRAINT \"t_more Unique\" UNIQUE NULLS NOT DISTINCT (n) INCLUDE (v); \
             ALTER TABLE t_more ADD CONSTRAINT t_more_kept_fillfactor UNIQUE (n) WITH (fillfactor = 60); \
             ALTER TABLE t_more ADD CONSTRAINT t_more_no_overlap EXCLUDE USING btree (n WITH =); \
             CREATE INDEX t_more_collated ON t_more (v COLLATE \"C\" text_pattern_ops); \
             CREATE INDEX t_more_hash ON t_more USING hash (v); \
             CREATE INDEX t_more_brin ON t_more USING brin (n) WITH (pages_per_range = 16); \
             CREATE INDEX t_more_kept_expression ON t_more (lower(v)); \
             CREATE INDEX t_more_kept_partial ON t_more (v) WHERE n > 5; \
             CREATE INDEX t_more_kept_comment ON t_more (n, v); \
             COMMENT ON INDEX t_more_kept_comment IS 'of the subscriber'; \
             ALTER TABLE t_more ADD CONSTRAINT t_more_kept_deferrable UNIQUE (id, n) DEFERRABLE; \
             CREATE TABLE child (id int REFERENCES t_referenced); \
             CREATE INDEX t_referenced_n ON t_referenced (n); \
             CREATE UNIQUE INDEX t_identity_n ON t_identity (n); \
             ALTER TABLE t_identity REPLICA IDENTITY USING INDEX t_identity_n; \
             CREATE INDEX t_identity_kept_cluster ON t_identity (v); \
             ALTER TABLE t_identity CLUSTER ON t_identity_kept_cluster; \
             CREATE VIEW by_key AS SELECT id, n, v FROM t_identity GROUP BY id",
        );
        case.publish("FOR TABLE t_plain, t_more, t_referenced, t_identity, t_heir, t_part1");
        let (schema_before, before) = (schema(&case.subscriber), oids(&case.subscriber));
        let log = case.run_until_current();
        assert!(events(&log, "indexes_in_place") == 0, "{log}");
        expect_schema(&case.subscriber, &schema_before);
        assert_eq!(
            recreated(&before, &oids(&case.subscriber)),
            [
                "t_more Unique",
                "t_more_brin",
                "t_more_collated",
                "t_more_desc",
                "t_more_hash",
                "t_more_no_overlap",
                "t_more_pkey",
                "t_plain_pkey",
                "t_referenced_n"
            ]
        );
        case.expect_equal(&[
            "t_plain",
            "t_more",
            "t_referenced",
            "t_identity",
            "t_heir",
            "t_part1",
        ]);
        case.publisher.sql("UPDATE t_more SET v = 'new' WHERE id = 7; DELETE FROM t_plain WHERE id = 8; INSERT INTO t_identity VALUES (-1, -1, '')");
        case.run_until_current();
        case.expect_equal(&["t_plain", "t_more", "t_identity"]);
    });
}

/// A row that only an index of the subscriber rejects is reported with its line, and all indexes
/// exist afterwards.
#[test]
fn a_row_that_an_index_rejects_is_named() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, n int, v text)");
        fill(&case.publisher, "t");
        case.publisher.sql("UPDATE t SET n = (SELECT n FROM t WHERE id = 5) WHERE id = 41005");
        case.publisher.sql("VACUUM FULL t");
        case.subscriber.sql("CREATE UNIQUE INDEX t_n ON t (n)");
        case.publish("FOR ALL TABLES");
        let schema_before = schema(&case.subscriber);
        case.run().expect(9, &["t_n", "public.t", "line "]);
        expect_schema(&case.subscriber, &schema_before);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0");
        case.subscriber.sql("DROP INDEX t_n");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A process that is killed during the copy or while the indexes are built leaves the table
/// unchanged. Meanwhile `status` reports the index build without waiting for a lock.
#[test]
fn a_kill_before_the_indexes_are_built_leaves_the_table_unchanged() {
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                 AND wait_event_type = 'Lock' AND application_name LIKE 'pgapace%copy'";
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, n int, v text)");
        fill(&case.publisher, "t");
        // The first row and its first comparison wait for the session that holds the locks.
        case.subscriber.sql(
            "CREATE FUNCTION row_waits(id int) RETURNS bool LANGUAGE plpgsql AS \
               $$BEGIN IF id = 1 THEN PERFORM pg_catalog.pg_advisory_xact_lock_shared(1); END IF; \
                 RETURN true; END$$; \
             ALTER TABLE t ADD CHECK (row_waits(id)); \
             CREATE FUNCTION build_waits(a int, b int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS \
               $$BEGIN IF a = 1 OR b = 1 THEN PERFORM pg_catalog.pg_advisory_xact_lock_shared(2); END IF; \
                 RETURN pg_catalog.btint4cmp(a, b); END$$; \
             CREATE OPERATOR CLASS slow_ops FOR TYPE int USING btree AS OPERATOR 1 <, OPERATOR 2 <=, \
               OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 build_waits(int, int); \
             CREATE INDEX t_slow ON t (id slow_ops)",
        );
        case.publish("FOR TABLE t");
        let schema_before = schema(&case.subscriber);
        let mut holder = case.subscriber.connect();
        let directory = must(tempfile::tempdir());
        for lock in [1, 2] {
            must(holder.batch_execute(&format!("SELECT pg_advisory_lock({lock})")));
            let mut process = case.tool.start(directory.path().join(lock.to_string()));
            let waiting = wait_until(PATIENCE, "the copy to wait", || {
                Ok(process.is_running() && case.subscriber.value(waits) != "0")
            });
            waiting.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
            let status = json(&case.tool.finish("status", &["--json"]));
            let running = &status[0]["copy"]["running"][0];
            assert_eq!(running["building_indexes"], lock == 2, "{status:#}");
            if lock == 2 {
                assert_eq!(running["bytes_done"], running["bytes"], "{status:#}");
            }
            must(process.kill9());
            must(holder.batch_execute("SELECT pg_advisory_unlock_all()"));
            let mut look = case.subscriber.connect();
            must(wait_until(PATIENCE, "the session to end", || {
                Ok(look.query_one(waits, &[])?.get::<_, i64>(0) == 0)
            }));
            assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0");
            expect_schema(&case.subscriber, &schema_before);
        }
        let log = case.run_until_current();
        assert!(events(&log, "indexes_in_place") == 0, "{log}");
        expect_schema(&case.subscriber, &schema_before);
        case.expect_equal(&["t"]);
    });
}
