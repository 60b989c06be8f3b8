//! Time limits that are set for the role or the database.

use std::time::Duration;

use testbed::compare::TableName;
use testbed::{Proxy, Result};

use crate::support::{DB, PATIENCE, Site, wait_while_running};

/// A database without the limit, for sessions of the test.
const OTHER: &str = "template1";

/// The walsender sends a transaction inside a transaction of its own, which lasts until the receiver has
/// taken all changes.
#[test]
fn a_limit_for_transactions_does_not_end_the_stream() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    // The first run creates the slot, with a session of other settings.
    site.tool().run_until_current();
    site.publisher.sql(DB, &format!("ALTER DATABASE {DB} SET transaction_timeout = '500ms'"))?;
    let publisher = Proxy::in_front_of(&site.publisher)?;
    let program = site
        .program_between(&publisher.conninfo(DB), &site.subscriber.conninfo(DB))
        .args(["--streaming", "off"]);
    let mut run = site.spawn_streaming(&program)?;
    publisher.hold_streams(true);
    // More than the proxy holds.
    let rows = "SELECT i, repeat(md5(i::text), 200) FROM generate_series(1, 20000) i";
    let insert = format!("SET transaction_timeout = 0; INSERT INTO t {rows}");
    site.publisher.sql(DB, &insert)?;
    let sends = "SELECT count(*) FROM pg_stat_activity \
                 WHERE wait_event IN ('WalSenderWriteData', 'ClientWrite')";
    wait_while_running(&mut run, "the changes to be sent", PATIENCE, || {
        Ok(site.publisher.query_one_text(OTHER, sends)? == "1")
    })?;
    // Four times the limit.
    assert!(run.wait_timeout(Duration::from_secs(2)).is_none(), "{}", run.log());
    site.publisher.sql(OTHER, &format!("ALTER DATABASE {DB} RESET transaction_timeout"))?;
    publisher.hold_streams(false);
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])?;
    // The first stream is still the one.
    assert_eq!(run.events("streaming"), 1, "{}", run.log());
    Ok(())
}
