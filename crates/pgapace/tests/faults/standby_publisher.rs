//! A standby as the publisher: it is promoted while pgapace reads from it, or it is not promoted yet.

use std::time::Duration;

use testbed::{Result, Stop, wait_until};

use super::failover::{
    both_hosts, expect_followed, followed, promote, site, standby, wait_for_rows,
    wait_until_synchronised,
};
use crate::see::http_client::{free_port, get, parse};
use crate::support::{
    DB, PATIENCE, Tool, expect_exit, holds_for, wait_for_event, wait_for_log, wait_while_running,
};

/// pgapace reads from a standby, which is promoted while the stream goes on. The next run does not take the transactions
/// that came after the promotion for ones that the promoted server lacks. A standby refuses serializable transactions,
/// which the role, the database or the connection string may have as default. It does not have the values of unlogged
/// sequences.
#[test]
fn a_standby_may_be_promoted_under_its_stream() -> Result<()> {
    let mut site = site()?;
    site.publisher.sql(DB, "CREATE UNLOGGED SEQUENCE unlogged; CREATE SEQUENCE logged START 7")?;
    site.subscriber.sql(DB, "CREATE SEQUENCE unlogged; CREATE SEQUENCE logged")?;
    let standby = standby(&mut site, "")?;
    let from = standby.conninfo(DB) + " options='-c default_transaction_isolation=serializable'";
    let port = free_port();
    let program = site
        .program_between(&from, &site.subscriber.conninfo(DB))
        .args(["--http", &format!("127.0.0.1:{port}")]);
    let mut run = site.spawn(&program)?;
    wait_while_running(&mut run, "the stream of a standby", PATIENCE, || {
        // A slot of a standby is created at such a snapshot.
        site.publisher.sql(DB, "SELECT pg_log_standby_snapshot()")?;
        Ok(site
            .subscriber
            .query_one_text(DB, "SELECT to_regclass('pgapace.progress') IS NOT NULL")?
            == "t"
            && site.subscriber.query_one_text(DB, "SELECT count(*) FROM pgapace.progress")? != "0")
    })?;
    wait_for_event(&mut run, "streaming", PATIENCE)?;
    assert!(run.log().contains("it is unlogged, and the publisher is a standby"), "{}", run.log());
    assert_eq!(site.subscriber.query_one_text(DB, "SELECT nextval('logged')")?, "7");
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'old'); INSERT INTO log VALUES (1)")?;
    wait_for_rows(&site, &mut run, 1)?;
    // What the standby has received and not replayed is a lag.
    standby.sql(DB, "SELECT pg_wal_replay_pause()")?;
    site.publisher.sql(DB, "SELECT pg_logical_emit_message(true, '', repeat('x', 1000000))")?;
    wait_while_running(&mut run, "the lag", PATIENCE, || {
        let samples = parse(&get(port, "/metrics").body);
        let bytes = samples.iter().find(|((name, labels), _)| {
            name == "pgapace_lag_bytes" && labels["stage"] == "committed"
        });
        Ok(bytes.is_some_and(|(_, bytes)| *bytes > 900_000.0))
    })?;
    standby.sql(DB, "SELECT pg_wal_replay_resume()")?;
    // As if another server had sent rows of a copy that this one lacks.
    let column = |name: &str| {
        site.subscriber.query_one_text(DB, &format!("SELECT {name} FROM pgapace.subscription"))
    };
    let copied = "UPDATE pgapace.relation SET snapshot_lsn = sync_lsn, sync_lsn = '7F/0'";
    site.subscriber.sql(DB, copied)?;
    site.publisher.stop(Stop::Fast)?;
    promote(&standby)?;
    standby.sql(DB, "UPDATE t SET v = 'new'; INSERT INTO log VALUES (2)")?;
    wait_for_rows(&site, &mut run, 2)?;
    holds_for(Duration::from_secs(3), "the old timeline", || Ok(column("timeline")? == "1"))?;
    site.subscriber.sql(DB, "UPDATE pgapace.relation SET sync_lsn = snapshot_lsn")?;
    wait_while_running(&mut run, "the new timeline", PATIENCE, || Ok(column("timeline")? == "2"))?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    standby.sql(DB, "INSERT INTO log VALUES (3)")?;
    let mut run = site.spawn_streaming(&program)?;
    expect_followed(&site, &standby, &mut run, 3)
}

