//! A standby of the publisher is promoted: followed only if it has all that the target has.

use std::fs;
use std::process::Command;

use testbed::compare::TableName;
use testbed::{Cluster, Error, Result, Stop, servers, wait_until};

use super::site::{DB, NAME, PATIENCE, Site, expect_exit};

/// A running standby, made from the files of the stopped publisher, which is started again.
fn standby(site: &mut Site, settings: &str) -> Result<Cluster> {
    let mut standby = Cluster::builder(&servers::find_or_fetch(18)?).name("standby").start()?;
    standby.stop(Stop::Fast)?;
    site.publisher.sql(DB, "SELECT pg_create_physical_replication_slot('standby', true)")?;
    site.publisher.stop(Stop::Fast)?;
    let (from, to) = (site.publisher.data_dir(), standby.data_dir());
    // Its own directories and settings stay; the rest is the publisher's.
    let keep = ["postgresql.conf", "pg_hba.conf", "postgresql.auto.conf", "pg_replslot"];
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if keep.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if keep.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        // Owners stay as they are: the servers may run as another user than the test.
        let copied = Command::new("cp").arg("-a").arg(entry.path()).arg(to).status()?.success();
        if !copied {
            return Err(Error::other(format!("cannot copy {}", entry.path().display())));
        }
    }
    // An empty file owned as the others are.
    let owned = to.join("PG_VERSION");
    let signal = to.join("standby.signal");
    let copied = Command::new("cp").arg("-a").arg(owned).arg(&signal).status()?.success();
    assert!(copied, "make {}", signal.display());
    let conninfo = site.publisher.conninfo(DB).replace('\'', "''");
    let conf = to.join("postgresql.conf");
    let mut text = fs::read_to_string(&conf)?;
    text.push_str(&format!(
        "\nprimary_conninfo = '{conninfo}'\nprimary_slot_name = 'standby'\n\
         hot_standby_feedback = on\nwal_receiver_status_interval = 1\n{settings}\n"
    ));
    fs::write(&conf, text)?;
    site.publisher.start()?;
    standby.start()?;
    wait_for_replay(site, &standby)?;
    Ok(standby)
}

fn wait_for_replay(site: &Site, standby: &Cluster) -> Result<()> {
    let sql = format!("SELECT pg_last_wal_replay_lsn() >= '{}'", site.publisher_lsn()?);
    wait_until(PATIENCE, "the standby to replay", || Ok(standby.query_one_text(DB, &sql)? == "t"))
}

fn promote(standby: &Cluster) -> Result<()> {
    assert_eq!(standby.query_one_text(DB, "SELECT pg_promote()")?, "t");
    Ok(())
}

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.tables("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE log (v int)")?;
    Ok(site)
}

#[test]
fn a_promoted_standby_that_lacks_applied_transactions_is_refused() -> Result<()> {
    let mut site = site()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'both')")?;
    site.catch_up(&mut run)?;
    run.kill9()?;
    let standby = standby(&mut site, "")?;
    // The standby stops where it is, and the rest goes on.
    standby.sql(DB, "ALTER SYSTEM SET primary_conninfo = ''")?;
    standby.sql(DB, "SELECT pg_reload_conf()")?;
    wait_until(PATIENCE, "the standby to be cut off", || {
        Ok(standby.query_one_text(DB, "SELECT count(*) FROM pg_stat_wal_receiver")? == "0")
    })?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'lost by the standby')")?;
    site.catch_up(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    promote(&standby)?;
    let create = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    standby.sql(DB, &create)?;
    standby.sql(DB, "INSERT INTO t SELECT i, 'new' FROM generate_series(3, 2000) i")?;
    let program = site.program_between(&standby.conninfo(DB), &site.target.conninfo(DB));
    let mut run = site.spawn(&program)?;
    expect_exit(
        &mut run,
        10,
        &["the promoted server lacks what was applied", "synchronized_standby_slots"],
    )?;
    assert_eq!(site.target.query_one_text(DB, "SELECT count(*) FROM t")?, "2");
    Ok(())
}

#[test]
fn a_promoted_standby_with_a_synchronised_slot_is_followed() -> Result<()> {
    let mut site = site()?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    let standby = standby(&mut site, "sync_replication_slots = on")?;
    site.publisher.set("synchronized_standby_slots", "standby")?;
    // One program that is told both servers, as it would be in production.
    let hosts = format!(
        "host={},{} port={},{} user=postgres dbname={DB} target_session_attrs=read-write",
        site.publisher.socket_dir().display(),
        standby.socket_dir().display(),
        site.publisher.port(),
        standby.port()
    );
    let program = site.program_between(&hosts, &site.target.conninfo(DB));
    let mut run = site.spawn_streaming(&program)?;
    for i in 1..=20 {
        site.publisher.sql(
            DB,
            &format!(
                "BEGIN; INSERT INTO t VALUES ({i}, 'old'); INSERT INTO log VALUES ({i}); COMMIT"
            ),
        )?;
    }
    site.catch_up(&mut run)?;
    let synced = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{NAME}' \
         AND synced AND NOT temporary AND invalidation_reason IS NULL"
    );
    wait_until(PATIENCE, "the slot to be synchronised", || {
        Ok(standby.query_one_text(DB, &synced)? == "1")
    })?;
    // A fast stop waits until the standby and we have everything.
    site.publisher.sql(DB, "INSERT INTO log VALUES (21)")?;
    site.publisher.stop(Stop::Fast)?;
    assert!(run.is_running(), "{}", run.log());
    promote(&standby)?;
    standby.sql(DB, "UPDATE t SET v = 'new'; INSERT INTO log VALUES (22)")?;
    let rows = "SELECT count(*) FROM log";
    wait_until(PATIENCE, "the program to follow", || {
        Ok(site.target.query_one_text(DB, rows)? == "22")
    })
    .inspect_err(|_| eprintln!("{}", run.log()))?;
    testbed::compare::expect_equal(
        &mut standby.connect(DB)?,
        &mut site.target.connect(DB)?,
        &[TableName::from("t"), TableName::from("log")],
    )?;
    assert!(run.is_running(), "{}", run.log());
    Ok(())
}
