//! Creation of a cluster: directories, initdb, settings, first start.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::directory::Directories;
use super::guardian::Guardian;
use super::port::Port;
use super::privileges::ServerUser;
use super::{Cluster, Started, template};
use crate::error::{Context, Error, Result};
use crate::servers::ServerBinaries;

/// Number of ports to try for the first start.
const PORT_ATTEMPTS: usize = 5;

/// The properties of a new cluster; see [`Cluster::builder`].
#[derive(Clone, Debug)]
pub struct ClusterBuilder {
    binaries: ServerBinaries,
    name: String,
    directory: Option<PathBuf>,
    settings: Vec<(String, String)>,
    logical: bool,
    durable: bool,
    listen: String,
    hba: Vec<String>,
    files: Vec<(String, Vec<u8>)>,
    initdb_args: Vec<String>,
    locale: String,
    encoding: String,
    keep: bool,
}

impl ClusterBuilder {
    pub(super) fn new(binaries: &ServerBinaries) -> Self {
        Self {
            binaries: binaries.clone(),
            name: format!("postgres{}", binaries.major()),
            directory: None,
            settings: Vec::new(),
            logical: true,
            durable: false,
            listen: "127.0.0.1".into(),
            hba: Vec::new(),
            files: Vec::new(),
            initdb_args: Vec::new(),
            locale: "C".into(),
            encoding: "UTF8".into(),
            keep: false,
        }
    }

