//! Names of subscriptions that are taken: a dry run refuses what the verb refuses.

use super::{NativeSubscription, TABLES};
use crate::support::on_versions;

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
