//! Transactions that depend on each other. The first of them is blocked on the subscriber; a
//! transaction that does not wait for it would overtake it.

use std::time::Duration;

use super::dependent_scenarios::SCENARIOS;
use crate::support::{Case, must, on_versions};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

fn in_every_scenario(args: &[&str]) {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        case.both("CREATE TABLE brake (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO brake VALUES (1, 0)");
        for scenario in SCENARIOS {
            case.both(scenario.ddl);
            case.publisher.sql(scenario.rows);
        }
        // The leaf partitions have their own keys, the root has none.
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let mut brake = case.subscriber.connect();
        for scenario in SCENARIOS {
            must(brake.batch_execute("BEGIN; SELECT FROM brake FOR UPDATE"));
            for (number, transaction) in scenario.transactions.iter().enumerate() {
                let held = if number == 0 { "UPDATE brake SET v = v + 1; " } else { "" };
                case.publisher.sql(&format!("BEGIN; {held}{transaction}; COMMIT"));
            }
            // Time for transactions that do not wait, so that they would overtake.
            std::thread::sleep(Duration::from_millis(150));
            must(brake.batch_execute("COMMIT"));
            eprintln!("{}", scenario.name);
            case.wait_until_applied(&mut process);
            case.expect_equal(scenario.tables);
        }
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
        assert!(!log.contains("conflict"), "{log}");
    });
}

#[test]
fn dependent_transactions_one_by_one() {
    in_every_scenario(&["--workers", "4", "--group-transactions", "1"]);
}

#[test]
fn dependent_transactions_without_commit_order() {
    let order = "--preserve-commit-order=false";
    in_every_scenario(&["--workers", "4", "--group-transactions", "1", order]);
}

#[test]
fn dependent_transactions_by_row_without_commit_order() {
    let order = "--preserve-commit-order=false";
    in_every_scenario(&["--workers", "3", "--apply-mode", "row", order]);
}

#[test]
fn dependent_transactions_in_groups() {
    in_every_scenario(&["--workers", "4", "--group-transactions", "2"]);
}

/// An independent transaction does not wait for dependent ones: it is visible while the first is
/// blocked.
#[test]
fn independent_transactions_overtake_without_commit_order() {
    on_versions(&VERSIONS, |mut case: Case| {
        case.tool.args = ["--workers", "4", "--group-transactions", "1"].map(str::to_owned).into();
        case.tool.args.push("--preserve-commit-order=false".to_owned());
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 0), (2, 0)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let mut brake = case.subscriber.connect();
        must(brake.batch_execute("BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE"));
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
        case.publisher.sql("UPDATE t SET v = 2 WHERE id = 1");
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 2");
        let waited =
            testbed::wait_until(crate::support::PATIENCE, "the third to be visible", || {
                Ok(case.subscriber.value("SELECT v FROM t WHERE id = 2") == "1")
            });
        must(waited);
        // It is applied beyond a gap, which the view shows.
        let applied = "SELECT lowest_lsn < highest_lsn, cardinality(beyond) FROM pgapace.applied";
        assert_eq!(case.subscriber.rows(applied), ["t|1"]);
        must(brake.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        let applied = "SELECT lowest_lsn = highest_lsn, cardinality(beyond) FROM pgapace.applied";
        assert_eq!(case.subscriber.rows(applied), ["t|0"]);
        case.stop(process);
    });
}
