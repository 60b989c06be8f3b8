//! Repairs while changes go on.

use std::time::Instant;

use testbed::Result;
use testbed::cluster::Stop;
use testbed::program::Process;

use super::{RATE, VERSIONS};
use crate::support::{DB, Load, PATIENCE, Site, long, one_or_all, random_pause};

/// Everything under load: no false difference, and repairs of rows that nobody changes meanwhile. In the long
/// form the servers crash, too.
fn under_load(publisher: u16, subscriber: u16, rounds: usize) -> Result<()> {
    let mut site = Site::new(publisher, subscriber)?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let mut run = site.spawn_streaming(&site.program())?;
    let mut random = fastrand::Rng::with_seed(19);
    let (begun, mut interrupted) = (Instant::now(), 0);
    for round in 0..rounds {
        if round % 3 == 2 {
            run.kill9()?;
            run = site.spawn(&site.program())?;
        }
        let crashes = long() && round % 5 == 4;
        if crashes {
            let server = if round % 2 == 0 { &mut site.publisher } else { &mut site.subscriber };
            server.restart(Stop::Immediate)?;
        }
        random_pause(&mut random, 0..300);
        let deadline = Instant::now() + 2 * PATIENCE;
        loop {
            let verified = site.tool().finish("verify", &[]);
            // After a crash the verb may come before the server or the process is ready.
            let again = crashes && [Some(4), Some(5), Some(8)].contains(&verified.code);
            if !again || Instant::now() > deadline {
                let logs = || format!("{}\n{}", verified.log, run.log());
                assert_eq!(verified.code, Some(0), "round {round}\n{}", logs());
                break;
            }
            interrupted += 1;
        }
        assert!(run.is_running(), "round {round}\n{}", run.log());
    }
    for _ in 0..2 {
        let corrupt = "UPDATE pgbench_accounts SET filler = 'wrong' WHERE aid % 10000 = 1; \
             DELETE FROM pgbench_history WHERE ctid IN (SELECT ctid FROM pgbench_history LIMIT 3); \
             INSERT INTO pgbench_history VALUES (1, 1, 1, 0, NULL, 'extra')";
        site.subscriber.sql(DB, corrupt)?;
        let tool = site.tool();
        tool.finish("verify", &[]).expect(18, &[]);
        tool.finish("repair", &["--delete-extra", "--batch", "4"]).expect(0, &[]);
        tool.finish("verify", &[]).expect(0, &[]);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let count = "SELECT count(*) FROM pgbench_history";
    let transactions: f64 = site.publisher.query_one_text(DB, count)?.parse().unwrap_or_default();
    let ledger = load.stop()?;
    eprintln!(
        "{publisher} to {subscriber}: {rounds} verifications, {interrupted} interrupted, and two repairs in {seconds:.0} s, \
         {:.0} transactions a second of TPC-B and {:.0} of the ledger",
        transactions / seconds,
        ledger as f64 / seconds,
    );
    catch_up_and_compare(&site, &mut run)
}

fn catch_up_and_compare(site: &Site, run: &mut Process) -> Result<()> {
    site.wait_until_applied(run)?;
    site.expect_equal_load()
}

#[test]
fn nothing_differs_and_repairs_last() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&VERSIONS[..2]) {
        under_load(publisher, subscriber, if long() { 50 } else { 3 })?;
    }
    Ok(())
}

/// Each of these takes up to half an hour.
fn under_load_between(publisher: u16, subscriber: u16) -> Result<()> {
    if long() { under_load(publisher, subscriber, 50) } else { Ok(()) }
}

#[test]
fn from_15_to_18() -> Result<()> {
    under_load_between(15, 18)
}

#[test]
fn from_18_to_15() -> Result<()> {
    under_load_between(18, 15)
}

/// A repair that is killed leaves whole batches, and the stream goes on.
#[test]
fn a_killed_repair_leaves_whole_batches() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    site.subscriber.sql(DB, "UPDATE pgbench_accounts SET filler = 'wrong' WHERE aid <= 2000")?;
    site.tool().finish("verify", &[]).expect(18, &[]);
    let load = Load::start(&site.publisher, RATE)?;
    let repair = site.tool().program("repair").args(["--batch", "100"]);
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..if long() { 30 } else { 6 } {
        let mut process = site.spawn(&repair)?;
        random_pause(&mut random, 100..900);
        process.kill9()?;
        let count = |sql: &str| site.subscriber.query_one_text(DB, sql);
        // The load may repair rows too: an UPDATE brings all columns.
        let sql = "SELECT count(*) FROM pgbench_accounts a WHERE filler = 'wrong' AND NOT EXISTS \
                     (SELECT FROM pgapace.difference d WHERE d.key ->> 'aid' = a.aid::text)";
        assert_eq!(count(sql)?, "0", "differences and rows change together");
    }
    site.tool().finish("repair", &[]).expect(0, &[]);
    load.stop()?;
    catch_up_and_compare(&site, &mut run)
}
