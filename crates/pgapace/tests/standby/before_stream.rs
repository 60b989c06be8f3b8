//! A process that does not stream yet: if it is suspended, it is replaced; however long it works, it is not.

use std::time::Duration;

use testbed::compare::TableName;
use testbed::postgres::{Client, NoTls};
use testbed::program::Process;
use testbed::{Cluster, Program, Result, wait_until};

use super::{first_commit, wait_for};
use crate::support::{DB, PATIENCE, Site, holds_for};

/// The shortest time that can be set: a setup may be silent three times as long, a start for five seconds.
const TAKEOVER: &str = "4";
/// Longer than that.
const LONG: Duration = Duration::from_secs(10);

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    site.publisher.sql(DB, "INSERT INTO log SELECT -i FROM generate_series(1, 1000) i")?;
    Ok(site)
}

fn program(site: &Site) -> Program {
    site.program().args(["--standby", "--takeover-timeout", TAKEOVER])
}

fn stage(site: &Site) -> String {
    let stage = site.subscriber.query_one_text(DB, "SELECT stage FROM pgapace.owner");
    stage.unwrap_or_default()
}

/// Starts two processes; the first one stays in `at`.
fn two_processes(site: &Site, at: &str) -> Result<(Process, Process)> {
    let first = site.spawn(&program(site))?;
    wait_until(PATIENCE, at, || Ok(stage(site) == at))?;
    let mut second = site.spawn(&program(site))?;
    wait_for(&mut second, "standby_waiting")?;
    Ok((first, second))
}

fn session(cluster: &Cluster) -> Result<Client> {
    Ok(Client::connect(&cluster.conninfo(DB), NoTls)?)
}

/// The standby has the subscription, and the first process waits once it goes on.
fn expect_takeover(site: &Site, first: &mut Process, second: &mut Process) -> Result<()> {
    wait_for(second, "streaming")?;
    first.thaw()?;
    wait_for(first, "standby_waiting")?;
    first_commit(site, 1)?;
    assert_eq!(second.events("standby_takes_over"), 1, "{}", second.log());
    site.expect_equal(&[TableName::from("log")])
}

/// While `blocked`, an open transaction, keeps the first process in `at`: it is not replaced, until it is suspended.
fn is_replaced_only_if_suspended(site: &Site, at: &str, mut blocked: Client) -> Result<()> {
    let (mut first, mut second) = two_processes(site, at)?;
    holds_for(LONG, "left to the first process", || Ok(second.events("standby_takes_over") == 0))?;
    first.freeze()?;
    wait_for(&mut second, "standby_takes_over")?;
    blocked.batch_execute("COMMIT")?;
    expect_takeover(site, &mut first, &mut second)
}

#[test]
fn a_setup_that_is_suspended_is_replaced_and_one_that_waits_is_not() -> Result<()> {
    let site = site()?;
    // No slot is created before this transaction ends.
    let mut open = session(&site.publisher)?;
    open.batch_execute("BEGIN; SELECT pg_current_xact_id()")?;
    is_replaced_only_if_suspended(&site, "setup", open)
}

#[test]
fn a_copy_that_is_suspended_is_replaced_and_one_that_takes_long_is_not() -> Result<()> {
    let site = site()?;
    let mut locks = session(&site.subscriber)?;
    locks.batch_execute("BEGIN; LOCK TABLE log IN SHARE ROW EXCLUSIVE MODE")?;
    is_replaced_only_if_suspended(&site, "copying", locks)
}

#[test]
fn a_start_that_is_suspended_is_replaced_and_one_that_waits_is_not() -> Result<()> {
    let site = site()?;
    let mut before = site.spawn_streaming(&program(&site))?;
    first_commit(&site, 0)?;
    before.terminate()?;
    before.wait(PATIENCE)?;
    // A start reads it to find where the stream resumes.
    let mut locks = session(&site.subscriber)?;
    locks.batch_execute("BEGIN; LOCK TABLE pgapace.prepared")?;
    is_replaced_only_if_suspended(&site, "starting", locks)
}
