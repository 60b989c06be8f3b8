//! The network on a bad day, on either side.

use std::thread::sleep;
use std::time::Duration;

use testbed::compare::TableName;
use testbed::{Proxy, Result};

use super::site::{DB, Load, Reader, Site, long};

#[test]
fn cuts_refusals_and_silence_on_either_side() -> Result<()> {
    let site = Site::start(&[("wal_sender_timeout", "3s")], &[])?;
    site.load_tables()?;
    let publisher = Proxy::in_front_of(&site.publisher)?;
    let target = Proxy::in_front_of(&site.target)?;
    let program = site
        .program_between(&publisher.conninfo(DB), &target.conninfo(DB))
        .args(["--receive-timeout", "2"]);
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.target);
    let load = Load::start(&site.publisher, 100.0)?;
    let mut random = fastrand::Rng::with_seed(8);
    for round in 0..if long() { 40 } else { 4 } {
        for proxy in [&publisher, &target] {
            sleep(Duration::from_millis(random.u64(50..300)));
            proxy.cut_all();
            sleep(Duration::from_millis(random.u64(50..300)));
            proxy.refuse(true);
            proxy.cut_all();
            sleep(Duration::from_millis(random.u64(100..800)));
            proxy.refuse(false);
            assert!(run.is_running(), "round {round}:\n{}", run.log());
        }
        site.catch_up(&mut run)?;
    }
    for proxies in [&[&publisher][..], &[&target], &[&publisher, &target]] {
        for proxy in proxies {
            proxy.freeze();
        }
        sleep(Duration::from_secs(4));
        for proxy in proxies {
            proxy.unfreeze();
        }
        site.catch_up(&mut run)?;
    }
    assert!(run.log().contains("the publisher has been silent for 2 s"), "{}", run.log());
    load.stop()?;
    site.catch_up(&mut run)?;
    assert!(reader.stop()? >= 10);
    site.expect_equal_load()
}

/// The network drops our packets, so the servers keep our old sessions: the next attempt, by
/// another way, must not take them for somebody else.
#[test]
fn a_half_open_connection_does_not_lock_us_out() -> Result<()> {
    let site = Site::start(&[("wal_sender_timeout", "3s")], &[])?;
    site.tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let publisher = [Proxy::in_front_of(&site.publisher)?, Proxy::in_front_of(&site.publisher)?];
    let target = [Proxy::in_front_of(&site.target)?, Proxy::in_front_of(&site.target)?];
    let through = |proxies: &[Proxy; 2]| {
        let [first, second] = proxies.each_ref().map(|proxy| proxy.addr().port());
        format!(
            "host=127.0.0.1,127.0.0.1 port={first},{second} user=postgres dbname={DB} \
             connect_timeout=2"
        )
    };
    let program = site.program_between(&through(&publisher), &through(&target)).args([
        "--receive-timeout",
        "2",
        "--busy-timeout",
        "10",
    ]);
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.catch_up(&mut run)?;
    publisher[0].freeze();
    target[0].freeze();
    site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
    site.catch_up(&mut run)?;
    site.expect_equal(&[TableName::from("t")])?;
    let owners =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace sub control'";
    assert_eq!(site.target.query_one_text(DB, owners)?, "1");
    Ok(())
}
