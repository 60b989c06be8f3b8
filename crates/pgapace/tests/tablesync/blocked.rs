//! Tables that cannot be copied are blocked; the others stream on.

use serde_json::Value;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

pub(super) const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

pub(super) fn with_state(state: &str, names: &str) -> String {
    format!(
        "SELECT coalesce(string_agg(table_name, ' ' ORDER BY table_name), '') = '{names}' \
         FROM pgapace.relation WHERE state = '{state}'"
    )
}

/// The status of a table.
pub(super) fn shown(case: &Case, name: &str) -> Value {
    let status = case.tool.finish("status", &["--json"]);
    let statuses: Value = serde_json::from_str(&status.stdout).unwrap_or_default();
    let tables = statuses[0]["tables"].as_array().cloned().unwrap_or_default();
    tables.into_iter().find(|table| table["name"] == name).unwrap_or_default()
}

/// Why a table is blocked. It may be copied again for a moment.
pub(super) fn reason(case: &Case, name: &str) -> String {
    let mut shown = shown(case, name);
    let blocked = wait_until(PATIENCE, "the table to be blocked", || {
        let is_blocked = shown["state"] == "blocked";
        if !is_blocked {
            shown = self::shown(case, name);
        }
        Ok(is_blocked)
    });
    must(blocked);
    assert!(shown["blocked_since"].is_string(), "{shown:#}");
    shown["reason"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn tables_that_cannot_be_copied_are_blocked() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        case.subscriber.sql(
            "CREATE TABLE filled (id int PRIMARY KEY); INSERT INTO filled VALUES (7); \
             CREATE TABLE unfit (other int PRIMARY KEY); \
             CREATE TABLE wrong (id int PRIMARY KEY CHECK (id <> 42))",
        );
        case.publisher.sql(
            "CREATE TABLE absent (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); \
             CREATE TABLE unfit (id int PRIMARY KEY); CREATE TABLE wrong (id int PRIMARY KEY); \
             INSERT INTO wrong SELECT generate_series(1, 100)",
        );
        let blocked = with_state("blocked", "absent filled unfit wrong");
        wait_for(&case, &mut process, "the tables to be blocked", &blocked);
        for (table, named) in
            [("absent", "lacks"), ("filled", "not empty"), ("unfit", "lacks"), ("wrong", "line 42")]
        {
            let reason = reason(&case, table);
            assert!(reason.contains(named), "{table}: {reason}");
        }
        assert!(process.events("table_blocked") > 0, "{}", process.log());
        assert!(case.tool.finish("status", &[]).stdout.contains("public.filled: blocked since"));

        // The other tables stream on, and no changes are stored for the blocked ones.
        let changes = "INSERT INTO first SELECT count(*) FROM first; \
             INSERT INTO absent SELECT count(*) FROM absent; \
             INSERT INTO filled SELECT count(*) FROM filled; \
             INSERT INTO unfit SELECT count(*) FROM unfit; UPDATE wrong SET id = id + 1000 WHERE id = 3";
        case.publisher.sql(changes);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM filled"), "1");
        let counted: u32 = must(case.statistic("tables_blocked").parse());
        assert!(counted >= 4, "{counted}");

        // A periodic check finds that the cause was removed.
        case.subscriber.sql("DELETE FROM filled; CREATE TABLE absent (id int PRIMARY KEY)");
        let ready = with_state("ready", "absent filled first");
        wait_for(&case, &mut process, "the repaired tables to be copied", &ready);
        assert!(process.events("table_unblocked") > 0, "{}", process.log());
        case.publisher.sql(changes);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "absent", "filled"]);
        case.stop(process);

        // `--until` is not reached while other tables are blocked.
        case.run().expect(6, &["public.unfit", "public.wrong"]);
        case.subscriber.sql(
            "ALTER TABLE unfit RENAME other TO id; ALTER TABLE wrong DROP CONSTRAINT wrong_id_check",
        );
        case.publisher.sql(changes);
        case.run_until_current();
        case.expect_equal(&["first", "absent", "filled", "unfit", "wrong"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// With `--if-not-empty rebase`, an added table holds a row that the subscriber cannot store.
#[test]
fn an_added_table_that_cannot_be_rebased_is_blocked() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.publisher.sql("CREATE TYPE mood AS ENUM ('good', 'bad')");
        case.subscriber.sql("CREATE TYPE mood AS ENUM ('good')");
        case.tool.args =
            ["--refresh-interval=1", "--if-not-empty=rebase"].map(str::to_owned).into();
        let mut process = case.start();
        let ddl = "CREATE TABLE wrong (id int PRIMARY KEY, m mood); INSERT INTO wrong VALUES (1, 'good'); \
                   CREATE TABLE fits (id int PRIMARY KEY); INSERT INTO fits VALUES (1)";
        case.subscriber.sql(ddl);
        case.publisher.sql(&format!("{ddl}, (2); INSERT INTO wrong VALUES (2, 'bad')"));
        wait_for(&case, &mut process, "the table to be blocked", &with_state("blocked", "wrong"));
        assert!(reason(&case, "wrong").contains("mood"), "{}", reason(&case, "wrong"));
        wait_for(&case, &mut process, "the other one", &with_state("ready", "first fits"));
        case.publisher.sql("INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "fits"]);
        case.subscriber.sql("ALTER TYPE mood ADD VALUE 'bad'");
        let ready = with_state("ready", "first fits wrong");
        wait_for(&case, &mut process, "the table to be rebased", &ready);
        case.expect_equal(&["wrong"]);
        case.stop(process);
    });
}

