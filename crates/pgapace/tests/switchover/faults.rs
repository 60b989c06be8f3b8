//! A party ends in each step, in both directions: the switchover ends in the state before or after, the
//! verb tells the truth, and running it again or `--abort` finishes it.
//!
//! A trigger on `pgapace.switchover` holds the verb while it records a step: all steps before are done then.

use std::time::Duration;

use testbed::program::Process;
use testbed::{Stop, wait_until};

use super::arena::{Arena, DB, Hold, Side};
use super::expected::{FAULTS, Fault, STEPS, Said, expected};
use super::{Clients, LATE, expect_there, rows, value};
use crate::support::{PATIENCE, long, must};

/// Starts the verb, and waits until it is held. Servers that stay away are waited for until its deadline, which
/// is short for that: on a busy machine it may be over before the step.
fn start_held(arena: &mut Arena, fault: Fault, to: Side) -> Process {
    let mut deadlines =
        if fault.lasts() { vec!["5", "15", "50", "150"] } else { vec![LATE] }.into_iter();
    loop {
        let deadline = deadlines.next().expect("another deadline");
        let log = arena.log("switchover");
        let program = arena.verb_tool(fault).program("switchover").args(arena.arguments());
        let mut verb = must(program.args(["--deadline", deadline]).spawn_logged(log));
        if Hold::wait(arena.cluster(to), &mut verb) {
            return verb;
        }
        let log = verb.log();
        assert!(log.contains("--deadline") && deadlines.len() > 0, "the verb ended:\n{log}");
    }
}

/// One fault in one step of one direction.
fn try_one(arena: &mut Arena, fault: Fault, step: &str, round: usize) {
    let what = format!("{fault:?} in {step} from {:?}", arena.side);
    println!("{what}, after {:?}", arena.begun.elapsed());
    let (from, to) = (arena.side, arena.side.other());
    let mut hold = Hold::install(arena.cluster(to), step);
    let mut verb = start_held(arena, fault, to);
    match fault {
        Fault::VerbKilled => {
            must(verb.kill9());
            let left = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                        AND application_name LIKE 'pgapace % control'";
            must(wait_until(PATIENCE, "the verb's session to end", || {
                Ok(value(arena.cluster(to), DB, left) == "0")
            }));
        }
        Fault::VerbKilledAfterSending => must(verb.kill9()),
        Fault::ProcessKilled => must(arena.process.kill9()),
        Fault::SourceStops => must(arena.cluster_mut(from).restart(Stop::Immediate)),
        Fault::SourceStaysAway => must(arena.cluster_mut(from).stop(Stop::Immediate)),
        Fault::TargetStops => {
            must(arena.cluster_mut(to).stop(Stop::Immediate));
            must(arena.cluster_mut(to).start());
        }
        Fault::TargetStaysAway => must(arena.cluster_mut(to).stop(Stop::Immediate)),
        Fault::SourceSilent => arena.proxy(from).freeze(),
        Fault::TargetSilent => arena.proxy(to).freeze(),
    }
    hold.release();
    if let Some(Said { codes, text }) = expected(fault, step) {
        let ended = verb.wait(PATIENCE);
        let log = verb.log();
        ended.unwrap_or_else(|error| panic!("{what}: {error}\n{log}"));
        assert!(codes.contains(&verb.exit_code().unwrap_or(-1)), "{what}: {log}");
        assert!(log.contains(text), "{what}: no {text:?} in {log}");
        // It must not say two things.
        let undone = log.contains("Everything was undone");
        assert!(!undone || !log.contains("could not be undone"), "{what}: {log}");
    }
    for side in [from, to] {
        arena.proxy(side).unfreeze();
        if !arena.cluster(side).is_running() {
            must(arena.cluster_mut(side).start());
        }
    }
    arena.ensure_process();
    settle(arena, &what, round);
    Hold::remove(arena.cluster(to));
    arena.expect_alive(&what);
}

