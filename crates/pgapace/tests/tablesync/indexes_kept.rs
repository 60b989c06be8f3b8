//! Indexes that stay in place during the copy.

use testbed::program::events;

use super::indexes::{ROWS, expect_schema, fill, oids, recreated, schema};
use crate::support::{VERSIONS, must, on_versions};

/// The copy keeps the indexes in place when it would have to wait for other sessions: for a table
/// that is in use, holds rows, belongs to another owner, or is watched by event triggers.
#[test]
fn indexes_stay_in_place_where_dropping_them_would_wait() {
    on_versions(&VERSIONS, |case| {
        let columns = "(id int PRIMARY KEY, n int, v text)";
        for table in ["t_used", "t_kept", "t_free"] {
            case.both(&format!("CREATE TABLE {table} {columns}"));
            fill(&case.publisher, table);
        }
        case.publish("FOR ALL TABLES");
        case.subscriber.sql("INSERT INTO t_kept VALUES (-1, -1, 'kept')");
        let before = oids(&case.subscriber);
        let mut reader = case.subscriber.connect();
        must(reader.batch_execute("BEGIN; SELECT FROM t_used"));
        let finished = case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]);
        finished.expect(0, &["t_used", "event=\"indexes_in_place\""]);
        must(reader.batch_execute("COMMIT"));
        assert_eq!(recreated(&before, &oids(&case.subscriber)), ["t_free_pkey"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t_kept"), (ROWS + 1).to_string());
        case.expect_equal(&["t_used", "t_free"]);
    });
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t_watched (id int PRIMARY KEY, n int, v text)");
        case.subscriber.sql(
            "CREATE TABLE ddl_seen (tag text); \
             CREATE FUNCTION see_ddl() RETURNS event_trigger LANGUAGE plpgsql AS \
             $$BEGIN INSERT INTO public.ddl_seen VALUES (tg_tag); END$$; \
             CREATE EVENT TRIGGER see_ddl ON ddl_command_end WHEN TAG IN ('ALTER TABLE', 'CREATE INDEX') \
             EXECUTE FUNCTION see_ddl(); ALTER EVENT TRIGGER see_ddl ENABLE ALWAYS",
        );
        fill(&case.publisher, "t_watched");
        let before = oids(&case.subscriber);
        case.tool.finish("resync", &["t_watched"]).expect(0, &[]);
        case.run_until_current();
        case.subscriber.sql("DROP EVENT TRIGGER see_ddl");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM ddl_seen"), "0");
        assert_eq!(recreated(&before, &oids(&case.subscriber)), [""; 0]);
        case.expect_equal(&["t_watched"]);
    });
}

/// The copy also keeps the indexes for a table with triggers, which may use an index; for a table
/// to which another subscription applies changes; and for a table that is decoded, because its rows
/// need the replica identity.
#[test]
fn indexes_stay_in_place_where_others_need_them() {
    on_versions(&VERSIONS, |case| {
        for table in ["t_decoded", "t_shared", "t_triggered"] {
            case.both(&format!("CREATE TABLE {table} (id int PRIMARY KEY, n int, v text)"));
            fill(&case.publisher, table);
        }
        case.publish("FOR ALL TABLES");
        case.publisher.sql("CREATE PUBLICATION shared FOR TABLE t_shared");
        let slot = format!("{}_decoder", case.subscriber.name);
        case.subscriber.sql(
            "CREATE INDEX t_decoded_n ON t_decoded (n); \
             CREATE FUNCTION counts() RETURNS trigger LANGUAGE plpgsql AS \
             $$BEGIN INSERT INTO public.t_triggered VALUES (-1, 0, '') ON CONFLICT (id) DO NOTHING; RETURN NULL; END$$; \
             CREATE TRIGGER counts AFTER INSERT ON t_triggered FOR EACH ROW WHEN (NEW.id = 1) \
               EXECUTE FUNCTION counts(); \
             ALTER TABLE t_triggered ENABLE ALWAYS TRIGGER counts",
        );
        must(
            case.subscriber
                .connect()
                .query("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&slot]),
        );
        let mut other = case.tool.clone();
        other.name.push_str("_other");
        other.publications = "shared".to_owned();
        other.finish("run", &["--until", "current", "--copy-data=false"]).expect(0, &[]);
        let before = oids(&case.subscriber);
        let log = case.run_until_current();
        assert!(events(&log, "indexes_in_place") == 0, "{log}");
        case.subscriber.rows(&format!("SELECT pg_drop_replication_slot('{slot}')"));
        assert_eq!(recreated(&before, &oids(&case.subscriber)), ["t_decoded_n"]);
        assert_eq!(
            case.subscriber.value("DELETE FROM t_triggered WHERE id = -1 RETURNING id"),
            "-1"
        );
        case.expect_equal(&["t_decoded", "t_shared", "t_triggered"]);
        other.finish("drop", &[]).expect(0, &[]);
    });
}

/// Without the privileges for the lock, or without disk space for the sort, the copy keeps the
/// indexes in place.
#[test]
fn indexes_stay_in_place_without_privileges_or_disk_space() {
    let ddl = "CREATE TABLE t (id int PRIMARY KEY, n int, v text); CREATE INDEX t_v ON t (v)";
    on_versions(&VERSIONS, |mut case| {
        let role = format!("{}_owner", case.tool.name);
        case.both(ddl);
        case.subscriber.change_setting_privileges(&format!(
            "CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {} TO {role}; \
             GRANT CREATE, USAGE ON SCHEMA public TO {role}; \
             GRANT SET ON PARAMETER session_replication_role TO {role}; \
             ALTER TABLE t OWNER TO {role}; REVOKE ALL ON t FROM {role}; \
             GRANT SELECT, INSERT ON t TO {role}",
            case.subscriber.name
        ));
        assert!(case.tool.subscriber.contains("user=postgres"), "{}", case.tool.subscriber);
        case.tool.subscriber =
            case.tool.subscriber.replace("user=postgres", &format!("user={role}"));
        fill(&case.publisher, "t");
        case.publish("FOR TABLE t");
        case.run().expect(0, &["event=\"indexes_in_place\"", "permission denied"]);
        case.expect_equal(&["t"]);
    });
    on_versions(&VERSIONS, |case| {
        case.both(ddl);
        fill(&case.publisher, "t");
        case.publish("FOR TABLE t");
        case.subscriber.sql(&format!(
            "ALTER DATABASE {0} SET temp_file_limit = 64; \
             ALTER DATABASE {0} SET maintenance_work_mem = '1MB'",
            case.subscriber.name
        ));
        let schema_before = schema(&case.subscriber);
        case.run().expect(0, &["event=\"indexes_in_place\"", "temp_file_limit"]);
        expect_schema(&case.subscriber, &schema_before);
        case.expect_equal(&["t"]);
    });
}
