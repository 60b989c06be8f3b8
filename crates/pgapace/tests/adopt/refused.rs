//! Native subscriptions that cannot be adopted, and the messages.

use testbed::wait_until;

use super::{NativeSubscription, TABLES};
use crate::support::{Database, PATIENCE, must, on_versions};

#[test]
fn a_table_that_is_not_ready_is_named() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        // Its copy fails again and again.
        case.subscriber.sql("INSERT INTO t VALUES (1, 1)");
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::create(&case, "");
        native.adopt(&[]).expect(3, &["are not ready: ", "public.t (", "srsubstate"]);
        assert_eq!(native.state(), native.running());
        // Nobody copies the tables of a disabled one.
        let name = &native.name;
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} DISABLE"));
        let enable = format!("ALTER SUBSCRIPTION \"{name}\" ENABLE;");
        native.adopt(&[]).expect(3, &["are not ready: ", &enable]);
    });
}

#[test]
fn a_skip_lsn_and_prepared_transactions_are_refused() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "WITH (two_phase = true)");
        let enabled = "SELECT subtwophasestate FROM pg_subscription WHERE subdbid = \
                       (SELECT oid FROM pg_database WHERE datname = current_database())";
        must(wait_until(PATIENCE, "two_phase", || Ok(case.subscriber.value(enabled) == "e")));
        let gid = format!("{}_held", native.name);
        case.publisher.sql("INSERT INTO log VALUES (0)");
        case.publisher
            .sql(&format!("BEGIN; INSERT INTO log VALUES (1); PREPARE TRANSACTION '{gid}'"));
        let prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()";
        must(wait_until(PATIENCE, "the PREPARE", || Ok(case.subscriber.value(prepared) == "1")));
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} SKIP (lsn = 'FFFFFF/0')", native.name));
        native.adopt(&[]).expect(
            3,
            &["skip the transaction with LSN FFFFFF/0", "1 prepared transactions: pg_gid_"],
        );
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} SKIP (lsn = NONE)", native.name));
        native.adopt(&[]).expect(3, &["prepared transactions"]);
        case.publisher.sql(&format!("COMMIT PREPARED '{gid}'"));
        must(wait_until(PATIENCE, "the COMMIT", || Ok(case.subscriber.value(prepared) == "0")));
        native.adopt(&[]).expect(0, &[]);
        case.publisher
            .sql(&format!("BEGIN; INSERT INTO log VALUES (2); PREPARE TRANSACTION '{gid}'"));
        case.publisher.sql(&format!("COMMIT PREPARED '{gid}'"));
        case.run_until_current();
        case.expect_equal(&["t", "log"]);
    });
}

#[test]
fn missing_privileges_are_printed_as_sql() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let role = format!("{}_role", native.name);
        case.subscriber.sql(&format!("CREATE ROLE {role} LOGIN"));
        case.subscriber.change_setting_privileges(&format!(
            "GRANT SET ON PARAMETER session_replication_role TO {role}"
        ));
        let mut tool = case.tool.clone();
        tool.subscriber = tool.subscriber.replace("user=postgres", &format!("user={role}"));
        let refused = tool.finish("adopt", &["--subscription", &native.name]);
        refused.expect(
            5,
            &[
                &format!("GRANT \"postgres\" TO {role};"),
                "GRANT EXECUTE ON FUNCTION pg_replication_origin_advance(text,pg_lsn), \
                 pg_replication_origin_progress(text,boolean) TO ",
            ],
        );
        assert_eq!(native.state(), native.running());
        case.subscriber.change_setting_privileges(&format!(
            "REVOKE SET ON PARAMETER session_replication_role FROM {role}; DROP ROLE {role}"
        ));
    });
}

#[test]
fn wrong_names_are_answered_with_right_ones() {
    on_versions(&[(15, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let other = case.tool.finish("adopt", &["--subscription", "no_such"]);
        other.expect(3, &["no native subscription \"no_such\"", &native.name]);
        let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
        assert_eq!(case.subscriber.value(schemas), "0");
        let mut tool = case.tool.clone();
        tool.subscriber = case.subscriber.cluster.conninfo("postgres");
        let elsewhere = tool.finish("adopt", &["--subscription", &native.name]);
        elsewhere.expect(3, &[&format!("Database \"{}\" has one", case.subscriber.name)]);
        // Another server has no such slot.
        let mut tool = case.tool.clone();
        tool.publisher.clone_from(&tool.subscriber);
        let wrong = tool.finish("adopt", &["--subscription", &native.name]);
        assert_ne!(wrong.code, Some(0));
        assert_eq!(native.state(), native.running());
    });
}

/// Another server has a slot and a publication of these names. No worker shows that it is the wrong one.
#[test]
fn another_publisher_is_refused_without_a_worker() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.disable();
        let name = format!("{}_other", native.name);
        let other = Database::create(case.subscriber.cluster, &name, "");
        other.sql(TABLES);
        other.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        other.sql(&format!(
            "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
            native.name
        ));
        let mut tool = case.tool.clone();
        tool.publisher = other.conninfo();
        let wrong = tool.finish("adopt", &["--subscription", &native.name]);
        wrong.expect(3, &["another database or server", "ENABLE"]);
        assert_eq!(native.state(), format!("f|{}", native.name));
        let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
        assert_eq!(case.subscriber.value(schemas), "0", "what was refused leaves nothing");
        other.sql(&format!("SELECT pg_drop_replication_slot('{}')", native.name));
        drop(other);
        must(case.subscriber.cluster.sql("postgres", &format!("DROP DATABASE {name}")));
    });
}

