//! `--copy-schema`: pgapace creates the publisher's schema on the subscriber.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use testbed::program::events;

use crate::faults::privileges::part;
use crate::support::{
    Case, PATIENCE, finish, must, on_versions, skipped, wait_for_event, wait_while_running,
};
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};

pub(super) const DDL: &str = "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN short AS text CHECK (length(VALUE) < 50); \
    CREATE TABLE parent (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, m mood, s short); \
    CREATE TABLE child (id serial PRIMARY KEY, parent int NOT NULL REFERENCES parent, v text); \
    CREATE INDEX child_v ON child (v); \
    CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
    CREATE TABLE parts1 PARTITION OF parts FOR VALUES FROM (0) TO (1000); \
    CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; \
    CREATE TRIGGER t BEFORE INSERT ON child FOR EACH ROW EXECUTE FUNCTION f(); \
    CREATE VIEW happy AS SELECT * FROM parent WHERE m = 'happy'; \
    INSERT INTO parent (m, s) SELECT 'happy', 'x' FROM generate_series(1, 1000); \
    INSERT INTO child (parent, v) SELECT i % 1000 + 1, md5(i::text) FROM generate_series(1, 20000) i; \
    INSERT INTO parts SELECT i, 'v' FROM generate_series(0, 999) i";

/// Indexes, constraints and triggers by name.
pub(super) const OBJECTS: &str = "SELECT indexname FROM pg_indexes WHERE schemaname = 'public' \
    UNION ALL SELECT conname::text FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype <> 'n' \
    UNION ALL SELECT tgname::text FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1";

pub(super) fn tools_are_there() -> bool {
    ["pg_dump", "psql", "pg_restore"]
        .iter()
        .all(|name| Command::new(name).arg("--version").output().is_ok())
}

