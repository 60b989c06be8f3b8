//! A switchover whose verb is told to stop, by the user, a service manager, or a terminal that is gone.

use std::path::Path;
use std::time::Duration;

use testbed::program::Process;
use testbed::wait_until;

use super::failures::{breakable_case, expect_before};
use super::kills::{BLOCKADES, STEP};
use super::{LATE, Slots, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, must, one_or_all};

/// How long a verb may take to end after a signal, on a busy machine.
const PROMPT: Duration = Duration::from_secs(30);

/// Bits of `/proc/PID/status`.
const SIGHUP: u64 = 1;
const SIGTERM: u64 = 1 << 14;

/// The signals that this line of `/proc/PID/status` names.
fn signals(line: &str, status: &str) -> u64 {
    let mask = status.lines().find_map(|found| found.strip_prefix(line));
    mask.map_or(0, |mask| must(u64::from_str_radix(mask.trim(), 16)))
}

/// Sends SIGHUP, or SIGTERM if this test itself ignores SIGHUP, and so does what it starts.
fn hang_up(process: &mut Process) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if signals("SigIgn:", &status) & SIGHUP != 0 {
        must(process.terminate());
    } else {
        must(process.hang_up());
    }
}

/// A shell command that says that it runs, and waits for another file.
fn held_command(running: &Path, go_on: &Path) -> String {
    let (running, go_on) = (running.display(), go_on.display());
    format!("touch {running}; while [ ! -e {go_on} ]; do sleep 0.02; done")
}

fn start(case: &Case, log: &str, args: &[&str]) -> Process {
    must(case.tool.program("switchover").args(args).spawn_logged(case.log_file(log)))
}

fn wait_for_file(file: &Path, process: &mut Process) {
    let waited = wait_until(PATIENCE, "the command", || {
        assert!(file.exists() || process.is_running(), "{}", process.log());
        Ok(file.exists())
    });
    waited.unwrap_or_else(|error| panic!("{error}: {}", process.log()));
}

fn wait_for_signal(process: &Process) {
    must(wait_until(PATIENCE, "the signal", || Ok(process.events("stop_requested") > 0)));
}

fn expect_end(mut process: Process, code: i32, named: &[&str]) {
    must(process.wait(PROMPT));
    let log = process.log();
    assert_eq!(process.exit_code(), Some(code), "{log}");
    for text in named {
        assert!(log.contains(text), "{text}: {log}");
    }
}

const SIGNALS: [fn(&mut Process); 3] =
    [|process| must(process.interrupt()), |process| must(process.terminate()), hang_up];
const UNDONE: &[&str] = &["event=\"switchover_undone\"", "Everything was undone"];

/// Whatever the step waits for.
#[test]
fn a_signal_in_any_step_before_the_end_undoes_everything() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = breakable_case(publisher, subscriber);
        let _slots = Slots(&case);
        let mut process = case.start();
        for (blockade, signal) in BLOCKADES.iter().zip(SIGNALS.iter().cycle()) {
            let mut client = case.subscriber.connect();
            let (mut held, blocker) = blockade.reach(&case, &mut client);
            signal(&mut held.process);
            expect_end(held.process, 11, UNDONE);
            must(blocker.rollback());
            expect_before(&case, &mut process);
        }
        // In a database that is read-only meanwhile.
        let database = case.publisher.name.as_str();
        for signal in SIGNALS {
            let mut client = case.subscriber.connect();
            let mut blocker = must(client.transaction());
            // A new slot waits for open transactions.
            must(blocker.batch_execute("INSERT INTO other VALUES (1)"));
            let mut verb = start(&case, "read-only", &["--go", "--deadline", LATE]);
            must(wait_until(PATIENCE, "the step", || {
                assert!(verb.is_running(), "{}", verb.log());
                Ok(value(case.subscriber.cluster, database, STEP) == "slot")
            }));
            let read_only = "SELECT current_setting('default_transaction_read_only')";
            assert_eq!(value(case.publisher.cluster, database, read_only), "on");
            signal(&mut verb);
            expect_end(verb, 11, UNDONE);
            assert_eq!(value(case.publisher.cluster, database, read_only), "off");
            must(blocker.rollback());
            expect_before(&case, &mut process);
        }
        case.stop(process);
    }
}

