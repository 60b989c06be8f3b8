//! Tables that lack changes, because they were published in another way for a while, do not move.

use super::failures::Held;
use super::{Slots, switchover, two_way_case};
use crate::support::{PATIENCE, must, wait_for_event};

#[test]
fn tables_that_may_lack_changes_do_not_move() {
    let mut case = two_way_case(18, 18);
    case.tool.args = vec!["--on-missed-changes".to_owned(), "ignore".to_owned()];
    let mut process = case.start();
    case.tool.args.clear();
    let _slots = Slots(&case);
    let held = Held::start(&case, "gap", &[]);
    for sql in [
        "ALTER PUBLICATION pub DROP TABLE orders",
        "INSERT INTO orders (client, n) VALUES (1, 1)",
        "ALTER PUBLICATION pub ADD TABLE orders",
    ] {
        case.publisher.sql(sql);
    }
    // The process has not looked at the publications since.
    let failed = held.finish();
    failed.expect(6, &["in another way", "public.orders", "Everything was undone"]);
    // It goes on with the table as it is.
    must(wait_for_event(&mut process, "table_stale", PATIENCE));
    let planned = switchover(&case.tool, &["--plan"]);
    planned.expect(3, &["public.orders may lack changes since", "pgapace resync"]);
    case.stop(process);
}
