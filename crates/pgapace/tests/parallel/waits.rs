//! Time spent waiting, by reason, is reported during the wait as well as afterwards.

use std::time::Duration;

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};
use crate::verbs::json;

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];
/// Long enough not to be accidental.
const SECONDS: f64 = 0.5;

fn waited(case: &Case, reason: &str) -> f64 {
    let status = json(&case.tool.finish("status", &["--json"]));
    let waited = &status[0]["counters"]["waits"][reason];
    waited.as_f64().unwrap_or_else(|| panic!("no {reason}: {status:#}"))
}

#[test]
fn a_lock_of_a_user_is_reported_as_wait_by_reason() {
    on_versions(&VERSIONS, |mut case| {
        let args = ["--workers", "4", "--group-transactions", "2", "--memory-limit", "16"];
        case.tool.args = args.map(str::to_owned).into();
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v int); \
             CREATE TABLE large (id int PRIMARY KEY, v text)",
        );
        case.publisher.sql("INSERT INTO t VALUES (1, 0), (2, 0)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("UPDATE t SET v = v + 1");
        case.wait_until_applied(&mut process);
        for reason in ["subscriber_lock", "memory"] {
            let seconds = waited(&case, reason);
            assert!(seconds < f64::EPSILON, "{reason}: {seconds} s with nothing in the way");
        }
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; UPDATE t SET v = 77 WHERE id = 1"));
        // The oldest transaction waits for the user, the second for its turn to commit, the third
        // for the first. There are more transactions than workers accept and memory holds.
        case.publisher.sql("UPDATE t SET v = 2 WHERE id = 1");
        case.publisher.sql("UPDATE t SET v = 2 WHERE id = 2");
        case.publisher.sql("UPDATE t SET v = 3 WHERE id = 1");
        case.publisher.sql(
            "DO $$ BEGIN FOR i IN 10..400 LOOP \
             INSERT INTO t VALUES (i, 0); COMMIT; END LOOP; END $$",
        );
        for id in 0..40 {
            case.publisher.sql(&format!("INSERT INTO large VALUES ({id}, repeat('x', 1000000))"));
        }
        for reason in ["subscriber_lock", "commit_order", "dependency", "worker", "memory"] {
            must(wait_until(PATIENCE, reason, || Ok(waited(&case, reason) >= SECONDS)));
        }
        let human = case.tool.finish("status", &[]).stdout;
        assert!(human.contains("waits (s)") && human.contains("subscriber_lock"), "{human}");
        must(user.batch_execute("ROLLBACK"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "large"]);
        let log = case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
        // The SQL view shows it, too.
        let seconds = case.statistic("wait_subscriber_lock").parse::<f64>();
        assert!(must(seconds) >= SECONDS);
    });
}

#[test]
fn an_idle_subscription_waits_for_the_publisher() {
    on_versions(&VERSIONS[1..], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        // The time that the statistic must show.
        std::thread::sleep(Duration::from_secs(2));
        // The waits are written with the next progress.
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.wait_until_applied(&mut process);
        must(wait_until(PATIENCE, "publisher", || Ok(waited(&case, "publisher") >= 1.0)));
        for reason in ["subscriber_lock", "commit_order", "dependency", "worker", "memory"] {
            let seconds = waited(&case, reason);
            assert!(seconds < SECONDS, "{reason}: {seconds} s with one transaction");
        }
        // More of it: the waits until the end are written at the end.
        std::thread::sleep(Duration::from_secs(3));
        case.stop(process);
        assert!(must(case.statistic("wait_publisher").parse::<f64>()) >= 3.0);
    });
}