/// Another session has the replication origin of the worker that would copy an added table.
#[test]
fn an_added_table_whose_copy_cannot_be_tagged_is_blocked() {
    on_versions(&[(18, 18)], |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        let other = holder(
            &case,
            "SELECT pg_replication_origin_session_setup(n) FROM ( \
               SELECT 'pgapace_' || d.oid || '_' || s.id || '_copy0' AS n, \
                 pg_replication_origin_create('pgapace_' || d.oid || '_' || s.id || '_copy0') \
               FROM pgapace.subscription s, pg_database d \
               WHERE d.datname = current_database() OFFSET 0) o",
        );
        let args = ["--refresh-interval=1", "--origin=none", "--workers=1"];
        case.tool.args = args.map(str::to_owned).into();
        let mut process = case.start();
        case.both("CREATE TABLE later (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO later VALUES (1)");
        wait_for(&case, &mut process, "the table to be blocked", &with_state("blocked", "later"));
        assert!(reason(&case, "later").contains("replication origin"), "{}", process.log());
        case.publisher.sql("INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        drop(other);
        wait_for(&case, &mut process, "the copy", &with_state("ready", "first later"));
        case.expect_equal(&["first", "later"]);
        case.stop(process);
    });
}

#[test]
fn a_lock_on_an_added_table_delays_no_other_table() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        case.subscriber.sql(
            "CREATE TABLE locked (id int PRIMARY KEY); INSERT INTO locked VALUES (7); DELETE FROM locked",
        );
        let mut locking = holder(&case, "BEGIN; LOCK TABLE locked");
        let mut process = case.start();
        let restarts = case.statistic("restarts");
        case.publisher.sql(
            "CREATE TABLE absent (id int PRIMARY KEY); CREATE TABLE locked (id int PRIMARY KEY)",
        );
        wait_for(&case, &mut process, "the other new table", &with_state("blocked", "absent"));
        // Its first change does not wait for the lock either.
        case.publisher.sql("INSERT INTO locked VALUES (1); INSERT INTO first VALUES (1)");
        let first = "SELECT count(*) = 1 FROM first";
        wait_for(&case, &mut process, "the other table to continue", first);
        wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql("INSERT INTO locked VALUES (2); INSERT INTO first VALUES (2)");
        let second = "SELECT count(*) = 2 FROM first";
        wait_for(&case, &mut process, "the other table to continue", second);
        must(locking.batch_execute("COMMIT"));
        wait_for(
            &case,
            &mut process,
            "the table to be ready",
            &with_state("ready", "first locked"),
        );
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "locked"]);
        assert_eq!(case.statistic("restarts"), restarts, "{}", process.log());
        case.stop(process);
    });
}
