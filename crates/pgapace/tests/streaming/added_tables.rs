//! Open transactions that change a table while it is copied.

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::parallel::{begin, on_publishers, pages, rows, stream_session, wait_for_rows};
use super::{each, expect_streamed};
use crate::support::{Case, PATIENCE, must};

/// When the copy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    BeforeTheCommit,
    AfterTheCommit,
}

/// Table `t` is applied. Table `late` exists with rows and will be published; its copy waits until
/// the returned session ends.
fn late(case: &Case) -> Client {
    let table = "(id int PRIMARY KEY, v text)";
    case.both(&format!("CREATE TABLE t {table}; CREATE TABLE late {table}"));
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.publisher.sql("INSERT INTO late SELECT i, 'old' FROM generate_series(1, 1000) i");
    let mut copying = case.subscriber.connect();
    each(&mut copying, &["BEGIN", "LOCK TABLE late IN SHARE MODE"]);
    copying
}

const PUBLISH: &str = "ALTER PUBLICATION pub ADD TABLE late";

fn wait_for(case: &Case, process: &mut Process, what: &str, sql: &str) {
    let waited = wait_until(PATIENCE, what, || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(case.subscriber.value(sql) == "t")
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
}

fn wait_for_the_copy(case: &Case, process: &mut Process) {
    let waits = "SELECT count(*) > 0 FROM pg_locks \
                 WHERE NOT granted AND relation = 'late'::regclass";
    wait_for(case, process, "the copy to wait for the lock", waits);
}

fn wait_for_the_join(case: &Case, process: &mut Process) {
    let joined = "SELECT count(*) = 1 FROM pgapace.relation \
                  WHERE table_name = 'late' AND sync_lsn IS NOT NULL AND catch_up IS NULL";
    wait_for(case, process, "the table to be ready", joined);
}

fn wait_for_small(case: &Case, process: &mut Process, id: i32) {
    case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, 'small')"));
    let applied = format!("SELECT count(*) = 1 FROM t WHERE id = {id}");
    wait_for(case, process, "what others commit", &applied);
}

fn wait_until_given_up(case: &Case, process: &mut Process) {
    let gone = wait_until(PATIENCE, "the stream to be rolled back", || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(stream_session(case) == "0")
    });
    gone.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
}

fn expect_nothing_lost(case: &Case, process: Process) {
    case.expect_equal(&["t", "late"]);
    let log = case.stop(process);
    assert!(!log.contains("retry_in_ms"), "{log}");
    assert_eq!(case.statistic("update_missing + delete_missing"), "0");
    expect_streamed(case);
}

/// Changes of 100 rows of `late`.
fn changes(from: u32) -> String {
    let to = from + 99;
    format!(
        "UPDATE late SET v = v || '+' WHERE id BETWEEN {from} AND {to}; \
         DELETE FROM late WHERE id = {to}; INSERT INTO late VALUES ({from}0000, 'new')"
    )
}

/// Changes rows of `late` starting at `from`, with rows of `t` before and after. Other changes are
/// in a subtransaction that is rolled back.
fn change_both(open: &mut Client, from: u32) {
    let more = from * 1000;
    each(
        open,
        &[
            &changes(from),
            &rows(more, 1000),
            "SAVEPOINT s",
            &changes(from + 100),
            &rows(more + 5000, 1000),
            "ROLLBACK TO s",
            &rows(more + 5000, 1000),
        ],
    );
}

/// One stream is open when the table is added, and the copy's snapshot waits for it. Another begins
/// during the copy.
#[test]
fn a_table_is_added_while_transactions_that_change_it_are_open() {
    for ends in [Ends::BeforeTheCommit, Ends::AfterTheCommit] {
        on_publishers(|case| {
            let mut copying = late(&case);
            let mut process = case.start();
            let mut before = begin(&case, &mut process, &[&rows(1, 1000)]);
            case.publisher.sql(PUBLISH);
            case.publisher.sql("UPDATE late SET v = 'joins' WHERE id = 1");
            wait_until_given_up(&case, &mut process);
            change_both(&mut before, 100);
            wait_for_small(&case, &mut process, -1);
            each(&mut before, &["COMMIT"]);
            wait_for_the_copy(&case, &mut process);

            let mut open = case.publisher.connect();
            let there = pages(&case);
            each(&mut open, &["BEGIN", &rows(20_000, 1000)]);
            wait_for_rows(&case, &mut process, there + 10);
            wait_for_small(&case, &mut process, -2);
            change_both(&mut open, 300);
            wait_until_given_up(&case, &mut process);
            wait_for_small(&case, &mut process, -3);
            assert_eq!(case.subscriber.value("SELECT count(*) FROM late"), "0");

            if ends == Ends::BeforeTheCommit {
                each(&mut copying, &["COMMIT"]);
                wait_for_the_join(&case, &mut process);
            }
            case.publisher.sql("UPDATE late SET v = v || '!' WHERE id BETWEEN 90 AND 150");
            each(&mut open, &[&changes(500), &rows(1_100_000, 1000), "COMMIT"]);
            case.publisher.sql("UPDATE late SET v = v || '?' WHERE id % 3 = 0");
            if ends == Ends::AfterTheCommit {
                wait_for_small(&case, &mut process, -4);
                assert_eq!(case.subscriber.value("SELECT count(*) FROM late"), "0");
                each(&mut copying, &["COMMIT"]);
            }
            case.wait_until_applied(&mut process);
            expect_nothing_lost(&case, process);
        });
    }
}

/// The first change of a table is in an open transaction: the table is added when it commits.
#[test]
fn a_table_first_changed_by_a_stream_is_added_at_its_commit() {
    on_publishers(|case| {
        let mut copying = late(&case);
        let mut process = case.start();
        case.publisher.sql(PUBLISH);
        let mut open = begin(&case, &mut process, &[&rows(1, 1000)]);
        each(&mut open, &["UPDATE late SET v = 'open' WHERE id <= 500", &rows(10_000, 1000)]);
        wait_until_given_up(&case, &mut process);
        wait_for_small(&case, &mut process, -1);
        each(&mut open, &["DELETE FROM late WHERE id = 1", "COMMIT"]);
        wait_for_the_copy(&case, &mut process);
        wait_for_small(&case, &mut process, -2);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM late"), "0");
        // Its changes of other tables are applied.
        let there = "SELECT count(*) = 2002 FROM t";
        wait_for(&case, &mut process, "the rest of the transaction", there);
        must(copying.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        wait_for_the_join(&case, &mut process);
        expect_nothing_lost(&case, process);
    });
}

/// The first change of the new table comes with a stream.
#[test]
fn a_table_recreated_before_a_stream_is_stale() {
    on_publishers(|case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t VALUES (1, 'old')");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let mut process = case.start();
        case.publisher.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql(&rows(2, 2000));
        let blocked = "SELECT state = 'blocked' AND stale_lsn IS NOT NULL FROM pgapace.relation";
        wait_for(&case, &mut process, "the table to be blocked", blocked);
        assert_eq!(case.subscriber.rows("SELECT * FROM t"), ["1|old"]);
        case.stop(process);
        expect_streamed(&case);
    });
}
