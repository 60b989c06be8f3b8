//! A session of the subscriber holds a lock on a table whose copy has its turn. Until the copy has the table, it holds
//! no lock on the publisher.

use serde_json::Value;
use testbed::postgres::Client;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};
use crate::tablesync::blocked::{BOTH, with_state};
use crate::tablesync::emptying::decisions;
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};
use crate::verbs::json;

/// DDL of the publisher, which the subscriber need not know.
fn alter_on_publisher(case: &Case, tables: &[&str]) {
    let mut session = case.publisher.connect();
    must(session.batch_execute("SET lock_timeout = '3s'"));
    for table in tables {
        let altered =
            session.batch_execute(&format!("ALTER TABLE {table} ALTER v SET DEFAULT 'x'"));
        altered.unwrap_or_else(|error| panic!("{table} is locked on the publisher: {error}"));
    }
}

#[test]
fn a_large_table_is_locked_on_the_publisher_after_the_subscriber() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE early (id int PRIMARY KEY, v text); CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql(
            "INSERT INTO t SELECT i, repeat('t', 500) FROM generate_series(1, 2000) i; \
             INSERT INTO early SELECT i, repeat('e', 500) FROM generate_series(1, 4000) i",
        );
        case.publish("FOR ALL TABLES");
        let mut locking = holder(&case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("first"));
        wait_for_a_waiter(&case, &mut process, "relation");
        wait_for(&case, &mut process, "the other table", &with_state("ready", "early"));
        wait_for_a_waiter(&case, &mut process, "relation");
        // Not that of a table that the same session has copied either.
        alter_on_publisher(&case, &["t", "early"]);
        case.publisher.sql("UPDATE t SET v = 'changed' WHERE id < 10");
        must(locking.batch_execute("COMMIT"));
        wait_for(&case, &mut process, "both tables", &with_state("ready", "early t"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["early", "t"]);
        case.stop(process);
    });
}

/// Those that share its round trips do not wait for it.
#[test]
fn a_locked_small_table_delays_neither_the_publisher_nor_other_tables() {
    on_versions(&BOTH, |case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text); \
             CREATE TABLE c (id int PRIMARY KEY, v text); CREATE TABLE none ()",
        );
        case.publisher.sql(
            "INSERT INTO a VALUES (1); INSERT INTO b VALUES (2); INSERT INTO c VALUES (3); \
             INSERT INTO none DEFAULT VALUES",
        );
        case.publish("FOR ALL TABLES");
        let mut locking = holder(&case, "BEGIN; LOCK TABLE a IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("first"));
        wait_for_a_waiter(&case, &mut process, "relation");
        wait_for(&case, &mut process, "the others", &with_state("ready", "b c none"));
        wait_for_a_waiter(&case, &mut process, "relation");
        alter_on_publisher(&case, &["a", "b", "c"]);
        must(locking.batch_execute("COMMIT"));
        wait_for(&case, &mut process, "all tables", &with_state("ready", "a b c none"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b", "c"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM none"), "1");
        case.stop(process);
    });
}

/// A session of a user in a transaction, and its process.
fn blocking(case: &Case, sql: &str) -> (Client, String) {
    let mut session = holder(case, &format!("BEGIN; {sql}"));
    let pid = must(session.query_one("SELECT pg_backend_pid()::text", &[]));
    (session, pid.get(0))
}

/// What waits for the session of this process, as `status` says.
fn blocked_by(case: &Case, pid: &str) -> Vec<String> {
    let text = case.tool.finish("status", &[]).stdout;
    let line = format!("process {pid} of ");
    assert_eq!(text.contains("blocked by"), !pid.is_empty(), "{text}");
    assert!(pid.is_empty() || text.contains(&line), "{text}");
    let status = &json(&case.tool.finish("status", &["--json"]))[0];
    let blockers = status["figures"]["blockers"].as_array().cloned().unwrap_or_default();
    let waiting = |blocker: &Value| blocker["waiting"].as_str().unwrap_or_default().to_owned();
    blockers
        .iter()
        .filter(|blocker| blocker["pid"].as_i64().is_some_and(|it| it.to_string() == pid))
        .map(waiting)
        .collect()
}

#[test]
fn sessions_that_block_a_first_copy_are_shown() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR TABLE t");
        let (mut locking, pid) = blocking(&case, "LOCK TABLE t IN SHARE MODE");
        let mut process = case.tool.start(case.log_file("first"));
        must(wait_for_event(&mut process, "lock_wait", PATIENCE));
        assert_eq!(blocked_by(&case, &pid), ["copy session"]);
        must(locking.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        assert_eq!(blocked_by(&case, ""), [""; 0]);
        case.stop(process);
    });
}

/// A reader keeps the table from being truncated.
#[test]
fn sessions_that_keep_a_table_from_being_emptied_are_shown() {
    on_versions(&BOTH, |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.subscriber.sql("INSERT INTO t VALUES (2)");
        case.publish("FOR TABLE t");
        let decided = decisions(case.run().expect(6, &["not empty"]));
        let (mut reading, pid) = blocking(&case, "SELECT FROM t");
        let program = case.tool.program("run").args(decided);
        let mut process = must(program.spawn_logged(case.log_file("first")));
        must(wait_for_event(&mut process, "lock_wait", PATIENCE));
        assert_eq!(blocked_by(&case, &pid), ["control session"]);
        assert_eq!(process.events("tables_emptied"), 0, "{}", process.log());
        must(reading.batch_execute("COMMIT"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        assert_eq!(process.events("tables_emptied"), 1, "{}", process.log());
        case.stop(process);
        case.expect_equal(&["t"]);
    });
}