    /// Stores all files in this directory, which must be empty or absent, instead of a temporary
    /// directory.
    pub fn dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.directory = Some(path.into());
        self
    }

    /// Sets a server setting. It overrides an earlier value and the default of this crate.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Whether `wal_level` is `logical`, the default here, or `replica`.
    pub fn wal_level_logical(mut self, on: bool) -> Self {
        self.logical = on;
        self
    }

    /// Enables fsync and full page writes as in production, so that the data survives a crash of
    /// the machine.
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// The TCP addresses to listen on (default `127.0.0.1`; empty for none).
    pub fn listen_tcp(mut self, addresses: impl Into<String>) -> Self {
        self.listen = addresses.into();
        self
    }

    /// Adds lines to `pg_hba.conf` before the default ones, which trust every local user.
    pub fn hba<S: Into<String>>(mut self, lines: impl IntoIterator<Item = S>) -> Self {
        self.hba.extend(lines.into_iter().map(Into::into));
        self
    }

    /// Adds a file to the data directory, such as a TLS key, that only the server can read.
    pub fn file(mut self, name: impl Into<String>, contents: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), contents.into()));
        self
    }

    /// Adds arguments for initdb.
    pub fn initdb_args<S: AsRef<str>>(mut self, args: &[S]) -> Self {
        self.initdb_args.extend(args.iter().map(|arg| arg.as_ref().to_string()));
        self
    }

    /// The locale of the databases (`C` by default).
    pub fn locale(mut self, locale: impl Into<String>) -> Self {
        self.locale = locale.into();
        self
    }

    /// The encoding of the databases (`UTF8` by default).
    pub fn encoding(mut self, encoding: impl Into<String>) -> Self {
        self.encoding = encoding.into();
        self
    }

    /// The name of this server in messages.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Leaves the directory in place when the cluster is dropped. The server is still stopped.
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Creates the cluster and starts its server.
    pub fn start(self) -> Result<Cluster> {
        let mut cluster = self.create()?;
        let in_memory = cluster.directories.in_memory();
        if in_memory {
            let kind = (self.binaries.bin("initdb"), self.initdb_arguments());
            template::fill(&cluster, kind, || {
                let template = self.create()?;
                self.initdb(&template)?;
                Ok(template)
            })?;
        } else {
            self.initdb(&cluster)?;
        }
        self.configure(&cluster, in_memory)?;
        for attempt in 1.. {
            match cluster.launch()? {
                Started::Ready => break,
                Started::PortInUse if attempt < PORT_ATTEMPTS => cluster.port = Port::take()?,
                Started::PortInUse => return Err(cluster.failure("found no free port")),
                Started::Failed => return Err(cluster.failure("did not start")),
            }
        }
        Ok(cluster)
    }

    /// The cluster with its directories, which are empty.
    fn create(&self) -> Result<Cluster> {
        let user = ServerUser::needed()?;
        let directories = Directories::create(self.directory.as_deref(), user.as_ref())?;
        let data = directories.data_home.join("data");
        let remove = if self.keep { Vec::new() } else { directories.each() };
        let guardian = Guardian::start(&data, &remove)?;
        let log = directories.home.join("server.log");
        // From here on, dropping the cluster cleans up.
        Ok(Cluster {
            binaries: self.binaries.clone(),
            name: self.name.clone(),
            user,
            directories,
            data,
            log,
            port: Port::take()?,
            server: None,
            guardian,
            keep: self.keep,
        })
    }

    fn initdb_arguments(&self) -> Vec<String> {
        let usual = ["-A", "trust", "-U", "postgres", "--no-sync", "--no-instructions"];
        let mut arguments: Vec<_> = usual.map(str::to_owned).into();
        arguments.extend(["-E".to_owned(), self.encoding.clone()]);
        arguments.push(format!("--locale={}", self.locale));
        arguments.extend_from_slice(&self.initdb_args);
        arguments
    }

    fn initdb(&self, cluster: &Cluster) -> Result<()> {
        let mut command = cluster.command("initdb");
        command.arg("-D").arg(&cluster.data).args(self.initdb_arguments()).stdin(Stdio::null());
        let output = command
            .output()
            .context(|| format!("run {}", self.binaries.bin("initdb").display()))?;
        if output.status.success() {
            return Ok(());
        }
        Err(Error::Server {
            what: format!("initdb of {} failed: {}", self.name, output.status),
            log_tail: String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr),
        })
    }

    fn configure(&self, cluster: &Cluster, in_memory: bool) -> Result<()> {
        let mut lines = String::from("\n# testbed\n");
        let defaults = self.default_settings(cluster, in_memory);
        let defaults = defaults.iter().map(|(name, value)| (*name, value.as_str()));
        let own = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in defaults.chain(own) {
            let quoted = value.replace('\\', "\\\\").replace('\'', "''");
            let _ = writeln!(lines, "{name} = '{quoted}'");
        }
        append(&cluster.data.join("postgresql.conf"), &lines)?;
        if !self.hba.is_empty() {
            let path = cluster.data.join("pg_hba.conf");
            let rest = fs::read_to_string(&path).context(|| format!("read {}", path.display()))?;
            fs::write(&path, format!("{}\n{rest}", self.hba.join("\n")))
                .context(|| format!("write {}", path.display()))?;
        }
        for (name, contents) in &self.files {
            let path = cluster.data.join(name);
            fs::write(&path, contents).context(|| format!("write {}", path.display()))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
                .context(|| format!("close {}", path.display()))?;
            if let Some(user) = &cluster.user {
                user.own(&path)?;
            }
        }
        Ok(())
    }

    fn default_settings(&self, cluster: &Cluster, in_memory: bool) -> Vec<(&'static str, String)> {
        let on_off = |on: bool| if on { "on" } else { "off" }.to_string();
        let mut settings = vec![
            ("unix_socket_directories", cluster.directories.home.display().to_string()),
            ("listen_addresses", self.listen.clone()),
            ("wal_level", if self.logical { "logical" } else { "replica" }.into()),
            ("fsync", on_off(self.durable)),
            ("full_page_writes", on_off(self.durable)),
            ("synchronous_commit", "on".into()),
            ("shared_buffers", "128MB".into()),
            ("max_connections", "100".into()),
            ("max_wal_senders", "20".into()),
            // Before PostgreSQL 18 this setting also limits replication origins. Every worker has
            // one, and those of subscriptions that a test leaves behind remain.
            ("max_replication_slots", "1000".into()),
            ("max_prepared_transactions", "100".into()),
            ("max_worker_processes", "20".into()),
            ("max_logical_replication_workers", "10".into()),
            ("jit", "off".into()),
            ("log_line_prefix", "%m [%p] %a ".into()),
            ("logging_collector", "off".into()),
            ("timezone", "UTC".into()),
            ("log_timezone", "UTC".into()),
        ];
        if self.binaries.major() >= 18 {
            settings.push(("max_active_replication_origins", "1000".into()));
        }
        if in_memory {
            // Segments are files in the data directory, so that they disappear with it even after
            // kill -9.
            settings.push(("dynamic_shared_memory_type", "mmap".into()));
        }
        settings
    }
}

fn append(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new()
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .context(|| format!("append to {}", path.display()))
}
