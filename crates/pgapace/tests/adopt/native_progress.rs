//! How far a native subscription has come, and why it goes no further.

use std::thread::sleep;
use std::time::{Duration, Instant};

use testbed::{Cluster, Result};

use crate::support::{DB, PATIENCE, Site};

/// Waits until the native subscription has confirmed `end`. A busy machine may need long for a backlog; one
/// that confirms nothing for a while stands still.
pub(super) fn wait_until_confirmed(site: &Site, end: u64) -> Result<()> {
    let (mut last, mut moved) = (0, Instant::now());
    loop {
        let confirmed = site.confirmed()?;
        if confirmed >= end {
            return Ok(());
        }
        if confirmed > last {
            (last, moved) = (confirmed, Instant::now());
        }
        if moved.elapsed() >= PATIENCE {
            return Err(testbed::Error::other(what_waits(site, end)));
        }
        // The interval of the checks; the limit is one without any progress.
        sleep(Duration::from_millis(50));
    }
}

/// Slots, workers, blockers and prepared transactions, to find out why a native subscription does not reach `end`.
fn what_waits(site: &Site, end: u64) -> String {
    let rows = |cluster: &Cluster, sql: &str| {
        let text = format!("SELECT string_agg(r::text, E'\\n') FROM ({sql}) r");
        cluster.query_one_text(DB, &text).unwrap_or_else(|error| error.to_string())
    };
    let (publisher, subscriber) = (&site.publisher, &site.subscriber);
    format!(
        "{:X?} instead of {end:X}\n{}\n{}\n{}\n{}\n{}\n{}",
        site.confirmed(),
        rows(publisher, "SELECT * FROM pg_stat_replication"),
        rows(publisher, "SELECT * FROM pg_replication_slots"),
        rows(subscriber, "SELECT * FROM pg_stat_subscription"),
        rows(subscriber, "SELECT *, pg_blocking_pids(pid) FROM pg_stat_activity"),
        rows(subscriber, "SELECT * FROM pg_prepared_xacts"),
        subscriber.log_tail()
    )
}
