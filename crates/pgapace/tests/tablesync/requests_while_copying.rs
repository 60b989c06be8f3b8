//! `pgapace resync` and `pgapace refresh` while tables are copied.

use testbed::wait_until;

use super::requests::{CHANGE, COPY, finish, shown, wait_for_part, wide};
use crate::support::{PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// Each resync request is followed by a copy and never changes the copy in progress.
#[test]
fn resync_during_the_first_copy_copies_again() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        wide(&mut case);
        case.publish("FOR ALL TABLES");
        let copying = holder(&case, &format!("SELECT pg_advisory_lock({COPY})"));
        let mut process = case.tool.start(case.log_file("first"));
        must(wait_until(PATIENCE, "the slot", || Ok(process.events("slot_created") == 1)));
        wait_for_part(&case, &mut process);
        finish(&case, "resync", &["wide"]);
        finish(&case, "resync", &["wide"]);
        finish(&case, "refresh", &[]);
        assert_eq!(shown(&case)["state"], "datasync");
        assert!(shown(&case)["requested_at"].is_string());
        drop(copying);
        let joined = "SELECT count(*) = 1 FROM pgapace.relation WHERE sync_lsn IS NOT NULL \
                      AND requested IS NULL AND state = 'ready' AND generation = 2";
        wait_for(&case, &mut process, "the second copy", joined);
        case.publisher.sql("UPDATE wide SET v = 'new' WHERE id % 1000 = 0");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["wide"]);
        case.stop(process);
    });
}

#[test]
fn resync_and_refresh_while_a_table_is_added() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY)");
        wide(&mut case);
        let update = "UPDATE wide SET v = v || '.' WHERE id < 4";
        let copying = holder(&case, &format!("SELECT pg_advisory_lock({COPY})"));
        let changing = holder(&case, &format!("SELECT pg_advisory_lock({CHANGE})"));
        let mut process = case.start();
        case.publisher.sql(update);
        wait_for_part(&case, &mut process);
        finish(&case, "resync", &["wide"]);
        must(process.kill9());

        // An interrupted copy starts again, followed by another copy.
        finish(&case, "resync", &["wide"]);
        finish(&case, "refresh", &[]);
        let mut process = case.start();
        wait_for_part(&case, &mut process);
        finish(&case, "resync", &["wide"]);
        case.publisher.sql(&format!("{update}; INSERT INTO other VALUES (0)"));
        let received = "SELECT count(*) = 1 FROM other";
        wait_for(&case, &mut process, "the changes of that transaction", received);
        drop(copying);

        // Between the end of the copy and the end of the catchup.
        let behind = "SELECT count(*) = 1 FROM pgapace.relation WHERE table_name = 'wide' \
                      AND state = 'catchup'";
        wait_for(&case, &mut process, "the table to be behind", behind);
        wait_for_a_waiter(&case, &mut process, "advisory");
        finish(&case, "resync", &["wide"]);
        finish(&case, "refresh", &[]);
        assert_eq!(shown(&case)["state"], "catchup");
        must(process.kill9());
        case.subscriber.sql("DELETE FROM wide WHERE id > 10000");
        finish(&case, "resync", &["wide"]);
        // The requested copy does not wait for the catchup.
        let mut process = case.start();
        assert_eq!(process.events("catch_up_skipped"), 1, "{}", process.log());
        case.publisher.sql(update);
        drop(changing);
        let joined = "SELECT count(*) = 1 FROM pgapace.relation WHERE table_name = 'wide' \
                      AND requested IS NULL AND state = 'ready'";
        wait_for(&case, &mut process, "the table to be ready", joined);
        case.publisher.sql(&format!("{update}; INSERT INTO other VALUES (1)"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["wide", "other"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");

        // Dropping the subscription also drops the request.
        finish(&case, "resync", &["wide"]);
        must(process.kill9());
        case.tool.finish("drop", &["--busy-timeout=60"]).expect(0, &[]);
        case.subscriber.sql("TRUNCATE wide, other");
        case.run_until_current();
        case.expect_equal(&["wide", "other"]);
    });
}
