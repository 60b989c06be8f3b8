//! Peers that read nothing for longer than the limits of `--standby`, and are alive.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::{DB, PATIENCE, Site, wait_while_running};

/// An apply worker has 2 MB to send behind a statement that waits for a lock, and the receiver reads nothing
/// because its memory is spent, both for longer than any of the limits.
#[test]
fn a_busy_peer_loses_no_connection() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.publish_tables(
        "CREATE TABLE locked (id int PRIMARY KEY); CREATE TABLE t (id int PRIMARY KEY, v text)",
    )?;
    let program = site
        .program_between(&site.publisher.conninfo_tcp(DB), &site.subscriber.conninfo_tcp(DB))
        .args(["--standby", "--streaming", "off", "--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    let walsender = "SELECT pid FROM pg_stat_replication";
    let before = site.publisher.query_one_text(DB, walsender)?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; LOCK TABLE locked")?;
    site.publisher.sql(
        DB,
        "BEGIN; INSERT INTO locked VALUES (1); \
         INSERT INTO t SELECT i, repeat(i::text, 2000) FROM generate_series(1, 250) i; COMMIT",
    )?;
    let more = "DO $$ BEGIN FOR n IN 1..400 LOOP \
                INSERT INTO t SELECT n * 1000 + i, repeat('x', 2000) FROM generate_series(1, 100) i; \
                COMMIT; END LOOP; END $$";
    site.publisher.sql(DB, more)?;
    // Each attempt would be a new statement. The last limit is the 10 s of wal_sender_timeout.
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                 AND application_name = 'pgapace sub apply' \
                 AND query_start < now() - interval '12 s'";
    wait_while_running(&mut run, "a wait for the lock", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, waits)? == "1")
    })?;
    let blocked = "SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'walsender'";
    assert_eq!(site.publisher.query_one_text(DB, blocked)?, "WalSenderWriteData");
    holder.batch_execute("COMMIT")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(run.events("session_lost"), 0, "{}", run.log());
    assert_eq!(site.publisher.query_one_text(DB, walsender)?, before, "{}", run.log());
    site.expect_equal(&[TableName::from("locked"), TableName::from("t")])
}
