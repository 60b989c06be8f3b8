//! Interrupted copies: copied tables stay, the others are copied again, and every change is applied
//! exactly once.

use std::collections::HashMap;
use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Result, Stop};

use crate::support::{
    DB, Load, PATIENCE, Site, expect_exit, random_pause, wait_for_event, wait_while_running,
};

const TABLES: u32 = 30;

/// Many tables of a few megabytes, one of them larger, with a load on other tables.
fn copy_site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let mut publisher = site.publisher.connect(DB)?;
    let mut subscriber = site.subscriber.connect(DB)?;
    for number in 0..TABLES {
        let create =
            format!("CREATE TABLE c{number} (id int PRIMARY KEY, v text, n int DEFAULT 0)");
        subscriber.batch_execute(&create)?;
        let rows = if number == 0 { 150_000 } else { 15_000 };
        publisher.batch_execute(&format!(
            "{create}; INSERT INTO c{number} SELECT i, md5(i::text) FROM generate_series(1, {rows}) i; \
             ALTER PUBLICATION pub ADD TABLE c{number}"
        ))?;
    }
    Ok(site)
}

fn copied(site: &Site) -> Result<HashMap<String, String>> {
    let mut subscriber = site.subscriber.connect(DB)?;
    let there = subscriber.query_one("SELECT to_regclass('pgapace.relation') IS NOT NULL", &[])?;
    if !there.get::<_, bool>(0) {
        return Ok(HashMap::new());
    }
    let sql = "SELECT table_name, sync_lsn || ' ' || copied_at FROM pgapace.relation \
               WHERE sync_lsn IS NOT NULL";
    Ok(subscriber.query(sql, &[])?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Changes rows of the tables that are being copied, until it is dropped.
struct Changes {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Changes {
    fn start(site: &Site) -> Result<Self> {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let mut client = site.publisher.connect(DB)?;
        let thread = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(3);
            let mut done = 0;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let table = random.u32(0..TABLES);
                let row = random.u32(1..15_000);
                // An update that moves rows, an insert, and a delete.
                let sql = format!(
                    "UPDATE c{table} SET n = n + 1 WHERE id BETWEEN {row} AND {row} + 20; \
                     INSERT INTO c{table} VALUES (1000000 + {done}, 'new', 1); \
                     DELETE FROM c{table} WHERE id = {row} + 30"
                );
                if client.batch_execute(&sql).is_err() {
                    break;
                }
                done += 1;
            }
            done
        });
        Ok(Self { stop, thread: Some(thread) })
    }

    fn stop(mut self) -> u64 {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or(0)
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

fn wait_until_more_are_copied(site: &Site, run: &mut Process, than: usize) -> Result<()> {
    wait_while_running(run, "tables to be copied", PATIENCE, || Ok(copied(site)?.len() > than))
}

#[test]
fn kill_9_during_the_copy_repeats_only_incomplete_tables() -> Result<()> {
    let site = copy_site()?;
    let load = Load::start(&site.publisher, 50.0)?;
    let changes = Changes::start(&site)?;
    let program = site.program().args(["--copy-split-size", "1", "--copy-workers", "2"]);
    let mut random = fastrand::Rng::with_seed(5);
    let mut before = HashMap::new();
    let mut interrupted = 0;
    for _ in 0..6 {
        let mut run = site.spawn(&program)?;
        // Each attempt copies more tables, until all are copied.
        if wait_until_more_are_copied(&site, &mut run, before.len()).is_err() {
            break;
        }
        random_pause(&mut random, 0..60);
        run.kill9()?;
        interrupted += u32::from(run.events("streaming") == 0);
        let now = copied(&site)?;
        for (table, state) in &before {
            assert_eq!(now.get(table), Some(state), "{table} was copied again");
        }
        before = now;
    }
    assert!(interrupted >= 2, "only {interrupted} attempts ended in the middle");
    let mut run = site.spawn(&program)?;
    wait_for_event(&mut run, "streaming", PATIENCE)?;
    let now = copied(&site)?;
    for (table, state) in &before {
        assert_eq!(now.get(table), Some(state), "{table} was copied again");
    }
    let sync_lsns: std::collections::HashSet<_> =
        now.values().filter_map(|state| state.split(' ').next()).collect();
    assert!(sync_lsns.len() >= 2, "all tables were copied under one snapshot: {sync_lsns:?}");
    assert!(changes.stop() > 50, "too few changes meanwhile");
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    let tables: Vec<_> =
        (0..TABLES).map(|number| TableName::from(format!("c{number}").as_str())).collect();
    site.expect_equal(&tables)?;
    site.expect_equal_load()?;
    let slots = "SELECT string_agg(slot_name, ' ') FROM pg_replication_slots";
    assert_eq!(site.publisher.query_one_text(DB, slots)?, "sub");
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}

/// pgapace waits for the restart of either server and does not copy tables again.
#[test]
fn restarts_of_either_server_during_the_copy_are_waited_for() -> Result<()> {
    let mut site = copy_site()?;
    // The servers keep their ports.
    let program = site.program().args(["--copy-split-size", "1", "--copy-workers", "2"]);
    let mut run = site.spawn(&program)?;
    wait_until_more_are_copied(&site, &mut run, 2)?;
    site.publisher.restart(Stop::Fast)?;
    let before = copied(&site)?;
    wait_until_more_are_copied(&site, &mut run, before.len())?;
    site.subscriber.restart(Stop::Immediate)?;
    wait_for_event(&mut run, "streaming", PATIENCE)?;
    site.publisher.sql(DB, "UPDATE c1 SET n = 7; DELETE FROM c2 WHERE id < 100")?;
    site.wait_until_applied(&mut run)?;
    let tables: Vec<_> =
        (0..TABLES).map(|number| TableName::from(format!("c{number}").as_str())).collect();
    site.expect_equal(&tables)
}
