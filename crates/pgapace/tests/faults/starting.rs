//! Starts that fail and are tried again.

use testbed::wait_until;

use crate::support::{Case, Database, PATIENCE, must, on_versions};

/// Nothing else waits for a lock in the database of a test.
const END: &str = "SELECT count(pg_terminate_backend(a.pid)) > 0 \
     FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
     WHERE NOT l.granted AND a.datname = current_database()";

/// Starts while `table` of one server is locked, and terminates the session that waits for it.
fn lose_a_session(case: &Case, server: &Database<'_>, table: &str) {
    let mut locking = server.connect();
    must(locking.batch_execute(&format!("BEGIN; LOCK TABLE {table}")));
    let mut process = case.tool.start(case.log_file(table));
    let waited = wait_until(PATIENCE, "the session to be terminated", || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(server.value(END) == "t")
    });
    must(waited);
    must(locking.batch_execute("COMMIT"));
    case.publisher.sql("INSERT INTO t SELECT count(*) FROM t");
    case.wait_until_applied(&mut process);
    assert!(process.events("run_failed") > 0, "{}", process.log());
    case.stop(process);
}

#[test]
fn a_later_start_that_loses_a_session_at_once_is_tried_again() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        lose_a_session(&case, &case.subscriber, "pgapace.subscription");
        lose_a_session(&case, &case.publisher, "pg_catalog.pg_publication");
        case.expect_equal(&["t"]);
    });
}
