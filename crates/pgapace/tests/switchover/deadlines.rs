//! Deadlines of switchovers that suit a busy machine.

use crate::support::{Finished, Tool};

/// A deadline that no busy machine exceeds: a new slot waits for open transactions of other tests, too.
pub(super) const LATE: &str = "300";
/// Deadlines that are to run out. On a busy machine the first ones are over before what a test waits for.
const DEADLINES: [&str; 3] = ["6", "25", "80"];

/// Runs the verb. One that moves writes has a late deadline, unless its arguments name another one.
pub(super) fn switchover(tool: &Tool, args: &[&str]) -> Finished {
    let moves = args.contains(&"--go") || args.contains(&"--back");
    let late = if moves && !args.contains(&"--deadline") { &["--deadline", LATE][..] } else { &[] };
    tool.finish("switchover", &[args, late].concat())
}

/// Tries with growing deadlines, until one runs out where it should. If not, the attempt returns the log of the verb.
pub(super) fn until_deadline_runs_out(mut attempt: impl FnMut(&str) -> Option<String>) {
    for deadline in DEADLINES {
        let Some(log) = attempt(deadline) else { return };
        assert!(log.contains("--deadline") && deadline != DEADLINES[2], "{deadline}: {log}");
    }
}
