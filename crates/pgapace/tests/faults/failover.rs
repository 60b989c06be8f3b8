//! Promotion of a standby of the publisher: pgapace follows it only if it has every transaction
//! that the subscriber has.

use std::fs;
use std::process::Command;

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Cluster, Error, Program, Result, Stop, servers, wait_until};

use crate::support::{DB, NAME, PATIENCE, Site, Tool, expect_exit, wait_while_running};

/// Creates a running standby from the files of the publisher, which is stopped meanwhile.
pub(super) fn standby(site: &mut Site, settings: &str) -> Result<Cluster> {
    let mut standby = Cluster::builder(&servers::find_or_fetch(18)?).name("standby").start()?;
    standby.stop(Stop::Fast)?;
    site.publisher.sql(DB, "SELECT pg_create_physical_replication_slot('standby', true)")?;
    site.publisher.stop(Stop::Fast)?;
    let (from, to) = (site.publisher.data_dir(), standby.data_dir());
    // Keep the standby's own directories and settings, and copy the publisher's other files.
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
        // Keep the owners, because the servers may run as a different user than the test.
        let copied = Command::new("cp").arg("-a").arg(entry.path()).arg(to).status()?.success();
        if !copied {
            return Err(Error::other(format!("cannot copy {}", entry.path().display())));
        }
    }
    // Create an empty file with the same owner as the others.
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

/// The standby receives nothing more, while the publisher and the subscriber continue.
pub(super) fn cut_off(standby: &Cluster) -> Result<()> {
    standby.sql(DB, "ALTER SYSTEM SET primary_conninfo = ''")?;
    standby.sql(DB, "SELECT pg_reload_conf()")?;
    wait_until(PATIENCE, "the standby to be cut off", || {
        Ok(standby.query_one_text(DB, "SELECT count(*) FROM pg_stat_wal_receiver")? == "0")
    })
}

fn wait_for_replay(site: &Site, standby: &Cluster) -> Result<()> {
    let sql = format!("SELECT pg_last_wal_replay_lsn() >= '{}'", site.publisher_lsn()?);
    wait_until(PATIENCE, "the standby to replay", || Ok(standby.query_one_text(DB, &sql)? == "t"))
}

pub(super) fn promote(standby: &Cluster) -> Result<()> {
    assert_eq!(standby.query_one_text(DB, "SELECT pg_promote()")?, "t");
    Ok(())
}

pub(super) fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE log (v int)")?;
    Ok(site)
}

#[test]
fn a_promoted_standby_that_lacks_applied_transactions_is_refused() -> Result<()> {
    let mut site = site()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'both')")?;
    site.wait_until_applied(&mut run)?;
    run.kill9()?;
    let standby = standby(&mut site, "")?;
    cut_off(&standby)?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (2, 'lost by the standby')")?;
    site.wait_until_applied(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    // A verification needs an LSN, which only a slot on a primary has.
    let follower = Tool { publisher: standby.conninfo(DB), ..site.tool() };
    follower.finish("verify", &[]).expect(4, &["the publisher is a standby"]);
    promote(&standby)?;
    let create = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    standby.sql(DB, &create)?;
    standby.sql(DB, "INSERT INTO t SELECT i, 'new' FROM generate_series(3, 2000) i")?;
    let program = site.program_between(&standby.conninfo(DB), &site.subscriber.conninfo(DB));
    let mut run = site.spawn(&program)?;
    expect_exit(
        &mut run,
        10,
        &["the promoted server lacks transactions", "synchronized_standby_slots"],
    )?;
    assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?, "2");
    Ok(())
}

