//! Runs the binary under test as an external process, like a user.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cluster::process;
use crate::error::{Context, Error, Result};

const POLL: Duration = Duration::from_millis(5);

/// A shell script that kills the program if its owner ends without dismissing the watcher.
const WATCHER: &str =
    "trap '' HUP INT QUIT TERM; read -r pid; read -r word || kill -KILL \"$pid\" 2>/dev/null";

/// A program to run: path, arguments, environment.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, Option<OsString>)>,
    directory: Option<PathBuf>,
    own_session: bool,
    namespace: Option<String>,
    user: Option<u32>,
}

impl Program {
    /// Describes the program at this path.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            args: Vec::new(),
            env: Vec::new(),
            directory: None,
            own_session: false,
            namespace: None,
            user: None,
        }
    }

    /// Runs it in this network namespace.
    pub(crate) fn in_namespace(mut self, name: &str) -> Self {
        self.namespace = Some(name.to_owned());
        self
    }

    /// Runs it as this user and group, which need no name. Only root can do that.
    pub fn as_user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Adds one argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_os_string());
        self
    }

    /// Adds several arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_os_string()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_os_string(), Some(value.as_ref().to_os_string())));
        self
    }

    /// Removes an environment variable.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_os_string(), None));
        self
    }

    /// Sets the working directory.
    pub fn current_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Starts the program and appends its standard output and standard error to a log file.
    pub fn spawn_logged(&self, log: impl Into<PathBuf>) -> Result<Process> {
        let log = log.into();
        let open = || {
            File::options()
                .create(true)
                .append(true)
                .open(&log)
                .context(|| format!("open {}", log.display()))
        };
        let (output, errors) = (open()?, open()?);
        let (watcher, leash) = watcher()?;
        let mut watcher = Watcher { process: watcher, leash: Some(leash) };
        let child = self
            .command()
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .context(|| format!("run {}", self.path.display()))?;
        watcher.tell(&format!("{}\n", child.id()));
        Ok(Process { child, log, status: None, _watcher: watcher })
    }

    /// Runs the program in its own session, like a service. Linux first divides CPU time between
    /// sessions (autogroups), and every process of a PostgreSQL server has its own. Without its own
    /// session, the program would share one process's part with the program that started it.
    pub fn in_own_session(mut self) -> Self {
        self.own_session = true;
        self
    }

    /// Runs the program to its end and collects its output.
    pub fn output(&self) -> Result<Output> {
        self.command()
            .stdin(Stdio::null())
            .output()
            .context(|| format!("run {}", self.path.display()))
    }

    fn command(&self) -> Command {
        let mut command = if let Some(namespace) = &self.namespace {
            // ip enters the namespace with its own process, and then becomes the program.
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(&self.path);
            command.process_group(0);
            command
        } else if let Some(id) = self.user {
            let mut command = Command::new("setpriv");
            command.args([format!("--reuid={id}"), format!("--regid={id}")]);
            command.arg("--clear-groups").arg(&self.path);
            command.process_group(0);
            command
        } else if self.own_session {
            // setsid creates a session and process group for its own process, and then becomes the
            // program.
            let mut command = Command::new("setsid");
            command.arg(&self.path);
            command
        } else {
            let mut command = Command::new(&self.path);
            command.process_group(0);
            command
        };
        command.args(&self.args);
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        command
    }
}

/// Number of lines with this event in a log in text form.
pub fn events(log: &str, event: &str) -> usize {
    log.matches(&format!("event=\"{event}\"")).count()
}

/// A running program. It is killed when this value is dropped and when this process is killed.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
    status: Option<ExitStatus>,
    _watcher: Watcher,
}

impl Process {
    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file of its output.
    pub fn log_file(&self) -> &Path {
        &self.log
    }

    /// The program's output so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Number of lines with this event in the program's log.
    pub fn events(&self, event: &str) -> usize {
        events(&self.log(), event)
    }

    /// The exit status, if the program has ended.
    pub fn status(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Whether the program still runs.
    pub fn is_running(&mut self) -> bool {
        self.status().is_none()
    }

    /// The exit code, if the program has ended by itself.
    pub fn exit_code(&mut self) -> Option<i32> {
        self.status().and_then(|status| status.code())
    }

    /// Kills the program with SIGKILL and waits for its end.
    pub fn kill9(&mut self) -> Result<()> {
        if self.is_running() {
            self.child.kill().context(|| format!("kill process {}", self.pid()))?;
            self.status = Some(self.child.wait().context(|| "wait for a killed process".into())?);
        }
        Ok(())
    }

    /// Terminates the program with SIGTERM.
    pub fn terminate(&mut self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Interrupts the program with SIGINT, as Ctrl-C does.
    pub fn interrupt(&mut self) -> Result<()> {
        self.signal(Signal::INT)
    }

    /// Makes the program reload its configuration, with SIGHUP.
    pub fn hang_up(&mut self) -> Result<()> {
        self.signal(Signal::HUP)
    }

    /// Suspends the program with SIGSTOP.
    pub fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Resumes the program after [`freeze`](Self::freeze).
    pub fn thaw(&mut self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.is_running() {
            return process::signal(self.pid(), signal);
        }
        Ok(())
    }

    /// Waits for the end of the program, at most for `timeout`; none if it still runs.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while self.is_running() && Instant::now() < deadline {
            sleep(POLL);
        }
        self.status()
    }

    /// Waits for the end of the program. An error with the end of the log if it still runs after
    /// `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        self.wait_timeout(timeout).ok_or_else(|| {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(30)..].join("\n");
            Error::other(format!("process {} still runs after {timeout:?}:\n{tail}", self.pid()))
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.kill9() {
            tracing::warn!(event = "program_not_killed", %error, "could not kill a program under test");
        }
    }
}

/// The shell that kills the program if this process is killed.
#[derive(Debug)]
struct Watcher {
    process: Child,
    leash: Option<ChildStdin>,
}

impl Watcher {
    fn tell(&mut self, line: &str) {
        if let Some(leash) = &mut self.leash {
            let _ = leash.write_all(line.as_bytes());
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.tell("done\n");
        self.leash = None;
        let _ = self.process.wait();
    }
}

/// Starts a shell script that reads from a pipe until this process ends. It has a process group of its
/// own, so that a signal to the terminal's does not end it.
pub(crate) fn watching_shell(script: &str, name: &str, args: &[&Path]) -> Result<Child> {
    Command::new("sh")
        .args(["-c", script, name])
        .args(args)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context(|| format!("start the shell {name}"))
}

fn watcher() -> Result<(Child, ChildStdin)> {
    let mut process = watching_shell(WATCHER, "pgapace-watcher", &[])?;
    let leash = process.stdin.take().ok_or_else(|| Error::other("the watcher has no input"))?;
    Ok((process, leash))
}
