//! Interruptions while tables catch up.

use testbed::Proxy;
use testbed::postgres::Client;
use testbed::program::Process;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{
    LOCK, changes, holder, late_tables, other_has, wait_for, wait_for_a_waiter,
};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// The snapshot and the time of a table's copy.
fn copy_of(case: &Case, table: &str) -> String {
    case.subscriber.value(&format!(
        "SELECT sync_lsn || ' ' || copied_at FROM pgapace.relation WHERE table_name = '{table}'"
    ))
}

/// Whether a table is copied and still catching up.
fn is_behind(case: &Case, table: &str) -> bool {
    let sql = format!(
        "SELECT sync_lsn IS NOT NULL AND catch_up IS NOT NULL FROM pgapace.relation \
         WHERE table_name = '{table}'"
    );
    case.subscriber.value(&sql) == "t"
}

/// Starts the program, with 20 changes. The first late table is copied. Applying the changes that
/// its copy lacks waits until the returned session ends.
pub(crate) fn start_behind(case: &Case) -> (Client, Process) {
    let applying = holder(case, &format!("SELECT pg_advisory_lock({LOCK})"));
    let mut copying = holder(case, "BEGIN; LOCK TABLE late IN SHARE MODE");
    let mut process = case.start();
    changes(case, 0..10);
    // The snapshot exists now.
    wait_for_a_waiter(case, &mut process, "relation");
    changes(case, 10..20);
    // They are deferred now. Changes that are received after the copy has caught up are not.
    other_has(case, &mut process, 20);
    must(copying.batch_execute("COMMIT"));
    wait_for_a_waiter(case, &mut process, "advisory");
    (applying, process)
}

/// Checks the result: no table was copied twice, and every change was applied exactly once.
pub(crate) fn expect_all(case: &Case, tables: &[&str]) {
    case.expect_equal(tables);
    assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    let left = "SELECT (SELECT count(*) FROM pgapace.relation WHERE catch_up IS NOT NULL) \
                  || ' ' || (SELECT count(*) FROM pgapace.progress WHERE subscription < 0)";
    assert_eq!(case.subscriber.value(left), "0 0");
}

/// The process is killed while a table lacks changes that the other tables have. When the copy of
/// another table ends in the next run, none of these changes has been received again. The table has
/// no deferred changes then, but it has not caught up.
#[test]
fn a_table_is_behind_until_the_changes_it_lacks_are_received_again() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        let proxy = must(Proxy::in_front_of(case.publisher.cluster));
        case.tool.publisher = proxy.conninfo(&case.publisher.name);
        let (applying, mut process) = start_behind(&case);
        changes(&case, 20..40);
        other_has(&case, &mut process, 40);
        assert!(is_behind(&case, "late"));
        let copied = copy_of(&case, "late");
        must(process.kill9());

        case.both("CREATE TABLE third (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO third SELECT i, 0 FROM generate_series(1, 1000) i");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        proxy.hold_streams(true);
        drop(applying);
        let mut process = case.start();
        let joined = "SELECT count(*) = 1 FROM pgapace.relation \
                      WHERE table_name = 'third' AND sync_lsn IS NOT NULL AND catch_up IS NULL";
        wait_for(&case, &mut process, "the other table to be copied", joined);
        assert!(is_behind(&case, "late"), "it is ready although it lacks changes");
        proxy.hold_streams(false);
        changes(&case, 40..60);
        case.publisher.sql("UPDATE third SET v = 1 WHERE id <= 10");
        case.wait_until_applied(&mut process);
        expect_all(&case, &["other", "late", "late_log", "third"]);
        assert_eq!(copy_of(&case, "late"), copied, "copied again");
        case.stop(process);
    });
}

