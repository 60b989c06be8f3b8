//! Processes on one machine.

use std::time::Duration;

use testbed::compare::TableName;
use testbed::{Error, Result, wait_until};

use super::{BOUND, first_commit, pair_of_processes, wait_for, within};
use crate::support::{
    DB, Load, NAME, PATIENCE, Reader, Site, finish, holds_for, long, pgapace, wait_for_events,
};

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    Ok(site)
}

#[test]
fn a_standby_takes_over_when_the_first_process_is_killed_or_stopped() -> Result<()> {
    let site = site()?;
    let (mut first, mut second) = pair_of_processes(&site)?;
    first.kill9()?;
    within("kill -9 to commit", first_commit(&site, 1)?, BOUND)?;
    wait_for(&mut second, "streaming")?;

    let mut third = site.spawn(&site.program().arg("--standby"))?;
    wait_for(&mut third, "standby_waiting")?;
    let subscriber = site.subscriber.conninfo(DB);
    let status = finish(&pgapace("status").args(["--subscriber", &subscriber, "--json"])).stdout;
    let waits = format!("\"process\": {}", third.pid());
    assert!(status.contains(&waits) && status.contains("\"standbys\""), "{status}");
    // One that was killed long ago.
    site.subscriber.sql(
        DB,
        "INSERT INTO pgapace.member (id, host, process, backend, waits_for, runs, weights, beat_at) \
         VALUES ('dead', 'app2', 1, 1, '{sub}', '{}', '{}', now() - interval '2 hours')",
    )?;
    // The owner's own row, of when it waited, goes soon after its takeover.
    wait_until(PATIENCE, "one standby", || {
        let brief = pgapace("status").args(["--subscriber", &subscriber, "--brief"]);
        Ok(finish(&brief).stdout.contains(" 1 waiting"))
    })?;

    let waited = second.events("standby_waiting");
    finish(&pgapace("hand-over").args(["--subscriber", &subscriber, "--name", NAME]))
        .expect(0, &[]);
    within("hand-over to commit", first_commit(&site, 3)?, BOUND)?;
    wait_for(&mut third, "streaming")?;
    // The process that gave it up is the standby now.
    wait_for_events(&mut second, "standby_waiting", waited + 1, PATIENCE)?;
    std::mem::swap(&mut second, &mut third);

    second.terminate()?;
    second.wait(PATIENCE)?;
    assert_eq!(second.exit_code(), Some(0), "{}", second.log());
    within("SIGTERM to commit", first_commit(&site, 2)?, BOUND)?;
    site.expect_equal(&[TableName::from("log")])?;
    third.terminate()?;
    third.wait(PATIENCE)?;
    let members = "SELECT coalesce(string_agg(id || ' ' || process, ', '), '') FROM pgapace.member";
    assert_eq!(site.subscriber.query_one_text(DB, members)?, "", "{}", third.log());
    Ok(())
}

#[test]
fn a_suspended_process_loses_its_subscription_and_commits_nothing_more() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    site.publish_more_tables("CREATE TABLE log (v int)", "log")?;
    let (mut first, mut second) = pair_of_processes(&site)?;
    let load = Load::start(&site.publisher, 50.0)?;
    let reader = Reader::start(&site.subscriber);
    for round in 0..if long() { 10 } else { 2 } {
        // In the middle of its work: with open transactions, and statements on their way.
        first.freeze()?;
        let took = first_commit(&site, round)
            .map_err(|e| Error::other(format!("{e}\n{}\n{}", first.log(), second.log())))?;
        within("SIGSTOP to commit", took, BOUND)?;
        let epoch = site.subscriber.query_one_text(DB, "SELECT epoch FROM pgapace.subscription")?;
        let waited = first.events("standby_waiting");
        first.thaw()?;
        wait_until(PATIENCE, "the first process to wait", || {
            Ok(first.events("standby_waiting") > waited)
        })?;
        let late = format!(
            "SELECT count(*) FROM pgapace.progress WHERE epoch < {epoch} AND lsn > \
             (SELECT min(lsn) FROM pgapace.progress WHERE epoch >= {epoch})"
        );
        assert_eq!(site.subscriber.query_one_text(DB, &late)?, "0");
        std::mem::swap(&mut first, &mut second);
    }
    load.stop()?;
    site.wait_until_applied(&mut first)?;
    assert!(reader.stop()? > 0);
    site.expect_equal_load()?;
    site.expect_equal(&[TableName::from("log")])
}