/// A wrong publisher that could not be refused does no harm, as long as nothing has run.
#[test]
fn an_adoption_after_which_nothing_has_run_is_undone() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        case.publisher.sql("INSERT INTO log VALUES (1)");
        native.wait_until_applied();
        let name = &native.name;
        let alter = |action: &str| {
            case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} {action}"));
        };
        let conninfo = case.publisher.conninfo().replace('\'', "''");
        native.adopt(&[]).expect(0, &[]);
        native.adopt(&["--abort"]).expect(0, &["event=\"adoption_undone\""]);
        assert_eq!(native.state(), native.running());
        case.publisher.sql("INSERT INTO log VALUES (2)");
        native.wait_until_applied();

        native.disable();
        alter("CONNECTION 'host=127.0.0.1 port=1 dbname=none'");
        case.publisher.sql("INSERT INTO log VALUES (3)");
        let adopted = native.adopt(&[]);
        let said = &adopted.expect(0, &[]).stdout;
        assert!(said.contains("not proven") && said.contains("leads nowhere"), "{said}");
        native.adopt(&["--abort"]).expect(0, &[]);
        assert_eq!(native.state(), format!("f|{name}"));
        alter(&format!("CONNECTION '{conninfo}'"));
        alter("ENABLE");
        native.wait_until_applied();
        case.expect_equal(&["log"]);
        native.adopt(&[]).expect(0, &[]);
        case.run_until_current();
        native.adopt(&["--abort"]).expect(3, &["has run since"]);
    });
}

/// Somebody gives the native subscription its slot back by hand.
#[test]
fn a_slot_that_was_taken_back_by_hand_is_noticed() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        case.run_until_current();
        let set = |value: &str| {
            let name = &native.name;
            case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} SET (slot_name = {value})"));
        };
        set(&format!("'{}'", native.name));
        case.run().expect(8, &["has slot", "slot_name = NONE"]);
        let checked = case.tool.finish("check", &[]);
        checked.expect(6, &[]);
        assert!(
            checked.stdout.contains("BLOCKER  subscriber native subscription"),
            "{}",
            checked.stdout
        );
        set("NONE");
        case.run_until_current();
    });
}

/// `check` must not advise to drop the slot from which a native subscription reads.
#[test]
fn check_names_the_native_subscription_that_uses_the_slot() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let check = || {
            let checked = case.tool.finish("check", &[]);
            checked.expect(6, &[]);
            assert!(!checked.stdout.contains("pg_drop_replication_slot"), "{}", checked.stdout);
            checked.stdout
        };
        let used = format!("is used by native subscription \"{}\"", native.name);
        assert!(check().contains(&used));
        // Without its worker the slot is free.
        let alter = |action: &str| {
            case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} {action}", native.name));
        };
        alter("DISABLE");
        let active =
            format!("SELECT active FROM pg_replication_slots WHERE slot_name = '{}'", native.name);
        must(wait_until(PATIENCE, "the slot to be free", || {
            Ok(case.publisher.value(&active) == "f")
        }));
        assert!(check().contains(&used));
        alter("SET (slot_name = NONE)");
        assert!(check().contains("may have been used by native subscription"));
    });
}

/// Only pgapace knows where the native subscription would have to continue.
#[test]
fn the_position_of_an_adopted_subscription_is_not_forgotten() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO log VALUES (1)");
        case.run_until_current();
        let drop = || case.tool.finish("drop", &["--keep-slot"]);
        drop().expect(3, &["was adopted from native subscription", "pgapace release"]);
        case.tool.finish("release", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO log VALUES (2)");
        native.wait_until_applied();
        case.expect_equal(&["log"]);
        native.adopt(&[]).expect(0, &[]);
        // With its slot, the native subscription has a position of its own.
        let name = &native.name;
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} SET (slot_name = '{name}')"));
        drop().expect(0, &[]);
    });
}
