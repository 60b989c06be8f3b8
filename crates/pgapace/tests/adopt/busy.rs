//! Another session has an open transaction with an ALTER SUBSCRIPTION: the wait for it is limited, and its process named.

use testbed::wait_until;

use super::{NativeSubscription, TABLES};
use crate::support::{Case, Finished, PATIENCE, must, on_versions};
use crate::verbs::lock_waits::holder;

/// Refused because of that session, of which the log tells while the verb waits.
#[track_caller]
fn expect_busy(finished: &Finished, pid: i32, said: &str) {
    finished.expect(8, &["event=\"lock_wait\"", &format!("process {pid} ("), said]);
}

fn alter(native: &NativeSubscription<'_>) -> String {
    format!("ALTER SUBSCRIPTION {} SET (synchronous_commit = off)", native.name)
}

#[test]
fn an_open_alter_subscription_is_waited_for_within_the_limit() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let limit = ["--busy-timeout", "2s"];
        let terminates = "pg_terminate_backend";
        let (holding, pid) = holder(&case, &alter(&native));
        expect_busy(&native.adopt(&limit), pid, terminates);
        drop(holding);
        assert_eq!(native.state(), native.running());
        native.adopt(&[]).expect(0, &[]);

        let (holding, pid) = holder(&case, &alter(&native));
        expect_busy(&native.adopt(&["--abort", "--busy-timeout", "2s"]), pid, terminates);
        expect_busy(&case.tool.finish("release", &limit), pid, terminates);
        assert_eq!(native.state(), "f|∅");
        drop(holding);
        case.publisher.sql("INSERT INTO log VALUES (1)");
        case.run_until_current();
        case.tool.finish("release", &[]).expect(0, &[]);
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}

/// The session comes when the native subscription is disabled already, and its worker has not ended: it cannot be
/// enabled again before that session has ended.
#[test]
fn an_alter_subscription_in_the_midst_of_an_adoption_leaves_it_disabled_and_says_so() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let (reading, _) = holder(&case, "LOCK TABLE log IN EXCLUSIVE MODE");
        case.publisher.sql("INSERT INTO log VALUES (1)");
        let blocked = "SELECT count(*) > 0 FROM pg_locks \
                       WHERE relation = 'log'::regclass AND NOT granted";
        let wait = |what: &str, done: &dyn Fn(&Case) -> bool| {
            must(wait_until(PATIENCE, what, || Ok(done(&case))));
        };
        wait("its worker to wait", &|case| case.subscriber.value(blocked) == "t");
        let args = ["--subscription", &native.name, "--busy-timeout", "8s"];
        let mut adopt =
            must(case.tool.program("adopt").args(args).spawn_logged(case.log_file("a")));
        wait("the adoption to begin", &|_| native.state() == format!("f|{}", native.name));
        let (holding, pid) = holder(&case, &alter(&native));
        drop(reading);
        must(adopt.wait(PATIENCE));
        let log = adopt.log();
        assert_eq!(adopt.exit_code(), Some(8), "{log}");
        for said in [format!("process {pid} ("), "is still disabled".to_owned()] {
            assert!(log.contains(&said), "{said}: {log}");
        }
        drop(holding);
        native.adopt(&["--abort"]).expect(0, &[]);
        assert_eq!(native.state(), native.running());
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}
