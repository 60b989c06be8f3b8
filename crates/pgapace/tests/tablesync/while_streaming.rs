//! Tables that are copied while others stream. The other tables do not wait, and every change is
//! applied exactly once, even if the process is killed.

use std::time::Duration;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use crate::support::{
    Case, PATIENCE, holds_for, must, on_versions, wait_for_event, wait_for_events,
};

/// Number of the advisory lock that the trigger on the subscriber waits for.
pub(super) const LOCK: u32 = 4711;

/// Commits several transactions that each change every table.
pub(super) fn changes(case: &Case, numbers: std::ops::Range<u32>) {
    let mut client = case.publisher.connect();
    for number in numbers {
        must(client.batch_execute(&format!(
            "BEGIN; INSERT INTO other VALUES ({number}, {number}); UPDATE late SET v = v + 1 WHERE id <= 5; \
             INSERT INTO late_log VALUES ({number}); COMMIT"
        )));
    }
}

/// Creates tables that are not part of the subscription yet. On the subscriber, updates of the
/// first table wait for the advisory lock.
pub(crate) fn late_tables(case: &Case) {
    case.both("CREATE TABLE late (id int PRIMARY KEY, v int); CREATE TABLE late_log (id int)");
    case.subscriber.sql(&format!(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN NEW; END $$; \
         CREATE TRIGGER wait BEFORE UPDATE ON late FOR EACH ROW EXECUTE FUNCTION wait(); \
         ALTER TABLE late ENABLE ALWAYS TRIGGER wait"
    ));
    case.publisher.sql(
        "INSERT INTO late SELECT i, 0 FROM generate_series(1, 1000) i; INSERT INTO late_log SELECT 0",
    );
}

pub(crate) fn wait_for(case: &Case, process: &mut Process, what: &str, sql: &str) {
    let waited = wait_until(PATIENCE, what, || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(case.subscriber.value(sql) == "t")
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
}

/// Waits until a session of this case waits for a lock. The process streams, so it has ended the sessions
/// of one that was killed before. (Its apply session may begin before the start is recorded.)
pub(crate) fn wait_for_a_waiter(case: &Case, process: &mut Process, lock: &str) {
    let sql = format!(
        "SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
         WHERE NOT l.granted AND l.locktype = '{lock}' AND a.datname = current_database() \
           AND a.application_name LIKE 'pgapace%'"
    );
    wait_for(case, process, "a session to wait for the lock", &sql);
}

pub(super) fn other_has(case: &Case, process: &mut Process, rows: u32) {
    let sql = format!("SELECT count(*) = {rows} FROM other");
    wait_for(case, process, "the other table to continue", &sql);
}

fn acknowledged(case: &Case) -> String {
    case.publisher.value(&format!(
        "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{}'",
        case.tool.name
    ))
}

pub(crate) fn holder(case: &Case, sql: &str) -> Client {
    let mut holder = case.subscriber.connect();
    must(holder.batch_execute(sql));
    holder
}

#[test]
fn the_other_tables_stream_while_tables_are_copied() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        let applying = holder(&case, &format!("SELECT pg_advisory_lock({LOCK})"));
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");

        // Its copy waits; other tables do not.
        let mut process = case.start();
        changes(&case, 0..20);
        wait_for_a_waiter(&case, &mut process, "relation");
        changes(&case, 20..40);
        other_has(&case, &mut process, 40);
        must(process.kill9());

        // The deferred changes are sent again, and the copy starts again.
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "relation");
        changes(&case, 40..60);
        other_has(&case, &mut process, 60);
        let held = acknowledged(&case);
        changes(&case, 60..80);
        other_has(&case, &mut process, 80);
        must(holds_for(Duration::from_millis(300), "acknowledged up to deferred changes", || {
            Ok(acknowledged(&case) == held)
        }));

        // The copy ends, and the deferred changes wait.
        must(copying.batch_execute("COMMIT"));
        wait_for_a_waiter(&case, &mut process, "advisory");
        let copies = "SELECT string_agg(table_name || ' ' || sync_lsn || ' ' || copied_at, ', ' ORDER BY table_name) \
                      FROM pgapace.relation WHERE table_name LIKE 'late%'";
        let copied = case.subscriber.value(copies);
        assert!(copied.contains("late ") && copied.contains("late_log "), "{copied}");
        changes(&case, 80..100);
        other_has(&case, &mut process, 100);
        must(process.kill9());

        // The run resumes without another copy.
        let mut process = case.start();
        wait_for_a_waiter(&case, &mut process, "advisory");
        changes(&case, 100..120);
        other_has(&case, &mut process, 120);
        assert_eq!(case.subscriber.value(copies), copied, "copied again");
        drop(applying);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other", "late", "late_log"]);
        assert_eq!(case.subscriber.value(copies), copied, "copied again");
        let left = "SELECT (SELECT count(*) FROM pgapace.relation WHERE catch_up IS NOT NULL) \
                      || ' ' || (SELECT count(*) FROM pgapace.progress WHERE subscription < 0)";
        assert_eq!(case.subscriber.value(left), "0 0");
        changes(&case, 120..130);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other", "late", "late_log"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.stop(process);
    });
}

