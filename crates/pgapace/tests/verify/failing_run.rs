//! Verbs that need a barrier while the runs of the subscription fail with an error that may pass.

use std::time::Instant;

use testbed::{Result, wait_until};

use super::verify;
use crate::support::{Case, PATIENCE, Site, expect_exit, must, wait_for_event};

/// Each change of table `t` fails as on a full disk.
const FULL_DISK: &str = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
       RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$; \
     CREATE TRIGGER full_disk BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION full_disk(); \
     ALTER TABLE t ENABLE ALWAYS TRIGGER full_disk";

/// Both verbs end with the error of the subscription, long before the patience of the test.
fn expect_the_error(case: &Case) {
    for verb in ["verify", "repair"] {
        let begun = Instant::now();
        let ended = case.tool.finish(verb, &["--barrier-timeout", "3"]);
        ended.expect(5, &["No space left on device", "53100", "Make room"]);
        assert!(begun.elapsed() < PATIENCE / 2, "{verb}: {:?}", begun.elapsed());
    }
}

#[test]
fn verify_and_repair_end_with_the_error_of_the_subscription() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO u VALUES (1)");
    case.wait_until_applied(&mut process);
    case.subscriber.sql("DELETE FROM u");
    verify(&case, 18, &[]);
    case.subscriber.sql(FULL_DISK);
    case.publisher.sql("INSERT INTO t VALUES (1)");
    must(wait_for_event(&mut process, "run_failed", PATIENCE));
    expect_the_error(&case);
    assert!(process.is_running(), "{}", process.log());
    // The verbs run the subscription themselves.
    case.stop(process);
    expect_the_error(&case);
    // The disk has room again while a verb waits.
    let mut process = case.start();
    let shown = "SELECT last_error IS NOT NULL FROM pgapace.stat_subscription";
    must(wait_until(PATIENCE, "the error", || Ok(case.subscriber.value(shown) == "t")));
    let mut repair = must(case.tool.program("repair").spawn_logged(case.log_file("repair")));
    must(wait_until(PATIENCE, "two more runs to fail", || {
        Ok(process.events("streaming") > 2 || !repair.is_running())
    }));
    case.subscriber.sql("DROP TRIGGER full_disk ON t");
    assert_eq!(must(repair.wait(PATIENCE)).code(), Some(0), "{}", repair.log());
    case.wait_until_applied(&mut process);
    case.expect_equal(&["t", "u"]);
    case.stop(process);
}

/// The slot of a barrier needs a place on the publisher.
#[test]
fn a_publisher_without_a_free_slot_is_named() -> Result<()> {
    let site = Site::start(&[("max_replication_slots", "1")], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    let full = site.tool().finish("verify", &[]);
    full.expect(4, &["all replication slots are in use"]);
    assert!(run.is_running(), "{}", run.log());
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}
