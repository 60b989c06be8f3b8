//! How many round trips a start needs. To a distant server each of them takes its time.

use std::time::{Duration, Instant};

use testbed::{Proxy, Result};

use crate::support::{DB, NAME, PATIENCE, Site, Tool, one_or_all, wait_for_event};

/// Most round trips of one session, on either server, in a run that has nothing to apply. Without those
/// of TCP, and with two to spare for what depends on time: status messages, statistics.
const MOST: u64 = 22;

/// Most round trips one after the other, of all sessions together, until changes can be applied.
/// Without those of TCP.
const MOST_IN_A_ROW: f64 = 12.0;

/// No start needs so few: less was not measured.
const FEWEST_IN_A_ROW: f64 = 6.0;

/// A proxy in front of each server.
fn proxies(site: &Site) -> Result<[Proxy; 2]> {
    Ok([Proxy::in_front_of(&site.publisher)?, Proxy::in_front_of(&site.subscriber)?])
}

#[test]
fn a_start_needs_few_round_trips() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        let start = || -> Result<[Vec<u64>; 2]> {
            let [publisher, subscriber] = proxies(&site)?;
            Tool::new(publisher.conninfo(DB), subscriber.conninfo(DB), NAME).run_until_current();
            Ok([publisher.round_trips(), subscriber.round_trips()])
        };
        start()?;
        let counts = start()?;
        let most = counts.iter().flatten().max().copied().unwrap_or(0);
        assert!((1..=MOST).contains(&most), "round trips of each session on {major}: {counts:?}");
        in_a_row(&site)?;
    }
    Ok(())
}

/// Bounds the round trips one after the other: how much longer a start takes if each takes longer.
fn in_a_row(site: &Site) -> Result<()> {
    const DELAYS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(150)];
    let start = |one_way: Duration| -> Result<Duration> {
        let [publisher, subscriber] = proxies(site)?;
        publisher.set_delay(one_way);
        subscriber.set_delay(one_way);
        let program = site.program_between(&publisher.conninfo(DB), &subscriber.conninfo(DB));
        let started = Instant::now();
        let mut run = site.spawn(&program)?;
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        let taken = started.elapsed();
        // The next start must not wait for sessions of this one.
        run.terminate()?;
        run.wait(PATIENCE)?;
        Ok(taken)
    };
    // A processor that others use too makes a start longer, never shorter. A long start nearby makes the
    // difference too small.
    let mut near = start(DELAYS[0])?;
    let mut tried = Vec::new();
    for _ in 0..12 {
        let longer = start(DELAYS[1])?.saturating_sub(near).as_secs_f64();
        let round_trips = longer / (2.0 * (DELAYS[1] - DELAYS[0]).as_secs_f64());
        println!("{round_trips:.2} round trips in a row");
        if round_trips <= FEWEST_IN_A_ROW {
            near = near.min(start(DELAYS[0])?);
        } else if round_trips < MOST_IN_A_ROW + 0.5 {
            return Ok(());
        }
        tried.push(round_trips);
    }
    panic!("round trips in a row: {tried:.2?}");
}

/// A commit on the publisher that waits for the subscriber waits for one answer of a distant subscriber: the
/// apply session commits synchronously, and no second commit follows that makes the first one durable.
#[test]
fn a_publisher_that_waits_is_answered_after_one_round_trip() -> Result<()> {
    const DELAYS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        site.tool().run_until_current();
        site.publisher.sql(DB, "ALTER SYSTEM SET synchronous_standby_names = 'sub'")?;
        site.publisher.sql(DB, "SELECT pg_reload_conf()")?;
        let mut number = 0;
        let mut commit = |one_way: Duration| -> Result<Duration> {
            let subscriber = Proxy::in_front_of(&site.subscriber)?;
            subscriber.set_delay(one_way);
            let publisher = site.publisher.conninfo(DB);
            let mut run =
                site.spawn_streaming(&site.program_between(&publisher, &subscriber.conninfo(DB)))?;
            let mut writer = site.publisher.connect(DB)?;
            let mut shortest = Duration::MAX;
            // A processor that others use too makes a commit longer, never shorter.
            for _ in 0..12 {
                number += 1;
                let started = Instant::now();
                writer.batch_execute(&format!("INSERT INTO t VALUES ({number}, '')"))?;
                shortest = shortest.min(started.elapsed());
            }
            run.terminate()?;
            run.wait(PATIENCE)?;
            Ok(shortest)
        };
        let near = commit(DELAYS[0])?;
        let mut round_trips = || -> Result<f64> {
            let longer = commit(DELAYS[1])?.saturating_sub(near).as_secs_f64();
            Ok(longer / (2.0 * (DELAYS[1] - DELAYS[0]).as_secs_f64()))
        };
        // A flush that a busy processor delays does not count as quick in this run.
        let mut tried = Vec::new();
        while tried.last().is_none_or(|last| *last >= 1.5) {
            assert!(tried.len() < 8, "round trips of a commit on {major}: {tried:.2?}");
            tried.push(round_trips()?);
        }
        assert!(tried.last().is_some_and(|last| *last > 0.5), "{tried:.2?}");
    }
    Ok(())
}
