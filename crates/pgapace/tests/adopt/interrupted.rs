//! The adopter is killed between its steps, and goes on or goes back.

use testbed::postgres::Transaction;
use testbed::program::Process;
use testbed::{Program, wait_until};

use super::{NativeSubscription, TABLES};
use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions};
use crate::verbs::signals::expect_stopped;

/// Starts the adopter, and kills it where it waits for the lock that `blocked` holds.
fn kill_at(case: &Case, native: &NativeSubscription<'_>, blocked: Transaction<'_>) {
    let program = case.tool.program("adopt").args(["--subscription", &native.name]);
    kill_program_at(case, &program, blocked);
}

/// The same for another verb.
pub(super) fn kill_program_at(case: &Case, program: &Program, blocked: Transaction<'_>) {
    let mut process = must(program.spawn_logged(case.log_file("killed")));
    wait_until_locked_out(case, &mut process);
    must(process.kill9());
    // Its session ends when the server notices that; until then it is another adopter, and what it has
    // sent would still be executed.
    let left = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgapace %' \
                AND datname = current_database()";
    must(wait_until(PATIENCE, "its session to end", || Ok(case.subscriber.value(left) == "0")));
    must(blocked.rollback());
}

/// Waits until the verb waits for a lock of the subscriber.
fn wait_until_locked_out(case: &Case, process: &mut Process) {
    let waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                   AND application_name LIKE 'pgapace %' AND datname = current_database()";
    must(wait_until(PATIENCE, "the adopter to wait", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(case.subscriber.value(waiting) == "t")
    }));
}

/// Before the first step: the subscription is locked.
fn kill_before_disable(case: &Case, native: &NativeSubscription<'_>) {
    let mut client = case.subscriber.connect();
    let mut blocked = must(client.transaction());
    let sql = format!("ALTER SUBSCRIPTION {} SET (synchronous_commit = off)", native.name);
    must(blocked.batch_execute(&sql));
    kill_at(case, native, blocked);
}

/// In the last step, which is rolled back.
fn kill_in_hand_over(case: &Case, native: &NativeSubscription<'_>) {
    let mut client = case.subscriber.connect();
    let mut blocked = must(client.transaction());
    must(blocked.batch_execute("LOCK TABLE pgapace.relation"));
    kill_at(case, native, blocked);
}

#[test]
fn every_step_can_be_the_last() {
    on_versions(&VERSIONS, |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let write = |from: i32| {
            for value in from..from + 20 {
                case.publisher.sql(&format!(
                    "INSERT INTO t VALUES ({value}, 0); UPDATE t SET v = v + 1; \
                     INSERT INTO log VALUES ({value})"
                ));
            }
        };
        write(0);
        kill_before_disable(&case, &native);
        assert_eq!(native.state(), native.running());
        native.wait_until_applied();

        write(100);
        kill_in_hand_over(&case, &native);
        assert_eq!(native.state(), format!("f|{}", native.name));
        case.tool
            .finish("run", &["--create-slot=false"])
            .expect(3, &["is not complete", "--abort"]);
        native.adopt(&["--abort"]).expect(0, &["event=\"adoption_undone\""]);
        assert_eq!(native.state(), native.running());
        write(200);
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
        native.adopt(&["--abort"]).expect(3, &["no adoption"]);

        write(300);
        kill_in_hand_over(&case, &native);
        // Somebody enables it by hand, and it goes on: positions are read again.
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} ENABLE", native.name));
        write(400);
        native.wait_until_applied();
        kill_in_hand_over(&case, &native);
        write(500);
        native.adopt(&[]).expect(0, &[]);
        write(600);
        case.run_until_current();
        case.expect_equal(&["t", "log"]);
        native.adopt(&["--abort"]).expect(3, &["has run since", "pgapace release"]);
    });
}