/// Two tables are copied together. The process is killed repeatedly when one copy is complete and
/// the other is not.
#[test]
fn a_kill_between_two_copies_repeats_only_the_incomplete_copy() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        // Small tables would be copied in one transaction.
        case.publisher.sql("INSERT INTO late SELECT i, 0 FROM generate_series(1001, 20000) i");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        let mut copied = None;
        for round in 0..3 {
            let mut process = case.start();
            wait_for_a_waiter(&case, &mut process, "relation");
            let complete = "SELECT count(*) = 1 FROM pgapace.relation \
                            WHERE table_name = 'late_log' AND sync_lsn IS NOT NULL";
            wait_for(&case, &mut process, "the smaller copy", complete);
            changes(&case, round * 20..round * 20 + 20);
            other_has(&case, &mut process, round * 20 + 20);
            must(process.kill9());
            let copy = copy_of(&case, "late_log");
            assert_eq!(*copied.get_or_insert(copy.clone()), copy, "copied again");
        }
        must(copying.batch_execute("COMMIT"));
        let mut process = case.start();
        changes(&case, 60..80);
        case.wait_until_applied(&mut process);
        expect_all(&case, &["other", "late", "late_log"]);
        assert_eq!(copied, Some(copy_of(&case, "late_log")), "copied again");
        case.stop(process);
    });
}

/// A session of the subscriber locks a row that a table needs to catch up. Only few changes are
/// applied in each attempt, and the other tables do not wait for them.
#[test]
fn a_locked_row_of_a_table_that_catches_up_delays_no_other_table() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        let (applying, mut process) = start_behind(&case);
        let copied = copy_of(&case, "late");
        let mut locking = holder(&case, "BEGIN; SELECT FROM late WHERE id = 2 FOR UPDATE");
        drop(applying);
        wait_for_a_waiter(&case, &mut process, "transactionid");
        for round in 2..8 {
            changes(&case, round * 10..round * 10 + 10);
            other_has(&case, &mut process, round * 10 + 10);
        }
        assert!(is_behind(&case, "late"));
        must(locking.batch_execute("COMMIT"));
        changes(&case, 80..90);
        case.wait_until_applied(&mut process);
        expect_all(&case, &["other", "late", "late_log"]);
        assert_eq!(copy_of(&case, "late"), copied, "copied again");
        case.stop(process);
    });
}

/// After a kill, two tables lack changes that the other tables have. The changes of one fill the spool
/// before the other one has received everything that it has to wait for.
#[test]
fn a_table_that_waits_leaves_its_worker_to_another_when_the_spool_is_full() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        case.both("CREATE TABLE wide (id int PRIMARY KEY, v text)");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        let applying = holder(&case, &format!("SELECT pg_advisory_lock({LOCK})"));
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        // The first table applies its changes, and the other one waits for its worker.
        changes(&case, 0..1);
        let mut client = case.publisher.connect();
        for number in 0..200 {
            must(
                client.batch_execute(&format!(
                    "INSERT INTO wide VALUES ({number}, repeat('x', 20000))"
                )),
            );
        }
        changes(&case, 1..20);
        other_has(&case, &mut process, 20);
        must(copying.batch_execute("COMMIT"));
        wait_for_a_waiter(&case, &mut process, "advisory");
        assert!(is_behind(&case, "late") && is_behind(&case, "wide"));
        must(process.kill9());

        case.tool.args = vec!["--spool-limit=1".to_owned()];
        let mut process = case.start();
        must(wait_for_event(&mut process, "deferred_changes_full", PATIENCE));
        drop(applying);
        case.wait_until_applied(&mut process);
        changes(&case, 20..30);
        case.wait_until_applied(&mut process);
        expect_all(&case, &["other", "late", "late_log", "wide"]);
        case.stop(process);
    });
}

/// Rows of a table that catches up swap unique values. For a term its updates are moves, as after a swap
/// that an ordinary worker meets.
#[test]
fn a_unique_value_that_moves_while_a_table_catches_up() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int, u int UNIQUE)");
        case.both("CREATE TABLE late_log (id int)");
        case.publisher.sql("INSERT INTO late SELECT i, 0, i FROM generate_series(1, 1000) i");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        changes(&case, 0..1);
        // The snapshot exists now.
        wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql("BEGIN; UPDATE late SET u = -u; UPDATE late SET u = 1001 + u; COMMIT");
        changes(&case, 1..2);
        other_has(&case, &mut process, 2);
        must(copying.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "table_serialized", PATIENCE));
        case.wait_until_applied(&mut process);
        wait_for(
            &case,
            &mut process,
            "the table to catch up",
            "SELECT count(*) = 0 FROM pgapace.relation WHERE catch_up IS NOT NULL",
        );
        expect_all(&case, &["late", "other"]);
        case.stop(process);
    });
}
