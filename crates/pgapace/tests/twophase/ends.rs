//! Ends of several transactions that are prepared on the subscriber follow each other, and share a group.

use super::{
    TABLE, expect_nothing_left, holder, notes, prepare, prepared, release, resolve,
    wait_until_prepared, wait_until_value,
};
use crate::support::{must, on_versions};

const ALL: u32 = 12;

/// Somebody else has committed one of them. The process is killed when some are executed and none is recorded.
#[test]
fn ends_that_share_a_group_are_executed_once() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.run_until_current();
        let process = case.start();
        for id in 1..=ALL {
            let insert = format!("INSERT INTO t VALUES ({id}, 'prepared')");
            prepare(&case, &format!("number_{id}"), &insert);
        }
        wait_until_prepared(&case, ALL);
        case.stop(process);
        for id in 1..=ALL {
            let what = if id % 4 == 0 { "ROLLBACK" } else { "COMMIT" };
            resolve(&case, what, &format!("number_{id}"));
        }
        let name = "SELECT name FROM pgapace.prepared WHERE gid LIKE '%number\\_5'";
        let name = case.subscriber.value(name);
        case.subscriber.sql(&format!("COMMIT PREPARED '{name}'"));

        let unrecorded = holder(&case, "SELECT FROM pgapace.prepared FOR SHARE");
        let mut process = case.start();
        wait_until_value(&case, "SELECT count(*) > 1 FROM t", "t");
        must(process.kill9());
        assert_ne!(notes(&case), "0");
        release(unrecorded);
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
    });
}
