//! Transactions and values that are larger than the memory limit.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::memory;
use crate::support::{DB, PATIENCE, Site, wait_while_running};

const LIMIT_MB: u64 = 16;
const VALUE_MB: u64 = 60;
/// Memory that the program uses in addition to its limit, for stacks, buffers and prepared statements.
const FIXED_MB: u64 = 16;
/// At one moment a value exists twice: as it was received, and in the message that is sent.
const COPIES: u64 = 2;

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables(
        "CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE log (v int); \
         CREATE TABLE value (id int PRIMARY KEY, v text)",
    )?;
    Ok(site)
}

/// 300 MB in one transaction: many small rows first, then wide ones, then updates of both.
const TRANSACTION: &str = "BEGIN; INSERT INTO log VALUES (1); \
    INSERT INTO big SELECT i, 'small ' || i FROM generate_series(1, 30000) i; \
    INSERT INTO big SELECT i, repeat(md5(i::text), 3200) FROM generate_series(30001, 32700) i; \
    UPDATE big SET v = v || 'x' WHERE id % 100 = 0; COMMIT";

fn tables() -> [TableName; 3] {
    ["big", "log", "value"].map(TableName::from)
}

#[test]
fn memory_is_bounded_by_the_limit_not_by_the_transaction() -> Result<()> {
    let site = site()?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, TRANSACTION)?;
    site.wait_until_applied(&mut run)?;
    let peak = memory::peak(&run)?;
    eprintln!("peak after a transaction of 300 MB: {peak} MB");
    assert!(peak <= LIMIT_MB + FIXED_MB, "{peak} MB");
    site.expect_equal(&tables())?;

    let units = VALUE_MB * 65536;
    let value = format!("INSERT INTO value VALUES (1, repeat('0123456789abcdef', {units}))");
    site.publisher.sql(DB, &value)?;
    site.wait_until_applied(&mut run)?;
    let peak = memory::peak(&run)?;
    eprintln!("peak after a value of {VALUE_MB} MB: {peak} MB");
    assert!(peak <= LIMIT_MB + COPIES * VALUE_MB + FIXED_MB, "{peak} MB");

    // Several wide values of one transaction are not in memory at the same time.
    let values = format!(
        "INSERT INTO value SELECT i, repeat('0123456789abcdef', {units} / 2) \
         FROM generate_series(2, 4) i"
    );
    site.publisher.sql(DB, &values)?;
    site.wait_until_applied(&mut run)?;
    let peak = memory::peak(&run)?;
    eprintln!("peak after 3 values of half the size: {peak} MB");
    assert!(peak <= LIMIT_MB + COPIES * VALUE_MB + FIXED_MB, "{peak} MB");
    site.expect_equal(&tables())
}

#[test]
fn a_kill_inside_a_large_transaction_rolls_it_back() -> Result<()> {
    let site = site()?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, TRANSACTION)?;
    let mut inside = 0;
    for pages in [10, 100] {
        let size = "SELECT pg_relation_size('big') / 8192";
        wait_while_running(&mut run, "the transaction to be under way", PATIENCE, || {
            let now: i64 = site.subscriber.query_one_text(DB, size)?.parse().unwrap_or(0);
            Ok(now > pages)
        })?;
        run.kill9()?;
        inside += u32::from(site.subscriber.query_one_text(DB, "SELECT count(*) FROM log")? == "0");
        run = site.spawn_streaming(&program)?;
    }
    assert!(inside > 0, "the transaction had ended each time: the test has no effect");
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&tables())
}
