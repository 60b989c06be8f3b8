//! The slot of the way back is created while the new side's catalogue changes.

use testbed::wait_until;

use super::failures::breakable_case;
use super::{LATE, Slots, expect_equal_soon, value};
use crate::support::{PATIENCE, must, one_or_all, wait_for_event};

/// The new side would decode later changes of the table as it was before.
#[test]
fn a_slot_of_the_way_back_is_created_again_if_a_table_is_altered_meanwhile() {
    for &major in one_or_all(&[15, 18]) {
        let case = breakable_case(major, major);
        let _slots = Slots(&case);
        let database = case.publisher.name.as_str();
        let mut process = case.start();
        let [mut older, mut altering] = [case.subscriber.connect(), case.subscriber.connect()];
        must(older.batch_execute("BEGIN; INSERT INTO other VALUES (1)"));
        let program = case.tool.program("switchover").args(["--go", "--deadline", LATE]);
        let mut verb = must(program.spawn_logged(case.log_file("altered")));
        let mut wait_until_waited_for = |session: &mut testbed::postgres::Client| {
            let pid: i32 = must(session.query_one("SELECT pg_backend_pid()", &[])).get(0);
            let waits = format!(
                "SELECT count(*) FROM pg_locks w JOIN pg_locks h USING (transactionid) \
                 WHERE NOT w.granted AND h.granted AND h.pid = {pid}"
            );
            must(wait_until(PATIENCE, "the slot to wait for a transaction", || {
                assert!(verb.is_running(), "{}", verb.log());
                Ok(value(case.subscriber.cluster, database, &waits) != "0")
            }));
        };
        wait_until_waited_for(&mut older);
        must(altering.batch_execute("BEGIN; ALTER TABLE orders ALTER n SET STATISTICS 7"));
        must(older.batch_execute("COMMIT"));
        wait_until_waited_for(&mut altering);
        case.subscriber.sql("INSERT INTO other VALUES (2)");
        must(altering.batch_execute("COMMIT"));
        must(verb.wait(PATIENCE));
        let log = verb.log();
        assert_eq!(verb.exit_code(), Some(0), "{log}");
        assert!(verb.events("slot_created_again") >= 1, "{log}");
        must(wait_for_event(&mut process, "applies_way_back", PATIENCE));
        case.subscriber.sql("INSERT INTO orders (client, n) VALUES (-2, -2)");
        expect_equal_soon(&case, &mut process);
        case.stop(process);
    }
}
