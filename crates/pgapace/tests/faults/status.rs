//! Positions and keepalives that the publisher receives.

use std::time::{Duration, Instant};

use testbed::compare::TableName;
use testbed::{Result, wait_until};

use crate::support::{DB, NAME, PATIENCE, Site, holds_for, lsn, wait_while_running};

/// Less than half of wal_sender_timeout, when the publisher would ask for a status.
const KEEPALIVE: Duration = Duration::from_secs(25);
pub(super) const DDL: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";

fn site(settings: &[(&str, &str)]) -> Result<Site> {
    let site = Site::start(settings, &[])?;
    site.publish_tables(DDL)?;
    // A publication FOR ALL TABLES would include this table, so it is created before the
    // publication.
    site.publisher.sql(
        DB,
        "CREATE TABLE unpublished (v int); DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE t",
    )?;
    Ok(site)
}

/// The pid and the three positions in pg_stat_replication.
fn walsender(site: &Site) -> Result<Option<(i32, [u64; 3])>> {
    let sql = format!(
        "SELECT pid, write_lsn, flush_lsn, replay_lsn FROM pg_stat_replication \
         WHERE application_name = '{NAME}' AND state = 'streaming' AND flush_lsn IS NOT NULL"
    );
    let rows = site.publisher.query_texts(DB, &sql)?;
    let Some(row) = rows.first() else { return Ok(None) };
    let position = |i: usize| lsn(row[i].as_deref().unwrap_or_default());
    let pid = row[0].as_deref().and_then(|pid| pid.parse().ok()).unwrap_or(0);
    Ok(Some((pid, [position(1)?, position(2)?, position(3)?])))
}

#[test]
fn positions_and_keepalives_while_apply_waits_for_a_lock() -> Result<()> {
    // Less than the ten seconds, and more than a busy machine keeps a process from running.
    let site = site(&[("wal_sender_timeout", "6s")])?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'a'), (2, 'b')")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    wait_until(PATIENCE, "the walsender to appear", || Ok(walsender(&site)?.is_some()))?;
    let (pid, _) = walsender(&site)?.unwrap_or_default();

    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE")?;
    let before = lsn(&site.publisher_lsn()?)?;
    site.publisher.sql(DB, "UPDATE t SET v = 'blocked' WHERE id = 1")?;
    let blocked = lsn(&site.publisher_lsn()?)?;
    site.publisher.sql(DB, "UPDATE t SET v = 'behind it' WHERE id = 2")?;
    let end = lsn(&site.publisher_lsn()?)?;
    let mut written = 0;
    holds_for(Duration::from_secs(10), "acknowledged up to the blocked transaction", || {
        let (now, [write, flush, apply]) =
            walsender(&site)?.expect("the walsender is always present");
        assert_eq!(now, pid, "the walsender was replaced: a keepalive was not answered in time");
        assert!(flush < blocked, "flush {flush:X} is beyond {before:X}, {blocked:X} is blocked");
        assert!(apply < blocked, "apply {apply:X} is beyond what is visible");
        assert!(site.confirmed()? < blocked);
        written = write;
        Ok(true)
    })?;
    assert!(written >= end, "received, and said so: {written:X} of {end:X}");
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    wait_while_running(&mut run, "flush and apply to follow", PATIENCE, || {
        Ok(walsender(&site)?.is_some_and(|(_, [w, f, a])| w >= end && f >= end && a >= end))
    })?;
    site.expect_equal(&[TableName::from("t")])
}

#[test]
fn an_idle_slot_advances_while_unpublished_tables_are_written() -> Result<()> {
    let site = site(&[])?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    let rows = "SELECT count(*) FROM pgapace.progress";
    for _ in 0..3 {
        for _ in 0..50 {
            site.publisher.sql(DB, "INSERT INTO unpublished VALUES (1)")?;
        }
        let end = lsn(&site.publisher_lsn()?)?;
        wait_while_running(&mut run, "the slot to advance", KEEPALIVE, || {
            Ok(site.confirmed()? >= end)
        })?;
        assert!(site.progress()? >= site.confirmed()?, "recorded before it is acknowledged");
    }
    // Old progress rows are removed.
    let left: i64 = site.subscriber.query_one_text(DB, rows)?.parse().unwrap_or(i64::MAX);
    assert!(left < 20, "{left} progress rows");
    Ok(())
}

/// A flush is a transaction of its own. Where no commit waits for it, transactions that come one by one share it.
#[test]
fn transactions_share_flushes_where_no_commit_waits() -> Result<()> {
    const TRANSACTIONS: u64 = 400;
    let site = site(&[])?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    let number = |sql: &str| -> Result<u64> {
        Ok(site.subscriber.query_one_text(DB, sql)?.parse().unwrap_or_default())
    };
    let next_xid = || number("SELECT pg_snapshot_xmax(pg_current_snapshot())");
    let (started, first) = (Instant::now(), next_xid()?);
    site.publisher.sql(
        DB,
        &format!(
            "DO $$ BEGIN FOR i IN 1..{TRANSACTIONS} LOOP \
               INSERT INTO t VALUES (i); COMMIT; PERFORM pg_sleep(0.002); \
             END LOOP; END $$"
        ),
    )?;
    let end = lsn(&site.publisher_lsn()?)?;
    // The last one is not forgotten.
    wait_while_running(&mut run, "the last flush", PATIENCE, || Ok(site.confirmed()? >= end))?;
    let counted = "SELECT transactions FROM pgapace.stat_subscription";
    wait_while_running(&mut run, "statistics", PATIENCE, || Ok(number(counted)? >= TRANSACTIONS))?;
    let (took, used) = (started.elapsed(), next_xid()? - first);
    let groups = number("SELECT groups FROM pgapace.stat_subscription")?;
    // A flush in a tenth of a second, two or three other writes in a second, and a few at the start.
    let others = 20 + (took.as_secs() + 1) * 14;
    assert!(
        used <= groups + others,
        "{used} transactions on the subscriber in {took:?}, {groups} of them groups"
    );
    Ok(())
}

#[test]
fn a_synchronous_publisher_gets_acknowledgements_at_once() -> Result<()> {
    let mut site = site(&[])?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    run.kill9()?;
    // The connection string names the walsender.
    let named = format!("{} application_name=mirror", site.publisher.conninfo(DB));
    site.publisher.set("synchronous_standby_names", "mirror")?;
    let program = site.program_between(&named, &site.subscriber.conninfo(DB));
    let run = site.spawn_streaming(&program.args(["--status-interval", "60"]))?;
    for level in ["on", "remote_write", "remote_apply"] {
        let mut client = site.publisher.connect(DB)?;
        client.batch_execute(&format!(
            "SET synchronous_commit = {level}; SET statement_timeout = '90s'"
        ))?;
        for (what, sql) in [
            ("published", "INSERT INTO t SELECT coalesce(max(id), 0) + 1, 'x' FROM t"),
            ("unpublished", "INSERT INTO unpublished VALUES (1)"),
        ] {
            let started = Instant::now();
            for _ in 0..10 {
                client.batch_execute(sql)?;
                if level == "remote_apply" && what == "published" {
                    let rows = "SELECT count(*) FROM t";
                    let here = site.publisher.query_one_text(DB, rows)?;
                    assert_eq!(
                        site.subscriber.query_one_text(DB, rows)?,
                        here,
                        "visible at return"
                    );
                }
            }
            let took = started.elapsed();
            assert!(
                took < Duration::from_secs(30),
                "10 {what} commits with {level} took {took:?}:\n{}",
                run.log()
            );
        }
    }
    site.expect_equal(&[TableName::from("t")])
}
