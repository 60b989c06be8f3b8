//! Transactions that are held until they end, because they cannot be prepared on the subscriber, or not yet.

use super::durable::now;
use super::{
    TABLE, expect_nothing_left, holder, is_acknowledged, prepare, prepared, prepared_count,
    resolve, wait_until_prepared, wait_until_value,
};
use crate::support::{PATIENCE, must, on_versions, wait_for_event};
use testbed::program::events;
use testbed::wait_until;

/// The transaction is first held in memory.
#[test]
fn a_transaction_held_too_long_is_prepared() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args.extend(["--two-phase", "--two-phase-hold", "1"].map(str::to_owned));
        case.replicate(TABLE);
        let mut process = case.start();
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        let end = now(&case);
        wait_until_prepared(&case, 1);
        case.publisher.sql("INSERT INTO t VALUES (2, 'two')");
        let moved = || Ok(is_acknowledged(&case, &end));
        must(wait_until(PATIENCE, "the slot to move on", moved));
        resolve(&case, "COMMIT", "one");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
        case.stop(process);
    });
}

/// A trigger changes a row that both transactions change, and another table has equal rows: prepared, a transaction
/// would lock rows that the publisher has not locked.
#[test]
fn transactions_that_may_lock_other_rows_are_held() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.both("CREATE TABLE other (id int PRIMARY KEY)");
        case.both("CREATE TABLE equal (v int); ALTER TABLE equal REPLICA IDENTITY FULL");
        case.both(TABLE);
        case.subscriber.sql(
            "CREATE TABLE totals (n int); INSERT INTO totals VALUES (0); \
             CREATE FUNCTION tally() RETURNS trigger LANGUAGE plpgsql AS \
               'BEGIN UPDATE public.totals SET n = n + 1; RETURN NULL; END'; \
             CREATE TRIGGER tally AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION tally(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER tally",
        );
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO equal VALUES (1), (1)");
        case.run_until_current();
        let mut process = case.start();
        let delete = "DELETE FROM equal WHERE ctid = (SELECT ctid FROM equal \
                      FOR UPDATE SKIP LOCKED LIMIT 1)";
        prepare(&case, "trigger", "INSERT INTO t VALUES (1, 'one')");
        prepare(&case, "equal", delete);
        prepare(&case, "other", "INSERT INTO other VALUES (1)");
        wait_until_prepared(&case, 1);
        case.publisher.sql("INSERT INTO t VALUES (2, 'two')");
        case.publisher.sql(delete);
        resolve(&case, "COMMIT", "other");
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.value("SELECT n FROM totals"), "1");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM equal"), "1");
        resolve(&case, "COMMIT", "trigger");
        resolve(&case, "COMMIT", "equal");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "equal", "other"]);
        assert_eq!(case.subscriber.value("SELECT n FROM totals"), "2");
        case.stop(process);
    });
}

/// A session of the subscriber holds a row that apply needs, and waits for a prepared transaction, which ends later in
/// the stream. No server sees that deadlock.
#[test]
fn a_session_that_waits_for_a_prepared_transaction_is_named() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.publisher.sql("INSERT INTO t VALUES (1, 'one'), (2, 'two')");
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        prepare(&case, "one", "UPDATE t SET v = 'later' WHERE id = 1");
        wait_until_prepared(&case, 1);
        let gid = case
            .subscriber
            .value("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()");
        let mut user = holder(&case, "SELECT FROM t WHERE id = 2 FOR UPDATE");
        let pid = must(user.query_one("SELECT pg_backend_pid()", &[])).get::<_, i32>(0);
        let waiting =
            std::thread::spawn(move || user.batch_execute("SELECT FROM t WHERE id = 1 FOR UPDATE"));
        let waits = format!("SELECT 0 = ANY (pg_blocking_pids({pid}))");
        wait_until_value(&case, &waits, "t");
        case.publisher.sql("UPDATE t SET v = 'sooner' WHERE id = 2");
        resolve(&case, "COMMIT", "one");
        must(wait_for_event(&mut process, "prepared_deadlock", PATIENCE));
        let log = process.log();
        let line = log.lines().find(|line| line.contains("event=\"prepared_deadlock\""));
        let line = line.unwrap_or_default();
        assert!(line.contains(&format!("pid={pid} gid=\"{gid}\"")), "{line}");
        let blockers = "SELECT string_agg(coalesce(pid, 0)::text, ' ') FROM pgapace.stat_blocker";
        wait_until_value(&case, blockers, &pid.to_string());
        case.subscriber.sql(&format!("SELECT pg_terminate_backend({pid})"));
        case.wait_until_applied(&mut process);
        assert!(waiting.join().expect("the session ends").is_err());
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
        let log = case.stop(process);
        let reported = ["prepared_deadlock", "prepared_lock_wait", "run_failed"];
        assert_eq!(reported.map(|event| events(&log, event)), [1, 0, 0], "{log}");
    });
}

/// The table has a column that the subscriber lacks. The error is reported when the transaction commits, not before.
#[test]
fn a_transaction_that_cannot_be_applied_is_held() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.both("CREATE TABLE other (id int PRIMARY KEY)");
        case.replicate(TABLE);
        case.publisher.sql("INSERT INTO t VALUES (1, 'one'); ALTER TABLE t ADD extra int");
        let mut process = case.start();
        prepare(&case, "one", "INSERT INTO t VALUES (2, 'two', 2)");
        prepare(&case, "two", "INSERT INTO other VALUES (1)");
        wait_until_prepared(&case, 1);
        resolve(&case, "COMMIT", "two");
        resolve(&case, "ROLLBACK", "one");
        case.publisher.sql("INSERT INTO other VALUES (2)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        case.stop(process);
        prepare(&case, "one", "INSERT INTO t VALUES (2, 'two', 2)");
        resolve(&case, "COMMIT", "one");
        case.run().expect(6, &["lacks published columns: extra", "public.t"]);
        case.subscriber.sql("ALTER TABLE t ADD extra int");
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
    });
}

/// The transaction is held until it ends, while others are prepared on the subscriber.
#[test]
fn a_table_recreated_within_a_prepared_transaction_is_stale() {
    const BLOCKED: &str = "SELECT count(*) FROM pgapace.relation WHERE state = 'blocked'";
    on_versions(&[(16, 18), (18, 15)], |mut case| {
        prepared(&mut case);
        case.both("CREATE TABLE other (id int PRIMARY KEY, v int)");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.run_until_current();
        let mut process = case.start();
        prepare(
            &case,
            "one",
            "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (2, 7)",
        );
        prepare(&case, "two", "INSERT INTO other VALUES (1, 1)");
        wait_until_prepared(&case, 1);
        resolve(&case, "COMMIT", "one");
        let blocked = || Ok(case.subscriber.value(BLOCKED) == "1");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        resolve(&case, "COMMIT", "two");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        assert_eq!(case.subscriber.rows("SELECT id FROM t"), ["1"]);
        case.stop(process);
    });
}

/// A transaction is held if the subscriber cannot prepare it, or if conflict rules need the time of
/// its commit.
#[test]
fn rules_keep_transactions_held() {
    on_versions(&[(18, 18)], |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.tool.args.extend(["--on-conflict", "insert_exists=skip"].map(str::to_owned));
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        case.run_until_current();
        assert_eq!(prepared_count(&case), "0");
        case.subscriber.sql("INSERT INTO t VALUES (1, 'mine')");
        resolve(&case, "COMMIT", "one");
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT v FROM t"), "mine");
    });
}
