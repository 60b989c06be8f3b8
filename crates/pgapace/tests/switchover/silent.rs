//! A server that does not answer while writes are stopped: packets are lost, or a backend hangs. It holds the verb up neither
//! beyond the deadline nor after a signal. Writes are resumed if the publisher answers, and `--abort` undoes the rest.

use std::time::Duration;

use testbed::program::Process;
use testbed::{Proxy, wait_until};

use super::failures::{breakable_case, expect_before, when_free};
use super::kills::{BLOCKADES, STEP};
use super::{Slots, until_deadline_runs_out, value};
use crate::support::{Case, Database, PATIENCE, must, one_or_all, signal};

/// How long a verb may take after its deadline, or after a signal, on a busy machine.
const PROMPT: Duration = Duration::from_secs(30);

/// What the verb says if it has resumed writes without the subscriber.
const RESUMED: [&str; 3] = [
    "event=\"writes_resumed\"",
    "Writes were resumed: the publisher takes writes. The rest could not be undone: ",
    "pgapace switchover --abort undoes the rest",
];

/// A case whose verbs reach the servers through proxies. The process that applies does not.
fn case_with_proxies(publisher: u16, subscriber: u16) -> (Case, [Proxy; 2], Process) {
    let mut case = breakable_case(publisher, subscriber);
    let process = case.start();
    must(wait_until(PATIENCE, "pgapace to stream", || Ok(process.events("streaming") > 0)));
    let through = |side: &Database<'_>| must(Proxy::in_front_of(side.cluster));
    let proxies = [through(&case.publisher), through(&case.subscriber)];
    case.tool.publisher = proxies[0].conninfo(&case.publisher.name);
    case.tool.subscriber = proxies[1].conninfo(&case.subscriber.name);
    (case, proxies, process)
}

fn writes_are_stopped(case: &Case) -> bool {
    let read_only = "SELECT current_setting('default_transaction_read_only')";
    value(case.publisher.cluster, &case.publisher.name, read_only) == "on"
}

/// Lets `--go` with growing deadlines reach the slot of the way back, which waits for a transaction. Then `silence` is
/// to keep a server from answering. Returns the verb, which has ended in time.
fn silent_at_slot(case: &Case, silence: impl Fn()) -> Process {
    let mut client = case.subscriber.connect();
    let mut blocker = must(client.transaction());
    must(blocker.batch_execute("INSERT INTO other VALUES (1)"));
    let mut ended = None;
    until_deadline_runs_out(|deadline| {
        let program = case.tool.program("switchover").args(["--go", "--deadline", deadline]);
        let mut verb = must(program.spawn_logged(case.log_file("silent")));
        must(wait_until(PATIENCE, "the slot", || {
            let step = value(case.subscriber.cluster, &case.publisher.name, STEP);
            Ok(step == "slot" || !verb.is_running())
        }));
        if !verb.is_running() {
            return Some(verb.log());
        }
        silence();
        let limit = Duration::from_secs(must(deadline.parse())) + PROMPT;
        let waited = verb.wait(limit);
        waited.unwrap_or_else(|error| panic!("{error}: {}", verb.log()));
        ended = Some(verb);
        None
    });
    must(blocker.rollback());
    ended.expect("a verb")
}

fn expect_said(verb: &mut Process, code: i32, named: &[&str]) {
    let log = verb.log();
    assert_eq!(verb.exit_code(), Some(code), "{log}");
    for text in named {
        assert!(log.contains(text), "{text}: {log}");
    }
    assert!(!log.contains("Everything was undone"), "{log}");
}

/// When the server answers again.
fn expect_aborted(case: &Case, process: &mut Process) {
    when_free(case, &["--abort"]).expect(0, &["event=\"switchover_undone\""]);
    assert!(!writes_are_stopped(case));
    expect_before(case, process);
}

#[test]
fn a_silent_server_ends_no_later_than_the_deadline() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let (case, [of_publisher, of_subscriber], mut process) =
            case_with_proxies(publisher, subscriber);
        let _slots = Slots(&case);

        let mut verb = silent_at_slot(&case, || of_subscriber.freeze());
        expect_said(&mut verb, 5, &RESUMED);
        expect_said(&mut verb, 5, &["event=\"silent_server\" server=\"subscriber\""]);
        assert!(!writes_are_stopped(&case));
        of_subscriber.unfreeze();
        expect_aborted(&case, &mut process);

        // What the publisher is not needed for is undone.
        let mut verb = silent_at_slot(&case, || of_publisher.hold_answers(true));
        expect_said(&mut verb, 5, &["The switchover could not be undone: publisher: "]);
        assert!(writes_are_stopped(&case));
        let slot = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}_back'",
            case.tool.name
        );
        assert_eq!(case.subscriber.value(&slot), "0");
        of_publisher.hold_answers(false);
        expect_aborted(&case, &mut process);
        case.stop(process);
    }
}

#[test]
fn a_signal_ends_a_switchover_whose_server_is_silent() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let (case, [of_publisher, of_subscriber], mut process) =
            case_with_proxies(publisher, subscriber);
        let _slots = Slots(&case);
        let draining = BLOCKADES.iter().find(|blockade| blockade.step == "draining");
        let draining = draining.expect("the step");
        let not_undone = ["The switchover could not be undone: publisher: "];
        let sides = [
            ("subscriber", &of_subscriber, &RESUMED[..]),
            ("publisher", &of_publisher, &not_undone[..]),
        ];
        for (name, proxy, said) in sides {
            let mut client = case.subscriber.connect();
            let (mut held, blocker) = draining.reach(&case, &mut client);
            proxy.hold_answers(true);
            must(held.process.terminate());
            let waited = held.process.wait(PROMPT);
            waited.unwrap_or_else(|error| panic!("{error}: {}", held.process.log()));
            expect_said(&mut held.process, 11, said);
            let silent = format!("The {name} does not answer.");
            expect_said(&mut held.process, 11, &[&silent, "event=\"silent_server\""]);
            proxy.hold_answers(false);
            must(blocker.rollback());
            expect_aborted(&case, &mut process);
        }
        case.stop(process);
    }
}

/// Its kernel acknowledges what the verb sends, and new sessions are served.
#[test]
fn a_backend_that_hangs_ends_no_later_than_the_deadline() {
    let case = breakable_case(15, 15);
    let _slots = Slots(&case);
    let mut process = case.start();
    must(wait_until(PATIENCE, "pgapace to stream", || Ok(process.events("streaming") > 0)));
    let creating = "SELECT coalesce(max(pid), 0) FROM pg_stat_activity \
        WHERE datname = current_database() AND query LIKE '%pg_create_logical_replication_slot%' \
          AND state = 'active' AND pid <> pg_backend_pid()";
    let hung = std::cell::RefCell::new(String::new());
    let mut verb = silent_at_slot(&case, || {
        must(wait_until(PATIENCE, "the backend", || Ok(case.subscriber.value(creating) != "0")));
        hung.replace(case.subscriber.value(creating));
        must(signal(&hung.borrow(), "-STOP"));
    });
    let said = verb.log();
    let stopped = writes_are_stopped(&case);
    must(signal(&hung.borrow(), "-CONT"));
    expect_said(&mut verb, 5, &["event=\"silent_server\" server=\"subscriber\""]);
    expect_said(&mut verb, 5, &RESUMED);
    assert!(!stopped, "{said}");
    expect_aborted(&case, &mut process);
    case.stop(process);
}
