//! Processes that die or hang while the subscription passes from one to another.

use std::time::{Duration, Instant};

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Result, wait_until};

use super::{BOUND, first_commit, pair_of_processes, wait_for, within};
use crate::support::{DB, NAME, PATIENCE, Site, finish, pgapace};

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    Ok(site)
}

/// Two standbys race for a subscription whose owner hangs. The faster one dies in the middle.
#[test]
fn a_takeover_that_dies_half_way_is_taken_over() -> Result<()> {
    let site = site()?;
    let (mut first, second) = pair_of_processes(&site)?;
    let mut third = site.spawn(&site.program().arg("--standby"))?;
    wait_for(&mut third, "standby_waiting")?;
    first.freeze()?;
    let mut standbys = [second, third];
    let takes_over = |one: &Process| one.events("standby_takes_over") > 0;
    wait_until(PATIENCE, "a takeover", || Ok(standbys.iter().any(takes_over)))?;
    let faster = standbys.iter().position(takes_over).unwrap_or_default();
    standbys[faster].kill9()?;
    within("a second death to commit", first_commit(&site, 1)?, BOUND)?;
    first.thaw()?;
    wait_for(&mut first, "standby_waiting")?;
    standbys[1 - faster].terminate()?;
    standbys[1 - faster].wait(PATIENCE)?;
    within("SIGTERM to commit", first_commit(&site, 2)?, BOUND)?;
    site.expect_equal(&[TableName::from("log")])
}

/// The only standby hangs when it is to have the subscription: the process that gave it up takes it again.
#[test]
fn a_hand_over_to_a_standby_that_hangs_is_taken_back() -> Result<()> {
    let site = site()?;
    let (mut first, mut second) = pair_of_processes(&site)?;
    second.freeze()?;
    let subscriber = site.subscriber.conninfo(DB);
    finish(&pgapace("hand-over").args(["--subscriber", &subscriber, "--name", NAME]))
        .expect(0, &[]);
    within("hand-over to commit", first_commit(&site, 1)?, BOUND)?;
    assert_eq!(first.events("streaming"), 2, "{}", first.log());
    second.thaw()?;
    // It has not seen the first process without the subscription, or was too late.
    first_commit(&site, 2)?;
    for process in [&mut first, &mut second] {
        assert!(process.is_running(), "{}", process.log());
    }
    site.expect_equal(&[TableName::from("log")])
}

/// The sessions of the new owner hold the replication origins. The old one does not wait for them: it would be of no use
/// for ten seconds, and the new one may die meanwhile.
#[test]
fn a_process_that_lost_its_subscription_waits_again_at_once() -> Result<()> {
    let site = Site::start(&[], &[("wal_level", "logical")])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    let (mut first, _second) = pair_of_processes(&site)?;
    first_commit(&site, 1)?;
    let origins = "SELECT count(*) FROM pg_replication_origin_status";
    assert_ne!(site.subscriber.query_one_text(DB, origins)?, "0", "commits are not tagged");
    first.freeze()?;
    first_commit(&site, 2)?;
    first.thaw()?;
    let thawed = Instant::now();
    wait_for(&mut first, "standby_waiting")?;
    // Before the ten seconds are over, and much more than it needs.
    within("SIGCONT to wait", thawed.elapsed(), Duration::from_secs(10))
}

/// After takeovers from processes that applied nothing, the next one has more time, until it has applied something.
#[test]
fn an_owner_that_applies_has_no_more_time_than_another() -> Result<()> {
    let site = site()?;
    let (_first, _second) = pair_of_processes(&site)?;
    let stalls = || site.subscriber.query_one_text(DB, "SELECT stalls FROM pgapace.owner");
    site.subscriber.sql(DB, "UPDATE pgapace.owner SET stalls = 2")?;
    first_commit(&site, 1)?;
    wait_until(PATIENCE, "no more patience", || Ok(stalls()? == "0"))
}

/// One that streamed for long without any change to apply has shown that a start takes no long time.
#[test]
fn an_idle_owner_that_hangs_makes_its_heirs_no_more_patient() -> Result<()> {
    let site = site()?;
    let (mut first, mut second) = pair_of_processes(&site)?;
    let owner = |column: &str| {
        site.subscriber.query_one_text(DB, &format!("SELECT {column} FROM pgapace.owner"))
    };
    // As after half a minute.
    site.subscriber.sql(DB, "UPDATE pgapace.owner SET beat = beat + 30")?;
    let epoch = owner("epoch")?;
    first.freeze()?;
    // As if it had applied nothing: the row is that of the first start.
    site.subscriber.sql(DB, "UPDATE pgapace.progress SET epoch = 0")?;
    wait_for(&mut second, "standby_takes_over")?;
    wait_until(PATIENCE, "the next owner", || Ok(owner("epoch")? != epoch))?;
    assert_eq!(owner("stalls")?, "0");
    first.thaw()?;
    wait_for(&mut first, "standby_waiting")
}
