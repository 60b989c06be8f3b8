//! Native subscriptions whose slot is lost.

use testbed::wait_until;

use super::{NativeSubscription, TABLES};
use crate::support::{PATIENCE, must, on_versions};

/// The way on that is named ends with equal tables.
#[test]
fn a_native_subscription_whose_slot_is_lost_is_replaced() {
    on_versions(&[(14, 14), (18, 18)], |case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let name = &native.name;
        case.subscriber.sql(&format!("ALTER SUBSCRIPTION {name} DISABLE"));
        let free =
            format!("SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{name}'");
        must(wait_until(PATIENCE, "the native worker to end", || {
            Ok(case.publisher.value(&free) == "t")
        }));
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{name}')"));
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        let detach = format!("ALTER SUBSCRIPTION \"{name}\" SET (slot_name = NONE)");
        native
            .adopt(&[])
            .expect(7, &["does not exist on the publisher", &detach, "run --if-not-empty rebase"]);
        case.subscriber.sql(&detach);
        case.subscriber.sql(&format!("DROP SUBSCRIPTION {name}"));
        let rebase = ["--if-not-empty", "rebase", "--until", "current"];
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["t", "log"]);
    });
}