/// Ends what was interrupted: with `--abort`, or with the same command again.
fn settle(arena: &mut Arena, what: &str, round: usize) {
    let to = arena.side.other();
    // A statement of a killed verb may be under way still. Its session holds the lock of the switchover.
    let locks =
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1885827959";
    let ended = || Ok(value(arena.cluster(to), DB, locks) == "0");
    must(wait_until(PATIENCE, "the session of a killed verb to end", ended));
    if round.is_multiple_of(2) || arena.recorded(to).is_empty() {
        let aborted = arena.verb_when_free(&["--abort"]);
        let after = ["ended", "opened"].contains(&arena.recorded(to).as_str());
        // It names what has ended last: this switchover, or the one before, which led here.
        let last = if after { to } else { arena.side };
        let name = if last == Side::New { "shop" } else { "shop_back" };
        let complete =
            aborted.log.contains(&format!("{name} is switched over: nothing can be undone"));
        assert_eq!(aborted.code, Some(if complete { 3 } else { 0 }), "{what}: {aborted:?}");
        assert!(complete || !after, "{what}: {aborted:?}");
        if !after {
            return;
        }
    }
    let done = arena.switch();
    assert_eq!(done.code, Some(0), "{what}: {done:?}\n{}", arena.process.log());
    arena.side = to;
}

/// One fault at any moment: before the first step, in a step, while the process turns round.
fn try_any_moment(arena: &mut Arena, random: &mut fastrand::Rng, round: usize) {
    let fault = random.choice(FAULTS).expect("a fault");
    let delay = Duration::from_millis(random.u64(0..3500));
    let what = format!("{fault:?} after {delay:?} from {:?}", arena.side);
    println!("{what}, after {:?}", arena.begun.elapsed());
    let (from, to) = (arena.side, arena.side.other());
    let log = arena.log("switchover");
    let program = arena.verb_tool(fault).program("switchover").args(arena.arguments());
    let mut verb = must(program.args(["--deadline", "60"]).spawn_logged(log));
    // The fault comes at this moment.
    std::thread::sleep(delay);
    match fault {
        Fault::VerbKilled | Fault::VerbKilledAfterSending if verb.is_running() => {
            must(verb.kill9());
        }
        Fault::VerbKilled | Fault::VerbKilledAfterSending => {}
        Fault::ProcessKilled => must(arena.process.kill9()),
        Fault::SourceStops | Fault::SourceStaysAway => {
            must(arena.cluster_mut(from).restart(Stop::Immediate));
        }
        Fault::TargetStops | Fault::TargetStaysAway => {
            must(arena.cluster_mut(to).restart(Stop::Immediate));
        }
        Fault::SourceSilent | Fault::TargetSilent => {
            let side = if fault == Fault::SourceSilent { from } else { to };
            arena.proxy(side).freeze();
            // Before writes are stopped, nothing limits the silence.
            std::thread::sleep(Duration::from_secs(3));
            arena.proxy(side).unfreeze();
        }
    }
    let ended = verb.wait(PATIENCE);
    let log = verb.log();
    ended.unwrap_or_else(|error| panic!("{what}: {error}\n{log}"));
    arena.ensure_process();
    let recorded = arena.recorded(to);
    let after = ["ended", "opened"].contains(&recorded.as_str());
    match verb.exit_code() {
        Some(0) => {
            assert!(after, "{what}: {recorded:?}: {log}");
            arena.side = to;
        }
        code => {
            let undone = log.contains("Everything was undone");
            assert!(!undone || recorded.is_empty(), "{what}: {recorded:?}: {log}");
            let again = log.contains("The same command again opens the");
            assert!(!again || recorded == "ended", "{what}: {recorded:?}: {log}");
            // It has said something of this kind, or had not begun.
            let said = undone || again || log.contains("could not be undone");
            assert!(code.is_none() || said || recorded.is_empty(), "{what}: {recorded:?}: {log}");
            settle(arena, &what, round);
        }
    }
    arena.expect_alive(&what);
}

