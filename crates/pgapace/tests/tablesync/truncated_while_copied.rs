//! Tables that are truncated on the publisher again and again while they are copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use testbed::postgres::Client;
use testbed::program::{Process, events};

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event, wait_while_running};
use crate::tablesync::first_copy::start_into_lock;
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

const VERSIONS: [(u16, u16); 3] = [(14, 14), (18, 18), (15, 18)];
const COLUMNS: &str = "(id int PRIMARY KEY, v text, n int DEFAULT 0)";

/// Runs `body` while another session of the publisher makes changes, which are told their number.
fn while_changed<T>(
    case: &Case,
    change: impl Fn(&mut Client, u32) + Sync,
    body: impl FnOnce() -> T,
) -> T {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    let mut client = case.publisher.connect();
    std::thread::scope(|scope| {
        // The thread also ends if the body panics.
        let _stop = Stop(&stop);
        scope.spawn(|| {
            for round in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                change(&mut client, round);
            }
        });
        body()
    })
}

/// Starts a first copy, and goes on with it while there are such changes, until it streams. The slot is created before:
/// it is refused while tables change all the time.
fn first_copy_while_changed(case: &Case, change: impl Fn(&mut Client, u32) + Sync) -> Process {
    let mut locked = holder(case, "BEGIN; LOCK TABLE t IN SHARE MODE");
    let mut process = start_into_lock(case);
    while_changed(case, change, || {
        let files = "SELECT pg_relation_filenode('t')";
        let before = case.publisher.value(files);
        let other = || Ok(case.publisher.value(files) != before);
        must(wait_while_running(&mut process, "other files of the table", PATIENCE, other));
        must(locked.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        process
    })
}

fn truncate_and_fill(client: &mut Client, round: u32) {
    const ROWS: u32 = 2_000;
    let fill = |rows: u32| {
        format!(
            "INSERT INTO t SELECT i, md5((i * {round})::text) FROM generate_series(1, {rows}) i"
        )
    };
    let changes = "UPDATE t SET n = n + 1 WHERE id % 10 = 0; DELETE FROM t WHERE id % 7 = 0";
    // Every third TRUNCATE is in the middle of a transaction.
    if round.is_multiple_of(3) {
        must(
            client.batch_execute(&format!("BEGIN; {changes}; TRUNCATE t; {}; COMMIT", fill(ROWS))),
        );
    } else {
        must(client.batch_execute("TRUNCATE t"));
        must(client.batch_execute(&fill(ROWS)));
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
        let mut process = first_copy_while_changed(&case, truncate_and_fill);
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
        while_changed(&case, truncate_and_fill, || {
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
        sql.split('\n').for_each(|sql| case.publisher.sql(sql));
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

/// TRUNCATE of a partition alone is not sent.
#[test]
fn a_partitioned_table_is_copied_again_unless_all_of_it_is_truncated() {
    let whole = "TRUNCATE t; INSERT INTO t VALUES (1, 'new'), (101, 'new')";
    for (changes, copied) in [([whole, whole], false), (["TRUNCATE low", "TRUNCATE high"], true)] {
        on_versions(&VERSIONS, |case| {
            case.publisher.sql(&format!(
                "CREATE TABLE t {COLUMNS} PARTITION BY RANGE (id); \
                 CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100); \
                 CREATE TABLE high PARTITION OF t FOR VALUES FROM (100) TO (200); \
                 INSERT INTO t SELECT generate_series(1, 199)"
            ));
            case.subscriber.sql(&format!("CREATE TABLE t {COLUMNS}"));
            case.publish("FOR TABLE t WITH (publish_via_partition_root)");
            let log = change_under_the_snapshot(&case, &changes);
            assert_eq!(events(&log, "truncate_replaces_copy") == 0, copied, "{log}");
            case.expect_equal(&["t"]);
        });
    }
}

/// The transaction is prepared on the subscriber, too, or applied when it commits.
#[test]
fn a_prepared_transaction_that_truncates_is_applied() {
    let prepared = "BEGIN; INSERT INTO t VALUES (7, 'removed'); TRUNCATE t; INSERT INTO t VALUES (1, 'new'); \
                    PREPARE TRANSACTION 'truncates while copied'\n\
                    COMMIT PREPARED 'truncates while copied'\n\
                    INSERT INTO t VALUES (2, 'newer')";
    for two_phase in ["--two-phase", "--two-phase=false"] {
        on_versions(&[(15, 15), (18, 18)], |mut case| {
            case.tool.args.push(two_phase.to_owned());
            if two_phase == "--two-phase" {
                case.tool.args.extend(["--two-phase-hold", "0"].map(str::to_owned));
            }
            case.both(&format!("CREATE TABLE t {COLUMNS}"));
            case.publisher.sql("INSERT INTO t SELECT generate_series(1, 5)");
            case.publish("FOR TABLE t");
            let log = change_under_the_snapshot(&case, &[prepared, prepared]);
            assert_eq!(events(&log, "truncate_replaces_copy"), 1, "{log}");
            case.expect_equal(&["t"]);
        });
    }
}

/// It is rewritten under each of the ten snapshots.
#[test]
fn a_table_that_is_rewritten_all_the_time_holds_up_no_first_start() {
    on_versions(&VERSIONS, |case| {
        case.both(&format!("CREATE TABLE other {COLUMNS}; CREATE TABLE t {COLUMNS}"));
        // With rows in both, they would be read together before the subscriber's tables are locked.
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 5)");
        case.publish("FOR ALL TABLES");
        let log = change_under_the_snapshot(&case, &[REWRITE; 10]);
        assert_eq!(events(&log, "table_added_later"), 1, "{log}");
        case.publisher.sql("INSERT INTO other VALUES (1); UPDATE t SET n = 0 WHERE id = 1");
        case.run_until_current();
        expect_complete(&case, "t");
    });
}
