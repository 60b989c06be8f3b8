//! The shell in which the commands of a page run.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use testbed::Pair;
use testbed::servers::ServerBinaries;

use crate::package::Root;
use crate::support::{PATIENCE, must};

const END: &str = "@@end";
/// The port of `--http` in all pages.
const PORT: &str = "9187";

/// A bash whose standard output and standard error are read together, in a directory of its own.
pub(super) struct Shell {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// A free port, for the one that pages name.
    port: u16,
    /// Texts that the page does not show, and what it shows instead.
    secrets: Vec<(String, &'static str)>,
    _home: Option<TempDir>,
}

/// The directory of client programs that suit the publisher, the older server. Pages also use curl.
pub(super) fn clients(binaries: &ServerBinaries) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|folder| folder.join("curl").exists()) {
        return None;
    }
    let has_all = |folder: &Path| {
        ["psql", "pg_dump", "pg_restore", "pgbench"].iter().all(|name| folder.join(name).exists())
    };
    let own = binaries.directory().to_owned();
    std::iter::once(own).chain([PathBuf::from("/usr/bin")]).find(|folder| has_all(folder))
}

impl Shell {
    /// With the program of this build and the client programs of a directory.
    pub(super) fn start(clients: &Path, binaries: &ServerBinaries, pair: &Pair) -> Self {
        let home = must(TempDir::new());
        let program = PathBuf::from(env!("CARGO_BIN_EXE_pgapace"));
        let own = program.parent().unwrap_or(Path::new("/")).display();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("bash");
        command
            .args(["--noprofile", "--norc"])
            .current_dir(home.path())
            .env_clear()
            .env("PATH", format!("{own}:{}:{path}", clients.display()))
            .env("HOME", home.path())
            .envs(binaries.environment());
        Self::spawn(command, Some(home), pair)
    }

    /// With what is installed in a root, for a user or for root.
    pub(super) fn within(root: &Root, user: Option<&str>, home: &str, pair: &Pair) -> Self {
        let mut command = root.command(user, home, &["bash", "--noprofile", "--norc"]);
        command.env("HOME", home);
        Self::spawn(command, None, pair)
    }

    fn spawn(mut command: Command, home: Option<TempDir>, pair: &Pair) -> Self {
        command.env("LC_ALL", "C.UTF-8").env("PAGER", "cat").env("PSQLRC", "/dev/null");
        let mut secrets = Vec::new();
        for (name, cluster) in [("PUBLISHER", &pair.publisher), ("SUBSCRIBER", &pair.subscriber)] {
            let info = cluster.conninfo("shop");
            command.env(format!("PGAPACE_{name}"), &info);
            let socket = cluster.socket_dir().display().to_string();
            secrets.push((format!("{socket}/"), "…"));
            secrets.push((socket, "…"));
        }
        let mut child = must(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .process_group(0)
                .spawn(),
        );
        let mut input = child.stdin.take().expect("a pipe");
        must(input.write_all(b"exec 2>&1\n"));
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let port = must(TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr())).port();
        Self { child, input, lines, port, secrets, _home: home }
    }

    /// Runs a command; returns its exit code and what it printed.
    pub(super) fn run(&mut self, command: &str) -> (i32, Vec<String>) {
        let command = command.replace(PORT, &self.port.to_string());
        must(self.input.write_all(format!("{command}\necho \"{END} $?\"\n").as_bytes()));
        let mut printed = Vec::new();
        let deadline = Instant::now() + 2 * PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => match line.split_once(END) {
                    Some((before, code)) => {
                        if !before.is_empty() {
                            printed.push(before.to_owned());
                        }
                        return (code.trim().parse().unwrap_or(-1), printed);
                    }
                    None => printed.push(line),
                },
                Err(RecvTimeoutError::Timeout) => panic!("{command}\n{}", printed.join("\n")),
                Err(RecvTimeoutError::Disconnected) => panic!("the shell ended: {command}"),
            }
        }
    }

    /// Runs a command, again and again if it may be repeated, until it prints what is wanted.
    pub(super) fn run_until(
        &mut self,
        command: &str,
        retry: bool,
        wanted: impl Fn(&[String]) -> bool,
    ) -> Vec<String> {
        let bless = std::env::var_os("PGAPACE_BLESS").is_some();
        let deadline = Instant::now() + if bless { PATIENCE / 6 } else { PATIENCE };
        loop {
            let (_, printed) = self.run(command);
            if !retry || wanted(&printed) || Instant::now() > deadline {
                return printed;
            }
            // A reader would not repeat it faster.
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The output, as a page shows it.
    pub(super) fn readable(&self, printed: Vec<String>) -> Vec<String> {
        let mut lines = printed;
        for line in &mut lines {
            for (secret, shown) in &self.secrets {
                *line = line.replace(secret.as_str(), shown);
            }
            line.truncate(line.trim_end().len());
        }
        lines
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // The group has the shell and what it runs in the background.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.child.wait();
    }
}
