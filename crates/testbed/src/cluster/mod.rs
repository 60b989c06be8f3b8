//! Test clusters: one running PostgreSQL server in its own directory.

mod builder;
mod directory;
mod guardian;
pub(crate) mod port;
pub(crate) mod privileges;
pub(crate) mod process;
mod template;

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls, SimpleQueryMessage};
use rustix::process::Signal;

pub use builder::ClusterBuilder;
use directory::Directories;
use guardian::Guardian;
use port::Port;
use privileges::ServerUser;

use crate::error::{Context, Error, Result};
use crate::servers::ServerBinaries;
use crate::wait::{wait_until, with_session};

const START_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
const LOG_TAIL_LINES: usize = 30;

/// A shutdown mode of pg_ctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Waits until every client has disconnected.
    Smart,
    /// Disconnects the clients and shuts down regularly.
    Fast,
    /// Aborts; the next start performs crash recovery.
    Immediate,
}

/// A running server. Dropping it stops the server and removes its directory. If this process is
/// killed, a guardian process does the same.
#[derive(Debug)]
pub struct Cluster {
    binaries: ServerBinaries,
    name: String,
    user: Option<ServerUser>,
    directories: Directories,
    data: PathBuf,
    log: PathBuf,
    port: Port,
    server: Option<Child>,
    guardian: Guardian,
    keep: bool,
}

/// The result of a launch.
enum Started {
    Ready,
    PortInUse,
    Failed,
}

impl Cluster {
    /// Builds a new cluster with these programs.
    pub fn builder(binaries: &ServerBinaries) -> ClusterBuilder {
        ClusterBuilder::new(binaries)
    }

    /// The programs that this server runs.
    pub fn binaries(&self) -> &ServerBinaries {
        &self.binaries
    }

    /// The name of this server in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port, used for TCP and in the name of the Unix socket.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The directory of the Unix socket.
    pub fn socket_dir(&self) -> &Path {
        &self.directories.home
    }

    /// The data directory.
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// The server's log.
    pub fn log_file(&self) -> &Path {
        &self.log
    }

