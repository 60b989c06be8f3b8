//! Network failures on either side.

use std::thread::sleep;
use std::time::Duration;

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Program, Proxy, Result, Stop};

use crate::support::{
    DB, Load, PATIENCE, Reader, Site, executable, long, one_or_all, random_pause, skipped,
    wait_for_event, wait_for_log, wait_while_running,
};

#[test]
fn cuts_refusals_and_silence_on_either_side() -> Result<()> {
    let site = Site::start(&[("wal_sender_timeout", "3s")], &[])?;
    site.load_tables()?;
    let publisher = Proxy::in_front_of(&site.publisher)?;
    let subscriber = Proxy::in_front_of(&site.subscriber)?;
    let program = site
        .program_between(&publisher.conninfo(DB), &subscriber.conninfo(DB))
        .args(["--receive-timeout", "2"]);
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.subscriber);
    let load = Load::start(&site.publisher, 100.0)?;
    let mut random = fastrand::Rng::with_seed(8);
    for round in 0..if long() { 40 } else { 4 } {
        for proxy in [&publisher, &subscriber] {
            random_pause(&mut random, 50..300);
            proxy.cut_all();
            random_pause(&mut random, 50..300);
            proxy.refuse(true);
            proxy.cut_all();
            random_pause(&mut random, 100..800);
            proxy.refuse(false);
            assert!(run.is_running(), "round {round}:\n{}", run.log());
        }
        site.wait_until_applied(&mut run)?;
    }
    for proxies in [&[&publisher][..], &[&subscriber], &[&publisher, &subscriber]] {
        for proxy in proxies {
            proxy.freeze();
        }
        // Longer than wal_sender_timeout.
        sleep(Duration::from_secs(4));
        for proxy in proxies {
            proxy.unfreeze();
        }
        site.wait_until_applied(&mut run)?;
    }
    assert!(run.log().contains("the publisher has been silent for 2 s"), "{}", run.log());
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    assert!(reader.stop()? >= 10);
    site.expect_equal_load()
}

#[test]
fn a_half_open_connection_does_not_prevent_the_next_attempt() -> Result<()> {
    half_open_connection("3s")
}

/// No timeout ends the walsender, which uses the slot.
#[test]
fn a_half_open_connection_without_a_timeout_does_not_prevent_the_next_attempt() -> Result<()> {
    half_open_connection("0")
}

/// The network drops pgapace's packets, so the servers keep its old sessions. The next attempt,
/// over another connection, must not mistake them for another process.
fn half_open_connection(wal_sender_timeout: &str) -> Result<()> {
    let site = Site::start(&[("wal_sender_timeout", wal_sender_timeout)], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let publisher = [Proxy::in_front_of(&site.publisher)?, Proxy::in_front_of(&site.publisher)?];
    let subscriber = [Proxy::in_front_of(&site.subscriber)?, Proxy::in_front_of(&site.subscriber)?];
    let through = |proxies: &[Proxy; 2]| {
        let [first, second] = proxies.each_ref().map(|proxy| proxy.addr().port());
        format!(
            "host=127.0.0.1,127.0.0.1 port={first},{second} user=postgres dbname={DB} \
             connect_timeout=2"
        )
    };
    let program = site.program_between(&through(&publisher), &through(&subscriber)).args([
        "--receive-timeout",
        "2",
        "--busy-timeout",
        "10",
    ]);
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    publisher[0].freeze();
    subscriber[0].freeze();
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])?;
    let owners =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace sub control'";
    assert_eq!(site.subscriber.query_one_text(DB, owners)?, "1");
    Ok(())
}

