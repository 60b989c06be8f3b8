//! Clusters of Citus: a coordinator and two workers on this machine. They need a server with the extension.

use std::path::Path;

use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::servers::ServerBinaries;

/// Directory of the server programs with Citus.
pub const VARIABLE: &str = "PGAPACE_CITUS_BIN";
/// The database that has the extension on all servers.
pub const DATABASE: &str = "postgres";

/// The server programs that the environment names.
pub fn binaries() -> Result<ServerBinaries> {
    let Some(directory) = std::env::var_os(VARIABLE) else {
        return Err(Error::other(format!("{VARIABLE} is not set")));
    };
    ServerBinaries::in_directory(Path::new(&directory))
}

/// A server with the extension, which belongs to no cluster yet.
pub fn server(binaries: &ServerBinaries, name: &str, settings: &[(&str, &str)]) -> Result<Cluster> {
    let mut builder = Cluster::builder(binaries)
        .name(name)
        .setting("shared_preload_libraries", "citus")
        .setting("citus.node_conninfo", "sslmode=prefer")
        .setting("max_prepared_transactions", "100");
    for (setting, value) in settings {
        builder = builder.setting(*setting, *value);
    }
    let server = builder.start()?;
    server.sql(DATABASE, "CREATE EXTENSION citus")?;
    Ok(server)
}

/// A coordinator and two workers.
#[derive(Debug)]
pub struct CitusCluster {
    /// A node of its own cluster.
    pub coordinator: Cluster,
    /// Those that have the shards.
    pub workers: [Cluster; 2],
}

impl CitusCluster {
    /// Starts the servers with these settings.
    pub fn start(binaries: &ServerBinaries, settings: &[(&str, &str)]) -> Result<Self> {
        let coordinator = server(binaries, "coordinator", settings)?;
        let workers =
            [server(binaries, "worker 1", settings)?, server(binaries, "worker 2", settings)?];
        coordinator.sql(
            DATABASE,
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
