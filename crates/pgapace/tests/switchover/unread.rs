//! A switchover whose output nobody reads: its terminal was stopped with Ctrl-S, or what collects it hangs.

use testbed::wait_until;

use super::{LATE, Slots, two_way_case, value};
use crate::support::{PATIENCE, UnreadPipe, must, wait_for_event};

#[test]
fn output_that_nobody_reads_keeps_no_writes_stopped() {
    let case = two_way_case(15, 15);
    let _slots = Slots(&case);
    let database = case.publisher.name.as_str();
    let read_only = |cluster| value(cluster, database, "SHOW default_transaction_read_only");
    let mut process = case.start();
    let start = |output: &UnreadPipe, args: &[&str]| {
        let program = case.tool.program("switchover").args(["--deadline", LATE]).args(args);
        must(program.spawn_logged(output.path()))
    };

    let mut output = must(UnreadPipe::full(&case.log_file("undone")));
    let stop = ["--stop-writes", "echo stopping; exit 7", "--resume-writes", "echo resuming"];
    let mut verb = start(&output, &[&["--go"], &stop[..]].concat());
    assert!(verb.wait_timeout(PATIENCE).is_some(), "it still runs");
    assert_eq!(verb.exit_code(), Some(3), "{:?}", output.read());
    let undone = "SELECT count(*) FROM pgapace.switchover";
    assert_eq!(value(case.subscriber.cluster, database, undone), "0");

    let mut output = must(UnreadPipe::full(&case.log_file("done")));
    let mut verb = start(&output, &["--go", "--verify", "all", "--open", "echo clients move"]);
    must(wait_for_event(&mut process, "applies_way_back", PATIENCE));
    assert_eq!(read_only(case.publisher.cluster), "on");
    assert_eq!(read_only(case.subscriber.cluster), "off");
    // Then the reader goes on.
    let lines = ["clients move", "was switched over at", "nobody could write for", "is applied"];
    let mut said = String::new();
    let waited = wait_until(PATIENCE, "all lines", || {
        said.push_str(&output.read()?);
        Ok(lines.iter().all(|line| said.contains(line)))
    });
    waited.unwrap_or_else(|error| panic!("{error}: {said}"));
    assert!(verb.wait_timeout(PATIENCE).is_some(), "it still runs");
    assert_eq!(verb.exit_code(), Some(0), "{said}");
    case.stop(process);
}
