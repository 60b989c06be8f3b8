//! A switchover whose machine is lost.

use testbed::network::Network;
use testbed::{Cluster, Result, wait_until};

use super::DDL;
use super::deadlines::LATE;
use crate::support::{DB, NAME, PATIENCE, Site, Tool, skipped};

/// Writes are stopped, and nobody tells the servers that the process is gone: their sessions are idle.
#[test]
fn a_lost_machine_keeps_its_locks_for_seconds() -> Result<()> {
    let Some(network) = Network::create(1)? else {
        skipped("a_lost_machine_keeps_its_locks_for_seconds", "it needs root and ip netns");
        return Ok(());
    };
    let site = Site::over(&network)?;
    site.publish_tables(DDL)?;
    site.subscriber.sql(DB, "CREATE PUBLICATION pgapace_back FOR TABLE orders")?;
    let mut process = site.spawn_streaming(&site.program())?;
    let at = |cluster: &Cluster| cluster.conninfo_at(&network.server_address(), DB);
    let far = Tool::new(at(&site.publisher), at(&site.subscriber), NAME);
    let directory = tempfile::tempdir()?;
    let stopped = directory.path().join("stopped");
    let stop = format!("touch {}; sleep 600", stopped.display());
    let command = ["--stop-writes", &stop, "--resume-writes", "true"];
    let program = far.program("switchover").args(["--go", "--deadline", LATE]).args(command);
    let mut verb = site.spawn(&network.on(0, &program))?;
    wait_until(PATIENCE, "writes to be stopped", || {
        assert!(verb.is_running(), "{}", verb.log());
        Ok(stopped.exists())
    })?;
    network.unplug(0)?;
    verb.kill9()?;

    let abort = || site.tool().finish("switchover", &["--abort", "--resume-writes", "true"]);
    let held = ["another process switches sub over", "of the subscriber", "pg_terminate_backend("];
    abort().expect(8, &held);
    let mut last = None;
    wait_until(PATIENCE, "the servers to end the sessions of the lost machine", || {
        let finished = abort();
        let held = finished.log.contains("another process switches");
        last = Some(finished);
        Ok(!held)
    })?;
    last.expect("it was run").expect(0, &[]);
    site.publisher.sql(DB, "INSERT INTO orders (client, n) VALUES (1, 1)")?;
    site.wait_until_applied(&mut process)
}
