//! Gaps in what is published, of a table that is copied meanwhile.

use testbed::postgres::Client;
use testbed::program::{Process, events};
use testbed::wait_until;

use super::gaps::{ALL, BLOCKED, one_by_one, replicate, state};
use crate::support::{Case, PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// During the copy the table is removed and added again: its snapshot does not contain the changes
/// of that time.
#[test]
fn a_gap_during_the_copy_makes_the_table_stale() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO late SELECT i, 0 FROM generate_series(1, 10) i");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql("ALTER PUBLICATION pub DROP TABLE late");
        case.publisher.sql("UPDATE late SET v = 1");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
        must(copying.batch_execute("COMMIT"));
        let copied = "SELECT count(*) = 1 FROM pgapace.relation \
                      WHERE table_name = 'late' AND state IN ('catchup', 'ready')";
        wait_for(&case, &mut process, "the copy", copied);
        must(process.kill9());
        case.run().expect(BLOCKED, &["public.late"]);
        assert_eq!(state(&case, "late"), "blocked true");
    });
}

/// The snapshot of the copy is from before the gap. A run that finds a gap stops its copies, but one may
/// end right before that: the test sets the mark instead.
#[test]
fn a_gap_found_during_a_copy_is_not_forgotten() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int)");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        case.publisher.sql("INSERT INTO late VALUES (1, 0); ALTER PUBLICATION pub ADD TABLE late");
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql("INSERT INTO late VALUES (2, 0)");
        let now = case.publisher.value("SELECT pg_current_wal_lsn()");
        case.subscriber.sql(&format!(
            "UPDATE pgapace.relation SET stale_lsn = '{now}', stale_through = '{now}', \
               stale_reason = 'a gap' WHERE table_name = 'late' AND state = 'datasync'"
        ));
        let becomes = |expected: &str| {
            must(wait_until(PATIENCE, expected, || Ok(state(&case, "late") == expected)));
        };
        must(copying.batch_execute("COMMIT"));
        becomes("ready true");
        case.tool.finish("resync", &["late"]).expect(0, &[]);
        becomes("ready false");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "other", "late"]);
        case.stop(process);
    });
}

/// The copy of one table is complete, and another table takes its name while the copy of a third goes on. What is
/// deferred under the name is not of the table that was copied.
#[test]
fn a_table_replaced_before_its_deferred_changes_is_stale() {
    on_versions(&ALL, |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int); CREATE TABLE small (id int PRIMARY KEY, v int)");
        // Small tables would be copied in one transaction.
        case.publisher.sql(
            "INSERT INTO late SELECT i, 0 FROM generate_series(1, 20000) i; INSERT INTO small VALUES (1, 0), (2, 0)",
        );
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        let complete = "SELECT count(*) = 1 FROM pgapace.relation \
                        WHERE table_name = 'small' AND sync_lsn IS NOT NULL";
        wait_for(&case, &mut process, "the smaller copy", complete);
        case.publisher.sql("UPDATE small SET v = 1 WHERE id = 2");
        case.publisher.sql(
            "BEGIN; DROP TABLE small; CREATE TABLE small (id int PRIMARY KEY, v int); INSERT INTO small VALUES (3, 7); COMMIT",
        );
        case.publisher.sql("INSERT INTO small VALUES (1, 7); UPDATE small SET v = 8 WHERE id = 3");
        case.publisher.sql("INSERT INTO other VALUES (1, 1)");
        wait_for(&case, &mut process, "the other table", "SELECT count(*) = 1 FROM other");
        must(copying.batch_execute("COMMIT"));
        let blocked = || Ok(state(&case, "small") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        assert_eq!(
            case.subscriber.rows("SELECT id || ' ' || v FROM small ORDER BY id"),
            ["1 0", "2 1"]
        );
        case.wait_until_applied(&mut process);
        case.tool.finish("resync", &["small"]).expect(0, &[]);
        let ready = || Ok(state(&case, "small") == "ready false");
        must(wait_until(PATIENCE, "the table to be ready again", ready));
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["other", "late", "small"]);
    });
}

/// The key of an advisory lock for which updates of the subscriber's table wait.
const CHANGE: u32 = 7;

/// Starts a run that copies a table and waits with the first of its deferred changes, which is `change`. Returns the holder of
/// the lock for which it waits.
fn catches_up(case: &mut Case, change: &str) -> (Process, Client) {
    replicate(case);
    case.both("CREATE TABLE late (id int PRIMARY KEY, v int UNIQUE)");
    case.subscriber.sql(&format!(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS \
           $$BEGIN PERFORM pg_advisory_xact_lock({CHANGE}); RETURN new; END$$; \
         CREATE TRIGGER wait BEFORE UPDATE ON late FOR EACH ROW EXECUTE FUNCTION wait(); \
         ALTER TABLE late ENABLE ALWAYS TRIGGER wait"
    ));
    case.publisher.sql("INSERT INTO late SELECT i, i FROM generate_series(1, 10) i");
    let changing = holder(case, &format!("SELECT pg_advisory_lock({CHANGE})"));
    let mut copying = holder(case, "BEGIN; LOCK TABLE late IN SHARE MODE");
    let mut process = case.start();
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
    case.publisher.sql("INSERT INTO late VALUES (11, 11)");
    wait_for_a_waiter(case, &mut process, "relation");
    case.publisher.sql(change);
    case.publisher.sql("INSERT INTO other VALUES (100, 0)");
    let received = "SELECT count(*) = 1 FROM other WHERE id = 100";
    wait_for(case, &mut process, "what follows the change", received);
    must(copying.batch_execute("COMMIT"));
    wait_for_a_waiter(case, &mut process, "advisory");
    assert_eq!(state(case, "late"), "catchup false");
    (process, changing)
}

/// `pgapace resync` of a table that cannot catch up, because a row of the subscriber has the unique value.
#[test]
fn a_catch_up_that_fails_does_not_stop_a_requested_copy() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let (mut process, changing) = catches_up(&mut case, "UPDATE late SET v = 20 WHERE id = 2");
        case.subscriber.sql("INSERT INTO late VALUES (20, 20)");
        case.tool.finish("resync", &["late"]).expect(0, &[]);
        drop(changing);
        let copied = "SELECT state = 'ready' AND requested IS NULL FROM pgapace.relation \
                      WHERE table_name = 'late'";
        wait_for(&case, &mut process, "the requested copy", copied);
        assert_eq!(process.events("catch_up_skipped"), 1, "{}", process.log());
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["t", "other", "late"]);
    });
}

/// The same with a row whose DELETE was not published, so that pgapace itself requests the copy at its next start.
#[test]
fn a_catch_up_after_a_missed_change_does_not_stop_the_copy() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        let (mut process, changing) = catches_up(&mut case, "UPDATE late SET v = 20 WHERE id = 2");
        must(process.kill9());
        let unpublished = "ALTER PUBLICATION pub SET (publish = 'insert, update'); \
                           DELETE FROM late WHERE id = 1; \
                           ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate'); \
                           INSERT INTO late VALUES (30, 1)";
        one_by_one(&case, unpublished);
        drop(changing);
        let log = case.run_until_current();
        assert_eq!(events(&log, "catch_up_skipped"), 1, "{log}");
        assert_eq!(state(&case, "late"), "ready false");
        case.expect_equal(&["late"]);
    });
}