/// Creates a standby to which the slot of a first run with these arguments is synchronised. The
/// returned program connects to both servers, as in production.
pub(super) fn followed(site: &mut Site, args: &[&str]) -> Result<(Cluster, Program)> {
    let mut run = site.spawn(&site.program().args(args).args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    let standby = standby(site, "sync_replication_slots = on")?;
    site.publisher.set("synchronized_standby_slots", "standby")?;
    let hosts = both_hosts(site, &standby) + " target_session_attrs=read-write";
    let program = site.program_between(&hosts, &site.subscriber.conninfo(DB)).args(args);
    Ok((standby, program))
}

/// A connection string with the publisher and its standby.
pub(super) fn both_hosts(site: &Site, standby: &Cluster) -> String {
    format!(
        "host={},{} port={},{} user=postgres dbname={DB}",
        site.publisher.socket_dir().display(),
        standby.socket_dir().display(),
        site.publisher.port(),
        standby.port()
    )
}

pub(super) fn wait_until_synchronised(standby: &Cluster, condition: &str) -> Result<()> {
    let synced = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{NAME}' \
         AND synced AND NOT temporary AND invalidation_reason IS NULL AND {condition}"
    );
    wait_until(PATIENCE, "the slot to be synchronised", || {
        Ok(standby.query_one_text(DB, &synced)? == "1")
    })
}

#[test]
fn a_promoted_standby_with_a_synchronised_slot_is_followed() -> Result<()> {
    let mut site = site()?;
    let (standby, program) = followed(&mut site, &[])?;
    let mut run = site.spawn_streaming(&program)?;
    for i in 1..=20 {
        site.publisher.sql(
            DB,
            &format!(
                "BEGIN; INSERT INTO t VALUES ({i}, 'old'); INSERT INTO log VALUES ({i}); COMMIT"
            ),
        )?;
    }
    site.wait_until_applied(&mut run)?;
    wait_until_synchronised(&standby, "failover")?;
    // A fast shutdown waits until the standby and the subscriber have all WAL.
    site.publisher.sql(DB, "INSERT INTO log VALUES (21)")?;
    site.publisher.stop(Stop::Fast)?;
    assert!(run.is_running(), "{}", run.log());
    promote(&standby)?;
    standby.sql(DB, "UPDATE t SET v = 'new'; INSERT INTO log VALUES (22)")?;
    expect_followed(&site, &standby, &mut run, 22)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    // The server that was left behind comes back as a primary, before the promoted one in the list.
    site.publisher.start()?;
    let mut run = site.spawn(&program)?;
    expect_exit(&mut run, 10, &["the publisher is on timeline 1", "left behind by a failover"])?;
    // Neither do verbs follow it: a rebase would delete what came from the promoted one.
    let old = site.tool();
    for verb in ["rebase", "drop", "sequences"] {
        old.finish(verb, &[])
            .expect(10, &["the publisher is on timeline 1", "left behind by a failover"]);
    }
    let rows = "SELECT count(*) FROM log, pgapace.progress GROUP BY lsn";
    assert_eq!(site.subscriber.query_one_text(DB, rows)?, "22");
    Ok(())
}

/// The stream waits for the standby (synchronized_standby_slots), but the copy of a table does not: it has
/// rows of a transaction that the standby never received.
#[test]
fn a_promoted_standby_that_lacks_rows_of_a_copy_is_refused() -> Result<()> {
    let mut site = site()?;
    let (standby, program) = followed(&mut site, &[])?;
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'both')")?;
    site.wait_until_applied(&mut run)?;
    wait_until_synchronised(&standby, "failover")?;
    cut_off(&standby)?;
    site.publisher.sql(DB, "UPDATE t SET v = 'lost by the standby'")?;
    site.tool().finish("resync", &["t"]).expect(0, &[]);
    wait_while_running(&mut run, "the copy", PATIENCE, || {
        let copied = "SELECT coalesce(string_agg(v, ', '), '') FROM t";
        Ok(site.subscriber.query_one_text(DB, copied)? == "lost by the standby")
    })?;
    site.publisher.stop(Stop::Immediate)?;
    promote(&standby)?;
    standby.sql(DB, "INSERT INTO t SELECT i, 'new' FROM generate_series(2, 2000) i")?;
    expect_exit(
        &mut run,
        10,
        &["the promoted server lacks transactions that the subscriber has", "pgapace rebase"],
    )
}