/// A standby sends the changes of its primary. A promoted one is another server, with the same system identifier.
#[test]
fn a_standby_does_not_publish_to_its_primary() -> Result<()> {
    let mut site = site()?;
    let standby = standby(&mut site, "")?;
    let (publisher, subscriber) = (standby.conninfo(DB), site.publisher.conninfo(DB));
    let tool = Tool { publisher, subscriber, ..site.tool() };
    tool.run().expect(3, &["the publisher is a standby of the subscriber"]);
    let schema = "SELECT to_regnamespace('pgapace') IS NULL";
    assert_eq!(site.publisher.query_one_text(DB, schema)?, "t");
    promote(&standby)?;
    let checked = tool.finish("check", &[]);
    assert!(checked.stdout.contains("are different databases"), "{}", checked.stdout);
    Ok(())
}

/// A list of hosts without target_session_attrs leads to a standby while the publisher is down. A synchronised slot
/// is the primary's.
#[test]
fn a_standby_with_a_synchronised_slot_is_waited_for() -> Result<()> {
    let mut site = site()?;
    let (standby, _) = followed(&mut site, &[])?;
    let tool = Tool { publisher: both_hosts(&site, &standby), ..site.tool() };
    let checked = tool.finish("check", &[]).stdout;
    assert!(checked.contains("target_session_attrs=primary"), "{checked}");
    let mut run = site.spawn_streaming(&tool.program("run"))?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'old'); INSERT INTO log VALUES (1)")?;
    wait_for_rows(&site, &mut run, 1)?;
    wait_until_synchronised(&standby, "failover")?;
    site.publisher.stop(Stop::Fast)?;
    wait_for_log(&mut run, "is only synchronised", PATIENCE)?;
    promote(&standby)?;
    standby.sql(DB, "UPDATE t SET v = 'new'; INSERT INTO log VALUES (2)")?;
    expect_followed(&site, &standby, &mut run, 2)
}

/// The same without a slot there. Verbs that drop the slot refuse such a standby.
#[test]
fn a_standby_without_the_slot_is_waited_for() -> Result<()> {
    let mut site = site()?;
    let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
    expect_exit(&mut run, 0, &[])?;
    let standby = standby(&mut site, "")?;
    // The primary's slot would stay, and hold WAL.
    let wrong = Tool { publisher: standby.conninfo(DB), ..site.tool() };
    for verb in ["rebase", "drop"] {
        let named = ["on which slot \"sub\" does not exist", "target_session_attrs", "--keep-slot"];
        wrong.finish(verb, &[]).expect(7, &named);
    }
    let tool = Tool { publisher: both_hosts(&site, &standby), ..site.tool() };
    let mut run = site.spawn_streaming(&tool.program("run"))?;
    site.publisher.stop(Stop::Fast)?;
    wait_for_log(&mut run, "on which slot \"sub\" does not exist", PATIENCE)?;
    site.publisher.start()?;
    site.publisher.sql(DB, "INSERT INTO log VALUES (1)")?;
    wait_for_rows(&site, &mut run, 1)
}

/// A slot of a standby waits for a record that only the primary writes. A first start names what helps. A rebase whose
/// new slot would wait for a primary that is away keeps the old one.
#[test]
fn a_slot_that_waits_for_the_primary_says_so() -> Result<()> {
    let mut site = site()?;
    let standby = standby(&mut site, "")?;
    let tool = Tool { publisher: standby.conninfo(DB), ..site.tool() };
    let mut run = site.spawn(&tool.program("run"))?;
    wait_for_event(&mut run, "slot_waits", PATIENCE)?;
    assert!(run.log().contains("pg_log_standby_snapshot()"), "{}", run.log());
    assert!(!run.log().contains("receives no WAL"), "{}", run.log());
    // Each attempt to find a consistent state takes such a record.
    let streams = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'sub' AND active";
    wait_while_running(&mut run, "the stream of a standby", PATIENCE, || {
        site.publisher.sql(DB, "SELECT pg_log_standby_snapshot()")?;
        Ok(standby.query_one_text(DB, streams)? == "1")
    })?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.publisher.stop(Stop::Fast)?;
    let receives = "SELECT count(*) FROM pg_stat_wal_receiver";
    wait_until(PATIENCE, "the standby to notice", || {
        Ok(standby.query_one_text(DB, receives)? == "0")
    })?;
    let named = ["receives no WAL from its primary", "primary_conninfo"];
    tool.finish("rebase", &[]).expect(4, &named);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'sub'";
    assert_eq!(standby.query_one_text(DB, slots)?, "1");
    let named = "SELECT count(*) FROM pgapace.subscription WHERE rebasing";
    assert_eq!(site.subscriber.query_one_text(DB, named)?, "0");
    Ok(())
}
