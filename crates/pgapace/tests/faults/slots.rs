//! Slots and publishers that pgapace cannot follow: each is rejected with its own exit code.

use std::time::Duration;

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Cluster, ClusterBuilder, Pair, Result, servers, wait_until};

use crate::support::{
    DB, NAME, PATIENCE, Site, Tool, expect_exit, holds_for, one_or_all, wait_for_event,
};

const DDL: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";

fn site(settings: &[(&str, &str)]) -> Result<Site> {
    let site = Site::start(settings, &[])?;
    site.publish_tables(DDL)?;
    Ok(site)
}

/// Runs until all changes are applied, then stops.
fn follow_and_stop(site: &Site) -> Result<()> {
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])
}

fn insert(site: &Site, id: i32) -> Result<()> {
    site.publisher.sql(DB, &format!("INSERT INTO t VALUES ({id}, 'x')"))
}

fn rows_on_subscriber(site: &Site) -> Result<String> {
    site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")
}

#[test]
fn a_dropped_slot_is_refused() -> Result<()> {
    let site = site(&[])?;
    follow_and_stop(&site)?;
    site.publisher.sql(DB, &format!("SELECT pg_drop_replication_slot('{NAME}')"))?;
    insert(&site, 1)?;
    let mut run = site.spawn(&site.program())?;
    expect_exit(
        &mut run,
        7,
        &["slot \"sub\" does not exist on the publisher", "HINT:", "pgapace rebase"],
    )?;
    assert_eq!(rows_on_subscriber(&site)?, "0");
    // The hint works: drop the subscription, truncate the tables, start again.
    let mut drop = site.spawn(&drop_program(&site))?;
    expect_exit(&mut drop, 0, &["dropped subscription sub"])?;
    follow_and_stop(&site)?;
    site.expect_equal(&[TableName::from("t")])
}

/// A publisher with room for only one slot is sufficient.
#[test]
fn a_single_free_slot_is_enough() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let settings = |builder: ClusterBuilder| builder.setting("max_replication_slots", "1");
        let site = Site::of(Pair::start_with(major, major, settings, |builder| builder)?)?;
        site.publish_tables(DDL)?;
        insert(&site, 1)?;
        follow_and_stop(&site)?;
        insert(&site, 2)?;
        follow_and_stop(&site)?;
        site.expect_equal(&[TableName::from("t")])?;
        let slots = "SELECT string_agg(slot_name, ',') FROM pg_replication_slots";
        assert_eq!(site.publisher.query_one_text(DB, slots)?, NAME);
    }
    Ok(())
}

fn drop_program(site: &Site) -> testbed::Program {
    site.tool().program("drop")
}

#[test]
fn a_slot_that_lost_its_wal_is_refused() -> Result<()> {
    let site = site(&[
        ("max_slot_wal_keep_size", "1MB"),
        ("min_wal_size", "32MB"),
        ("max_wal_size", "32MB"),
    ])?;
    follow_and_stop(&site)?;
    insert(&site, 1)?;
    let lost = format!("SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{NAME}'");
    wait_until(PATIENCE, "the slot to be invalidated", || {
        site.publisher.sql(DB, "SELECT pg_switch_wal()")?;
        site.publisher.sql(DB, "CHECKPOINT")?;
        Ok(site.publisher.query_one_text(DB, &lost)? == "lost")
    })?;
    let mut run = site.spawn(&site.program())?;
    expect_exit(&mut run, 7, &["slot \"sub\" was invalidated: wal_removed", "pgapace rebase"])?;
    assert_eq!(rows_on_subscriber(&site)?, "0");
    site.tool()
        .finish("sequences", &[])
        .expect(14, &["slot of the subscription is lost", "rebase"]);
    site.tool().finish("switchover", &["--plan"]).expect(3, &["whose slot is lost", "rebase"]);
    Ok(())
}

#[test]
fn an_advanced_slot_is_refused() -> Result<()> {
    let site = site(&[])?;
    follow_and_stop(&site)?;
    insert(&site, 1)?;
    let advance =
        format!("SELECT pg_replication_slot_advance('{NAME}', pg_current_wal_flush_lsn())");
    site.publisher.sql(DB, &advance)?;
    let mut run = site.spawn(&site.program())?;
    expect_exit(&mut run, 7, &["slot \"sub\" has moved to", "changes in between were skipped"])?;
    assert_eq!(rows_on_subscriber(&site)?, "0");
    Ok(())
}

