//! A Citus coordinator as subscriber. They need a server with Citus; without one the tests print that they are skipped.

mod crashes;
mod refused;
mod tables;

use testbed::citus::{CitusCluster, DATABASE as DB, VARIABLE, server};
use testbed::{Result, ServerBinaries};

use crate::support::skipped;

/// The server programs, or `None` if the test is skipped.
fn binaries(test: &str) -> Result<Option<ServerBinaries>> {
    if std::env::var_os(VARIABLE).is_none() {
        skipped(test, "PGAPACE_CITUS_BIN is not set");
        return Ok(None);
    }
    testbed::citus::binaries().map(Some)
}