#[test]
fn the_schema_is_created_before_and_after_the_copy() {
    // The oldest publisher can be read by pg_dump of any supported version.
    on_versions(&[(15, 15), (15, 18)], |mut case| {
        case.publisher.sql(DDL);
        case.publisher.sql("SELECT lo_from_bytea(0, 'large')");
        case.publish("FOR ALL TABLES");
        // A role with what docs/privileges.sql has for it.
        let database = &case.subscriber.name;
        let role = format!("copier_{database}");
        for heading in ["subscriber", "subscriber, optional, for run --copy-schema"] {
            let sql = part(heading).replace("pgapace_subscriber", &role);
            case.subscriber.sql(&sql.replace("DATABASE shop", &format!("DATABASE {database}")));
        }
        // Sessions of pgapace and of the tools write all the same.
        for setting in ["read_only = on", "isolation = serializable", "deferrable = on"] {
            case.subscriber
                .sql(&format!("ALTER DATABASE {database} SET default_transaction_{setting}"));
        }
        case.tool.subscriber = format!("{} user={role}", case.tool.subscriber);
        case.tool.args = vec!["--copy-schema".to_owned(), "--copy-split-size=1".to_owned()];
        let program = case.tool.program("run").args(["--until", "current"]);
        finish(&program.env("PATH", "/nowhere")).expect(3, &["--copy-schema needs pg_dump"]);
        if !tools_are_there() {
            return;
        }
        // An existing object prevents an index: the tables are copied, and the rest can be created
        // later.
        case.subscriber.sql("CREATE TABLE child_v ()");
        case.run().expect(5, &["index or constraint cannot be created", "child_v"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM child"), "20000");
        case.subscriber.sql("DROP TABLE child_v");
        case.publisher.sql(
            "INSERT INTO parent (m) VALUES ('sad'); UPDATE child SET parent = 1001 WHERE id = 7",
        );
        case.run_until_current();
        case.expect_equal(&["parent", "child", "parts"]);
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM happy"), "1000");
        // The stream does not carry large objects, so an empty one would say what is not true.
        let large = "SELECT count(*) FROM pg_largeobject_metadata";
        assert_eq!(case.subscriber.value(large), "0");
        assert_eq!(case.subscriber.value("SELECT nextval('child_id_seq')"), "20001");
        case.publisher
            .sql("UPDATE child SET v = 'new' WHERE id < 10; DELETE FROM parts WHERE id < 5");
        case.run_until_current();
        case.expect_equal(&["parent", "child", "parts"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// Relations that a job creates on the publisher while tables are copied.
const STAGING: &str = "CREATE TABLE staging (id int PRIMARY KEY, child int REFERENCES child); \
    CREATE INDEX staging_child ON staging (child); \
    COMMENT ON CONSTRAINT staging_pkey ON staging IS 'of a job'; \
    ALTER TABLE staging ENABLE ROW LEVEL SECURITY; CREATE POLICY all_rows ON staging USING (true); \
    CREATE TRIGGER t BEFORE INSERT ON staging FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()";

/// A PATH on which this script stands before the tool of that name.
fn path_with(directory: &Path, name: &str, script: &str) -> String {
    let file = directory.join(name);
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap_or_default())
}

/// Tools of 17 and later make a setting that older subscribers lack.
#[test]
fn newer_tools_create_the_schema_on_an_older_subscriber() {
    let Ok(newer) = std::env::var(testbed::citus::VARIABLE) else {
        return skipped("newer_tools_create_the_schema_on_an_older_subscriber", "no newer pg_dump");
    };
    let path = format!("{newer}:{}", std::env::var("PATH").unwrap_or_default());
    on_versions(&[(15, 15)], |mut case| {
        case.publisher.sql(DDL);
        case.publish("FOR ALL TABLES");
        case.tool.args = vec!["--copy-schema".to_owned()];
        case.subscriber.sql("CREATE TABLE child_v ()");
        let run = || {
            let program = case.tool.program("run").args(["--until", "current"]);
            finish(&program.env("PATH", &path))
        };
        run().expect(5, &["index or constraint cannot be created", "42P07"]);
        case.subscriber.sql("DROP TABLE child_v");
        run().expect(0, &[]);
        case.expect_equal(&["parent", "child", "parts"]);
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
    });
}

/// A first start with --copy-schema that fails while it creates the rest of the schema.
fn fail_at_first(case: &mut Case) {
    case.publisher.sql(DDL);
    case.publish("FOR TABLE parent, child, parts WITH (publish_via_partition_root = true)");
    case.tool.args = vec!["--copy-schema".to_owned()];
    case.subscriber.sql("CREATE TABLE child_v ()");
    case.run().expect(5, &["child_v"]);
    case.subscriber.sql("DROP TABLE child_v");
}

#[test]
fn a_psql_that_fails_while_indexes_are_created_is_an_error() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15)], |mut case| {
        fail_at_first(&mut case);
        let directory = tempfile::tempdir().unwrap();
        let path = path_with(directory.path(), "psql", "echo 'Verbindung beendet' >&2; exit 2");
        let program = case.tool.program("run").args(["--until", "current"]).env("PATH", path);
        finish(&program).expect(5, &["index or constraint cannot be created", "Verbindung"]);
        case.publisher.sql(STAGING);
        case.publisher
            .sql("CREATE TABLE parts2 PARTITION OF parts FOR VALUES FROM (1000) TO (2000)");
        let log = case.run_until_current();
        assert!(log.contains("public.parts2, public.staging"), "{log}");
        case.publisher.sql("DROP TABLE staging, parts2");
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
    });
}

/// psql waits for a lock when pgapace is killed. It would go on beside the psql of the next run.
#[test]
fn the_next_run_ends_a_psql_that_a_killed_one_left() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15), (15, 18)], |mut case| {
        fail_at_first(&mut case);
        let mut locked = holder(&case, "BEGIN; LOCK TABLE child IN SHARE UPDATE EXCLUSIVE MODE");
        let mut process = case.tool.start(case.log_file("killed"));
        wait_for_a_waiter(&case, &mut process, "relation");
        let sessions = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                        AND application_name LIKE 'pgapace schema%' AND datname = current_database()";
        let left = case.subscriber.value(sessions);
        must(process.kill9());
        assert_eq!(case.subscriber.value(sessions), left, "psql outlives its parent");
        let mut process = case.tool.start(case.log_file("next"));
        let another = || {
            let now = case.subscriber.rows(sessions);
            Ok(now.len() == 1 && now[0] != left)
        };
        must(wait_while_running(&mut process, "only the next psql to wait", PATIENCE, another));
        must(locked.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
        case.stop(process);
    });
}