#[test]
fn a_slot_in_use_is_waited_for() -> Result<()> {
    let site = site(&[])?;
    follow_and_stop(&site)?;
    // Another subscriber uses the same slot.
    site.subscriber.create_database("other")?;
    site.subscriber.sql("other", DDL)?;
    let elsewhere = site
        .program_between(&site.publisher.conninfo(DB), &site.subscriber.conninfo("other"))
        .args(["--slot", NAME, "--create-slot=false"]);
    let mut other: Process = site.spawn_streaming(&elsewhere)?;
    let mut run = site.spawn(&site.program().args(["--busy-timeout", "1"]))?;
    expect_exit(&mut run, 8, &["slot \"sub\" is in use by walsender", "pg_stat_replication"])?;
    // It streams only when the slot is free, and then continues without a gap.
    let mut run = site.spawn(&site.program())?;
    holds_for(Duration::from_millis(700), "waiting for the slot", || {
        Ok(run.is_running() && run.events("streaming") == 0)
    })?;
    other.kill9()?;
    site.wait_until_applied(&mut run)?;
    insert(&site, 1)?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

/// Another server with the same table, publication and slot.
fn impostor() -> Result<Cluster> {
    let impostor = Cluster::builder(&servers::find_or_fetch(18)?).name("impostor").start()?;
    // So that its tables have other oids.
    impostor.sql(DB, "CREATE TABLE before (); DROP TABLE before")?;
    impostor.sql(DB, DDL)?;
    impostor.sql(DB, "CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t VALUES (1, 'wrong')")?;
    let create = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    impostor.sql(DB, &create)?;
    impostor.sql(DB, "INSERT INTO t VALUES (2, 'wrong')")?;
    Ok(impostor)
}

#[test]
fn another_publisher_is_refused() -> Result<()> {
    let site = site(&[])?;
    follow_and_stop(&site)?;
    let impostor = impostor()?;
    let program = site.program_between(&impostor.conninfo(DB), &site.subscriber.conninfo(DB));
    let mut run = site.spawn(&program)?;
    expect_exit(&mut run, 10, &["the publisher is another database system", "pgapace drop"])?;
    assert_eq!(rows_on_subscriber(&site)?, "0");
    // Nothing of the other system was recorded: with the right one, the table goes on.
    let kept = "SELECT string_agg(table_name || ' ' || state, ', ') FROM pgapace.relation \
                WHERE stale_lsn IS NULL";
    assert_eq!(site.subscriber.query_one_text(DB, kept)?, "t ready");
    insert(&site, 1)?;
    follow_and_stop(&site)?;
    site.expect_equal(&[TableName::from("t")])
}

/// The new slot waits for a transaction when the process is killed: slot and progress are gone then.
fn an_interrupted_rebase_refuses_it_too(site: &Site, wrong: &Tool) -> Result<()> {
    let mut open = site.publisher.connect(DB)?;
    open.batch_execute("BEGIN; INSERT INTO t VALUES (10, 'x')")?;
    let mut rebase = site.spawn(&site.tool().program("rebase"))?;
    wait_for_event(&mut rebase, "rebase_started", PATIENCE)?;
    rebase.kill9()?;
    for verb in ["rebase", "run"] {
        wrong.finish(verb, &[]).expect(10, &["is another database system", "--keep-slot"]);
        assert_eq!(rows_on_subscriber(site)?, "3", "{verb}");
    }
    open.batch_execute("COMMIT")?;
    site.tool().finish("rebase", &[]).expect(0, &[]);
    site.expect_equal(&[TableName::from("t")])
}

/// Its slot has the name of the subscription's, and its rows would replace those of the subscriber.
#[test]
fn rebase_and_drop_refuse_another_publisher() -> Result<()> {
    let site = site(&[])?;
    insert(&site, 7)?;
    follow_and_stop(&site)?;
    let impostor = impostor()?;
    let wrong = Tool { publisher: impostor.conninfo(DB), ..site.tool() };
    let slots = "SELECT count(*) FROM pg_replication_slots";
    for verb in ["rebase", "drop"] {
        wrong.finish(verb, &[]).expect(10, &["is another database system", "--keep-slot"]);
        for server in [&impostor, &site.publisher] {
            assert_eq!(server.query_one_text(DB, slots)?, "1", "{verb}");
        }
        // Nothing of the subscription was forgotten: it goes on.
        insert(&site, if verb == "drop" { 8 } else { 9 })?;
        follow_and_stop(&site)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    an_interrupted_rebase_refuses_it_too(&site, &wrong)?;
    // The way to follow the other system.
    let dropped = wrong.finish("drop", &["--keep-slot"]);
    dropped.expect(0, &[]);
    assert!(dropped.stdout.contains("was left as it is"), "{}", dropped.stdout);
    impostor.sql(DB, &format!("SELECT pg_drop_replication_slot('{NAME}')"))?;
    let followed = wrong.finish("run", &["--until", "current", "--if-not-empty", "rebase"]);
    followed.expect(0, &[]);
    testbed::compare::expect_equal(
        &mut impostor.connect(DB)?,
        &mut site.subscriber.connect(DB)?,
        &[TableName::from("t")],
    )
}
