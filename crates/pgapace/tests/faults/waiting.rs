//! Unavailable servers: pgapace waits for those that may become available, and `status` shows it.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use testbed::compare::TableName;
use testbed::program::{Process, events};
use testbed::{Cluster, Error, Program, Result, Stop};

use crate::support::{
    DB, NAME, PATIENCE, Site, expect_exit, pgapace, wait_for_event, wait_for_log,
    wait_while_running,
};

pub(super) const MAJORS: [u16; 2] = [15, 18];

pub(super) fn site(major: u16) -> Result<Site> {
    let site = Site::new(major, major)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

pub(super) fn until_current(site: &Site) -> Program {
    site.program().args(["--until", "current"])
}

pub(super) fn follow(site: &Site) -> Result<()> {
    expect_exit(&mut site.spawn(&until_current(site))?, 0, &[])
}

/// The subscription's part of `status --json`.
pub(super) fn status(site: &Site) -> Result<serde_json::Value> {
    let program = pgapace("status").args(["--subscriber", &site.subscriber.conninfo(DB), "--json"]);
    let output = program.output()?;
    let all: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::other(format!("{e}: {}", String::from_utf8_lossy(&output.stderr))))?;
    Ok(all[0].clone())
}

/// Makes the next start of a stopped server a recovery that lasts until the returned file exists.
/// Until then the server answers with 57P03.
fn recovers_slowly(server: &Cluster) -> Result<std::path::PathBuf> {
    let data = server.data_dir();
    // Create an empty file with the same owner as the others.
    let signal = data.join("recovery.signal");
    let copied =
        Command::new("cp").arg("-a").arg(data.join("PG_VERSION")).arg(&signal).status()?.success();
    assert!(copied, "make {}", signal.display());
    let go = server.socket_dir().join("go");
    let conf = data.join("postgresql.auto.conf");
    let mut text = fs::read_to_string(&conf)?;
    text.push_str(&format!(
        "restore_command = 'while ! test -e {}; do sleep 0.1; done; false'\n",
        go.display()
    ));
    fs::write(&conf, text)?;
    Ok(go)
}

#[test]
fn servers_that_are_away_are_waited_for() -> Result<()> {
    for major in MAJORS {
        for publisher in [true, false] {
            let mut site = site(major)?;
            follow(&site)?;
            site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
            let away = if publisher { &mut site.publisher } else { &mut site.subscriber };
            away.stop(Stop::Fast)?;
            let mut run = site.spawn(&until_current(&site))?;
            wait_for_event(&mut run, "waiting_for_server", PATIENCE)?;
            if publisher {
                wait_while_running(&mut run, "the state to be known", PATIENCE, || {
                    Ok(status(&site)?["state"] == "retrying")
                })?;
                let status = status(&site)?;
                assert!(status["next_try_at"].is_string(), "{status:#}");
                let error = status["last_error"].as_str().unwrap_or_default();
                assert!(error.contains("publisher"), "{status:#}");
            }
            let away = if publisher { &mut site.publisher } else { &mut site.subscriber };
            away.start()?;
            expect_exit(&mut run, 0, &[])?;
            site.expect_equal(&[TableName::from("t")])?;
            let status = status(&site)?;
            assert_eq!(status["state"], "stopped", "{status:#}");
            assert!(status["last_error"].is_null(), "{status:#}");
            assert!(status["next_try_at"].is_null(), "{status:#}");
        }
    }
    Ok(())
}

#[test]
fn servers_that_recover_are_waited_for() -> Result<()> {
    for major in MAJORS {
        for publisher in [true, false] {
            let mut site = site(major)?;
            // The first start of the subscription waits, too.
            if publisher {
                follow(&site)?;
            }
            site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
            let program = until_current(&site).args(["--connect-timeout", "600"]);
            let log = tempfile::NamedTempFile::new()?;
            let recovers = if publisher { &mut site.publisher } else { &mut site.subscriber };
            recovers.stop(Stop::Fast)?;
            let go = recovers_slowly(recovers)?;
            let mut run = std::thread::scope(|scope| {
                let started = scope.spawn(|| recovers.start());
                let waits = |run: &mut Process| {
                    wait_for_log(run, "57P03", PATIENCE)?;
                    wait_for_event(run, "waiting_for_server", PATIENCE)
                };
                let run = program.spawn_logged(log.path()).and_then(|mut run| {
                    waits(&mut run)?;
                    Ok(run)
                });
                fs::write(&go, "")?;
                started.join().map_err(|_| Error::other("the start panicked"))??;
                run
            })?;
            expect_exit(&mut run, 0, &[])?;
            site.expect_equal(&[TableName::from("t")])?;
        }
    }
    Ok(())
}