fn run(publisher: u16, subscriber: u16, faults: &[(Fault, &str)]) {
    let mut arena = Arena::start(publisher, subscriber);
    // The schema of pgapace is on both sides then.
    arena.go_to(Side::New);
    arena.go_to(Side::Old);
    let (old, new) = (arena.cluster(Side::Old).conninfo(DB), arena.cluster(Side::New).conninfo(DB));
    let clients = Clients::start(2, (old, new), &arena.moved(), 0);
    clients.wait_for_more();
    let directions = if long() { vec![Side::Old, Side::New] } else { vec![] };
    for (number, (fault, step)) in faults.iter().enumerate() {
        if directions.is_empty() {
            // Whichever side has writes.
            try_one(&mut arena, *fault, step, number);
        }
        for side in &directions {
            arena.go_to(*side);
            try_one(&mut arena, *fault, step, number);
        }
        expect_there(arena.cluster(arena.side), DB, &clients.known());
    }
    let mut random = fastrand::Rng::with_seed(u64::from(publisher * 100 + subscriber));
    for round in 0..if long() { 60 } else { 1 } {
        try_any_moment(&mut arena, &mut random, round);
        expect_there(arena.cluster(arena.side), DB, &clients.known());
    }
    clients.wait_for_more();
    let acknowledged = clients.stop();
    expect_there(arena.cluster(arena.side), DB, &acknowledged);
    arena.expect_alive("the end");
    let here = rows(arena.cluster(Side::Old), DB);
    assert_eq!(here, rows(arena.cluster(Side::New), DB));
    let mut once = here.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), here.len(), "a row twice");
    must(arena.process.terminate());
    must(arena.process.wait(PATIENCE));
    println!("{publisher} to {subscriber}: all faults took {:?}", arena.begun.elapsed());
}

/// All faults in all steps, in the long form only.
fn run_all(publisher: u16, subscriber: u16) {
    if !long() {
        return;
    }
    let all: Vec<_> =
        STEPS.iter().flat_map(|step| FAULTS.iter().map(move |fault| (*fault, *step))).collect();
    run(publisher, subscriber, &all);
}

#[test]
fn a_fault_in_any_step_ends_before_or_after() {
    if long() {
        return run_all(15, 18);
    }
    let faults = [
        (Fault::VerbKilledAfterSending, "ended"),
        (Fault::TargetStops, "slot"),
        (Fault::SourceStops, "draining"),
        (Fault::ProcessKilled, "aside"),
        (Fault::VerbKilled, "opened"),
        (Fault::TargetStaysAway, "opened"),
        (Fault::TargetSilent, "ended"),
    ];
    run(15, 18, &faults);
}

#[test]
fn a_fault_in_any_step_of_15() {
    run_all(15, 15);
}

#[test]
fn a_fault_in_any_step_of_18() {
    run_all(18, 18);
}

/// The old side is away when its slot is to be dropped, in the long form in both directions. Nobody repeats the verb: the next one
/// that needs a slot of that name drops it.
#[test]
fn a_slot_that_was_left_keeps_no_writes_from_moving() {
    let mut arena = Arena::start(15, 18);
    for _ in 0..if long() { 2 } else { 1 } {
        let (from, to) = (arena.side, arena.side.other());
        let mut hold = Hold::install(arena.cluster(to), "opened");
        let mut verb = start_held(&mut arena, Fault::SourceStaysAway, to);
        must(arena.cluster_mut(from).stop(Stop::Immediate));
        hold.release();
        must(verb.wait(PATIENCE));
        let log = verb.log();
        assert_eq!(verb.exit_code(), Some(0), "{log}");
        assert!(log.contains("event=\"ended_slot_left\""), "{log}");
        must(arena.cluster_mut(from).start());
        Hold::remove(arena.cluster(to));
        arena.side = to;
        arena.expect_alive("a slot was left");
    }
    let (from, to) = (arena.side, arena.side.other());
    arena.go_to(to);
    arena.expect_alive("the end");
    for (side, slots) in [(from, "0"), (to, "1")] {
        let sql = "SELECT count(*) FROM pg_replication_slots";
        assert_eq!(value(arena.cluster(side), DB, sql), slots, "{side:?}");
    }
    must(arena.process.terminate());
    must(arena.process.wait(PATIENCE));
}
