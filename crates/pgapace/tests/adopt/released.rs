//! A subscription is handed to a native one, which continues.

use testbed::workload::tpcb;

use super::interrupted::kill_program_at;
use super::under_load::{LOAD_TABLES, load, load_case};
use super::{NativeSubscription, TABLES};
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

/// A table that pgapace has copied since is not known to the native subscription.
#[test]
fn a_table_that_was_added_since_needs_another_native_subscription() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        case.both("CREATE TABLE added (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO added VALUES (1)");
        case.run_until_current();
        // The copy may be later than what the first run had as its goal.
        case.run_until_current();
        let drop = format!("DROP SUBSCRIPTION \"{}\"", native.name);
        case.tool.finish("release", &[]).expect(3, &["does not know", "public.added", &drop]);
        case.subscriber.sql(&drop);
        let connection = case.publisher.conninfo();
        case.tool.finish("release", &["--connection", &connection]).expect(0, &[]);
        case.publisher.sql("INSERT INTO added VALUES (2); INSERT INTO t VALUES (1)");
        native.wait_until_applied();
        case.expect_equal(&["t", "added"]);
    });
}

/// A run with fewer publications has not applied the changes of the others.
#[test]
fn another_list_of_publications_is_not_handed_back() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publisher
            .sql("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION logs FOR TABLE log");
        let native = NativeSubscription::create(&case, "");
        native.wait_until_ready();
        let name = native.name.clone();
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} SET PUBLICATION pub, logs"));
        native.wait_until_ready();
        native.wait_until_applied();
        let set = |publications: &str| {
            case.subscriber.sql(&format!(
                "ALTER SUBSCRIPTION {name} SET PUBLICATION {publications} WITH (refresh = false)"
            ));
        };
        native.adopt(&[]).expect(0, &[]);
        // Only `pub`: what is written to `log` meanwhile is not applied.
        case.run_until_current();
        case.publisher.sql("INSERT INTO log VALUES (1); INSERT INTO t VALUES (1, 1)");
        case.run_until_current();
        let refused = case.tool.finish("release", &[]);
        refused.expect(3, &["has publications pub, logs", "SET PUBLICATION \"pub\" WITH"]);
        // The same the other way round.
        set("logs");
        case.tool.finish("release", &[]).expect(3, &["has publications logs"]);
        set("pub");
        case.tool.finish("release", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO t VALUES (2, 2)");
        native.wait_until_applied();
        case.expect_equal(&["t"]);
    });
}

/// The native subscription still has the table as ready, and would go on with it.
#[test]
fn a_table_that_was_not_published_for_some_time_is_not_handed_back() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publisher.sql("CREATE PUBLICATION pub FOR TABLE t, log");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        case.publisher.sql("ALTER PUBLICATION pub DROP TABLE log");
        // Not looked at since: pgapace does not know it yet.
        case.tool.finish("release", &[]).expect(3, &["in another way", "--until current"]);
        case.run_until_current();
        case.publisher.sql("INSERT INTO log VALUES (1)");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE log");
        case.tool.finish("release", &[]).expect(3, &["may lack changes"]);
        case.run().expect(6, &["public.log"]);
        case.tool.finish("resync", &["log"]).expect(0, &[]);
        case.run_until_current();
        case.run_until_current();
        // Out and in again, and pgapace has not looked.
        case.publisher.sql("ALTER PUBLICATION pub DROP TABLE log");
        case.publisher.sql("INSERT INTO log VALUES (2)");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE log");
        case.tool.finish("release", &[]).expect(3, &["may lack changes"]);
        case.run().expect(6, &["public.log"]);
        case.tool.finish("release", &[]).expect(3, &["not ready: public.log"]);
        case.tool.finish("resync", &["log"]).expect(0, &[]);
        case.run_until_current();
        case.run_until_current();
        case.tool.finish("release", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO log VALUES (3)");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}

/// PostgreSQL takes this name for no slot, in quotes too.
#[test]
fn a_slot_that_is_named_none_is_not_handed_back() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        case.tool.args = vec!["--slot=none".to_owned()];
        case.run_until_current();
        case.tool.args.clear();
        let connection = case.publisher.conninfo();
        let refused = case.tool.finish("release", &["--connection", &connection]);
        refused.expect(3, &["is named none", "--if-not-empty rebase"]);
        // Nothing is left of it.
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.adoption"), "0");
        case.tool.finish("drop", &[]).expect(0, &[]);
    });
}

/// Each run changes the slot as it is told, and the native worker would not notice.
#[test]
fn another_two_phase_of_the_slot_is_not_handed_back() {
    on_versions(&[(15, 15), (15, 18), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        let run = |two_phase: &str| {
            case.tool.finish("run", &["--until", "current", two_phase]).expect(0, &[]);
        };
        run("--two-phase");
        let refused = case.tool.finish("release", &[]);
        let state = || {
            let sql = "SELECT subtwophasestate FROM pg_subscription WHERE subdbid = \
                       (SELECT oid FROM pg_database WHERE datname = current_database())";
            case.subscriber.value(sql)
        };
        match (case.publisher.major(), case.subscriber.major()) {
            (18.., _) => {
                refused.expect(3, &["the slot has two_phase", "--two-phase=false"]);
                run("--two-phase=false");
                case.tool.finish("release", &[]).expect(0, &[]);
                assert_eq!(state(), "d");
            }
            (_, 18..) => {
                let set = format!("ALTER SUBSCRIPTION \"{}\" SET (two_phase = true);", native.name);
                refused.expect(3, &["the slot has two_phase", &set]);
                case.subscriber.sql(&set);
                case.tool.finish("release", &[]).expect(0, &[]);
            }
            _ => {
                let drop = format!("DROP SUBSCRIPTION \"{}\";", native.name);
                refused.expect(3, &["the slot has two_phase", &drop]);
                case.subscriber.sql(&drop);
                let connection = case.publisher.conninfo();
                case.tool.finish("release", &["--connection", &connection]).expect(0, &[]);
            }
        }
        case.publisher.sql("INSERT INTO log VALUES (1)");
        native.wait_until_applied();
        case.expect_equal(&["log"]);
        if case.publisher.major() < 18 {
            must(testbed::wait_until(PATIENCE, "two_phase", || Ok(state() == "e")));
            return;
        }
        let alter = |action: &str| {
            case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} {action}", native.name));
        };
        native.disable();
        alter("SET (two_phase = true)");
        alter("ENABLE");
        must(testbed::wait_until(PATIENCE, "two_phase", || Ok(state() == "e")));
        native.adopt(&[]).expect(0, &[]);
        run("--two-phase=false");
        case.tool.finish("release", &[]).expect(3, &["the slot has not", "--two-phase --until"]);
        run("--two-phase");
        case.tool.finish("release", &[]).expect(0, &[]);
        assert_eq!(state(), "e");
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
