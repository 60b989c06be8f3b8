//! Peak memory with a limit of 64 MB. The tests take several minutes on a slow machine and run only
//! with `PGAPACE_TEST_LONG=1`.

use testbed::Result;
use testbed::compare::TableName;
use testbed::postgres::Client;

use crate::support::memory::peak;
use crate::support::{DB, Site, long};

/// The memory limit; all sizes are in megabytes.
const LIMIT: u64 = 64;
/// Memory in addition to the limit: see `faults/large.rs`.
const FIXED: u64 = 28;

const MODES: [&str; 3] = ["parallel", "on", "off"];

fn site() -> Result<Site> {
    let settings = [("logical_decoding_work_mem", "64kB"), ("max_connections", "260")];
    let site = Site::start(&settings, &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    Ok(site)
}

/// Inserts `count` rows of 1 kB each.
fn rows(from: u64, count: u64) -> String {
    format!(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 32) \
         FROM generate_series({from}, {from} + {count} - 1) i"
    )
}

/// Runs `load` in each mode. Peak memory stays below the limit plus `additional`.
fn stays_below(additional: u64, load: impl Fn(&Site, u64) -> Result<()>) -> Result<()> {
    if !long() {
        return Ok(());
    }
    let site = site()?;
    for (round, mode) in (0..).zip(MODES) {
        let program = site.program().args(["--memory-limit", "64", "--streaming", mode]);
        let mut run = site.spawn_streaming(&program)?;
        load(&site, round)?;
        site.wait_until_applied(&mut run)?;
        let peak = peak(&run)?;
        eprintln!("streaming {mode}: peak {peak} MB");
        assert!(peak <= LIMIT + FIXED + additional, "streaming {mode}: {peak} MB");
        run.kill9()?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

#[test]
fn memory_is_bounded_for_one_transaction_of_600_mb() -> Result<()> {
    stays_below(0, |site, round| site.publisher.sql(DB, &rows(round * 1_000_000, 600_000)))
}

#[test]
fn memory_is_bounded_for_200_interleaved_transactions() -> Result<()> {
    stays_below(0, |site, round| {
        let mut sessions: Vec<Client> =
            (0..200).map(|_| site.publisher.connect(DB)).collect::<Result<_>>()?;
        for session in &mut sessions {
            session.batch_execute("BEGIN")?;
        }
        for block in 0..3 {
            for (number, session) in (0..).zip(&mut sessions) {
                let from = round * 10_000_000 + number * 10_000 + block * 1000;
                session.batch_execute(&rows(from, 1000))?;
            }
        }
        for session in &mut sessions {
            session.batch_execute("COMMIT")?;
        }
        Ok(())
    })
}

/// At one moment a value exists twice: as it was received or read, and as it is spooled or sent.
#[test]
fn memory_is_bounded_for_a_value_of_100_mb() -> Result<()> {
    const VALUE: u64 = 100;
    stays_below(2 * VALUE, |site, round| {
        let value = format!("repeat(md5('{round}'), {})", VALUE << 15);
        site.publisher.sql(DB, &format!("INSERT INTO t VALUES (-1 - {round}, {value})"))
    })
}
