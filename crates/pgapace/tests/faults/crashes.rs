//! Crashes of each process under load: no change is lost or applied twice, and readers see a prefix
//! of the commit order.

use std::time::{Duration, Instant};

use testbed::{Proxy, Result, Stop, wait_until};

use crate::support::{DB, Load, NAME, PATIENCE, Reader, Site, long, lsn, random_pause};

const RATE: f64 = 150.0;

#[test]
fn kill_9_of_pgapace_under_load() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(20);
    for round in 0..if long() { 200 } else { 20 } {
        random_pause(&mut random, 20..700);
        run.kill9()?;
        // Every other process is killed at an arbitrary moment; on a busy machine that is before it
        // streams.
        run = if round % 2 == 0 { site.spawn_streaming(&program)? } else { site.spawn(&program)? };
    }
    let written = load.stop()?;
    site.wait_until_applied(&mut run)?;
    let checks = reader.stop()?;
    assert!(checks >= 20 && written >= 200, "{checks} checks, {written} transactions");
    site.expect_equal_load()
}

/// Asynchronous commits of the subscriber are lost and applied again. The publisher has no
/// acknowledgement for them.
#[test]
fn immediate_restarts_of_the_subscriber_under_load() -> Result<()> {
    // A slow walwriter, so that commits are lost unless pgapace makes them durable.
    let lazy = [("wal_writer_delay", "10s"), ("wal_writer_flush_after", "2GB")];
    let mut site = Site::start(&[], &lazy)?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let proxy = Proxy::in_front_of(&site.subscriber)?;
    let program = site.program_between(&site.publisher.conninfo(DB), &proxy.conninfo(DB));
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(10);
    let mut lost = 0;
    let rounds = if long() { 100 } else { 10 };
    for round in 0..5 * rounds {
        // On a busy machine the walwriter may be faster, and a round then shows nothing.
        if round >= rounds && lost >= 3 {
            break;
        }
        let at_start = site.progress()?;
        wait_until(Duration::from_secs(60), "progress after the restart", || {
            Ok(site.progress()? > at_start)
        })?;
        random_pause(&mut random, 50..400);
        let mut observer = site.subscriber.connect(DB)?;
        if round % 2 == 0 {
            // Locked rows block only the durability session.
            observer.batch_execute("BEGIN; SELECT FROM pgapace.progress FOR SHARE")?;
            // Workers commit meanwhile, and no commit is durable.
            let locked = site.progress()?;
            wait_until(PATIENCE, "commits that are not durable", || Ok(site.progress()? > locked))?;
        }
        let sql = "SELECT max(lsn)::text FROM pgapace.progress";
        let visible = lsn(&observer.query_one(sql, &[])?.get::<_, String>(0))?;
        proxy.refuse(true);
        site.subscriber.stop(Stop::Immediate)?;
        site.subscriber.start()?;
        let survived = site.progress()?;
        let confirmed = site.confirmed()?;
        assert!(
            confirmed <= survived,
            "acknowledged {confirmed:X}, but only {survived:X} survived (round {round})"
        );
        lost += u32::from(survived < visible);
        proxy.refuse(false);
        assert!(run.is_running(), "pgapace ended:\n{}", run.log());
    }
    assert!(lost >= 3, "only {lost} restarts lost commits: the test has no effect");
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    assert!(reader.stop()? >= 10);
    site.expect_equal_load()
}

#[test]
fn restarts_of_the_publisher_under_load() -> Result<()> {
    let mut site = Site::start(&[], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..if long() { 100 } else { 10 } {
        let before = site.progress()?;
        wait_until(Duration::from_secs(60), "progress after the restart", || {
            Ok(site.progress()? > before)
        })?;
        random_pause(&mut random, 50..500);
        let started = Instant::now();
        site.publisher.stop(if round % 2 == 0 { Stop::Fast } else { Stop::Immediate })?;
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "a fast stop of the publisher took {:?}: it waits until we have confirmed everything",
            started.elapsed()
        );
        site.publisher.start()?;
        assert!(run.is_running(), "pgapace ended:\n{}", run.log());
    }
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    assert!(reader.stop()? >= 10);
    let active = format!("SELECT active FROM pg_replication_slots WHERE slot_name = '{NAME}'");
    assert_eq!(site.publisher.query_one_text(DB, &active)?, "t");
    site.expect_equal_load()
}
