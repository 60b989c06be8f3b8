//! Names of subscriptions that are taken: a dry run refuses what the verb refuses.

use super::interrupted::kill_program_at;
use super::{NativeSubscription, TABLES};
use crate::support::{finish, must, on_versions};

/// Once with `--dry-run`, then without.
const WAYS: [&[&str]; 2] = [&["--dry-run"], &[]];

#[test]
fn a_subscription_that_is_adopted_is_not_adopted_again() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        native.adopt(&["--dry-run"]).expect(0, &[]);
        native.adopt(&[]).expect(0, &[]);
        for way in WAYS {
            native.adopt(way).expect(3, &["is adopted already, as subscription"]);
        }
        // Another native subscription under the same name.
        let second = NativeSubscription { case: &case, name: format!("{}_second", native.name) };
        case.subscriber.sql(&format!(
            "CREATE SUBSCRIPTION {} CONNECTION '{}' PUBLICATION pub WITH (copy_data = false)",
            second.name,
            case.publisher.conninfo().replace('\'', "''")
        ));
        let taken = format!("has a subscription {} already", native.name);
        for way in WAYS {
            second.adopt(way).expect(3, &[&taken, "another name"]);
            assert_eq!(second.state(), second.running());
        }
        native.adopt(&["--abort"]).expect(0, &[]);
    });
}

#[test]
fn a_native_subscription_is_not_created_under_a_name_that_is_taken() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate(TABLES);
        let taken = NativeSubscription { case: &case, name: format!("{}_taken", case.tool.name) };
        let connection = case.publisher.conninfo();
        case.subscriber.sql(&format!(
            "CREATE SUBSCRIPTION {} CONNECTION '{}' PUBLICATION pub WITH (connect = false, slot_name = NONE)",
            taken.name,
            connection.replace('\'', "''")
        ));
        for way in WAYS {
            let args =
                [&["--connection", &connection, "--subscription", &taken.name], way].concat();
            let refused = case.tool.finish("release", &args);
            refused.expect(3, &["has a native subscription", "--subscription"]);
            assert_eq!(taken.state(), "f|∅");
        }
    });
}

/// The earlier release has created it before it was killed.
#[test]
fn arguments_for_a_native_subscription_that_exists_are_named() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate(TABLES);
        let native = NativeSubscription { case: &case, name: format!("{}_one", case.tool.name) };
        let connection = case.publisher.conninfo();
        let release = |connection: &str, name: &str| {
            let args = ["--connection", connection, "--subscription", name];
            case.tool.program("release").args(args)
        };
        let mut client = case.subscriber.connect();
        let mut blocked = must(client.transaction());
        must(blocked.batch_execute("LOCK TABLE pgapace.relation IN SHARE MODE"));
        kill_program_at(&case, &release(&connection, &native.name), blocked);
        assert_eq!(native.state(), "f|∅");

        let other = format!("{connection} application_name=other");
        let dry_run = finish(&release(&other, "two").arg("--dry-run"));
        for released in [dry_run, finish(&release(&other, "two"))] {
            let said = &released.expect(0, &[]).stdout;
            assert!(said.contains("no effect: --subscription and --connection"), "{said}");
            assert!(said.contains(&native.name), "{said}");
        }
        assert_eq!(native.state(), format!("t|{}", case.tool.name));
    });
}
