//! Everything that shows a subscription: figures on the subscriber, `status`, `top`, the HTTP server.

mod alerts;
mod browser;
mod events;
mod figures;
mod full_disk;
mod health;
mod http;
mod http_address;
pub(crate) mod http_client;
mod idle_lag;
mod page;
mod pictures;
mod questions;
mod report;
mod status_output;
mod terminal;
mod top;

use testbed::program::Process;
use testbed::wait_until;

use crate::support::{Case, PATIENCE};

/// Waits until the first column of a query on the subscriber is `true`.
#[track_caller]
pub(crate) fn wait_for(case: &Case, process: &mut Process, what: &str, condition: &str) {
    let sql = format!("SELECT coalesce(({condition}), false)");
    let waited = wait_until(PATIENCE, what, || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(case.subscriber.value(&sql) == "t")
    });
    if let Err(error) = waited {
        let figures =
            case.subscriber.rows("SELECT jsonb_pretty(figures) FROM pgapace.stat_figures");
        panic!("{error}\n{}\n{}", figures.join("\n"), process.log());
    }
}