#[test]
fn of_two_first_starts_one_copies_and_one_waits() -> Result<()> {
    let site = site()?;
    site.publisher.sql(DB, "INSERT INTO log SELECT i FROM generate_series(1, 50000) i")?;
    let program = site.program().arg("--standby");
    let (mut one, mut other) = (site.spawn(&program)?, site.spawn(&program)?);
    wait_until(PATIENCE, "one process to stream and one to wait", || {
        let streaming = one.events("streaming") + other.events("streaming");
        assert!(one.is_running() && other.is_running(), "{}\n{}", one.log(), other.log());
        Ok(streaming == 1 && one.events("standby_waiting") + other.events("standby_waiting") == 1)
    })?;
    first_commit(&site, 0)?;
    site.expect_equal(&[TableName::from("log")])
}

#[test]
fn the_heartbeat_is_written_only_for_a_standby() -> Result<()> {
    let site = site()?;
    let program = site.program().args(["--standby", "--takeover-timeout", "8"]);
    let _first = site.spawn_streaming(&program)?;
    let beat = || -> Result<i64> {
        let beat = site.subscriber.query_one_text(DB, "SELECT beat FROM pgapace.owner")?;
        Ok(beat.parse().unwrap_or_default())
    };
    wait_until(PATIENCE, "the first beat", || Ok(beat()? > 0))?;
    holds_for(Duration::from_millis(2500), "silent while no process waits", || Ok(beat()? == 1))?;
    // A process that shares the subscription and tries to run it does not wait, but judges the beat.
    site.subscriber.sql(
        DB,
        "INSERT INTO pgapace.member (id, host, process, backend, waits_for, runs, weights) \
         VALUES ('other', 'app2', 1, 1, '{}', '{sub}', '{1}')",
    )?;
    wait_until(PATIENCE, "beats for another process", || Ok(beat()? > 2))?;
    site.subscriber.sql(DB, "DELETE FROM pgapace.member")?;
    let mut second = site.spawn(&program)?;
    wait_for(&mut second, "standby_waiting")?;
    wait_until(PATIENCE, "more beats", || Ok(beat()? > 3))?;
    // A standby does not take a subscription from a process that works, however long it waits.
    holds_for(Duration::from_secs(11), "left to the process that works", || {
        Ok(second.events("standby_takes_over") == 0)
    })
}

/// Two subscriptions of each process lead to one subscriber database by different connection strings.
#[test]
fn connection_strings_of_one_database_have_a_row_each() -> Result<()> {
    let site = Site::start(&[], &[])?;
    let ddl = "CREATE TABLE log (v int); CREATE TABLE other (v int)";
    site.publisher.sql(DB, ddl)?;
    site.subscriber.sql(DB, ddl)?;
    let publications = "CREATE PUBLICATION p1 FOR TABLE log; CREATE PUBLICATION p2 FOR TABLE other";
    site.publisher.sql(DB, publications)?;
    let (publisher, subscriber) = (site.publisher.conninfo(DB), site.subscriber.conninfo(DB));
    let subscription = |number: u32, subscriber: &str| {
        format!(
            "[[subscription]]\nname = \"s{number}\"\npublication = \"p{number}\"\n\
             publisher = \"{publisher}\"\nsubscriber = \"{subscriber}\"\n"
        )
    };
    let second = format!("{subscriber} connect_timeout=20");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("pgapace.toml");
    std::fs::write(&file, subscription(1, &subscriber) + &subscription(2, &second))?;
    let config = file.to_string_lossy().into_owned();
    let program = pgapace("run").args(["--standby", "--config", &config]);
    let mut processes = [site.spawn(&program)?, site.spawn(&program)?];
    let check = |condition: &str| -> Result<bool> {
        Ok(site.subscriber.query_one_text(DB, &format!("SELECT {condition}"))? == "t")
    };
    // Each process has one row for each subscription, which stays, and both are run.
    let rows = "(SELECT count(*) FILTER (WHERE runs = '{s1}') = 2 \
                   AND count(*) FILTER (WHERE runs = '{s2}') = 2 \
                   AND count(DISTINCT process) = 2 AND min(beat) > 5 FROM pgapace.member)";
    let run = "(SELECT count(*) = 2 FROM pgapace.owner WHERE stage = 'streaming')";
    wait_until(PATIENCE, "rows of all", || check(&format!("{rows} AND {run}")))?;
    for process in &processes {
        assert_eq!(process.events("standby_takes_over"), 0, "{}", process.log());
    }
    let [first, other] = &mut processes;
    first.terminate()?;
    first.wait(PATIENCE)?;
    let other = other.pid();
    let all = format!("(SELECT count(*) = 2 AND min(process) = {other} FROM pgapace.member)");
    let runs = format!(
        "(SELECT count(*) = 2 FROM pgapace.owner WHERE stage = 'streaming' AND process = {other})"
    );
    wait_until(PATIENCE, "the other process to run both", || check(&format!("{all} AND {runs}")))
}
