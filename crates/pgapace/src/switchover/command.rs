//! Commands of the user: `--stop-writes`, `--resume-writes`, `--open`.
//!
//! A command must not outlive the verb. If a user kills the verb, and `--abort` then resumes writes, a
//! command that is left over would stop them again. So a command runs in a process group of its own, which
//! a shell kills as soon as the pipe from this process ends, for any reason.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;

/// Runs its argument. Processes that the command itself leaves in the background go on after its end.
const SCRIPT: &str = r#"
exec 3<&0 </dev/null
sh -c "$1" 3<&- &
command=$!
{ cat <&3 >/dev/null; kill -KILL 0; } &
watcher=$!
exec 3<&-
wait $command
status=$?
exec 2>/dev/null
kill -KILL $watcher
exit $status
"#;
/// Between two looks whether the command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long the output of a command that has ended is waited for while nobody can write.
const WHILE_STOPPED: Duration = Duration::from_millis(50);
/// The same where nobody waits to write.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// Runs a command, until `ends` fails: then it is killed. Returns what passes on its output.
pub(super) fn run(command: &str, flag: &str, ends: &dyn Fn() -> Result<()>) -> Result<Said> {
    let failed = |error: &std::io::Error| {
        Failure::new(Class::Config, format!("cannot run the command of {flag}: {error}"))
    };
    let (mut output, mut errors) = (Relay::to(&io::stdout()), Relay::to(&io::stderr()));
    let mut child = Command::new("sh")
        .args(["-c", SCRIPT, "pgapace", command])
        .stdin(Stdio::piped())
        .stdout(output.take())
        .stderr(errors.take())
        .process_group(0)
        .spawn()
        .map_err(|e| failed(&e))?;
    let pipe = child.stdin.take();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| failed(&e))? {
            break status;
        }
        if let Err(ended) = ends() {
            drop(pipe);
            child.wait().map_err(|e| failed(&e))?;
            return Err(ended);
        }
        std::thread::sleep(LOOK_EVERY);
    };
    // What watches the command writes nothing, but it holds the output until then.
    drop(pipe);
    let said = Said { output, errors };
    match expect_success(status, flag) {
        Ok(()) => Ok(said),
        Err(failure) => {
            said.wait_shortly();
            Err(failure)
        }
    }
}

/// The output of a command that has ended, part of which may still be on its way.
#[must_use]
pub(super) struct Said {
    output: Relay,
    errors: Relay,
}

impl Said {
    /// Lets the output stand before what the verb says next, while nobody can write.
    pub(super) fn wait_shortly(self) {
        self.wait(WHILE_STOPPED);
    }

    /// The same where nobody waits to write.
    pub(super) fn wait_longer(self) {
        self.wait(AFTERWARDS);
    }

    fn wait(mut self, patience: Duration) {
        let until = Instant::now() + patience;
        self.output.wait(until);
        self.errors.wait(until);
    }
}

/// Passes on what a command writes. Nobody can write to the database until the command has ended, so a reader that stops may
/// not hold it up; unless the command writes more than a pipe takes.
struct Relay {
    input: Option<Stdio>,
    process: Option<Child>,
}

impl Relay {
    fn to(of_verb: &impl AsFd) -> Self {
        let input = output(of_verb);
        if is_file(of_verb) || is_gone(of_verb) {
            return Self { input: Some(input), process: None };
        }
        match Self::start(of_verb) {
            Ok(relay) => relay,
            // The system has refused it.
            Err(_) => Self { input: Some(input), process: None },
        }
    }

    fn start(of_verb: &impl AsFd) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let process = Command::new("cat")
            .stdin(reader)
            .stdout(of_verb.as_fd().try_clone_to_owned()?)
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { input: Some(writer.into()), process: Some(process) })
    }

    /// The output of the command.
    fn take(&mut self) -> Stdio {
        self.input.take().unwrap_or_else(Stdio::null)
    }

    /// Waits until all is passed on: not for processes that the command has left in the background, nor for a reader.
    fn wait(&mut self, until: Instant) {
        let Some(process) = &mut self.process else { return };
        while matches!(process.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Whether writes do not depend on a reader.
fn is_file(output: &impl AsFd) -> bool {
    let file = output.as_fd().try_clone_to_owned().map(File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|data| data.is_file())
}

/// Output of a command goes where that of the verb goes. Not if the terminal or the reader is gone: the write would fail,
/// and with it the command that is to resume writes.
fn output(of_verb: &impl AsFd) -> Stdio {
    if is_gone(of_verb) { Stdio::null() } else { Stdio::inherit() }
}

/// Whether nobody can read what is written here.
fn is_gone(output: &impl AsFd) -> bool {
    let mut looked = [PollFd::new(output, PollFlags::empty())];
    // A look that fails says nothing.
    let _ = poll(&mut looked, Some(&Timespec::default()));
    looked[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// The end of a command that one signal does not end, because nobody can write until it has succeeded.
pub(super) fn insisted(stop: &Shutdown, flag: &str) -> Result<()> {
    if !stop.insisted() {
        return Ok(());
    }
    let message = format!("the command of {flag} was killed after a second signal");
    Err(Failure::new(Class::Stopped, message))
}

fn expect_success(status: ExitStatus, flag: &str) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    Err(Failure::new(Class::Config, format!("the command of {flag} failed: {status}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::{is_gone, run};
    use crate::error::{Class, Failure, Result};

    fn after(millis: u64) -> impl Fn() -> Result<()> {
        let deadline = Instant::now() + Duration::from_millis(millis);
        move || match Instant::now() < deadline {
            true => Ok(()),
            false => Err(Failure::new(Class::Behind, "it is late")),
        }
    }

    #[test]
    fn the_status_of_the_command_counts() {
        assert!(run("true", "--open", &after(60_000)).is_ok());
        assert!(run("test -z \"$(cat)\"", "--open", &after(60_000)).is_ok(), "no input");
        let failure = run("exit 7", "--open", &|| Ok(())).map(drop).expect_err("it fails");
        assert!(failure.message.contains("--open failed: exit status: 7"), "{}", failure.message);
    }

    #[test]
    fn a_command_is_killed_at_the_deadline_with_what_it_started() {
        let directory = tempfile::tempdir().expect("a directory");
        let (begun, late) = (directory.path().join("begun"), directory.path().join("late"));
        let command =
            format!("touch {}; (sleep 2; touch {}) & wait", begun.display(), late.display());
        let failure =
            run(&command, "--stop-writes", &after(1000)).map(drop).expect_err("it is late");
        assert_eq!(failure.class, Class::Behind);
        assert!(begun.exists());
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!late.exists());
    }

    #[test]
    fn output_that_nobody_reads_is_known() {
        let (output, reader) = UnixStream::pair().expect("a pair");
        assert!(!is_gone(&output));
        drop(reader);
        assert!(is_gone(&output));
    }

    #[test]
    fn a_background_process_of_the_command_goes_on() {
        let directory = tempfile::tempdir().expect("a directory");
        let late = directory.path().join("late");
        let command = format!("(sleep 0.3; touch {}) >/dev/null 2>&1 &", late.display());
        assert!(run(&command, "--open", &|| Ok(())).is_ok());
        let deadline = Instant::now() + Duration::from_secs(60);
        while !late.exists() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
