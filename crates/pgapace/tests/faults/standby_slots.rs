//! A standby for which the publisher waits is away (`synchronized_standby_slots`): a slot with failover gets nothing.

use std::time::Duration;

use testbed::{Cluster, Result};

use super::failover::site;
use crate::support::{DB, PATIENCE, expect_exit, holds_for, wait_for_log, wait_while_running};

/// Figures of an idle subscription are written once a minute. This one is not idle.
const SOON: Duration = Duration::from_secs(45);

/// Nothing is ever received in this run, and `status` knows the lag long before a minute is over. With the standby's slot
/// out of the way, WAL without changes for the subscription is no lag.
#[test]
fn a_lag_of_which_nothing_arrives_is_known_soon() -> Result<()> {
    let mut site = site()?;
    site.publisher.sql(DB, "DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE t")?;
    let tool = site.tool();
    tool.run_until_current();
    // Its commit time tells how old is what follows.
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'v')")?;
    tool.run_until_current();
    let named = "synchronized_standby_slots names standby, which its standby does not use";
    assert!(!tool.finish("check", &[]).stdout.contains("synchronized_standby_slots"));
    site.publisher.sql(DB, "SELECT pg_create_physical_replication_slot('standby', true)")?;
    site.publisher.set("synchronized_standby_slots", "standby")?;
    let checked = tool.finish("check", &[]).stdout;
    assert!(checked.contains(named), "{checked}");

    let mut run = site.spawn_streaming(&site.program())?;
    let behind = ["--check", "--max-lag", "5s"];
    let write = |publisher: &Cluster| publisher.sql(DB, "INSERT INTO log VALUES (1)");
    wait_while_running(&mut run, "the lag", SOON, || {
        write(&site.publisher)?;
        Ok(tool.finish("status", &behind).code == Some(14))
    })?;
    wait_for_log(
        &mut run,
        "HINT:  Start the standby associated with the replication slot",
        PATIENCE,
    )?;

    site.publisher.set("synchronized_standby_slots", "")?;
    wait_while_running(&mut run, "the lag to end", PATIENCE, || {
        write(&site.publisher)?;
        Ok(tool.finish("status", &behind).code == Some(0))
    })?;
    holds_for(Duration::from_secs(8), "without a lag", || {
        write(&site.publisher)?;
        Ok(tool.finish("status", &behind).code == Some(0))
    })?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}
