//! Workloads that change the publisher in tests, demos and benchmarks.

pub mod ledger;
mod ledger_check;
pub mod random_dml;
pub mod tpcb;
mod tpcb_tables;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};

const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
const NAP: Duration = Duration::from_millis(20);

/// Connects, and retries while the server is unavailable, until `stop` is set.
fn connect_until(conninfo: &str, stop: &AtomicBool) -> Option<Client> {
    while !stop.load(Ordering::Relaxed) {
        match Client::connect(conninfo, NoTls) {
            Ok(client) => return Some(client),
            Err(error) => {
                tracing::debug!(%error, "a workload waits for its server");
                sleep(RECONNECT_PAUSE);
            }
        }
    }
    None
}

/// Sleeps until `due`, or until `stop` is set.
fn sleep_until(due: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        sleep(left.min(NAP));
    }
}
