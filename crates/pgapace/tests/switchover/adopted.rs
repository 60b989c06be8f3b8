//! Native subscriptions of the new side that are disabled and have no slot: they do not keep the way back from
//! beginning anew.

use testbed::wait_until;

use super::{Slots, expect_equal_soon, switchover, two_way_case, value};
use crate::adopt::NativeSubscription;
use crate::support::{Case, PATIENCE, must, on_versions};

/// Moves writes over and back. Each side gets a row.
fn over_and_back(case: &Case, round: i32) {
    let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
    let database = case.publisher.name.as_str();
    let insert = |client: i32| {
        format!("INSERT INTO orders (id, client, n) VALUES ({client}{round}, {client}, {round})")
    };
    switchover(&case.tool, &["--go"]).expect(0, &[]);
    must(new.sql(database, &insert(1)));
    let done = switchover(&case.tool, &["--back"]);
    done.expect(0, &[]);
    assert!(done.stdout.contains("is applied (backend"), "{}", done.stdout);
    must(old.sql(database, &insert(2)));
}

#[test]
fn an_adopted_subscription_turns_back_and_is_released() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        let case = &case;
        case.both(super::DDL);
        case.publish("FOR TABLE orders");
        case.subscriber.sql("CREATE PUBLICATION pgapace_back FOR TABLE orders");
        let _slots = Slots(case);
        let native = NativeSubscription::ready(case, "");
        native.adopt(&[]).expect(0, &[]);
        let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
        let database = case.publisher.name.as_str();
        let mut process = case.start();
        for round in 0..2 {
            over_and_back(case, round);
            expect_equal_soon(case, &mut process);
        }
        // A start with the settings as before.
        case.stop(process);
        process = case.start();
        expect_equal_soon(case, &mut process);
        case.stop(process);
        native.adopt(&[]).expect(3, &["is adopted already"]);
        case.tool.finish("release", &[]).expect(0, &["event=\"native_released\""]);
        let sql = format!(
            "SELECT concat_ws('|', subenabled, subslotname) FROM pg_subscription WHERE subname = '{}'",
            native.name
        );
        assert_eq!(value(new, database, &sql), native.running());
        must(old.sql(database, "INSERT INTO orders (id, client, n) VALUES (100, 3, 0)"));
        let count = |cluster| value(cluster, database, "SELECT count(*), max(id) FROM orders");
        must(wait_until(PATIENCE, "the native subscription to apply", || {
            Ok(count(new) == count(old))
        }));
        // The native subscription is dropped by a session that may write.
        let reset = format!("ALTER DATABASE {database} RESET default_transaction_read_only");
        must(new.sql("postgres", &reset));
    });
}

#[test]
fn a_native_subscription_without_a_slot_is_no_obstacle_to_the_way_back() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let native = NativeSubscription::create(
        &case,
        "WITH (connect = false, slot_name = NONE, enabled = false)",
    );
    let mut process = case.start();
    over_and_back(&case, 0);
    expect_equal_soon(&case, &mut process);
    case.stop(process);
    let (new, database) = (case.subscriber.cluster, case.publisher.name.as_str());
    must(new.sql(
        "postgres",
        &format!("ALTER DATABASE {database} RESET default_transaction_read_only"),
    ));
    drop(native);
}