    /// The last lines of the server's log.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
    }

    /// A connection string over the Unix socket, as superuser `postgres`.
    pub fn conninfo(&self, dbname: &str) -> String {
        self.conninfo_at(&self.directories.home.display().to_string(), dbname)
    }

    /// A connection string over TCP, as superuser `postgres`.
    pub fn conninfo_tcp(&self, dbname: &str) -> String {
        self.conninfo_at("127.0.0.1", dbname)
    }

    /// The same at another address of this machine.
    pub fn conninfo_at(&self, host: &str, dbname: &str) -> String {
        let quoted = |value: &str| value.replace('\\', "\\\\").replace('\'', "\\'");
        let (host, dbname) = (quoted(host), quoted(dbname));
        format!("host='{host}' port={} user=postgres dbname='{dbname}'", self.port())
    }

    /// Opens a connection over the Unix socket.
    pub fn connect(&self, dbname: &str) -> Result<Client> {
        Client::connect(&self.conninfo(dbname), NoTls)
            .context(|| format!("connect to {} database {dbname}", self.name))
    }

    /// Runs SQL on a new connection.
    pub fn sql(&self, dbname: &str, sql: &str) -> Result<()> {
        self.connect(dbname)?
            .batch_execute(sql)
            .context(|| format!("run on {} {dbname}: {}", self.name, abbreviated(sql)))
    }

    /// The rows of a query as text, from a new connection, or from one that the queries of a
    /// [`wait_until`] share.
    pub fn query_texts(&self, dbname: &str, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        let messages = with_session(&self.conninfo(dbname), |client| client.simple_query(sql))
            .context(|| format!("run on {} {dbname}: {}", self.name, abbreviated(sql)))?;
        let row_texts = |message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|i| row.get(i).map(str::to_string)).collect())
            }
            _ => None,
        };
        Ok(messages.into_iter().filter_map(row_texts).collect())
    }

    /// The first column of the first row as text; an error if there is no row or the value is null.
    pub fn query_one_text(&self, dbname: &str, sql: &str) -> Result<String> {
        let rows = self.query_texts(dbname, sql)?;
        let value = rows.into_iter().next().and_then(|row| row.into_iter().next()).flatten();
        value.ok_or_else(|| {
            Error::other(format!("no value on {} {dbname} from: {}", self.name, abbreviated(sql)))
        })
    }

    /// Creates a database.
    pub fn create_database(&self, name: &str) -> Result<()> {
        self.sql("postgres", &format!("CREATE DATABASE \"{}\"", name.replace('"', "\"\"")))
    }

    /// Changes a setting with ALTER SYSTEM and waits until new sessions see the reload. A setting
    /// that requires a restart takes effect only after [`restart`](Self::restart).
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let loaded = "SELECT pg_conf_load_time()::text";
        let before = self.query_one_text("postgres", loaded)?;
        let value = value.replace('\'', "''");
        self.sql("postgres", &format!("ALTER SYSTEM SET {name} = '{value}'"))?;
        self.sql("postgres", "SELECT pg_reload_conf()")?;
        wait_until(STOP_TIMEOUT, format!("{} to reload its settings", self.name), || {
            Ok(self.query_one_text("postgres", loaded)? != before)
        })
    }

    /// The process ID of the postmaster, if the server runs.
    pub fn postmaster_pid(&self) -> Option<u32> {
        self.server.as_ref().map(Child::id).filter(|id| process::runs(*id))
    }

    /// Whether the postmaster runs.
    pub fn is_running(&self) -> bool {
        self.postmaster_pid().is_some()
    }

    /// Starts a stopped server on the same port. Does nothing if the server runs.
    pub fn start(&mut self) -> Result<()> {
        if self.is_running() {
            return Ok(());
        }
        self.reap();
        match self.launch()? {
            Started::Ready => Ok(()),
            Started::PortInUse => Err(self.failure("found its port taken")),
            Started::Failed => Err(self.failure("did not start")),
        }
    }

    /// Stops the server and waits until it has stopped. Does nothing if the server does not run.
    pub fn stop(&mut self, mode: Stop) -> Result<()> {
        let Some(pid) = self.postmaster_pid() else {
            self.reap();
            return Ok(());
        };
        let stop_signal = match mode {
            Stop::Smart => Signal::TERM,
            Stop::Fast => Signal::INT,
            Stop::Immediate => Signal::QUIT,
        };
        process::signal(pid, stop_signal)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while process::runs(pid) {
            if Instant::now() > deadline {
                return Err(self.failure(&format!("did not stop ({mode:?}) in time")));
            }
            sleep(POLL);
        }
        self.reap();
        Ok(())
    }

    /// Stops and starts the server.
    pub fn restart(&mut self, mode: Stop) -> Result<()> {
        self.stop(mode)?;
        self.start()
    }

    /// Copies the data directory of a stopped server, like a storage snapshot.
    pub fn save_storage(&self) -> Result<()> {
        self.copy_storage(&self.data, &self.saved())
    }

    /// Restores the copy that [`save_storage`](Self::save_storage) made. The copy remains.
    pub fn restore_storage(&self) -> Result<()> {
        self.copy_storage(&self.saved(), &self.data)
    }

    fn saved(&self) -> PathBuf {
        self.data.with_extension("saved")
    }

    fn copy_storage(&self, from: &Path, to: &Path) -> Result<()> {
        if self.is_running() {
            return Err(Error::other(format!("{} runs: its storage changes", self.name)));
        }
        if to.exists() {
            fs::remove_dir_all(to).context(|| format!("remove {}", to.display()))?;
        }
        // Keep the owners, because the server may run as a different user than the test.
        let status = Command::new("cp").arg("-a").arg(from).arg(to).status();
        let status = status.context(|| format!("copy {}", from.display()))?;
        if !status.success() {
            return Err(Error::other(format!("cannot copy {}", from.display())));
        }
        Ok(())
    }

    /// Kills the postmaster and all its children with SIGKILL, which resembles a crash of the
    /// machine.
    pub fn kill9(&mut self) -> Result<()> {
        let Some(pid) = self.postmaster_pid() else {
            return Ok(());
        };
        // A stopped postmaster cannot start another child during the enumeration.
        process::signal(pid, Signal::STOP)?;
        let children = process::children(pid);
        process::signal(pid, Signal::KILL)?;
        for child in &children {
            // The child may have ended already.
            let _ = process::signal(*child, Signal::KILL);
        }
        self.reap();
        wait_until(STOP_TIMEOUT, format!("the processes of {} to end", self.name), || {
            Ok(!children.iter().any(|child| process::runs(*child)))
        })
    }

    /// A command for one of this server's programs. It runs as the server's user, in a directory
    /// that this user can enter.
    pub(crate) fn command(&self, program: &str) -> Command {
        self.dress(self.binaries.command(program))
    }

    /// Prepares any command in the same way.
    pub(crate) fn dress(&self, mut command: Command) -> Command {
        command.current_dir(&self.directories.home);
        if let Some(user) = &self.user {
            user.apply(&mut command);
        }
        command
    }

    /// Makes the server's user the owner of a file.
    pub(crate) fn own(&self, file: &Path) -> Result<()> {
        self.user.as_ref().map_or(Ok(()), |user| user.own(file))
    }

    /// Starts the postmaster as a child process and waits until it accepts connections.
    fn launch(&mut self) -> Result<Started> {
        let log_before = fs::metadata(&self.log).map_or(0, |metadata| metadata.len());
        let open_log = || {
            File::options()
                .create(true)
                .append(true)
                .open(&self.log)
                .context(|| format!("open {}", self.log.display()))
        };
        let (output, errors) = (open_log()?, open_log()?);
        let child = self
            .command("postgres")
            .arg("-D")
            .arg(&self.data)
            .args(["-p", &self.port().to_string()])
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            // An interrupt from the keyboard must reach only this process, which then stops the
            // server.
            .process_group(0)
            .spawn()
            .context(|| format!("run {}", self.binaries.bin("postgres").display()))?;
        let pid = child.id();
        self.guardian.server_started(pid);
        self.server = Some(child);

        let deadline = Instant::now() + START_TIMEOUT;
        while process::runs(pid) {
            if self.takes_sessions(pid)
                && Client::connect(&self.conninfo("postgres"), NoTls).is_ok()
            {
                return Ok(Started::Ready);
            }
            if Instant::now() > deadline {
                let failure = self.failure("took no connection in time");
                self.kill9()?;
                return Err(failure);
            }
            sleep(POLL);
        }
        self.reap();
        let log = fs::read(&self.log).unwrap_or_default();
        let new = log.get(usize::try_from(log_before).unwrap_or(0)..).unwrap_or_default();
        let in_use = String::from_utf8_lossy(new).contains("Address already in use");
        Ok(if in_use { Started::PortInUse } else { Started::Failed })
    }

    /// Whether this postmaster has written to its lock file that it takes sessions. A server that starts would start a
    /// process only to refuse the session.
    fn takes_sessions(&self, pid: u32) -> bool {
        let lock_file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
        let mut lines = lock_file.lines();
        let is_own = lines.next().is_some_and(|line| line.trim() == pid.to_string());
        let status = lines.nth(6).map(str::trim);
        is_own && matches!(status, Some("ready" | "standby"))
    }

    /// Collects the exit status of a postmaster that has ended or is ending.
    fn reap(&mut self) {
        if let Some(mut child) = self.server.take() {
            let _ = child.wait();
            self.guardian.server_stopped();
        }
    }

    fn failure(&self, what: &str) -> Error {
        Error::Server {
            what: format!("{} (PostgreSQL {}) {what}", self.name, self.binaries.version()),
            log_tail: self.log_tail(),
        }
    }

    /// A killed postmaster leaves a small System V segment behind, which its lock file names.
    fn remove_segment(&self) {
        let lock_file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
        let segment = lock_file.lines().nth(6).and_then(|line| line.split_whitespace().nth(1));
        if let Some(segment) = segment {
            let _ = Command::new("ipcrm")
                .args(["-m", segment])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.stop(Stop::Immediate).is_err()
            && let Err(error) = self.kill9()
        {
            tracing::warn!(
                event = "server_not_stopped",
                server = self.name,
                %error,
                "could not stop a test server"
            );
        }
        if !self.keep {
            self.remove_segment();
            self.directories.remove();
        }
    }
}

fn abbreviated(sql: &str) -> String {
    const LONGEST: usize = 200;
    let mut text: String = sql.chars().take(LONGEST).collect();
    if text.len() < sql.len() {
        text.push('…');
    }
    text
}