/// The copies of two tables have different snapshots, so a row refers to one that the stream brings.
#[test]
fn a_foreign_key_waits_for_the_stream_after_an_interruption() {
    if !tools_are_there() {
        return;
    }
    on_versions(&[(15, 15), (15, 18)], |mut case| {
        // A row of the second table is refused, until the subscriber has this setting.
        case.publisher.sql(
            "CREATE FUNCTION allowed(int) RETURNS bool LANGUAGE sql STABLE AS \
               $$ SELECT coalesce(current_setting('app.allowed', true), '') = 'on' $$; \
             CREATE TABLE parent (id int PRIMARY KEY); \
             CREATE TABLE child (id int PRIMARY KEY, parent int CHECK (allowed(parent))); \
             CREATE INDEX child_parent ON child (parent); \
             ALTER TABLE child ADD CONSTRAINT \"its parent\" FOREIGN KEY (parent) REFERENCES parent; \
             COMMENT ON CONSTRAINT \"its parent\" ON child IS 'of the child'; \
             SET app.allowed = 'on'; INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1)",
        );
        case.publish("FOR TABLE parent, child");
        case.tool.args = vec!["--copy-schema".to_owned()];
        case.run().expect(9, &["public.child", "23514"]);
        case.publisher.sql(STAGING);
        case.publisher.sql(
            "SET app.allowed = 'on'; INSERT INTO parent VALUES (2); INSERT INTO child VALUES (2, 2)",
        );
        let allow = format!("ALTER DATABASE {} SET app.allowed = 'on'", case.subscriber.name);
        case.subscriber.sql(&allow);
        let log = case.run_until_current();
        assert_eq!(events(&log, "foreign_key_not_valid"), 1, "{log}");
        assert_eq!(events(&log, "schema_left_out"), 1, "{log}");
        case.publisher.sql("DROP TABLE staging");
        case.expect_equal(&["parent", "child"]);
        assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
        let valid = "SELECT convalidated || ' ' || obj_description(oid) FROM pg_constraint \
                     WHERE contype = 'f'";
        assert_eq!(case.subscriber.value(valid), "false of the child");
        let command = "ALTER TABLE public.child VALIDATE CONSTRAINT \"its parent\";";
        assert!(log.replace('\\', "").contains(command), "{log}");
        case.subscriber.sql(command);
        assert_eq!(case.subscriber.value(valid), "true of the child");
    });
}

/// A job creates a table between the dump and the snapshot of the copy. It is added later, as one that is created during
/// the copy. So is it by a second start.
#[test]
fn a_table_that_is_created_behind_the_dump_is_added_later() {
    if !tools_are_there() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let late = "PATH=\"${PATH#*:}\"; pg_dump \"$@\" && psql -qX \"$LATE\" \
                -c 'CREATE TABLE IF NOT EXISTS late (id int PRIMARY KEY)'";
    let path = path_with(directory.path(), "pg_dump", late);
    for killed in [false, true] {
        on_versions(&[(15, 15)], |mut case| {
            case.publisher.sql(DDL);
            case.publish("FOR ALL TABLES");
            case.tool.args = vec!["--copy-schema".to_owned()];
            let program = case.tool.program("run").env("PATH", &path);
            let program = program.env("LATE", case.publisher.conninfo());
            let log = if killed {
                // The slot waits for a transaction.
                let mut open = case.publisher.connect();
                must(open.batch_execute("BEGIN; SELECT pg_current_xact_id()"));
                let mut process = must(program.spawn_logged(case.log_file("killed")));
                let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                             AND backend_type = 'walsender' AND datname = current_database()";
                let waits = || Ok(case.publisher.value(waits) == "1");
                must(wait_while_running(&mut process, "the slot to wait", PATIENCE, waits));
                must(process.kill9());
                must(open.batch_execute("ROLLBACK"));
                case.run().expect(6, &["reached by all tables but these: public.late"]).log.clone()
            } else {
                let finished = finish(&program.args(["--until", "current"]));
                finished.expect(6, &["reached by all tables but these: public.late"]);
                finished.log
            };
            assert_eq!(events(&log, "schema_left_out"), 1, "{log}");
            assert_eq!(events(&log, "table_blocked"), 1, "{log}");
            assert!(!log.contains("--copy-schema at the first start"), "{log}");
            case.expect_equal(&["parent", "child", "parts"]);
            case.publisher.sql("INSERT INTO late VALUES (1)");
            case.subscriber.sql("CREATE TABLE late (id int PRIMARY KEY)");
            case.run_until_current();
            case.expect_equal(&["late"]);
            assert_eq!(case.subscriber.rows(OBJECTS), case.publisher.rows(OBJECTS));
        });
    }
}
