//! A subscriber that goes back to a state in which it had nothing of a prepared transaction.

use testbed::{Program, Result, Stop};

use crate::support::{DB, NAME, PATIENCE, Site, expect_exit, one_or_all, wait_while_running};

const HELD: [&str; 3] = ["--two-phase", "--two-phase-hold", "3600"];
const PREPARED: [&str; 3] = ["--two-phase", "--two-phase-hold", "0"];

fn site(major: u16) -> Result<Site> {
    let site = Site::new(major, major)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

fn prepare(site: &Site, gid: &str, sql: &str) -> Result<()> {
    let mut client = site.publisher.connect(DB)?;
    for sql in ["BEGIN", sql, &format!("PREPARE TRANSACTION '{gid}'")] {
        client.batch_execute(sql)?;
    }
    Ok(())
}

/// Runs until everything is applied, and `done` holds on the subscriber and the slot.
fn run_until(site: &Site, program: &Program, done: &dyn Fn() -> Result<bool>) -> Result<()> {
    let mut run = site.spawn_streaming(program)?;
    site.wait_until_applied(&mut run)?;
    wait_while_running(&mut run, "the state", PATIENCE, done)?;
    run.kill9()
}

fn save(site: &mut Site) -> Result<()> {
    site.subscriber.stop(Stop::Fast)?;
    site.subscriber.save_storage()?;
    site.subscriber.start()
}

fn restore(site: &mut Site) -> Result<()> {
    site.subscriber.stop(Stop::Fast)?;
    site.subscriber.restore_storage()?;
    site.subscriber.start()
}

/// The slot has reached the progress of the subscriber, whatever was held before it.
fn acknowledged(site: &Site) -> Result<bool> {
    let progress = site.subscriber.query_one_text(DB, "SELECT max(lsn) FROM pgapace.progress")?;
    let sql = format!(
        "SELECT confirmed_flush_lsn >= '{progress}' FROM pg_replication_slots WHERE slot_name = '{NAME}'"
    );
    Ok(site.publisher.query_one_text(DB, &sql)? == "t")
}

/// The progress lies beyond its PREPARE, because it was held. Afterwards it was prepared on the subscriber, and
/// acknowledged, without any progress. The restored state has neither.
#[test]
fn a_subscriber_that_lost_a_prepared_transaction_is_refused() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = site(major)?;
        let held = site.program().args(HELD);
        run_until(&site, &held, &|| Ok(true))?;
        prepare(&site, "one", "INSERT INTO t VALUES (1, 'prepared')")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'beyond')")?;
        run_until(&site, &held, &|| Ok(true))?;
        save(&mut site)?;
        let there = "SELECT count(*) FROM pg_prepared_xacts";
        run_until(&site, &site.program().args(PREPARED), &|| {
            Ok(site.subscriber.query_one_text(DB, there)? == "1" && acknowledged(&site)?)
        })?;
        restore(&mut site)?;
        site.publisher.sql(DB, "COMMIT PREPARED 'one'")?;
        let mut run = site.spawn(&held)?;
        expect_exit(&mut run, 7, &["has moved to", "pgapace rebase"])?;
        site.tool().finish("rebase", &[]).expect(0, &[]);
        let mut run = site.spawn_streaming(&held)?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[testbed::TableName::from("t")])?;
    }
    Ok(())
}

/// One was committed since, while another one is held: the slot waits for that, and not for the first.
#[test]
fn a_subscriber_that_lost_the_commit_of_a_held_transaction_is_refused() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = site(major)?;
        let held = site.program().args(HELD);
        run_until(&site, &held, &|| Ok(true))?;
        prepare(&site, "one", "INSERT INTO t VALUES (1, 'prepared')")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'between')")?;
        let first = site.publisher_lsn()?;
        prepare(&site, "two", "INSERT INTO t VALUES (3, 'held')")?;
        let second = site.publisher_lsn()?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (4, 'beyond')")?;
        run_until(&site, &held, &|| Ok(true))?;
        save(&mut site)?;
        site.publisher.sql(DB, "COMMIT PREPARED 'one'")?;
        let passed = format!(
            "SELECT confirmed_flush_lsn >= '{first}' AND confirmed_flush_lsn < '{second}' \
             FROM pg_replication_slots WHERE slot_name = '{NAME}'"
        );
        run_until(&site, &held, &|| Ok(site.publisher.query_one_text(DB, &passed)? == "t"))?;
        restore(&mut site)?;
        let mut run = site.spawn(&held)?;
        expect_exit(&mut run, 7, &["lacks the transaction that was prepared", "pgapace rebase"])?;
    }
    Ok(())
}

/// The end of a held transaction is progress too: what ended is not missing after a restart.
#[test]
fn a_restart_does_not_miss_a_transaction_that_was_rolled_back() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = site(major)?;
        let held = site.program().args(HELD);
        run_until(&site, &held, &|| Ok(true))?;
        prepare(&site, "one", "INSERT INTO t VALUES (1, 'prepared')")?;
        prepare(&site, "two", "INSERT INTO t VALUES (2, 'held')")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (3, 'beyond')")?;
        let held_now = "SELECT cardinality(held) FROM pgapace.progress ORDER BY lsn DESC LIMIT 1";
        run_until(&site, &held, &|| Ok(site.subscriber.query_one_text(DB, held_now)? == "2"))?;
        site.publisher.sql(DB, "ROLLBACK PREPARED 'one'")?;
        site.publisher.sql(DB, "ROLLBACK PREPARED 'two'")?;
        run_until(&site, &held, &|| acknowledged(&site))?;
        let mut run = site.spawn_streaming(&held)?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (4, 'after')")?;
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[testbed::TableName::from("t")])?;
        assert_eq!(run.events("prepared_transaction_empty"), 0, "{}", run.log());
    }
    Ok(())
}

/// A publisher that was restored does the same again, so the second transaction gets the xid and the LSN of the first.
#[test]
fn another_transaction_in_the_place_of_one_that_is_prepared_is_refused() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = site(major)?;
        let program = site.program().args(PREPARED);
        run_until(&site, &program, &|| Ok(true))?;
        site.publisher.stop(Stop::Fast)?;
        site.publisher.save_storage()?;
        site.publisher.start()?;
        prepare(&site, "one", "INSERT INTO t VALUES (1, 'first')")?;
        let there = "SELECT count(*) FROM pg_prepared_xacts";
        run_until(&site, &program, &|| Ok(site.subscriber.query_one_text(DB, there)? == "1"))?;
        let xid = site.publisher.query_one_text(DB, "SELECT transaction FROM pg_prepared_xacts")?;
        site.publisher.stop(Stop::Fast)?;
        site.publisher.restore_storage()?;
        site.publisher.start()?;
        prepare(&site, "one", "INSERT INTO t VALUES (1, 'other')")?;
        let again =
            site.publisher.query_one_text(DB, "SELECT transaction FROM pg_prepared_xacts")?;
        assert_eq!(xid, again);
        site.publisher.sql(DB, "COMMIT PREPARED 'one'")?;
        let mut run = site.spawn(&program)?;
        expect_exit(&mut run, 10, &["another history", "prepare"])?;
        assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?, "0");
    }
    Ok(())
}
