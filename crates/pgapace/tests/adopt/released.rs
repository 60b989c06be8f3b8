//! A subscription is handed to a native one, which continues.

use testbed::workload::tpcb;

use super::interrupted::kill_program_at;
use super::under_load::{LOAD_TABLES, load, load_case};
use super::{NativeSubscription, TABLES};
use crate::conflicts::stops::commit_lsn;
use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions, one_or_all};

/// Waits until the subscriber has some rows of the load more.
fn wait_for_more(case: &Case) {
    let sql = "SELECT count(*) FROM pgbench_history";
    let rows = || case.subscriber.value(sql).parse::<u64>().unwrap_or(0);
    let enough = rows() + 50;
    must(testbed::wait_until(PATIENCE, "more rows", || Ok(rows() >= enough)));
}

/// Back and forth under load, with processes that are killed.
#[test]
fn native_and_pgapace_take_turns() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let case = load_case(publisher, subscriber);
        let native = NativeSubscription::ready(&case, "");
        let load: tpcb::Load = load(&case);
        for round in 0..3 {
            wait_for_more(&case);
            native.adopt(&[]).expect(0, &[]);
            let mut process = case.start();
            wait_for_more(&case);
            case.tool.finish("release", &[]).expect(8, &["run by another process"]);
            if round == 1 {
                case.stop(process);
            } else {
                must(process.kill9());
            }
            if round > 0 {
                // It is killed before its only transaction commits.
                let mut client = case.subscriber.connect();
                let mut blocked = must(client.transaction());
                must(blocked.batch_execute("LOCK TABLE pgapace.relation IN SHARE MODE"));
                kill_program_at(&case, &case.tool.program("release"), blocked);
                assert_eq!(native.state(), "f|∅");
            }
            if round == 2 {
                // In between pgapace goes on.
                let process = case.start();
                wait_for_more(&case);
                case.stop(process);
            }
            let released = release(&case);
            assert!(released.contains("was handed to native subscription"), "{released}");
            assert_eq!(native.state(), native.running());
        }
        must(load.stop());
        native.wait_until_applied();
        case.expect_equal(&LOAD_TABLES);
        case.run().expect(7, &["pgapace adopt"]);
    }
}

/// `release` that succeeds as soon as sessions of a killed process have ended.
fn release(case: &Case) -> String {
    let mut done = None;
    must(testbed::wait_until(PATIENCE, "release", || {
        let finished = case.tool.finish("release", &[]);
        if finished.code == Some(8) {
            return Ok(false);
        }
        finished.expect(0, &["event=\"native_released\""]);
        done = Some(finished.stdout);
        Ok(true)
    }));
    done.unwrap_or_default()
}

#[test]
fn a_subscription_that_pgapace_created_becomes_native() {
    on_versions(&VERSIONS, |case| {
        case.both(TABLES);
        case.publisher.sql("INSERT INTO log SELECT generate_series(1, 100)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql("INSERT INTO log VALUES (101); INSERT INTO t VALUES (1, 1)");
        case.run_until_current();
        case.publisher.sql("INSERT INTO log VALUES (102); UPDATE t SET v = 2");
        case.tool.finish("release", &[]).expect(3, &["--connection is not given"]);
        let native = NativeSubscription::existing(&case);
        let connection = case.publisher.conninfo();
        let planned = case.tool.finish("release", &["--connection", &connection, "--dry-run"]);
        assert!(planned.stdout.contains("would be created"), "{}", planned.stdout);
        case.tool.finish("release", &["--connection", &connection]).expect(0, &["native_created"]);
        assert_eq!(native.state(), native.running());
        case.publisher.sql("INSERT INTO log VALUES (103); UPDATE t SET v = 3");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
        // And back again.
        native.adopt(&[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO log VALUES (104); UPDATE t SET v = 4");
        case.run_until_current();
        case.expect_equal(&["t", "log"]);
    });
}

/// The publisher sends a PREPARE once; whoever holds it in memory must not hand over.
#[test]
fn a_prepared_transaction_that_is_held_is_not_lost() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "WITH (two_phase = true)");
        let enabled = "SELECT subtwophasestate FROM pg_subscription WHERE subdbid = \
                       (SELECT oid FROM pg_database WHERE datname = current_database())";
        must(testbed::wait_until(PATIENCE, "two_phase", || {
            Ok(case.subscriber.value(enabled) == "e")
        }));
        native.adopt(&[]).expect(0, &[]);
        let gid = format!("{}_held", native.name);
        case.publisher
            .sql(&format!("BEGIN; INSERT INTO log VALUES (1); PREPARE TRANSACTION '{gid}'"));
        case.publisher.sql("INSERT INTO log VALUES (2)");
        case.run_until_current();
        let refused = case.tool.finish("release", &[]);
        refused.expect(3, &["prepared"]);
        case.publisher.sql(&format!("COMMIT PREPARED '{gid}'"));
        case.run_until_current();
        case.tool.finish("release", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO log VALUES (3)");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}

/// The request to skip it is forgotten at the next start only.
#[test]
fn a_transaction_that_was_skipped_does_not_stand_in_the_way() {
    on_versions(&[(18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        case.subscriber.sql("INSERT INTO t VALUES (1, 0)");
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        let failed = case.run();
        failed.expect(9, &["23505"]);
        let lsn = commit_lsn(&failed);
        case.tool.finish("skip", &["--lsn", &lsn]).expect(0, &[]);
        let skips = format!("is to skip the transaction with LSN {lsn}");
        case.tool.finish("release", &[]).expect(3, &[&skips, "Run pgapace run until it has"]);
        let log = case.run_until_current();
        assert_eq!(testbed::program::events(&log, "transaction_skipped"), 1, "{log}");
        case.tool.finish("release", &[]).expect(0, &["event=\"native_released\""]);
        assert_eq!(native.state(), native.running());
        case.publisher.sql("UPDATE t SET v = 2 WHERE id = 1");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}
