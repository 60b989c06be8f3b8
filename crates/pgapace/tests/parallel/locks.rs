//! Locks on the subscriber, of pgapace and of users, delay apply but neither block nor end it
//! permanently.

use std::time::Duration;
use testbed::program::events;

use crate::support::{Case, PATIENCE, must, on_versions, one_or_all, wait_for_event};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

fn start(case: &mut Case) -> testbed::program::Process {
    case.tool.args = ["--workers", "4", "--group-transactions", "2"].map(str::to_owned).into();
    case.both(
        "CREATE TABLE brake (id int PRIMARY KEY, v int); CREATE TABLE t (id int PRIMARY KEY, v int)",
    );
    case.publisher.sql("INSERT INTO brake VALUES (1, 0); INSERT INTO t VALUES (1, 0), (2, 0)");
    case.publish("FOR ALL TABLES");
    case.start()
}

/// Waits until the oldest transaction waits for the brake: what follows goes to another worker.
fn wait_until_braked(case: &Case) {
    let sql = "SELECT count(*) > 0 FROM pg_stat_activity a \
               CROSS JOIN unnest(pg_blocking_pids(a.pid)) blocker \
               JOIN pg_locks l ON l.pid = blocker AND l.relation = 'brake'::regclass \
                 AND l.mode = 'RowShareLock' \
               WHERE a.application_name LIKE 'pgapace %'";
    must(testbed::wait_until(PATIENCE, "a session to wait for the brake", || {
        Ok(case.subscriber.value(sql) == "t")
    }));
}

