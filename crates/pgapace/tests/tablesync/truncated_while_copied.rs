//! Tables that are truncated on the publisher again and again while they are copied.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use testbed::postgres::Client;
use testbed::program::events;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

const VERSIONS: [(u16, u16); 3] = [(14, 14), (18, 18), (15, 18)];
const COLUMNS: &str = "(id int PRIMARY KEY, v text, n int DEFAULT 0)";

/// Runs `body` while another session of the publisher truncates table `t` and fills it with so many rows.
fn while_truncated<T>(case: &Case, rows: u32, body: impl FnOnce() -> T) -> T {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
    let mut client = case.publisher.connect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                truncate_and_fill(&mut client, rows, rounds.fetch_add(1, Ordering::Relaxed));
            }
        });
        let done = body();
        stop.store(true, Ordering::Relaxed);
        assert!(rounds.load(Ordering::Relaxed) > 5, "too few rounds");
        done
    })
}

fn truncate_and_fill(client: &mut Client, rows: u32, round: u32) {
    let fill = |rows: u32| {
        format!(
            "INSERT INTO t SELECT i, md5((i * {round})::text) FROM generate_series(1, {rows}) i"
        )
    };
    let changes = "UPDATE t SET n = n + 1 WHERE id % 10 = 0; DELETE FROM t WHERE id % 7 = 0";
    // Every third TRUNCATE is in the middle of a transaction.
    if round.is_multiple_of(3) {
        must(
            client.batch_execute(&format!("BEGIN; {changes}; TRUNCATE t; {}; COMMIT", fill(rows))),
        );
    } else {
        must(client.batch_execute("TRUNCATE t"));
        must(client.batch_execute(&fill(rows)));
    }
    must(client.batch_execute(changes));
    // The pace of the load: the table keeps its files for about so long.
    std::thread::sleep(Duration::from_millis(20));
}

fn expect_complete(case: &Case, table: &str) {
    let state = "SELECT string_agg(table_name || ' ' || state, ', ') FROM pgapace.relation \
                 WHERE NOT (state = 'ready' AND stale_lsn IS NULL)";
    assert_eq!(case.subscriber.rows(state), ["∅"]);
    case.expect_equal(&["other", table]);
}

#[test]
fn a_table_that_is_truncated_all_the_time_holds_up_no_first_start() {
    on_versions(&VERSIONS, |mut case| {
        // Several parts of a table that is large by this measure.
        case.tool.args = vec!["--copy-split-size=1".to_owned()];
        case.both(&format!("CREATE TABLE other {COLUMNS}; CREATE TABLE t {COLUMNS}"));
        case.publisher.sql(
            "INSERT INTO other SELECT generate_series(1, 1000); \
             INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 60000) i",
        );
        case.publish("FOR ALL TABLES");
        let mut process = while_truncated(&case, 2_000, || case.start());
        case.wait_until_applied(&mut process);
        expect_complete(&case, "t");
        case.stop(process);
    });
}

#[test]
fn a_table_that_is_truncated_all_the_time_is_added() {
    on_versions(&VERSIONS, |case| {
        case.replicate(&format!("CREATE TABLE other {COLUMNS}"));
        let mut process = case.start();
        case.both(&format!("CREATE TABLE t {COLUMNS}"));
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 20000)");
        while_truncated(&case, 2_000, || {
            let ready = "SELECT count(*) = 2 FROM pgapace.relation WHERE state = 'ready'";
            wait_for(&case, &mut process, "the added table", ready);
        });
        case.wait_until_applied(&mut process);
        expect_complete(&case, "t");
        assert_eq!(process.events("table_blocked"), 0, "{}", process.log());
        case.stop(process);
    });
}

/// Copies table `t`, whose first copies wait for it on the subscriber. Meanwhile the publisher executes one of these. Returns
/// the log.
fn change_under_the_snapshot(case: &Case, sql: &[&str]) -> String {
    let mut locked = holder(case, "BEGIN; LOCK TABLE t IN SHARE MODE");
    let mut process = case.tool.start(case.log_file("run"));
    for sql in sql {
        wait_for_a_waiter(case, &mut process, "relation");
        case.publisher.sql(sql);
        // The next copy waits for the next lock, which waits for this copy.
        let mut next = case.subscriber.connect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                must(next.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE"));
                next
            });
            let queued = "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted \
                          AND relation = 't'::regclass";
            wait_for(case, &mut process, "the next lock to be queued", queued);
            must(locked.batch_execute("COMMIT"));
            locked = next.join().expect("the lock");
        });
    }
    must(locked.batch_execute("COMMIT"));
    must(wait_for_event(&mut process, "streaming", PATIENCE));
    case.wait_until_applied(&mut process);
    case.stop(process)
}

const TRUNCATE: &str =
    "INSERT INTO t VALUES (7, 'removed'); TRUNCATE t; INSERT INTO t VALUES (1, 'new')";
const REWRITE: &str =
    "ALTER TABLE t ALTER n TYPE bigint; UPDATE t SET n = n + 1; ALTER TABLE t ALTER n TYPE int";

/// Only a TRUNCATE that the publisher sends is in the place of a copy.
#[test]
fn a_rewritten_table_is_copied_again_unless_a_truncate_is_sent() {
    let all = "insert, update, delete, truncate";
    for (publish, changes, copied) in [
        (all, &[TRUNCATE, TRUNCATE], false),
        (all, &[REWRITE, TRUNCATE], false),
        (all, &[TRUNCATE, REWRITE], true),
        (all, &[REWRITE, &format!("{TRUNCATE}; {REWRITE}")], false),
        ("insert, update, delete", &[TRUNCATE, TRUNCATE], true),
    ] {
        on_versions(&VERSIONS, |case| {
            case.both(&format!("CREATE TABLE t {COLUMNS}"));
            case.publisher.sql("INSERT INTO t SELECT generate_series(1, 5)");
            case.publish(&format!("FOR TABLE t WITH (publish = '{publish}')"));
            let log = change_under_the_snapshot(&case, changes);
            let what = format!("{publish}, {changes:?}:\n{log}");
            assert_eq!(events(&log, "truncate_replaces_copy") == 0, copied, "{what}");
            assert_eq!(events(&log, "table_copied") == 1, copied, "{what}");
            case.expect_equal(&["t"]);
            let missing = case.statistic("update_missing || '|' || delete_missing");
            assert_eq!(missing, "0|0", "{what}");
        });
    }
}
