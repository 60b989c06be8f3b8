//! A session of the subscriber holds a lock on a table whose copy has its turn. Until the copy has the table, it holds
//! no lock on the publisher.

use crate::support::{Case, must, on_versions};
use crate::tablesync::blocked::{BOTH, with_state};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

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
