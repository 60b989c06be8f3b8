//! Clients with two-phase commits: what is prepared before and when writes are stopped.

use std::sync::atomic::{AtomicBool, Ordering};

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::failures::expect_before;
use super::late::wait_for_lock;
use super::{
    LATE, Slots, expect_equal_soon, switchover, two_way_case, until_deadline_runs_out, value,
};
use crate::support::{Case, PATIENCE, must, one_or_all, wait_for_event};

const PREPARED: &str = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()";

fn prepare(client: &mut Client, gid: &str) {
    must(client.batch_execute(&format!(
        "BEGIN; INSERT INTO orders (client, n) SELECT 7, count(*) FROM orders; PREPARE TRANSACTION '{gid}'"
    )));
}

/// Starts the verb, and lets the client prepare a transaction behind the checks. Returns when writes are stopped for
/// new sessions.
fn prepared_behind_the_checks(case: &Case, client: &mut Client, deadline: &str) -> Process {
    let mut blocker = case.subscriber.connect();
    must(blocker.batch_execute("BEGIN; LOCK TABLE pgapace.switchover IN SHARE MODE"));
    let program = case.tool.program("switchover").args(["--go", "--deadline", deadline]);
    let mut verb = must(program.spawn_logged(case.log_file("two-phase")));
    wait_for_lock(case, &mut verb, "INSERT INTO pgapace.switchover%");
    prepare(client, &case.tool.name);
    must(blocker.batch_execute("ROLLBACK"));
    let stopped = format!(
        "SELECT count(*) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase \
         WHERE d.datname = '{}' AND 'default_transaction_read_only=on' = ANY (s.setconfig)",
        case.publisher.name
    );
    let waited = wait_until(PATIENCE, "writes to be stopped", || {
        let is_stopped = value(case.publisher.cluster, "postgres", &stopped) == "1";
        Ok(is_stopped || !verb.is_running())
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", verb.log()));
    verb
}

/// The session that has prepared a transaction is not ended before it has resolved it.
#[test]
fn a_session_resolves_what_it_has_prepared() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let mut process = case.start();
        let (old, database) = (case.publisher.cluster, case.publisher.name.as_str());
        let mut client = case.publisher.connect();

        // It stays prepared: the deadline ends the switchover, and no session.
        until_deadline_runs_out(|deadline| {
            let mut failed = prepared_behind_the_checks(&case, &mut client, deadline);
            must(failed.wait(PATIENCE));
            must(client.batch_execute(&format!("COMMIT PREPARED '{}'", case.tool.name)));
            let log = failed.log();
            if !log.contains("1 prepared transactions") {
                return Some(log);
            }
            assert_eq!(failed.exit_code(), Some(8), "{log}");
            assert!(log.contains("Everything was undone"), "{log}");
            None
        });
        expect_before(&case, &mut process);

        let mut verb = prepared_behind_the_checks(&case, &mut client, LATE);
        let resolved = client.batch_execute(&format!("COMMIT PREPARED '{}'", case.tool.name));
        resolved.unwrap_or_else(|error| panic!("{error:?}\n{}", verb.log()));
        must(verb.wait(PATIENCE));
        assert_eq!(verb.exit_code(), Some(0), "{}", verb.log());
        assert_eq!(value(old, database, PREPARED), "0");
        expect_equal_soon(&case, &mut process);
        case.stop(process);
    }
}

/// A transaction that is prepared for a moment is no problem; one that stays is named.
#[test]
fn a_plan_names_only_what_stays_prepared() {
    let case = two_way_case(15, 15);
    let process = case.start();
    let ended = AtomicBool::new(false);
    let planned = std::thread::scope(|scope| {
        for number in 0..2 {
            let (mut client, gid) =
                (case.publisher.connect(), format!("{}_{number}", case.tool.name));
            let ended = &ended;
            scope.spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    prepare(&mut client, &gid);
                    must(client.batch_execute(&format!("COMMIT PREPARED '{gid}'")));
                }
            });
        }
        let planned = switchover(&case.tool, &["--plan"]);
        ended.store(true, Ordering::Relaxed);
        planned
    });
    planned.expect(0, &[]);
    let mut client = case.publisher.connect();
    prepare(&mut client, &case.tool.name);
    let planned = switchover(&case.tool, &["--plan"]);
    must(client.batch_execute(&format!("ROLLBACK PREPARED '{}'", case.tool.name)));
    planned.expect(3, &["is prepared on the publisher since", "ROLLBACK PREPARED"]);
    case.stop(process);
}

/// PostgreSQL 14 does not decode a transaction at its PREPARE.
#[test]
fn a_way_back_goes_on_without_two_phase_where_its_publisher_cannot() {
    let mut case = two_way_case(18, 14);
    case.tool.args = vec!["--two-phase".to_owned()];
    let _slots = Slots(&case);
    let mut process = case.start();
    let mut verbs = case.tool.clone();
    verbs.args.clear();
    let said = "the way back applies prepared transactions when they are committed";
    let planned = switchover(&verbs, &["--plan"]);
    planned.expect(0, &[]);
    assert!(planned.stdout.contains(said), "{}", planned.stdout);
    let moved = switchover(&verbs, &["--go"]);
    moved.expect(0, &[]);
    assert!(moved.stdout.contains(said), "{}", moved.stdout);
    must(wait_for_event(&mut process, "two_phase_left_out", PATIENCE));
    let mut client = case.subscriber.connect();
    prepare(&mut client, &case.tool.name);
    must(client.batch_execute(&format!("COMMIT PREPARED '{}'", case.tool.name)));
    expect_equal_soon(&case, &mut process);
    assert_eq!(process.events("run_failed"), 0, "{}", process.log());

    let returned = switchover(&verbs, &["--back"]);
    returned.expect(0, &[]);
    assert!(!returned.stdout.contains(said), "{}", returned.stdout);
    let mut client = case.publisher.connect();
    prepare(&mut client, &case.tool.name);
    must(client.batch_execute(&format!("COMMIT PREPARED '{}'", case.tool.name)));
    expect_equal_soon(&case, &mut process);
    let two_phase = format!(
        "SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{}'",
        case.tool.name
    );
    assert_eq!(value(case.publisher.cluster, "postgres", &two_phase), "t");
    case.stop(process);
}

/// The process of the way back has ended with an error: `--back` names it.
#[test]
fn a_way_back_that_has_failed_is_named_with_its_error() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let mut process = case.start();
    switchover(&case.tool, &["--go"]).expect(0, &[]);
    expect_equal_soon(&case, &mut process);
    let (new, old) = (case.subscriber.cluster, case.publisher.cluster);
    let database = case.publisher.name.as_str();
    let write = |sql: &str| {
        must(old.sql(database, &format!("BEGIN; SET TRANSACTION READ WRITE; {sql}; COMMIT")));
    };
    write("INSERT INTO orders VALUES (900, 7, 1)");
    must(new.sql(database, "INSERT INTO orders VALUES (900, 7, 2)"));
    let status = must(process.wait(PATIENCE));
    assert!(!status.success(), "{}", process.log());
    let refused = switchover(&case.tool, &["--back"]);
    refused.expect(3, &["start pgapace run; the last one ended with an error:", "orders"]);
    write("DELETE FROM orders WHERE id = 900");
    let process = case.start();
    switchover(&case.tool, &["--back"]).expect(0, &[]);
    case.stop(process);
}
