//! Gaps in what is published, of a table that is copied meanwhile.

use testbed::wait_until;

use super::gaps::{ALL, BLOCKED, replicate, state};
use crate::support::{PATIENCE, must, on_versions};
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
