//! A Citus coordinator as subscriber. They need a server with Citus; without one the tests print that they are skipped.

mod crashes;
mod refused;
mod tables;

use std::path::Path;

use testbed::{Cluster, Result, ServerBinaries};

use crate::support::skipped;

/// Directory of the server programs with Citus.
const VARIABLE: &str = "PGAPACE_CITUS_BIN";
/// Database names on the servers are their own; this database has the extension.
const DB: &str = "postgres";

/// The server programs, or `None` if the test is skipped.
fn binaries(test: &str) -> Result<Option<ServerBinaries>> {
    let Some(directory) = std::env::var_os(VARIABLE) else {
        skipped(test, "PGAPACE_CITUS_BIN is not set");
        return Ok(None);
    };
    ServerBinaries::in_directory(Path::new(&directory)).map(Some)
}

/// A server with the extension, which belongs to no cluster yet.
fn server(binaries: &ServerBinaries, name: &str, settings: &[(&str, &str)]) -> Result<Cluster> {
    let mut builder = Cluster::builder(binaries)
        .name(name)
        .setting("shared_preload_libraries", "citus")
        .setting("citus.node_conninfo", "sslmode=prefer")
        .setting("max_prepared_transactions", "100");
    for (setting, value) in settings {
        builder = builder.setting(*setting, *value);
    }
    let server = builder.start()?;
    server.sql(DB, "CREATE EXTENSION citus")?;
    Ok(server)
}

/// A coordinator and two workers.
struct CitusCluster {
    coordinator: Cluster,
    workers: [Cluster; 2],
}

impl CitusCluster {
    fn start(binaries: &ServerBinaries, settings: &[(&str, &str)]) -> Result<Self> {
        let coordinator = server(binaries, "coordinator", settings)?;
        let workers =
            [server(binaries, "worker 1", settings)?, server(binaries, "worker 2", settings)?];
        coordinator.sql(
            DB,
            &format!(
                "SELECT citus_set_coordinator_host('127.0.0.1', {}); \
                 SELECT citus_add_node('127.0.0.1', {}); SELECT citus_add_node('127.0.0.1', {})",
                coordinator.port(),
                workers[0].port(),
                workers[1].port()
            ),
        )?;
        Ok(Self { coordinator, workers })
    }
}