/// The oldest transaction waits for a user's lock on a table, the user waits for a later
/// transaction, and that one waits for its turn to commit. PostgreSQL cannot detect this deadlock.
#[test]
fn a_deadlock_through_a_lock_of_a_user_is_resolved() {
    on_versions(&VERSIONS, |mut case| {
        let mut process = start(&mut case);
        let mut brake = case.subscriber.connect();
        must(brake.batch_execute("BEGIN; SELECT FROM brake FOR UPDATE"));
        case.publisher
            .sql("BEGIN; UPDATE brake SET v = 1; UPDATE t SET v = 1 WHERE id = 1; COMMIT");
        wait_until_braked(&case);
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 2");
        let waiting = |mode: &str, granted: bool| {
            let sql = format!(
                "SELECT count(*) > 0 FROM pg_locks WHERE relation = 't'::regclass \
                 AND mode = '{mode}' AND granted = {granted}"
            );
            let seen =
                testbed::wait_until(PATIENCE, mode, || Ok(case.subscriber.value(&sql) == "t"));
            must(seen);
        };
        waiting("RowExclusiveLock", true);
        let mut user = case.subscriber.connect();
        let user = std::thread::spawn(move || {
            must(user.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE"));
            // Apply waits for this lock meanwhile.
            std::thread::sleep(Duration::from_millis(200));
            must(user.batch_execute("COMMIT"));
        });
        waiting("AccessExclusiveLock", false);
        must(brake.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        user.join().expect("the user's session ends");
        case.expect_equal(&["t", "brake"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
    });
}

/// With nothing to apply, no session of pgapace holds anything for which others could wait: no
/// transaction, and only its session locks.
#[test]
fn an_idle_subscription_holds_nothing() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        for args in [
            &["--workers", "1"][..],
            &["--workers", "4", "--prefetch", "on"],
            &["--workers", "4", "--preserve-commit-order=false"],
        ] {
            let mut case = Case::new(publisher, subscriber);
            case.tool.args = args.iter().copied().map(str::to_owned).collect();
            case.both("CREATE TABLE t (id int PRIMARY KEY)");
            case.publish("FOR ALL TABLES");
            let process = case.start();
            // An occasional statement of a session ends its transaction.
            let sql = "SELECT a.application_name, a.state, a.query, l.locktype, \
                         l.relation::regclass, l.mode \
                       FROM pg_stat_activity a LEFT JOIN pg_locks l \
                         ON l.pid = a.pid AND l.locktype <> 'advisory' \
                       WHERE a.datname = current_database() \
                         AND a.application_name LIKE 'pgapace %' \
                         AND (a.state <> 'idle' OR a.xact_start IS NOT NULL OR l.pid IS NOT NULL)";
            let mut seen = Vec::new();
            let idle = testbed::wait_until(PATIENCE, "every session to be idle", || {
                seen = case.subscriber.rows(sql);
                Ok(seen.is_empty())
            });
            idle.unwrap_or_else(|error| panic!("{args:?}: {error}\n{}", seen.join("\n")));
            let log = case.stop(process);
            assert!(!log.contains("retry_in_ms"), "{log}");
        }
    }
}

/// A row that a user has updated but not committed.
#[test]
fn a_row_lock_of_a_user_delays_apply() {
    on_versions(&VERSIONS, |mut case| {
        let mut process = start(&mut case);
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; UPDATE t SET v = 77 WHERE id = 1"));
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 2");
        must(wait_for_event(&mut process, "lock_wait", PATIENCE));
        // In commit order: the second transaction does not overtake the first.
        assert_eq!(case.subscriber.rows("SELECT v FROM t ORDER BY id"), ["0", "0"]);
        must(user.batch_execute("ROLLBACK"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        let log = case.stop(process);
        assert!(events(&log, "lock_wait") > 0, "{log}");
        assert!(!log.contains("retry_in_ms"), "{log}");
    });
}

/// The subscriber waits for a user's lock and reads nothing, so a worker cannot send all of its next group.
/// The worker still hears that the group before has committed, and the groups of other workers commit.
#[test]
fn a_commit_counts_while_the_next_group_is_locked_out() {
    on_versions(&VERSIONS, |mut case| {
        case.both("CREATE TABLE wide (id int PRIMARY KEY, v text)");
        let mut process = start(&mut case);
        case.publisher.sql("INSERT INTO brake VALUES (2, 0)");
        case.wait_until_applied(&mut process);
        let [mut first, mut second] = [1, 2].map(|id| {
            let mut user = case.subscriber.connect();
            must(
                user.batch_execute(&format!("BEGIN; SELECT FROM brake WHERE id = {id} FOR UPDATE")),
            );
            user
        });
        case.publisher.sql("UPDATE brake SET v = 1 WHERE id = 1");
        wait_until_braked(&case);
        // These go to the other workers.
        for id in 3..=5 {
            case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, 0)"));
            let count = format!(
                "SELECT count(*) = {id} - 2 FROM pg_locks \
                 WHERE relation = 't'::regclass AND mode = 'RowExclusiveLock' AND granted"
            );
            must(testbed::wait_until(PATIENCE, "another worker", || {
                Ok(case.subscriber.value(&count) == "t")
            }));
        }
        // Goes behind the first, and is more than a socket takes.
        case.publisher.sql(
            "BEGIN; UPDATE brake SET v = 1 WHERE id = 2; \
             INSERT INTO wide SELECT i, repeat(md5(i::text), 1000) FROM generate_series(1, 90) i; \
             COMMIT",
        );
        must(testbed::wait_until(PATIENCE, "the transaction to be received", || {
            let received = "SELECT bool_and(write_lsn >= pg_current_wal_lsn()) \
                            FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid \
                            WHERE database = current_database()";
            Ok(case.publisher.value(received) == "t")
        }));
        must(first.batch_execute("COMMIT"));
        must(testbed::wait_until(PATIENCE, "what is not locked to be applied", || {
            Ok(case.subscriber.value("SELECT count(*) FROM t") == "5")
        }));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM wide"), "0");
        must(second.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "brake", "wide"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
    });
}

/// A table whose changes cause such deadlocks repeatedly is serialized for a while.
#[test]
fn a_table_with_repeated_deadlocks_is_serialized_for_a_while() {
    on_versions(&VERSIONS, |mut case| {
        let mut process = start(&mut case);
        let began = std::time::Instant::now();
        let mut rounds = 0;
        while case.statistic("tables_serialized") == "0" {
            assert!(began.elapsed() < PATIENCE, "not serialized after {rounds} rounds");
            rounds += 1;
            let mut brake = case.subscriber.connect();
            must(brake.batch_execute("BEGIN; SELECT FROM brake FOR UPDATE"));
            case.publisher.sql(&format!(
                "BEGIN; UPDATE brake SET v = {rounds}; UPDATE t SET v = {rounds} WHERE id = 1; \
                 COMMIT"
            ));
            wait_until_braked(&case);
            case.publisher.sql(&format!("UPDATE t SET v = {rounds} WHERE id = 2"));
            // Once the table is serialized, which the statistics may show later, the second
            // transaction waits for the first.
            let second = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 't'::regclass \
                          AND mode = 'RowExclusiveLock' AND granted";
            let serialized = "SELECT count(*) > 0 FROM pgapace.relation \
                           WHERE apply_reason LIKE '%one after the other%'";
            let seen = testbed::wait_until(PATIENCE, "the second transaction", || {
                Ok(case.subscriber.value(second) == "t" || case.subscriber.value(serialized) == "t")
            });
            must(seen);
            let mut user = case.subscriber.connect();
            let user = std::thread::spawn(move || {
                must(user.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE; COMMIT"));
            });
            let queued = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 't'::regclass \
                          AND mode = 'AccessExclusiveLock' AND NOT granted";
            let seen = testbed::wait_until(PATIENCE, "the user", || {
                Ok(user.is_finished() || case.subscriber.value(queued) == "t")
            });
            must(seen);
            must(brake.batch_execute("COMMIT"));
            case.wait_until_applied(&mut process);
            user.join().expect("the user's session ends");
        }
        assert!(rounds >= 4, "serialized after {rounds} rounds");
        let reasons = "SELECT count(*) FROM pgapace.relation \
                       WHERE table_name = 't' AND apply_reason LIKE '%one after the other%'";
        let shown = testbed::wait_until(PATIENCE, "the reason", || {
            Ok(case.subscriber.value(reasons) == "1")
        });
        must(shown);
        assert!(case.tool.finish("status", &[]).stdout.contains("serialized"));
        let promoted = testbed::wait_until(PATIENCE, "the end of it", || {
            Ok(case.subscriber.value(reasons) == "0")
        });
        must(promoted);
        case.publisher.sql("UPDATE t SET v = 77");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "brake"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
    });
}
