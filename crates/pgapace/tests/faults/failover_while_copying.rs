//! Promotion of a standby of the publisher while the first tables are copied.

use testbed::{Result, Stop};

use super::failover::{both_hosts, promote, site, standby, wait_for_rows, wait_until_synchronised};
use crate::support::{DB, PATIENCE, expect_exit, wait_while_running};

/// The tables that are left are copied from the promoted server. The server that was left behind, which lacks them, is
/// refused from then on.
#[test]
fn the_copy_goes_on_with_a_standby_that_has_everything() -> Result<()> {
    let mut site = site()?;
    // Small tables would be copied in one transaction.
    let rows = "INSERT INTO t SELECT i, repeat('old', 100) FROM generate_series(1, 20000) i; INSERT INTO log VALUES (1)";
    site.publisher.sql(DB, rows)?;
    let standby = standby(&mut site, "sync_replication_slots = on")?;
    let hosts = both_hosts(&site, &standby) + " target_session_attrs=read-write";
    let program = site.program_between(&hosts, &site.subscriber.conninfo(DB));
    let mut blocker = site.subscriber.connect(DB)?;
    blocker.batch_execute("BEGIN; LOCK TABLE t IN SHARE ROW EXCLUSIVE MODE")?;
    let mut run = site.spawn(&program)?;
    wait_for_rows(&site, &mut run, 1)?;
    wait_until_synchronised(&standby, "failover")?;
    site.publisher.stop(Stop::Immediate)?;
    promote(&standby)?;
    standby.sql(DB, "INSERT INTO t SELECT i, 'new' FROM generate_series(20001, 20010) i")?;
    blocker.batch_execute("COMMIT")?;
    wait_while_running(&mut run, "the copy", PATIENCE, || {
        let copied = site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?;
        Ok(copied == "20010")
    })?;
    standby.sql(DB, "INSERT INTO log VALUES (2)")?;
    wait_for_rows(&site, &mut run, 2)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &["event=\"timeline_changed\""])?;
    site.publisher.start()?;
    let mut run = site.spawn(&program)?;
    expect_exit(&mut run, 10, &["the publisher is on timeline 1", "left behind by a failover"])
}