/// `--until` waits for all tables, but a stop does not wait for their copies.
#[test]
fn until_waits_for_a_copy_and_a_stop_does_not() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int); CREATE TABLE late_log (id int)");
        case.publisher.sql("INSERT INTO late SELECT i, 0 FROM generate_series(1, 10) i");
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        changes(&case, 0..10);
        wait_for_a_waiter(&case, &mut process, "relation");
        case.stop(process);
        changes(&case, 10..20);
        // With this limit the deferred changes are written to files.
        case.tool.args = vec!["--spool-limit=1".to_owned()];
        std::thread::scope(|scope| {
            let run = scope.spawn(|| case.tool.run());
            let mut look = case.subscriber.connect();
            must(wait_until(PATIENCE, "the other table to continue", || {
                Ok(look.query_one("SELECT count(*) FROM other", &[])?.get::<_, i64>(0) == 20)
            }));
            must(holds_for(Duration::from_millis(300), "waiting for one of the tables", || {
                Ok(!run.is_finished())
            }));
            must(copying.batch_execute("COMMIT"));
            run.join().unwrap_or_else(|_| panic!("the run panicked")).expect(0, &[]);
        });
        case.expect_equal(&["other", "late", "late_log"]);
    });
}

/// There are more deferred changes than the spool may hold: the other tables wait as long as
/// necessary. A transaction larger than its parts, streamed or not, is deferred like any other.
#[test]
fn deferred_changes_beyond_the_spool_limit_make_the_others_wait() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.both("CREATE TABLE late (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO late SELECT i, 'old' FROM generate_series(1, 1000) i");
        case.tool.args = vec!["--spool-limit=2".to_owned()];
        let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO late VALUES (2000, 'first')");
        wait_for_a_waiter(&case, &mut process, "relation");
        let mut client = case.publisher.connect();
        for number in 0..300 {
            must(client.batch_execute(&format!(
                "BEGIN; INSERT INTO late SELECT 10000 + {number} * 10 + i, repeat('x', 1000) FROM generate_series(0, 9) i; \
                 UPDATE late SET v = v || '.' WHERE id = {number}; INSERT INTO other VALUES ({number}, 0); COMMIT"
            )));
        }
        must(wait_until(PATIENCE, "the spool to fill", || {
            Ok(process.events("deferred_changes_full") > 0)
        }));
        must(copying.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other", "late"]);
        case.stop(process);

        case.both("CREATE TABLE later (id int PRIMARY KEY, v text)");
        case.tool.args = vec!["--memory-limit=16".to_owned()];
        let mut copying = holder(&case, "BEGIN; LOCK TABLE later IN SHARE MODE");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO later VALUES (-1, 'first')");
        wait_for_a_waiter(&case, &mut process, "relation");
        must(client.batch_execute(
            "BEGIN; INSERT INTO other VALUES (1000, 0); INSERT INTO later SELECT i, repeat('x', 200) FROM generate_series(1, 60000) i; \
             INSERT INTO other VALUES (1001, 0); COMMIT; DELETE FROM later WHERE id % 2 = 0",
        ));
        other_has(&case, &mut process, 302);
        must(copying.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other", "late", "later"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.stop(process);
    });
}

/// More tables than are counted, or whose definitions are read, in one step of the durability session.
#[test]
fn many_tables_are_copied_at_once() {
    const TABLES: usize = 70;
    on_versions(&[(18, 18)], |case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        let mut process = case.start();
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        let each = |sql: &str| {
            let all: Vec<_> =
                (0..TABLES).map(|table| sql.replace('#', &table.to_string())).collect();
            format!("BEGIN; {}; COMMIT", all.join("; "))
        };
        case.both(&each("CREATE TABLE many# (id int PRIMARY KEY)"));
        for id in 1..4 {
            case.publisher.sql(&each(&format!(
                "INSERT INTO many# VALUES ({id}); INSERT INTO other VALUES ({id}00 + #, 0)"
            )));
        }
        let all = |what: &str| format!("SELECT count(*) = {TABLES} FROM pgapace.{what}");
        let ready = all("relation WHERE table_name LIKE 'many%' AND state = 'ready'");
        wait_for(&case, &mut process, "all tables to catch up", &ready);
        case.publisher.sql(&each("INSERT INTO many# VALUES (4)"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other", "many0", "many41", "many69"]);
        let counted = all("stat_table WHERE table_name LIKE 'many%' AND inserts > 0");
        wait_for(&case, &mut process, "all changes to be counted", &counted);

        case.subscriber.sql(&each("ALTER TABLE many# ADD note text"));
        case.publisher.sql(&each("INSERT INTO many# VALUES (5)"));
        must(wait_for_events(&mut process, "table_definition_changed", TABLES, PATIENCE));
        let left = all("progress WHERE subscription < 0").replace(&TABLES.to_string(), "0");
        assert_eq!(case.subscriber.value(&left), "t", "progress of tables that have caught up");
        case.stop(process);
    });
}
