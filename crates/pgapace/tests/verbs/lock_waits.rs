//! Verbs that wait for a lock which another session of the subscriber holds: the log names that session, and the first
//! signal ends the verb.

use postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::signals::expect_stopped;
use crate::support::{Case, PATIENCE, expect_exit, must, on_versions};

/// A session with an open transaction that has executed `sql`, and its process id.
pub(crate) fn holder(case: &Case, sql: &str) -> (Client, i32) {
    let mut client = case.subscriber.connect();
    must(client.batch_execute(&format!("BEGIN; {sql}")));
    let pid = must(client.query_one("SELECT pg_backend_pid()", &[])).get(0);
    (client, pid)
}

/// Starts a verb, and waits until it has logged that this session is in its way.
fn blocked_by(case: &Case, pid: i32, verb: &str, args: &[&str]) -> Process {
    let program = case.tool.program(verb).args(args);
    let mut process = must(program.spawn_logged(case.log_file(&format!("{verb}{pid}"))));
    let told = wait_until(PATIENCE, "the verb to name the session", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(process.log().lines().any(|line| {
            line.contains("event=\"lock_wait\"") && line.contains(&format!(" pid={pid} "))
        }))
    });
    told.unwrap_or_else(|error| panic!("{error}: {}", process.log()));
    process
}

/// The slot is not dropped before all locks are granted that its record needs.
#[test]
fn a_rebase_that_waits_for_a_lock_has_dropped_nothing_and_ends_at_a_signal() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        for lock in
            ["LOCK TABLE pgapace.progress IN EXCLUSIVE MODE", "DELETE FROM pgapace.progress"]
        {
            case.publisher.sql("INSERT INTO t SELECT count(*) FROM t");
            let (mut client, pid) = holder(&case, lock);
            let mut process = blocked_by(&case, pid, "rebase", &[]);
            must(process.interrupt());
            expect_stopped(process, &["stopped during the start of the rebase"]);
            must(client.batch_execute("ROLLBACK"));
            // From the old slot.
            case.run_until_current();
            case.expect_equal(&["t"]);
        }
        case.tool.finish("rebase", &[]).expect(0, &["rebase_started"]);
    });
}

#[test]
fn a_start_and_a_hand_over_that_wait_for_a_lock_end_at_the_first_signal() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let (mut client, pid) = holder(&case, "SELECT FROM pgapace.subscription FOR UPDATE");
        let mut run = blocked_by(&case, pid, "run", &[]);
        must(run.terminate());
        must(expect_exit(&mut run, 0, &["start_stopped"]));
        let mut hand_over = blocked_by(&case, pid, "hand-over", &[]);
        must(hand_over.interrupt());
        expect_stopped(hand_over, &["stopped during the hand-over", "was withdrawn"]);
        must(client.batch_execute("ROLLBACK"));
        case.run_until_current();
    });
}