#[test]
fn a_signal_before_writes_are_stopped_changes_nothing() {
    let case = breakable_case(15, 15);
    let _slots = Slots(&case);
    let mut process = case.start();
    must(wait_until(PATIENCE, "pgapace to stream", || Ok(process.events("streaming") > 0)));
    let mut client = case.subscriber.connect();
    let mut blocker = must(client.transaction());
    must(blocker.batch_execute("LOCK TABLE orders IN SHARE MODE"));
    case.publisher.sql("INSERT INTO orders (client, n) VALUES (-1, -1)");
    // The plan waits for what is not applied; or the verb before it.
    let lag = ["--go", "--max-lag", "1h", "--lag-for", "600"];
    for (args, signal) in [&["--plan", "--deadline", LATE][..], &lag].into_iter().zip(SIGNALS) {
        let mut verb = start(&case, "before", args);
        must(wait_until(PATIENCE, "the verb to handle signals", || {
            assert!(verb.is_running(), "{}", verb.log());
            let status = std::fs::read_to_string(format!("/proc/{}/status", verb.pid()));
            Ok(signals("SigCgt:", &status.unwrap_or_default()) & SIGTERM != 0)
        }));
        // Behind that it waits for the lag, and nothing tells when. Whenever it is, a signal has the same effect.
        std::thread::sleep(Duration::from_millis(500));
        assert!(verb.is_running(), "{}", verb.log());
        signal(&mut verb);
        expect_end(verb, 11, &["stopped "]);
    }
    must(blocker.rollback());
    expect_before(&case, &mut process);
    case.stop(process);
}

/// One signal does not end the command that resumes writes. Two do, and say that writes may be stopped.
#[test]
fn an_undo_is_finished_unless_the_user_insists() {
    let case = breakable_case(15, 15);
    let _slots = Slots(&case);
    let mut process = case.start();
    let file = |name: &str| case.log_file(name);
    let (resuming, go_on) = (file("resuming"), file("go-on"));
    let resume = held_command(&resuming, &go_on);
    let args = ["--go", "--deadline", LATE, "--stop-writes", "exit 7", "--resume-writes", &resume];
    let mut verb = start(&case, "insisted", &args);
    wait_for_file(&resuming, &mut verb);
    must(verb.interrupt());
    wait_for_signal(&verb);
    assert!(verb.is_running(), "{}", verb.log());
    must(verb.interrupt());
    expect_end(verb, 3, &["could not be undone", "pgapace switchover --abort undoes it"]);
    must(std::fs::remove_file(&resuming));

    // A terminal that goes may send SIGHUP more than once.
    let mut abort = start(&case, "abort", &["--abort"]);
    wait_for_file(&resuming, &mut abort);
    hang_up(&mut abort);
    wait_for_signal(&abort);
    must(abort.hang_up());
    must(std::fs::write(&go_on, ""));
    expect_end(abort, 0, &["event=\"switchover_undone\""]);
    expect_before(&case, &mut process);
    case.stop(process);
}

/// Nobody can write until the new side is open.
#[test]
fn a_signal_behind_the_end_lets_the_switchover_finish() {
    let case = two_way_case(15, 15);
    let _slots = Slots(&case);
    let process = case.start();
    let file = |name: &str| case.log_file(name);
    let (opening, go_on) = (file("opening"), file("open-go-on"));
    let open = held_command(&opening, &go_on);
    let args = ["--go", "--deadline", LATE, "--open", &open];
    let mut verb = start(&case, "killed", &args);
    wait_for_file(&opening, &mut verb);
    must(verb.terminate());
    wait_for_signal(&verb);
    assert!(verb.is_running(), "{}", verb.log());
    must(verb.terminate());
    expect_end(verb, 11, &["killed after a second signal", "The switchover is done"]);
    must(std::fs::remove_file(&opening));

    let mut verb = start(&case, "finished", &args);
    wait_for_file(&opening, &mut verb);
    hang_up(&mut verb);
    wait_for_signal(&verb);
    must(std::fs::write(&go_on, ""));
    expect_end(verb, 0, &["was switched over at", "nobody could write for"]);
    let again = switchover(&case.tool, &["--go"]);
    again.expect(0, &[]);
    assert!(again.stdout.contains("was already switched over at"), "{}", again.stdout);
    case.stop(process);
}
