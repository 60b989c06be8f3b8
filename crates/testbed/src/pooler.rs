//! PgBouncer between clients and a cluster, if it is installed.

use std::fs;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use crate::cluster::Cluster;
use crate::cluster::port::Port;
use crate::error::{Context, Error, Result};
use crate::wait::wait_until;

/// The environment variable that names the PgBouncer program.
const VARIABLE: &str = "PGAPACE_PGBOUNCER";
const PLACES: [&str; 3] = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"];
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Ends the pooler when the pipe from this process ends, for any reason.
const SCRIPT: &str = r#"
"$1" -q "$2" </dev/null &
pooler=$!
cat >/dev/null
kill -KILL $pooler
wait $pooler
"#;

/// The pool mode: when PgBouncer assigns a server connection to another client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// After the client has disconnected.
    Session,
    /// After each transaction.
    Transaction,
}

/// A running PgBouncer. It ends when this value is dropped or this process ends.
#[derive(Debug)]
pub struct Pooler {
    port: Port,
    shell: Child,
    /// The shell ends the pooler when this pipe is closed.
    pipe: Option<ChildStdin>,
}

impl Pooler {
    /// The PgBouncer program, if it is installed.
    pub fn find() -> Option<PathBuf> {
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        named.into_iter().chain(PLACES.map(PathBuf::from)).find(|path| path.is_file())
    }

    /// Starts PgBouncer for all databases of a cluster. `settings` are additional lines of the
    /// section `[pgbouncer]`.
    pub fn start(cluster: &Cluster, mode: PoolMode, settings: &[(&str, &str)]) -> Result<Self> {
        Self::start_for(cluster, mode, &format!("* = {}", Self::entry(cluster)), settings)
    }

    /// The connection string of a cluster, for the section `[databases]`.
    pub fn entry(cluster: &Cluster) -> String {
        let (socket_dir, port) = (Path::display(cluster.socket_dir()), cluster.port());
        format!("host={socket_dir} port={port} user=postgres")
    }

    /// The same with this section `[databases]`. The files of PgBouncer are among those of the cluster.
    pub fn start_for(
        cluster: &Cluster,
        mode: PoolMode,
        databases: &str,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        let program = Self::find().ok_or_else(|| Error::other("PgBouncer is not installed"))?;
        let port = Port::take()?;
        let file = cluster.socket_dir().join(format!("pgbouncer-{}.ini", port.number()));
        fs::write(&file, Self::ini(databases, mode, port.number(), settings))
            .context(|| format!("write {}", file.display()))?;
        cluster.own(&file)?;
        let mut shell = cluster
            .dress(Command::new("/bin/sh"))
            .args(["-c", SCRIPT, "pooler"])
            .args([program.as_path(), file.as_path()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context(|| format!("run {}", program.display()))?;
        let pipe = shell.stdin.take();
        let pooler = Self { port, shell, pipe };
        let address = ("127.0.0.1", pooler.port.number());
        wait_until(START_TIMEOUT, "PgBouncer to listen", || {
            Ok(TcpStream::connect(address).is_ok())
        })?;
        Ok(pooler)
    }

    fn ini(databases: &str, mode: PoolMode, port: u16, settings: &[(&str, &str)]) -> String {
        let mode = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
        };
        let mut text = format!(
            "[databases]\n{databases}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = {mode}\n"
        );
        for (name, value) in settings {
            text.push_str(&format!("{name} = {value}\n"));
        }
        text
    }

    /// A connection string through the pooler.
    pub fn conninfo(&self, dbname: &str) -> String {
        format!("host=127.0.0.1 port={} user=postgres dbname={dbname}", self.port.number())
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        self.pipe = None;
        // The shell ends as soon as it reads the end of the pipe.
        let _ = self.shell.wait();
    }
}
