//! Servers and relations that resemble PostgreSQL and its tables, but are not.

use crate::support::{Case, VERSIONS, on_versions};
use testbed::program::events;

/// Makes `version()` of a database return another product's text.
fn disguise(database: &crate::support::Database<'_>, version: &str) {
    database.sql(&format!(
        "SET allow_system_table_mods = on; CREATE OR REPLACE FUNCTION pg_catalog.version() \
         RETURNS text LANGUAGE sql STABLE AS $$SELECT '{version}'::text$$; \
         RESET allow_system_table_mods"
    ));
}

/// Checks that pgapace has created nothing.
fn expect_untouched(case: &Case) {
    let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
    assert_eq!(case.subscriber.value(schema), "0");
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(case.publisher.value(slots), "0");
}

#[test]
fn servers_other_than_postgresql_are_refused() {
    const YUGABYTE: &str = "PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64-pc-linux-gnu";
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        disguise(&case.subscriber, YUGABYTE);
        case.run().expect(5, &["YugabyteDB"]);
        case.tool.finish("check", &[]).expect(5, &[]);
        expect_untouched(&case);
        disguise(
            &case.subscriber,
            "PostgreSQL 16.3 (EnterpriseDB Advanced Server 16.3.0) on x86_64",
        );
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        assert!(checked.stdout.contains("EDB Postgres"), "{}", checked.stdout);
        disguise(&case.publisher, YUGABYTE);
        case.run().expect(4, &["YugabyteDB"]);
        expect_untouched(&case);
    });
}

#[test]
fn missing_functions_are_named() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        let rename = |name: &str| {
            format!(
                "SET allow_system_table_mods = on; ALTER FUNCTION pg_catalog.{name} RENAME TO gone; \
                 RESET allow_system_table_mods"
            )
        };
        case.subscriber.sql(&rename("pg_blocking_pids(int)"));
        case.publisher.sql(&rename("pg_export_snapshot()"));
        let checked = case.tool.finish("check", &[]);
        checked.expect(6, &[]);
        for name in ["pg_blocking_pids", "pg_export_snapshot"] {
            assert!(checked.stdout.contains(name), "{}", checked.stdout);
        }
    });
}

/// Objects in the place of the subscriber's table `t`, and the error for each.
const INSTEAD: [(&str, &str); 5] = [
    (
        "CREATE TABLE base (id int PRIMARY KEY); CREATE VIEW t AS SELECT * FROM base; \
         CREATE FUNCTION put() RETURNS trigger LANGUAGE plpgsql AS \
           'BEGIN INSERT INTO base VALUES (NEW.id); RETURN NEW; END'; \
         CREATE TRIGGER put INSTEAD OF INSERT ON t FOR EACH ROW EXECUTE FUNCTION put()",
        "a view",
    ),
    ("CREATE MATERIALIZED VIEW t AS SELECT 1 AS id", "a materialized view"),
    ("CREATE FOREIGN TABLE t (id int) SERVER far", "a foreign table"),
    (
        "CREATE TABLE t (id int) PARTITION BY RANGE (id); \
         CREATE TABLE near PARTITION OF t FOR VALUES FROM (0) TO (10); \
         CREATE FOREIGN TABLE distant PARTITION OF t FOR VALUES FROM (10) TO (20) SERVER far",
        "foreign table distant as a partition",
    ),
    (
        "CREATE SCHEMA _timescaledb_functions; \
         CREATE FUNCTION _timescaledb_functions.insert_blocker() RETURNS trigger \
           LANGUAGE plpgsql AS 'BEGIN RAISE ''blocked''; END'; \
         CREATE TABLE t (id int PRIMARY KEY); CREATE TRIGGER ts_insert_blocker BEFORE INSERT ON t \
           FOR EACH ROW EXECUTE FUNCTION _timescaledb_functions.insert_blocker()",
        "hypertable of TimescaleDB",
    ),
];

#[test]
fn relations_that_keep_their_rows_elsewhere_are_refused() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
        case.publish("FOR TABLE t");
        case.subscriber.sql(
            "CREATE FOREIGN DATA WRAPPER nowhere; CREATE SERVER far FOREIGN DATA WRAPPER nowhere",
        );
        for (ddl, said) in INSTEAD {
            case.subscriber.sql(ddl);
            let refused = case.run();
            refused.expect(6, &["public.t", said]);
            let checked = case.tool.finish("check", &[]);
            checked.expect(6, &[]);
            assert!(checked.stdout.contains(said), "{}", checked.stdout);
            let slots =
                "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
            assert_eq!(case.publisher.value(slots), "0", "{said}");
            let kind = match said {
                "a view" => "VIEW",
                "a materialized view" => "MATERIALIZED VIEW",
                "a foreign table" => "FOREIGN TABLE",
                _ => "TABLE",
            };
            case.subscriber.sql(&format!("DROP {kind} t CASCADE"));
        }
    });
}

/// A table that becomes such a relation later stops at its next change.
#[test]
fn a_table_that_stores_its_rows_elsewhere_later_stops_at_its_next_change() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.subscriber.sql(&INSTEAD[4].0.replace("CREATE TABLE t (id int PRIMARY KEY);", ""));
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run().expect(6, &["public.t", "TimescaleDB"]);
    });
}

#[test]
fn check_warns_about_unlogged_tables_and_access_methods() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.publisher
            .sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE p (id int PRIMARY KEY)");
        case.subscriber.sql(
            "CREATE UNLOGGED TABLE t (id int PRIMARY KEY); \
             CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler; \
             CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE p1 PARTITION OF p DEFAULT USING other",
        );
        case.publish("FOR TABLE t, p");
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        for said in ["table public.t is unlogged", "SET LOGGED", "access method other"] {
            assert!(checked.stdout.contains(said), "{said}: {}", checked.stdout);
        }
        let log = case.run_until_current();
        let warned = log.lines().filter(|line| events(line, "unlogged_table") == 1);
        assert!(warned.clone().count() == 1 && log.contains("table=\"public.t\""), "{log}");
    });
}
