//! Tables of the subscriber that are dropped and created again while pgapace reads them.

use testbed::{Proxy, wait_until};

use crate::support::{PATIENCE, must, on_versions};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v int)";

#[test]
fn a_table_that_is_created_anew_while_it_is_read_is_read_again() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let proxy = must(Proxy::in_front_of(case.subscriber.cluster));
        case.tool.subscriber = proxy.conninfo(&case.tool.name);
        case.replicate(TABLE);
        let mut process = case.start();
        // The answer tells the oid of the table. Its columns are read next.
        proxy.hold_answers(true);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        let asked = format!(
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name LIKE 'pgapace {}%' \
               AND query LIKE '%relreplident, c.reltype%' AND state = 'idle'",
            case.tool.name
        );
        must(wait_until(PATIENCE, "the query", || Ok(case.subscriber.value(&asked) == "t")));
        case.subscriber.sql(&format!("BEGIN; DROP TABLE t; {TABLE}; COMMIT"));
        proxy.hold_answers(false);
        case.wait_until_applied(&mut process);
        assert!(process.is_running(), "{}", process.log());
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}
