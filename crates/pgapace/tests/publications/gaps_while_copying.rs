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
