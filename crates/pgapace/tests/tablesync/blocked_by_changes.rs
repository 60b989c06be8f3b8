//! Tables a change of which cannot be applied are blocked with `--on-table-error block`; the others stream on.

use super::blocked::{BOTH, reason, shown, with_state};
use crate::support::{must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

#[test]
fn an_apply_error_blocks_its_table_with_on_table_error_block() {
    on_versions(&BOTH, |mut case| {
        case.replicate(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); \
             CREATE TABLE c (id int PRIMARY KEY)",
        );
        case.subscriber.sql("ALTER TABLE a ADD CHECK (id <> 42); DROP TABLE c");
        case.publisher.sql("BEGIN; INSERT INTO a VALUES (42); INSERT INTO b VALUES (1); COMMIT");
        case.run().expect(9, &["public.a"]);

        case.tool.args = vec!["--on-table-error=block".to_owned()];
        let mut process = case.start();
        case.publisher
            .sql("INSERT INTO a VALUES (43); INSERT INTO c VALUES (1); INSERT INTO b VALUES (2)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["b"]);
        assert!(reason(&case, "a").contains("23514"));
        assert!(reason(&case, "c").contains("no table public.c"));
        for table in ["a", "c"] {
            let shown = shown(&case, table);
            assert!(shown["stale_lsn"].is_string(), "{shown:#}");
            let reason = reason(&case, table);
            assert!(reason.contains(&format!("pgapace resync 'public.{table}'")), "{reason}");
            assert!(!reason.contains("start pgapace") && !reason.contains("skip"), "{reason}");
        }

        // The table lacks changes, so it stays blocked until a resync.
        case.subscriber
            .sql("ALTER TABLE a DROP CONSTRAINT a_id_check; CREATE TABLE c (id int PRIMARY KEY)");
        let log = case.stop(process);
        let of = format!(" subscription=\"{}\" ", case.tool.name);
        for event in ["table_apply_blocked", "stopped"] {
            let name = format!("event=\"{event}\"");
            let line = log.lines().find(|line| line.contains(&name)).unwrap_or_default();
            assert_eq!(line.matches(&of).count(), 1, "{event}: {log}");
        }
        case.run().expect(6, &["public.a", "public.c"]);
        let mut process = case.start();
        case.tool.finish("resync", &["a", "c"]).expect(0, &[]);
        wait_for(
            &case,
            &mut process,
            "the tables to be ready again",
            &with_state("ready", "a b c"),
        );
        case.publisher
            .sql("INSERT INTO a VALUES (44); INSERT INTO c VALUES (2); INSERT INTO b VALUES (3)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b", "c"]);
        let left = "SELECT count(*) FROM pgapace.relation WHERE stale_lsn IS NOT NULL OR reason IS NOT NULL";
        assert_eq!(case.subscriber.value(left), "0");
        case.stop(process);
    });
}

/// Errors of a table that catches up, and of a table that is truncated together with others.
#[test]
fn tables_are_blocked_while_catching_up_and_in_a_truncate_of_several() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)");
        case.both("CREATE TABLE late (id int PRIMARY KEY)");
        case.subscriber.sql("ALTER TABLE late ADD CHECK (id <> 42)");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        case.publisher.sql("INSERT INTO late VALUES (1)");
        case.tool.args = vec!["--on-table-error=block".to_owned()];
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql(
            "INSERT INTO late VALUES (42); INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)",
        );
        must(copying.batch_execute("COMMIT"));
        wait_for(&case, &mut process, "the table to be blocked", &with_state("blocked", "late"));
        assert!(reason(&case, "late").contains("23514"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b"]);
        let left = "SELECT count(*) FROM pgapace.progress WHERE subscription < 0";
        assert_eq!(case.subscriber.value(left), "0");
        // One TRUNCATE of three tables, of which one is blocked.
        case.publisher
            .sql("TRUNCATE a, late, b; INSERT INTO a VALUES (3); INSERT INTO late VALUES (3)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b"]);
        case.subscriber.sql("ALTER TABLE late DROP CONSTRAINT late_id_check");
        case.tool.finish("resync", &["late"]).expect(0, &[]);
        wait_for(
            &case,
            &mut process,
            "the table to be ready again",
            &with_state("ready", "a b late"),
        );
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b", "late"]);
        case.stop(process);
    });
}

/// Errors of a TRUNCATE of several tables, and of a COMMIT.
#[test]
fn an_error_at_truncate_or_commit_blocks_the_table_that_it_names() {
    on_versions(&BOTH, |mut case| {
        case.replicate(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); \
             CREATE TABLE c (id int PRIMARY KEY)",
        );
        case.tool.args = vec!["--on-table-error=block".to_owned()];
        case.subscriber.sql("CREATE TABLE refers (id int REFERENCES a)");
        case.publisher.sql("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)");
        case.publisher.sql("TRUNCATE a, b; INSERT INTO b VALUES (2); INSERT INTO c VALUES (2)");
        case.run().expect(6, &["public.a"]);
        assert!(reason(&case, "a").contains("foreign key"));
        case.expect_equal(&["b", "c"]);
        case.subscriber.sql("DROP TABLE refers");
        case.tool.finish("resync", &["a"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["a", "b", "c"]);

        case.subscriber.sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               RAISE EXCEPTION 'refused' USING SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME; END $$; \
             CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON b DEFERRABLE INITIALLY DEFERRED \
               FOR EACH ROW EXECUTE FUNCTION refuse(); \
             ALTER TABLE b ENABLE ALWAYS TRIGGER refuse",
        );
        case.publisher
            .sql("INSERT INTO a VALUES (3); INSERT INTO b VALUES (3); INSERT INTO c VALUES (3)");
        case.run().expect(6, &["public.b"]);
        assert!(reason(&case, "b").contains("refused"));
        case.expect_equal(&["a", "c"]);
        case.subscriber.sql("DROP TRIGGER refuse ON b");
        case.tool.finish("resync", &["b"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["a", "b", "c"]);
    });
}