/// A first start by hand fails soon and reports what it waited for. A permanent error fails at
/// once.
#[test]
fn a_first_start_waits_briefly_and_only_for_temporary_errors() -> Result<()> {
    let site = site(18)?;
    let closed = format!("host=127.0.0.1 port=1 user=postgres dbname={DB}");
    let subscriber = site.subscriber.conninfo(DB);
    let publisher = site.publisher.conninfo(DB);
    for (between, code) in [((&closed, &subscriber), 4), ((&publisher, &closed), 5)] {
        let program = site.program_between(between.0, between.1).args(["--connect-timeout", "1"]);
        expect_exit(&mut site.spawn(&program)?, code, &["HINT:", "--connect-timeout"])?;
    }
    let started = Instant::now();
    let unknown = |conninfo: &str| conninfo.replace("dbname='postgres'", "dbname='nowhere'");
    let nobody = |conninfo: &str| conninfo.replace("user=postgres", "user=nobody_at_all");
    for wrong in [unknown(&publisher), nobody(&publisher)] {
        for other in [&subscriber, &closed] {
            let program = site.program_between(&wrong, other).args(["--connect-timeout", "3600"]);
            expect_exit(&mut site.spawn(&program)?, 4, &[])?;
        }
    }
    for wrong in [unknown(&subscriber), nobody(&subscriber)] {
        let program = site.program_between(&publisher, &wrong).args(["--connect-timeout", "3600"]);
        expect_exit(&mut site.spawn(&program)?, 5, &[])?;
    }
    assert!(started.elapsed() < Duration::from_secs(600), "nothing of it was waited for");
    Ok(())
}

/// While the process streams, the servers are stopped one after the other. It reports the
/// unavailable server, and continues shortly after its return.
#[test]
fn status_shows_the_server_that_a_running_process_waits_for() -> Result<()> {
    for major in MAJORS {
        let mut site = site(major)?;
        let mut run = site.spawn_streaming(&site.program())?;
        assert_eq!(status(&site)?["state"], "running");
        for round in 1..4 {
            site.publisher.stop(Stop::Immediate)?;
            wait_while_running(&mut run, "the state to be known", PATIENCE, || {
                Ok(status(&site)?["state"] == "retrying")
            })?;
            site.publisher.start()?;
            site.publisher.sql(DB, &format!("INSERT INTO t VALUES ({round}, 'x')"))?;
            site.wait_until_applied(&mut run)?;
            wait_while_running(&mut run, "the error to be over", PATIENCE, || {
                let status = status(&site)?;
                Ok(status["state"] == "running" && status["last_error"].is_null())
            })?;
        }
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        assert_eq!(status(&site)?["state"], "stopped");
    }
    Ok(())
}

/// While the process runs, the publisher is configured to wait for the subscriber, and then not to
/// wait. It knows the subscriber by the name of the walsender, which the connection string may choose.
#[test]
fn a_publisher_may_become_synchronous_during_a_run() -> Result<()> {
    for major in MAJORS {
        let mut site = site(major)?;
        site.publisher.sql(
            DB,
            "CREATE TABLE unpublished (v int); DROP PUBLICATION pub; \
             CREATE PUBLICATION pub FOR TABLE t",
        )?;
        // Without an immediate acknowledgement, a commit without published changes waits for this
        // long.
        let walsender = if major == 15 { NAME } else { "other" };
        let publisher = site.publisher.conninfo(DB) + " application_name=" + walsender;
        let program = site.program_between(&publisher, &site.subscriber.conninfo(DB));
        let mut run = site.spawn_streaming(&program.env("PGAPACE_STATUS_INTERVAL", "3600"))?;
        for (number, name) in [walsender, "", walsender].into_iter().enumerate() {
            site.publisher.set("synchronous_standby_names", name)?;
            let started = number + 2;
            let path = run.log_file().to_path_buf();
            wait_while_running(&mut run, "another run", PATIENCE, || {
                let log = fs::read(&path)?;
                Ok(events(&String::from_utf8_lossy(&log), "streaming") == started)
            })?;
            let mut client = site.publisher.connect(DB)?;
            client.batch_execute("SET statement_timeout = '60s'")?;
            for _ in 0..3 {
                client.batch_execute("INSERT INTO unpublished VALUES (1)")?;
                client
                    .batch_execute("INSERT INTO t SELECT coalesce(max(id), 0) + 1, 'x' FROM t")?;
            }
        }
        assert!(!run.log().contains("retry_in_ms"), "{}", run.log());
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// Whether it has run before is not known while the subscriber is away.
#[test]
fn a_slot_of_another_program_is_no_subscription_that_was_dropped() -> Result<()> {
    let mut site = site(18)?;
    let slot = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    site.publisher.sql(DB, &slot)?;
    site.subscriber.stop(Stop::Fast)?;
    let mut run = site.spawn(&until_current(&site))?;
    wait_for_event(&mut run, "waiting_for_server", PATIENCE)?;
    site.subscriber.start()?;
    expect_exit(&mut run, 7, &["already exists"])
}

/// PostgreSQL 18 invalidates a slot that nothing uses, as while the subscriber is away.
#[test]
fn a_wait_for_the_subscriber_that_is_longer_than_a_slot_may_be_idle_keeps_it() -> Result<()> {
    let mut site = Site::start(&[("idle_replication_slot_timeout", "8s")], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.subscriber.stop(Stop::Fast)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    // Twice the limit.
    site.pass_idle_limit(&mut run, 16)?;
    site.subscriber.start()?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?, "1");
    Ok(())
}
