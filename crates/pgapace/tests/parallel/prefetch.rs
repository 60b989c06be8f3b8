//! Prefetch of rows: it must not affect anything except time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Case, PATIENCE, must, on_versions};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Two tables with keys of different types, and a backlog of transactions that often change the
/// same rows.
fn backlog(case: &mut Case, args: &[&str]) {
    case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
    case.replicate(
        "CREATE TABLE n (id bigint PRIMARY KEY, v int, u int UNIQUE); \
         CREATE TABLE s (a text, b int, v int, PRIMARY KEY (a, b)); \
         CREATE TABLE whole (v int); ALTER TABLE whole REPLICA IDENTITY FULL",
    );
    case.publisher.sql(
        "INSERT INTO n SELECT g, 0, g FROM generate_series(1, 2000) g; \
         INSERT INTO s SELECT 'key ' || g, g % 7, 0 FROM generate_series(1, 2000) g; \
         INSERT INTO whole SELECT g FROM generate_series(1, 50) g",
    );
    for round in 0..60 {
        case.publisher.sql(&format!(
            "UPDATE n SET v = v + 1 WHERE id % 13 = {round} % 13; \
             UPDATE s SET v = {round} WHERE b = {round} % 7; \
             DELETE FROM n WHERE id % 61 = {round}; \
             INSERT INTO n SELECT 10000 + {round} * 1000 + g, {round}, NULL \
               FROM generate_series(1, 150) g; \
             UPDATE n SET id = -id WHERE id = 7 + {round}; \
             UPDATE whole SET v = v + 1 WHERE v < 10"
        ));
    }
}

#[test]
fn prefetch_does_not_change_the_result() {
    on_versions(&VERSIONS, |mut case| {
        backlog(&mut case, &["--workers", "4", "--prefetch", "on", "--log-level", "debug"]);
        let log = case.run_until_current();
        assert!(log.contains("count(subscriber.ctid)"), "nothing was prefetched:\n{log}");
        assert!(!log.contains("retry_in_ms") && !log.contains("prefetched any more"), "{log}");
        case.expect_equal(&["n", "s", "whole"]);
    });
}

#[test]
fn terminated_or_blocked_prefetch_sessions_do_not_stop_apply() {
    on_versions(&VERSIONS, |mut case| {
        backlog(&mut case, &["--workers", "3", "--prefetch", "on"]);
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let mut other = case.subscriber.connect();
        let ender = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                must(other.batch_execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                     WHERE application_name LIKE 'pgapace % prefetch' \
                       AND datname = current_database()",
                ));
                // Some commands of a session get through.
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let mut process = case.start();
        let mut user = case.subscriber.connect();
        must(user.batch_execute(
            "BEGIN; LOCK TABLE s IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(1.5); COMMIT",
        ));
        case.wait_until_applied(&mut process);
        stop.store(true, Ordering::Relaxed);
        ender.join().expect("the other session ends");
        case.expect_equal(&["n", "s", "whole"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
    });
}

/// A prefetch statement that waits for a user's lock is cancelled, and the table is applied as
/// before.
#[test]
fn a_lock_of_a_user_does_not_end_prefetch() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = ["--workers", "2", "--prefetch", "on", "--log-level", "debug"]
            .map(str::to_owned)
            .into();
        case.both("CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        // Too few changes for prefetch.
        case.publisher.sql("INSERT INTO t (v) VALUES (1)");
        case.wait_until_applied(&mut process);
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE"));
        let more = "INSERT INTO t (v) SELECT g FROM generate_series(1, 2000) g";
        case.publisher.sql(more);
        // More often than there are prefetch sessions.
        let given_up = testbed::wait_until(PATIENCE, "cancelled statements", || {
            Ok(process.log().matches("some rows are not prefetched").count() > 4)
        });
        must(given_up);
        must(user.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        let now = case.subscriber.value("SELECT clock_timestamp()");
        let reads = format!(
            "SELECT count(*) > 0 FROM pg_stat_activity \
             WHERE application_name LIKE 'pgapace % prefetch' AND datname = current_database() \
               AND query LIKE '%count(subscriber.ctid)%' AND query_start > '{now}'"
        );
        let seen = testbed::wait_until(PATIENCE, "another statement", || {
            case.publisher.sql(more);
            case.wait_until_applied(&mut process);
            Ok(case.subscriber.value(&reads) == "t")
        });
        must(seen);
        case.expect_equal(&["t"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms") && !log.contains("prefetched any more"), "{log}");
    });
}

/// If all data is in memory, prefetch has no benefit, and `auto` switches it off.
#[test]
fn prefetch_auto_is_off_if_data_is_in_memory() {
    on_versions(&[(18, 18)], |mut case| {
        backlog(&mut case, &["--workers", "4", "--prefetch", "auto"]);
        let log = case.run_until_current();
        assert!(!log.contains("retry_in_ms"), "{log}");
        case.expect_equal(&["n", "s", "whole"]);
    });
}
