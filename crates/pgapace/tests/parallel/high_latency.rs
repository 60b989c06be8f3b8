//! A subscriber with high network latency: workers wait for replies only where that is unavoidable.

use std::time::Duration;

use testbed::program::Process;
use testbed::{Proxy, wait_until};

use crate::support::{Case, must, on_versions};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];
const PATIENCE: Duration = Duration::from_secs(60);
const DELAY: Duration = Duration::from_millis(3);
const TRANSACTIONS: u32 = 6;

/// A subscriber behind a proxy, and a subscription that streams. The table `log` shows changes that
/// were applied twice.
fn start(case: &mut Case) -> (Proxy, Process) {
    let proxy = must(Proxy::in_front_of(case.subscriber.cluster));
    proxy.set_delay(DELAY);
    case.tool.subscriber = proxy.conninfo(&case.tool.name);
    case.tool.args = vec!["--workers=4".to_owned()];
    case.replicate(
        "CREATE TABLE t (id int PRIMARY KEY, v int, u int UNIQUE); CREATE TABLE log (n int)",
    );
    let mut process = case.start();
    case.publisher.sql("INSERT INTO t SELECT g, 0, g FROM generate_series(1, 100) g");
    touch(case, &mut process);
    (proxy, process)
}

/// The run reads the catalogue for new tables, and has to wait for the replies.
fn touch(case: &Case, process: &mut Process) {
    case.publisher.sql("UPDATE t SET v = 0 WHERE id = 100; INSERT INTO log VALUES (0)");
    case.wait_until_applied(process);
}

/// Transactions that all depend on each other and are too large to be sent change by change.
fn write(case: &Case) {
    for _ in 0..TRANSACTIONS {
        case.publisher.sql(
            "BEGIN; UPDATE t SET v = v + 1 WHERE id <= 30; INSERT INTO log SELECT max(v) FROM t; \
             DELETE FROM t WHERE id = 90; INSERT INTO t VALUES (90, 0, 90); COMMIT",
        );
    }
}

fn wait_until_there(case: &Case, logged: u32) {
    let there = wait_until(PATIENCE, "commits without a reply", || {
        Ok(case.subscriber.value("SELECT count(*) FROM log WHERE n > 0") == logged.to_string())
    });
    must(there);
}

#[test]
fn transactions_are_sent_without_waiting_for_replies() {
    on_versions(&VERSIONS, |mut case| {
        let (proxy, mut process) = start(&mut case);
        proxy.hold_answers(true);
        write(&case);
        wait_until_there(&case, TRANSACTIONS);
        proxy.hold_answers(false);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "log"]);
        case.stop(process);
    });
}

/// A group finds other rows than it must. Groups that were sent after it are not committed before
/// it is applied row by row.
#[test]
fn a_missing_row_stops_transactions_sent_after_it() {
    on_versions(&VERSIONS, |mut case| {
        let (proxy, mut process) = start(&mut case);
        case.subscriber.sql("DELETE FROM t WHERE id = 7");
        proxy.hold_answers(true);
        write(&case);
        proxy.hold_answers(false);
        case.wait_until_applied(&mut process);
        case.stop(process);
        assert_eq!(case.statistic("update_missing"), TRANSACTIONS.to_string());
        case.subscriber.sql(&format!("INSERT INTO t VALUES (7, {TRANSACTIONS}, 7)"));
        case.expect_equal(&["t", "log"]);
    });
}

/// A conflict in the middle: everything before it is applied, and nothing after it.
#[test]
fn a_conflict_is_named_and_nothing_after_it_is_applied() {
    on_versions(&VERSIONS, |mut case| {
        let (proxy, mut process) = start(&mut case);
        case.subscriber.sql("INSERT INTO t VALUES (1000, 0, 1000)");
        proxy.hold_answers(true);
        write(&case);
        case.publisher.sql("UPDATE t SET u = 1000 + id WHERE id BETWEEN -20 AND 20");
        case.publisher.sql("INSERT INTO t SELECT g, 0, g + 5000 FROM generate_series(990, 1010) g");
        write(&case);
        proxy.hold_answers(false);
        let ended = must(process.wait(PATIENCE));
        assert_eq!(ended.code(), Some(9), "{}", process.log());
        assert!(process.log().contains("(id)=(1000)"), "{}", process.log());
        wait_until_there(&case, TRANSACTIONS);
        assert_eq!(case.subscriber.value("SELECT max(u) FROM t"), "1020");
        case.subscriber.sql("DELETE FROM t WHERE id = 1000");
        case.run_until_current();
        case.expect_equal(&["t", "log"]);
    });
}

/// Sessions are lost together with the replies to their commits.
#[test]
fn sessions_lost_with_unconfirmed_commits_apply_nothing_twice() {
    on_versions(&VERSIONS, |mut case| {
        let (proxy, mut process) = start(&mut case);
        for round in 1..=3 {
            proxy.hold_answers(true);
            write(&case);
            wait_until_there(&case, round * TRANSACTIONS);
            proxy.cut_all();
            proxy.hold_answers(false);
            touch(&case, &mut process);
            case.expect_equal(&["t", "log"]);
        }
        case.stop(process);
    });
}
