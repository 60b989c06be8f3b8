//! Processes on machines of their own, which lose their network or their power.

use testbed::compare::TableName;
use testbed::network::Network;
use testbed::program::Process;
use testbed::{Result, wait_until};

use super::{BOUND, first_commit, wait_for, within};
use crate::support::{DB, PATIENCE, Site, skipped};

/// A site whose servers are reached over a network, and a process with `--standby` on each of two
/// machines. The first streams.
fn start(network: &Network) -> Result<(Site, [Process; 2])> {
    let site = Site::over(network)?;
    site.publish_tables("CREATE TABLE log (v int)")?;
    let at = |cluster: &testbed::Cluster| cluster.conninfo_at(&network.server_address(), DB);
    let program =
        site.program_between(&at(&site.publisher), &at(&site.subscriber)).arg("--standby");
    let first = site.spawn_streaming(&network.on(0, &program))?;
    let mut second = site.spawn(&network.on(1, &program))?;
    wait_for(&mut second, "standby_waiting")?;
    Ok((site, [first, second]))
}

#[test]
fn a_machine_that_loses_power_or_network_is_replaced() -> Result<()> {
    let Some(network) = Network::create(2)? else {
        skipped("a_machine_that_loses_power_or_network_is_replaced", "it needs root and ip netns");
        return Ok(());
    };
    let (site, [mut first, mut second]) = start(&network)?;
    // Its connections to both servers stay open: they hear nothing of it.
    network.unplug(0)?;
    first.kill9()?;
    within("power loss to commit", first_commit(&site, 1)?, BOUND)?;
    // Nothing of it is left on the servers.
    let left = |sql: &str, cluster: &testbed::Cluster| cluster.query_one_text(DB, sql);
    let walsenders = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'sub'";
    wait_until(PATIENCE, "the old walsender to end", || {
        Ok(left(walsenders, &site.publisher)? == "1")
    })?;
    let owners = "SELECT count(*) FROM pg_stat_activity \
                  WHERE application_name IN ('pgapace sub control', 'pgapace sub durability')";
    wait_until(PATIENCE, "old sessions to end", || Ok(left(owners, &site.subscriber)? == "2"))?;

    network.plug(0)?;
    let at = |cluster: &testbed::Cluster| cluster.conninfo_at(&network.server_address(), DB);
    let program =
        site.program_between(&at(&site.publisher), &at(&site.subscriber)).arg("--standby");
    let mut third = site.spawn(&network.on(0, &program))?;
    wait_for(&mut third, "standby_waiting")?;
    // Cut off, it goes on living, and comes back.
    network.unplug(1)?;
    within("network loss to commit", first_commit(&site, 2)?, BOUND)?;
    network.plug(1)?;
    wait_until(PATIENCE, "the second process to wait again", || {
        assert!(second.is_running(), "{}", second.log());
        Ok(second.events("standby_waiting") == 2)
    })?;
    first_commit(&site, 3)?;
    site.expect_equal(&[TableName::from("log")])
}
