//! What keeps a subscription from being handed to a native one.

use super::{NativeSubscription, TABLES};
use crate::support::{PATIENCE, must, on_versions};

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
