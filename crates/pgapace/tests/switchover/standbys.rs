//! Processes with `--standby` turn round, and back.

use super::{Slots, expect_equal_soon, switchover, two_way_case};
use crate::support::{PATIENCE, Tool, must, one_or_all, wait_for_event};

#[test]
fn processes_with_standbys_apply_the_subscription_again_after_the_way_back() {
    for &(publisher, subscriber) in one_or_all(&[(18, 18), (15, 15)]) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
        let database = case.publisher.name.clone();
        let standby = Tool { args: vec!["--standby".to_owned()], ..case.tool.clone() };
        let start = |name: &str, event: &str| {
            let mut process = standby.start(case.log_file(name));
            must(wait_for_event(&mut process, event, PATIENCE));
            process
        };
        let (mut first, mut second) =
            (start("first", "streaming"), start("second", "standby_waiting"));
        let insert = "INSERT INTO orders (client, n) SELECT 1, count(*) FROM orders";
        for _ in 0..2 {
            for (direction, side) in [("--go", new), ("--back", old)] {
                switchover(&case.tool, &[direction]).expect(0, &[]);
                must(side.sql(&database, insert));
                expect_equal_soon(&case, &mut first);
                assert!(second.is_running(), "{direction}: {}", second.log());
            }
        }
        case.stop(first);
        must(old.sql(&database, insert));
        expect_equal_soon(&case, &mut second);
        switchover(&case.tool, &["--go"]).expect(0, &[]);
        switchover(&case.tool, &["--back"]).expect(0, &[]);
        case.stop(second);
        // A service manager starts it again.
        let mut again = start("again", "streaming");
        must(old.sql(&database, insert));
        expect_equal_soon(&case, &mut again);
        case.stop(again);
    }
}
