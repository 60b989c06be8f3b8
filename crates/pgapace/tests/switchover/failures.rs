//! A failure at each step ends in the state before.

use testbed::{Cluster, wait_until};

use super::{Clients, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, must};

/// Writes work on the publisher, and arrive.
fn expect_before(case: &Case, process: &mut testbed::program::Process) {
    let database = case.publisher.name.as_str();
    let insert = "INSERT INTO orders (client, n) VALUES (-1, -1)";
    must(case.publisher.cluster.sql(database, insert));
    let count = |cluster: &Cluster| value(cluster, database, "SELECT count(*) FROM orders");
    let arrived = wait_until(PATIENCE, "the row to arrive", || {
        Ok(count(case.publisher.cluster) == count(case.subscriber.cluster))
    });
    arrived.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    let subscriber = case.subscriber.cluster;
    assert_eq!(value(subscriber, database, "SELECT count(*) FROM pgapace.switchover"), "0");
    let slots = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}_back'",
        case.tool.name
    );
    assert_eq!(value(subscriber, database, &slots), "0");
    assert!(process.is_running(), "{}", process.log());
}

/// Somebody writes on, although the command has stopped writes.
#[test]
fn late_writes_undo_everything() {
    for (publisher, subscriber) in [(15, 15), (18, 18)] {
        let case = two_way_case(publisher, subscriber);
        let mut process = case.start();
        let never = case.log_file("never");
        let side = case.publisher.conninfo();
        let clients = Clients::start(3, (side.clone(), side), &never, 0);
        clients.wait_for_more();
        let resumed = case.log_file("resumed");
        let resume = format!("touch {}", resumed.display());
        let failed =
            switchover(&case.tool, &["--go", "--stop-writes", "true", "--resume-writes", &resume]);
        failed.expect(8, &["somebody still writes", "Everything was undone"]);
        assert!(resumed.exists());
        clients.stop();
        // It may have been ended in the middle of a transaction.
        if !process.is_running() {
            process = case.start();
        }
        expect_before(&case, &mut process);
        case.stop(process);
    }
}

/// The slot of the way back cannot be created in time, and then the process is killed there.
#[test]
fn the_last_step_can_fail_or_be_killed() {
    for (publisher, subscriber) in [(15, 15), (18, 18)] {
        let case = two_way_case(publisher, subscriber);
        case.subscriber.sql("CREATE TABLE other (v int)");
        let mut process = case.start();
        let database = case.publisher.name.clone();
        // A new slot waits for open transactions.
        let mut client = case.subscriber.connect();
        let mut open = must(client.transaction());
        must(open.batch_execute("INSERT INTO other VALUES (1)"));
        let failed = switchover(&case.tool, &["--go", "--deadline", "5"]);
        failed.expect(5, &["creating the slot of the way back", "Everything was undone"]);
        expect_before(&case, &mut process);

        let program = case.tool.program("switchover").args(["--go", "--deadline", "60"]);
        let mut killed = must(program.spawn_logged(case.log_file("killed")));
        let step = "SELECT coalesce(max(step), '') FROM pgapace.switchover";
        must(wait_until(PATIENCE, "the slot", || {
            assert!(killed.is_running(), "{}", killed.log());
            Ok(value(case.subscriber.cluster, &database, step) == "slot")
        }));
        must(killed.kill9());
        let read_only = "SELECT current_setting('default_transaction_read_only')";
        assert_eq!(value(case.publisher.cluster, &database, read_only), "on");
        must(open.rollback());
        let mut aborted = None;
        must(wait_until(PATIENCE, "the session of the killed process to end", || {
            let finished = switchover(&case.tool, &["--abort"]);
            let ended = finished.code != Some(8);
            aborted = Some(finished);
            Ok(ended)
        }));
        if let Some(aborted) = aborted {
            aborted.expect(0, &["event=\"switchover_undone\""]);
        }
        expect_before(&case, &mut process);
        switchover(&case.tool, &["--abort"]).expect(0, &[]);
        case.stop(process);
    }
}

#[test]
fn a_plan_names_what_is_missing() {
    let case = two_way_case(15, 18);
    case.subscriber.sql("DROP PUBLICATION pgapace_back");
    case.run_until_current();
    switchover(&case.tool, &["--plan"])
        .expect(3, &["no process applies", "no publication \"pgapace_back\""]);
    switchover(&case.tool, &[]).expect(2, &[]);
}
