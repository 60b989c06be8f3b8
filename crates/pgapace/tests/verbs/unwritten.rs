//! Standard output takes nothing, as a file on a full disk, or is closed.

use std::process::{Command, Output};

use crate::support::{Case, must, on_versions};

/// Runs a verb of the subscription with this redirection of the shell.
fn redirected(case: &Case, verb: &[&str], to: &str) -> (Option<i32>, String) {
    let tool = &case.tool;
    let given = ["--subscriber", &tool.subscriber, "--publisher", &tool.publisher];
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec \"$0\" \"$@\" {to}"), env!("CARGO_BIN_EXE_pgapace")]);
    let Output { status, stderr, .. } =
        must(shell.args(verb).args(given).args(["--name", &tool.name]).output());
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// The work is done, and a script that runs the verb must not take it for failed. Where the output is all, it is.
#[test]
fn a_verb_that_has_done_its_work_succeeds_and_says_so_on_standard_error() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        for (to, warns) in [("> /dev/full", true), (">&-", false)] {
            let (code, errors) = redirected(&case, &["skip", "--lsn", "none"], to);
            assert_eq!(code, Some(0), "{to}: {errors}");
            assert_eq!(errors.contains("event=\"output_not_written\""), warns, "{to}: {errors}");
            assert_eq!(errors.contains("skips nothing"), warns, "{to}: {errors}");
        }
        let (code, errors) = redirected(&case, &["status"], "> /dev/full");
        assert_eq!(code, Some(1), "{errors}");
        assert!(errors.contains("cannot write to standard output"), "{errors}");

        let run = case.start();
        for (action, code) in [("--plan", 1), ("--go", 0)] {
            let verb = ["switchover", action, "--no-back"];
            let (ended, errors) = redirected(&case, &verb, "> /dev/full");
            assert_eq!(ended, Some(code), "{action}: {errors}");
            let said = "was switched over at";
            assert_eq!(errors.contains(said), action == "--go", "{action}: {errors}");
        }
        case.subscriber.sql("INSERT INTO t VALUES (1)");
        drop(run);
    });
}