/// A session is lost while it waits for the rest of a large transaction, after conflict rules have
/// resolved its first parts. These parts are rolled back.
#[test]
fn a_session_is_lost_between_parts_under_rules() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        let publisher = Proxy::in_front_of(&site.publisher)?;
        let program = site
            .program_between(&publisher.conninfo(DB), &site.subscriber.conninfo(DB))
            .args(["--on-conflict", "insert_exists=skip", "--apply-mode", "row"])
            .args(["--workers", "1", "--streaming", "off", "--memory-limit", "16"]);
        let mut run = site.spawn_streaming(&program)?;
        site.subscriber.sql(DB, "INSERT INTO t VALUES (1, 'there')")?;
        let rows = "SELECT i, repeat(i::text, 3000) FROM generate_series(1, 5000) i";
        site.publisher.sql(DB, &format!("INSERT INTO t {rows}"))?;
        let session = "FROM pg_stat_activity WHERE application_name = 'pgapace sub apply'";
        let writes = format!("SELECT count(*) {session} AND backend_xid IS NOT NULL");
        wait_while_running(&mut run, "the first part", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, &writes)? == "1")
        })?;
        publisher.hold_streams(true);
        let waits = format!(
            "SELECT count(*) {session} AND wait_event = 'ClientRead' \
             AND query_start < now() - interval '1 s'"
        );
        wait_while_running(&mut run, "all received changes to be applied", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, &waits)? == "1")
        })?;
        let lose = format!("SELECT count(pg_terminate_backend(pid)) {session}");
        assert_eq!(site.subscriber.query_one_text(DB, &lose)?, "1");
        wait_while_running(&mut run, "the first parts to be rolled back", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, &writes)? == "0")
        })?;
        publisher.hold_streams(false);
        site.wait_until_applied(&mut run)?;
        let sums = "SELECT count(*) || ' ' || sum(id) || ' ' || sum(length(v)) FROM t WHERE id > 1";
        assert_eq!(
            site.subscriber.query_one_text(DB, sums)?,
            site.publisher.query_one_text(DB, sums)?
        );
        assert_eq!(site.subscriber.query_one_text(DB, "SELECT v FROM t WHERE id = 1")?, "there");
        let named = "SELECT count(*) FROM pgapace.conflict";
        assert_eq!(site.subscriber.query_one_text(DB, named)?, "1");
    }
    Ok(())
}

/// A server that refuses connections reports no SQLSTATE.
#[test]
fn retries_without_a_sqlstate_are_counted() -> Result<()> {
    let mut site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.stop(Stop::Immediate)?;
    let sql = "SELECT count(*) FROM pgapace.stat_retry WHERE sqlstate = 'none' AND retries > 0";
    wait_while_running(&mut run, "the retries to be counted", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, sql)? == "1")
    })
}

/// Limits the open files of a running process.
fn limit_files(run: &Process, most: u32) -> Result<()> {
    limit(run, &format!("--nofile={most}:"), |prlimit| prlimit)
}

/// `by` says who does it: without all privileges, only the user of the process may.
fn limit(run: &Process, most: &str, by: impl Fn(Program) -> Program) -> Result<()> {
    let prlimit = Program::new("prlimit").args(["--pid", &run.pid().to_string(), most]);
    let output = by(prlimit).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn a_process_without_room_for_files_names_the_limit() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    limit_files(&run, 3)?;
    site.publisher.sql(DB, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")?;
    wait_for_log(&mut run, "raise TasksMax and LimitNOFILE", PATIENCE)?;
    limit_files(&run, 1000)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)
}

/// Threads end a run at the same time, and begin another one. Where the system refuses them, no destructor panics.
#[test]
fn a_process_without_room_for_threads_ends_its_run_and_goes_on_later() -> Result<()> {
    // A user of its own, because the limit counts all threads of a user. It does not hold for root.
    let user = 60_000 + std::process::id() % 5_000;
    let version = executable().arg("--version").as_user(user).output();
    if !version.is_ok_and(|version| version.status.success()) {
        skipped("limit of threads", "only root can run the program as another user");
        return Ok(());
    }
    for (major, fewer) in [(15, 12), (18, 3)] {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        let servers = [&site.publisher, &site.subscriber].map(|server| server.conninfo_tcp(DB));
        let program = site.program_between(&servers[0], &servers[1]).args(["--workers", "4"]);
        let mut run = site.spawn_streaming(&program.as_user(user))?;
        let threads = std::fs::read_dir(format!("/proc/{}/task", run.pid()))?.count();
        limit(&run, &format!("--nproc={}:", threads - fewer), |prlimit| prlimit.as_user(user))?;
        let end = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active";
        site.publisher.sql(DB, end)?;
        wait_for_event(&mut run, "run_failed", PATIENCE)?;
        if fewer == 12 {
            wait_for_log(&mut run, "raise TasksMax and LimitNOFILE", PATIENCE)?;
        }
        site.publisher.sql(DB, end)?;
        limit(&run, "--nproc=1000:", |prlimit| prlimit.as_user(user))?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
        site.wait_until_applied(&mut run)?;
        assert!(!run.log().contains("panicked"), "{}", run.log());
    }
    Ok(())
}