/// The program continues with the promoted standby until `rows` rows are logged.
pub(super) fn expect_followed(
    site: &Site,
    standby: &Cluster,
    run: &mut Process,
    rows: u32,
) -> Result<()> {
    wait_for_rows(site, run, rows)?;
    testbed::compare::expect_equal(
        &mut standby.connect(DB)?,
        &mut site.subscriber.connect(DB)?,
        &[TableName::from("t"), TableName::from("log")],
    )?;
    assert!(run.is_running(), "{}", run.log());
    Ok(())
}

/// Transactions are prepared when the publisher is stopped, either held in memory or prepared on
/// the subscriber. They are resolved on the promoted standby.
#[test]
fn prepared_transactions_outlive_a_promotion() -> Result<()> {
    for hold in ["3600", "0"] {
        let mut site = site()?;
        let (standby, program) = followed(&mut site, &["--two-phase", "--two-phase-hold", hold])?;
        let mut run = site.spawn_streaming(&program)?;
        site.publisher.sql(DB, "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 9) i")?;
        site.wait_until_applied(&mut run)?;
        // Synchronisation requires that the slot advances, which it does not while a transaction is
        // held.
        wait_until_synchronised(&standby, "failover AND two_phase")?;
        let prepare = |server: &Cluster, gid: &str, sql: &str| {
            server.sql(DB, &format!("BEGIN; {sql}; PREPARE TRANSACTION '{gid}'"))
        };
        let resolve = |server: &Cluster, how: &str, gid: &str| {
            server.sql(DB, &format!("{how} PREPARED '{gid}'"))
        };
        prepare(&site.publisher, "ended", "UPDATE t SET v = 'ended' WHERE id = 1")?;
        prepare(&site.publisher, "commits", "UPDATE t SET v = 'two' WHERE id = 2")?;
        prepare(&site.publisher, "goes", "DELETE FROM t WHERE id = 3; INSERT INTO log VALUES (1)")?;
        site.publisher.sql(DB, "INSERT INTO log VALUES (2)")?;
        resolve(&site.publisher, "COMMIT", "ended")?;
        site.wait_until_applied(&mut run)?;
        let here = "SELECT (SELECT count(*) FROM pg_prepared_xacts) || ' ' \
                      || (SELECT count(*) FROM pgapace.prepared)";
        let expected = if hold == "0" { "2 2" } else { "0 0" };
        wait_while_running(&mut run, "what is prepared to be so here", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, here)? == expected)
        })?;
        // One transaction is prepared and another committed just before the publisher is stopped.
        prepare(&site.publisher, "late", "UPDATE t SET v = 'four' WHERE id = 4")?;
        prepare(&site.publisher, "both", "UPDATE t SET v = 'five' WHERE id = 5")?;
        resolve(&site.publisher, "COMMIT", "both")?;
        wait_for_replay(&site, &standby)?;
        // A transaction that is held in memory is not acknowledged, and a fast shutdown would wait
        // for that.
        site.publisher.stop(if hold == "0" { Stop::Fast } else { Stop::Immediate })?;
        assert!(run.is_running(), "{}", run.log());
        promote(&standby)?;
        standby
            .sql(DB, "UPDATE t SET v = v || '!' WHERE id IN (1, 5); INSERT INTO log VALUES (3)")?;
        resolve(&standby, "COMMIT", "commits")?;
        resolve(&standby, "ROLLBACK", "goes")?;
        resolve(&standby, "COMMIT", "late")?;
        prepare(&standby, "new", "UPDATE t SET v = v || ' new' WHERE id <= 5")?;
        resolve(&standby, "COMMIT", "new")?;
        standby.sql(DB, "DELETE FROM t WHERE id = 3; INSERT INTO log VALUES (4)")?;
        expect_followed(&site, &standby, &mut run, 3)?;
        assert_eq!(site.subscriber.query_one_text(DB, here)?, "0 0");
        let missing = "SELECT update_missing + delete_missing FROM pgapace.stat_subscription";
        assert_eq!(site.subscriber.query_one_text(DB, missing)?, "0");
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
    }
    Ok(())
}

pub(super) fn wait_for_rows(site: &Site, run: &mut Process, rows: u32) -> Result<()> {
    wait_while_running(run, "rows of the log", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM log")? == rows.to_string())
    })
}
