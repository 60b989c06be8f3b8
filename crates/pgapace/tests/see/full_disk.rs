//! The subscriber's disk is full: the state shows the error, although little of it can be written.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::small_disk::SmallDisk;
use crate::support::{
    Case, DB, PATIENCE, Site, expect_exit, finish, must, pgapace, wait_for_event,
    wait_while_running,
};

/// No table can get another page. The subscription had no error before, so its retries and events have no page yet.
#[test]
fn the_first_error_is_shown_though_no_table_can_grow() -> Result<()> {
    let site = Site::new(18, 18)?;
    let data = site.subscriber.query_one_text(DB, "SHOW data_directory")?;
    let Some(disk) = SmallDisk::mount(&data, 1) else { return Ok(()) };
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    let place = format!("CREATE TABLESPACE tight LOCATION '{}'", disk.path().display());
    site.subscriber.sql(DB, &place)?;
    for table in ["t", "pgapace.stat_retry", "pgapace.event", "pgapace.error_detail"] {
        site.subscriber.sql(DB, &format!("ALTER TABLE {table} SET TABLESPACE tight"))?;
    }
    disk.fill();
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
    let tool = site.tool();
    let check = || {
        finish(
            &pgapace("status")
                .args(["--subscriber", &tool.subscriber, "--name", &tool.name])
                .args(["--check"]),
        )
    };
    wait_while_running(&mut run, "the error to be shown", PATIENCE, || {
        let checked = check();
        Ok(checked.code == Some(15) && checked.stdout.contains("No space left on device"))
    })?;
    let count = "SELECT error_count >= 3 FROM pgapace.stat_subscription";
    wait_while_running(&mut run, "the error of more runs", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, count)? == "t")
    })?;
    let retries = "SELECT coalesce(sum(retries), 0) FROM pgapace.stat_retry";
    assert_eq!(site.subscriber.query_one_text(DB, retries)?, "0");
    assert!(!run.log().contains("failure_not_recorded"), "{}", run.log());
    disk.grow();
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])?;
    wait_while_running(&mut run, "the error to be over", PATIENCE, || Ok(check().code == Some(0)))?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    // Drop these before the file system is unmounted.
    site.subscriber.sql(DB, "DROP TABLE t; DROP SCHEMA pgapace CASCADE")?;
    site.subscriber.sql(DB, "DROP TABLESPACE tight")
}

/// Nothing shows the failure except the log.
#[test]
fn a_failure_that_cannot_be_recorded_is_a_warning() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let mut process = case.start();
    case.subscriber.sql(
        "ALTER TABLE pgapace.stat_subscription ADD CHECK (last_error IS NULL); \
         CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$; \
         CREATE TRIGGER full_disk BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION full_disk(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER full_disk",
    );
    case.publisher.sql("INSERT INTO t VALUES (1)");
    must(wait_for_event(&mut process, "run_failed", PATIENCE));
    must(wait_for_event(&mut process, "failure_not_recorded", PATIENCE));
    case.subscriber.sql("DROP TRIGGER full_disk ON t");
    case.wait_until_applied(&mut process);
    case.expect_equal(&["t"]);
    case.stop(process);
}
