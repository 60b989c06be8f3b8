//! What waits for transactions that are prepared on the subscriber.

use super::{TABLE, prepare, prepared, prepared_count, resolve, wait_until_prepared};
use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};

/// A copy that is requested waits for a prepared transaction, and names it.
#[test]
fn a_copy_waits_for_transactions_that_are_prepared_and_names_them() {
    on_versions(&[(15, 15), (18, 18)], |mut case: Case| {
        prepared(&mut case);
        case.replicate(TABLE);
        let mut process = case.start();
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        wait_until_prepared(&case, 1);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        must(wait_for_event(&mut process, "copy_waits", PATIENCE));
        let gid = format!("prepared=\"{}_one\"", case.tool.name);
        assert!(process.log().contains(&gid), "{}", process.log());
        resolve(&case, "COMMIT", "one");
        must(wait_for_event(&mut process, "table_caught_up", PATIENCE));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        assert_eq!(prepared_count(&case), "0");
        case.stop(process);
    });
}