#[test]
fn two_adopters_exclude_each_other() {
    on_versions(&[(15, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        kill_before_disable(&case, &native);
        let mut client = case.subscriber.connect();
        let mut blocked = must(client.transaction());
        must(blocked.batch_execute("LOCK TABLE pgapace.relation"));
        let program = case.tool.program("adopt").args(["--subscription", &native.name]);
        let mut first = must(program.spawn_logged(case.log_file("first")));
        let disabled = || native.state() == format!("f|{}", native.name);
        must(wait_until(PATIENCE, "the first adopter", || Ok(disabled())));
        native.adopt(&[]).expect(8, &["another process adopts"]);
        native.adopt(&["--abort"]).expect(8, &["another process adopts"]);
        must(blocked.rollback());
        assert!(must(first.wait(PATIENCE)).success(), "{}", first.log());
    });
}

/// An error after the native subscription was disabled enables it again.
#[test]
fn an_error_is_undone() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        // It creates the schema, whose table then takes no row.
        kill_before_disable(&case, &native);
        // A second attempt has disabled it already: the third one must know that it was enabled.
        kill_in_hand_over(&case, &native);
        assert_eq!(native.state(), format!("f|{}", native.name));
        case.subscriber
            .sql("ALTER TABLE pgapace.relation ADD CONSTRAINT no CHECK (false) NOT VALID");
        native.adopt(&[]).expect(5, &["is as before", "23514"]);
        assert_eq!(native.state(), native.running());
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.adoption"), "0");
        case.publisher.sql("INSERT INTO log VALUES (1)");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
    });
}

/// With slot_name = NONE it could not be enabled by mistake, and must not be able to afterwards.
#[test]
fn a_failed_adoption_leaves_a_native_subscription_without_a_slot() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let (name, slot) = (&native.name, &native.name);
        // It creates schema pgapace, whose table then takes no row.
        kill_before_disable(&case, &native);
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} DISABLE"));
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} SET (slot_name = NONE)"));
        native.adopt(&[]).expect(3, &["slot_name = NONE"]);
        case.subscriber
            .sql("ALTER TABLE pgapace.relation ADD CONSTRAINT no CHECK (false) NOT VALID");
        native.adopt(&["--slot", slot]).expect(5, &["is as before", "23514"]);
        assert_eq!(native.state(), "f|∅");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.adoption"), "0");
        case.subscriber.sql("ALTER TABLE pgapace.relation DROP CONSTRAINT no");
        native.adopt(&["--slot", slot]).expect(0, &[]);
    });
}

/// Whatever lock of another session the adopter waits for.
#[test]
fn a_signal_leaves_the_native_subscription_as_it_was() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        // It creates schema pgapace, whose table is locked below.
        kill_before_disable(&case, &native);
        let alter = format!("ALTER SUBSCRIPTION {} SET (synchronous_commit = off)", native.name);
        let program = case.tool.program("adopt").args(["--subscription", &native.name]);
        let relation = "LOCK TABLE pgapace.relation";
        for (lock, log) in [(&*alter, "interrupted"), (relation, "terminated")] {
            let mut client = case.subscriber.connect();
            let mut blocked = must(client.transaction());
            must(blocked.batch_execute(lock));
            let mut process = must(program.spawn_logged(case.log_file(log)));
            wait_until_locked_out(&case, &mut process);
            must(if log == "interrupted" { process.interrupt() } else { process.terminate() });
            expect_stopped(process, &["stopped during the adoption"]);
            must(blocked.rollback());
            assert_eq!(native.state(), native.running());
            assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.adoption"), "0");
        }
        case.publisher.sql("INSERT INTO log VALUES (1)");
        native.wait_until_applied();
        case.expect_equal(&["t", "log"]);
        native.adopt(&[]).expect(0, &[]);
    });
}

/// Another session locks the native subscription in the moment in which the adoption is rolled back.
#[test]
fn a_signal_ends_the_undoing_that_waits_for_a_lock() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        kill_before_disable(&case, &native);
        let (mut client, mut other) = (case.subscriber.connect(), case.subscriber.connect());
        let mut blocked = must(client.transaction());
        must(blocked.batch_execute("LOCK TABLE pgapace.relation"));
        let program = case.tool.program("adopt").args(["--subscription", &native.name]);
        let mut process = must(program.spawn_logged(case.log_file("stopped")));
        wait_until_locked_out(&case, &mut process);
        let alter = format!("BEGIN; ALTER SUBSCRIPTION {} SET (binary = false)", native.name);
        let altering = std::thread::spawn(move || other.batch_execute(&alter).map(|()| other));
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                       AND query LIKE 'BEGIN; ALTER%' AND datname = current_database()";
        must(wait_until(PATIENCE, "the other session to wait", || {
            Ok(case.subscriber.value(waiting) == "1")
        }));
        must(process.interrupt());
        expect_stopped(process, &["is still disabled", "pgapace adopt --abort"]);
        drop(altering.join());
        must(blocked.rollback());
        native.adopt(&["--abort"]).expect(0, &[]);
        assert_eq!(native.state(), native.running());
    });
}
