//! The program under test: its command line, and the result of a verb.

use std::path::PathBuf;

use testbed::Program;
use testbed::program::Process;

use super::must;

/// A verb of the program under test, without any option.
pub(crate) fn pgapace(verb: &str) -> Program {
    executable().arg(verb)
}

/// The program under test. It ignores PostgreSQL's and its own environment variables of the caller,
/// except for the apply mode, in which all tests can run, and for PGAPACE_TEST_PROGRAM, another program to test.
pub(crate) fn executable() -> Program {
    let other = std::env::var_os("PGAPACE_TEST_PROGRAM");
    let mut program = Program::new(other.unwrap_or_else(|| env!("CARGO_BIN_EXE_pgapace").into()));
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy().into_owned();
        if name.starts_with("PG") && name != "PGAPACE_APPLY_MODE" {
            program = program.env_remove(name);
        }
    }
    program.env("NO_COLOR", "1")
}

/// Runs a program to its end.
#[track_caller]
pub(crate) fn finish(program: &Program) -> Finished {
    let output = must(program.output());
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// The result of a verb that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The exit code; none if a signal ended the program.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    /// Standard error: the log and the last error.
    pub(crate) log: String,
}

impl Finished {
    /// Asserts the exit code, and that the log contains all of these texts.
    #[track_caller]
    pub(crate) fn expect(&self, code: i32, named: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{}", self.log);
        for text in named {
            assert!(self.log.contains(text), "the log does not contain {text:?}:\n{}", self.log);
        }
        self
    }
}

/// The program with the options of one subscription. It does not reference a cluster, so that a
/// test can stop and start servers meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct Tool {
    pub(crate) publisher: String,
    pub(crate) subscriber: String,
    /// Name of the subscription and its slot.
    pub(crate) name: String,
    /// The publications, separated by commas.
    pub(crate) publications: String,
    /// Additional arguments of `run`.
    pub(crate) args: Vec<String>,
}

impl Tool {
    /// For publication `pub`.
    pub(crate) fn new(publisher: String, subscriber: String, name: &str) -> Self {
        let (name, publications) = (name.to_owned(), "pub".to_owned());
        Self { publisher, subscriber, name, publications, args: Vec::new() }
    }

    /// A verb with the options of the subscription.
    pub(crate) fn program(&self, verb: &str) -> Program {
        pgapace(verb)
            .args(["--publisher", &self.publisher])
            .args(["--subscriber", &self.subscriber])
            .args(["--name", &self.name])
            .args(["--publication", &self.publications])
            .args(&self.args)
    }

    /// Runs a verb to its end.
    #[track_caller]
    pub(crate) fn finish(&self, verb: &str, args: &[&str]) -> Finished {
        finish(&self.program(verb).args(args))
    }

    /// `run --until current` with any result.
    pub(crate) fn run(&self) -> Finished {
        self.finish("run", &["--until", "current"])
    }

    /// `run --until current` that must succeed. Returns the log.
    #[track_caller]
    pub(crate) fn run_until_current(&self) -> String {
        let finished = self.run();
        finished.expect(0, &[]);
        finished.log
    }

    /// Starts `run` with this log file.
    pub(crate) fn start(&self, log: PathBuf) -> Process {
        must(self.program("run").spawn_logged(log))
    }
}
