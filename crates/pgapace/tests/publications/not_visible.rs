//! Tables of transactions that the publisher has sent, and that its other sessions do not see yet.

use std::thread;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Result, TableName};

use crate::support::{DB, NAME, PATIENCE, Site, one_or_all, wait_while_running};

/// A site whose subscriber has the table that the publisher creates later.
fn site(major: u16) -> Result<Site> {
    let site = Site::new(major, major)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    site.subscriber.sql(DB, "CREATE TABLE y (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

/// Commits of the publisher wait for this standby, and the subscription streams.
fn started(site: &mut Site, waits_for: &str, args: &[&str]) -> Result<(Process, Client)> {
    let program = site.program().args(args);
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    run.kill9()?;
    site.publisher.set("synchronous_standby_names", waits_for)?;
    let run = site.spawn_streaming(&program)?;
    let mut client = site.publisher.connect(DB)?;
    client.batch_execute("SET statement_timeout = '60s'")?;
    Ok((run, client))
}

const CREATE: &str = "CREATE TABLE y (id int PRIMARY KEY, v text); \
     INSERT INTO y SELECT g, 'y' FROM generate_series(1, 10) g";

/// The commit waits for the subscription itself. It returns, and no row is skipped.
#[test]
fn a_commit_that_creates_a_table_waits_for_the_subscription() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        for copy_data in ["--copy-data=true", "--copy-data=false"] {
            let mut site = site(major)?;
            let (mut run, mut client) = started(&mut site, NAME, &[copy_data])?;
            let absent = "CREATE TABLE absent (id int PRIMARY KEY); INSERT INTO absent VALUES (1)";
            let done = client
                .batch_execute(&format!("BEGIN; {CREATE}; INSERT INTO t VALUES (1); COMMIT"))
                .and_then(|()| client.batch_execute("UPDATE y SET v = 'u' WHERE id = 5"))
                .and_then(|()| {
                    client.batch_execute(&format!(
                        "BEGIN; {absent}; INSERT INTO t VALUES (2); COMMIT"
                    ))
                });
            assert!(done.is_ok(), "{copy_data}: {done:?}:\n{}", run.log());
            let state = "SELECT count(*) FROM pgapace.relation \
                 WHERE table_name = 'absent' AND state = 'blocked'";
            wait_while_running(
                &mut run,
                "the table that is absent to be blocked",
                PATIENCE,
                || Ok(site.subscriber.query_one_text(DB, state)? == "1"),
            )?;
            let all = "SELECT count(*) FROM y WHERE v = 'u'";
            wait_while_running(&mut run, "the update of the table", PATIENCE, || {
                Ok(site.subscriber.query_one_text(DB, all)? == "1")
            })?;
            site.expect_equal(&["t", "y"].map(TableName::from))?;
            assert!(!run.log().contains("table_changes_skipped"), "{}", run.log());
        }
    }
    Ok(())
}

/// A table that was added without a copy is replaced. The old rows do not get the changes of the new table.
#[test]
fn a_table_that_was_added_without_a_copy_is_replaced() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = site(major)?;
        let program = site.program().args(["--copy-data=false", "--refresh-interval=1h"]);
        let mut run = site.spawn_streaming(&program)?;
        site.publisher.sql(DB, &format!("BEGIN; {CREATE}; COMMIT"))?;
        let count = "SELECT count(*) FROM y";
        wait_while_running(&mut run, "the rows of the table", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, count)? == "10")
        })?;
        let again = CREATE.replace("(1, 10)", "(11, 13)");
        let replace = format!("BEGIN; DROP TABLE y; {again}; INSERT INTO t VALUES (1); COMMIT");
        site.publisher.sql(DB, &replace)?;
        let stale = "SELECT count(*) FROM pgapace.relation \
             WHERE table_name = 'y' AND state = 'blocked' AND stale_lsn IS NOT NULL";
        wait_while_running(&mut run, "the table to be stale", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, stale)? == "1")
        })?;
        wait_while_running(&mut run, "the other table", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")? == "1")
        })?;
        assert_eq!(site.subscriber.query_one_text(DB, count)?, "10");
    }
    Ok(())
}

/// The commit waits for a standby that is away. pgapace applies all of the transaction meanwhile.
#[test]
fn a_commit_that_creates_a_table_waits_for_another_standby() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = site(major)?;
        let (mut run, mut client) = started(&mut site, "away", &["--copy-data=false"])?;
        let commit = thread::spawn(move || {
            client
                .batch_execute(&format!("BEGIN; {CREATE}; INSERT INTO t VALUES (1); COMMIT"))
                .and_then(|()| client.batch_execute("UPDATE y SET v = 'u' WHERE id = 5"))
        });
        wait_while_running(&mut run, "the transaction", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")? == "1")
        })?;
        assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM y")?, "10");
        // Nothing has recorded the table yet: the next start finds it.
        run.kill9()?;
        let mut run = site.spawn_streaming(&site.program().arg("--copy-data=false"))?;
        site.publisher.set("synchronous_standby_names", "")?;
        let committed = commit.join().expect("the client does not panic");
        assert!(committed.is_ok(), "{committed:?}");
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&["t", "y"].map(TableName::from))?;
    }
    Ok(())
}

/// A prepared transaction is visible to nobody before it commits.
#[test]
fn a_prepare_that_creates_a_table_waits_for_the_subscription() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        for copy_data in ["--copy-data=true", "--copy-data=false"] {
            let mut site = site(major)?;
            let args = ["--two-phase", copy_data];
            let (mut run, mut client) = started(&mut site, NAME, &args)?;
            let prepare =
                format!("BEGIN; {CREATE}; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'x'");
            let done = client
                .batch_execute(&prepare)
                .and_then(|()| client.batch_execute("INSERT INTO t VALUES (2)"))
                .and_then(|()| client.batch_execute("COMMIT PREPARED 'x'"))
                .and_then(|()| client.batch_execute("UPDATE y SET v = 'u' WHERE id = 5"));
            assert!(done.is_ok(), "{copy_data}: {done:?}:\n{}", run.log());
            let all = "SELECT count(*) FROM y WHERE v = 'u'";
            wait_while_running(&mut run, "the update of the table", PATIENCE, || {
                Ok(site.subscriber.query_one_text(DB, all)? == "1")
            })?;
            site.expect_equal(&["t", "y"].map(TableName::from))?;
        }
    }
    Ok(())
}
