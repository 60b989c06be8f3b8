//! Somebody or something ends a party in each step, in both directions: the switchover ends in the state
//! before or after, what the verb says is true, and running it again or `--abort` finishes it.
//!
//! A trigger on `pgapace.switchover` holds the verb while it records a step: all steps before are done then.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Cluster, Pair, Stop, wait_until};

use super::{Clients, DDL, expect_there, rows, value};
use crate::faults::site::long;
use crate::support::{Finished, PATIENCE, Tool, must};

const DB: &str = "postgres";

/// The side that takes writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Old,
    New,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Old => Self::New,
            Self::New => Self::Old,
        }
    }
}

/// What happens while the verb records a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The verb is killed; what it has sent has no effect.
    VerbKilled,
    /// The verb is killed; what it has sent takes effect.
    VerbKilledAfterSending,
    /// The process that applies is killed.
    ProcessKilled,
    /// The server from which writes move stops at once, and starts again.
    SourceStops,
    /// The server to which writes move does so.
    TargetStops,
    /// The same, but they stay away until the verb has given up.
    SourceStaysAway,
    TargetStaysAway,
}

const FAULTS: [Fault; 7] = [
    Fault::VerbKilled,
    Fault::VerbKilledAfterSending,
    Fault::ProcessKilled,
    Fault::SourceStops,
    Fault::TargetStops,
    Fault::SourceStaysAway,
    Fault::TargetStaysAway,
];

const STEPS: [&str; 8] =
    ["stopping", "draining", "aside", "verifying", "sequences", "slot", "ended", "opened"];

/// What the verb says: exit codes and a text. No code is that of a verb that was killed.
struct Said {
    codes: &'static [i32],
    text: &'static str,
}

/// What is true after this fault in this step.
fn expected(fault: Fault, step: &str) -> Option<Said> {
    let place = STEPS.iter().position(|one| *one == step).expect("a step");
    let before = |name: &str| place < STEPS.iter().position(|one| *one == name).expect("a step");
    const UNDONE: &str = "Everything was undone";
    const DONE: &str = "event=\"subscription_switched_over\"";
    Some(match fault {
        Fault::VerbKilled | Fault::VerbKilledAfterSending => return None,
        // Behind the hand-over nobody needs the process.
        Fault::ProcessKilled if before("verifying") => Said { codes: &[8, 14, 16], text: UNDONE },
        // Behind the look for late changes nobody needs the server from which writes move.
        // Without it the process that applies may be missed first.
        Fault::SourceStops if before("slot") => Said { codes: &[4, 8, 16], text: UNDONE },
        Fault::ProcessKilled | Fault::SourceStops => Said { codes: &[0], text: DONE },
        Fault::TargetStops if before("opened") => Said { codes: &[5], text: UNDONE },
        Fault::TargetStops => Said { codes: &[0], text: DONE },
        Fault::SourceStaysAway if before("slot") => {
            Said { codes: &[4, 8, 16], text: "could not be undone" }
        }
        Fault::SourceStaysAway => Said { codes: &[0], text: "event=\"ended_slot_left\"" },
        Fault::TargetStaysAway if before("opened") => {
            Said { codes: &[5], text: "could not be undone" }
        }
        Fault::TargetStaysAway => {
            Said { codes: &[5], text: "The same command again opens the new side" }
        }
    })
}

/// Two servers, clients that write to the side that is open, and the process that applies.
struct Arena {
    pair: Pair,
    tool: Tool,
    directory: tempfile::TempDir,
    process: Process,
    side: Side,
    number: u32,
    begun: Instant,
}

impl Arena {
    fn start(publisher: u16, subscriber: u16) -> Self {
        let begun = Instant::now();
        let pair = must(Pair::start(publisher, subscriber));
        for cluster in [&pair.publisher, &pair.subscriber] {
            must(cluster.sql(DB, DDL));
        }
        must(pair.publisher.sql(DB, "CREATE PUBLICATION pub FOR TABLE orders"));
        must(pair.subscriber.sql(DB, "CREATE PUBLICATION pgapace_back FOR TABLE orders"));
        let (there, here) = (pair.publisher.conninfo(DB), pair.subscriber.conninfo(DB));
        let tool = Tool::new(there, here, "shop");
        let directory = must(tempfile::tempdir());
        let process = tool.start(directory.path().join("run-0.log"));
        let arena = Self { pair, tool, directory, process, side: Side::Old, number: 0, begun };
        must(wait_until(PATIENCE, "pgapace to stream", || {
            Ok(arena.process.events("streaming") > 0)
        }));
        arena
    }

    fn cluster(&self, side: Side) -> &Cluster {
        match side {
            Side::Old => &self.pair.publisher,
            Side::New => &self.pair.subscriber,
        }
    }

    fn cluster_mut(&mut self, side: Side) -> &mut Cluster {
        match side {
            Side::Old => &mut self.pair.publisher,
            Side::New => &mut self.pair.subscriber,
        }
    }

    /// The file that leads clients to the new side.
    fn moved(&self) -> PathBuf {
        self.directory.path().join("moved")
    }

    fn log(&mut self, name: &str) -> PathBuf {
        self.number += 1;
        self.directory.path().join(format!("{name}-{}.log", self.number))
    }

    /// The command that moves writes to the other side.
    fn arguments(&self) -> Vec<String> {
        let moved = self.moved();
        let (action, open) = match self.side {
            Side::Old => ("--go", format!("touch {}", moved.display())),
            Side::New => ("--back", format!("rm -f {}", moved.display())),
        };
        [action, "--open", &open, "--verify", "all"].map(str::to_owned).to_vec()
    }

    fn verb(&self, args: &[&str]) -> Finished {
        self.tool.finish("switchover", args)
    }

    /// The same, as soon as sessions of a killed verb have ended and the process applies again.
    fn verb_when_free(&self, args: &[&str]) -> Finished {
        let mut last = None;
        let free = wait_until(PATIENCE, "the verb", || {
            let finished = self.verb(args);
            let busy = ["another process switches", "no process applies", "has no subscription"];
            let free = !busy.iter().any(|text| finished.log.contains(text));
            last = Some(finished);
            Ok(free)
        });
        let last = last.expect("it was run");
        free.unwrap_or_else(|error| panic!("{error}: {last:?}\n{}", self.process.log()));
        last
    }

    fn switch(&self) -> Finished {
        let arguments = self.arguments();
        let arguments = arguments.iter().map(String::as_str);
        self.verb_when_free(&arguments.chain(["--deadline", "300"]).collect::<Vec<_>>())
    }

    /// The recorded step, or nothing.
    fn recorded(&self, to: Side) -> String {
        let name = if to == Side::New { "shop" } else { "shop_back" };
        let sql = format!(
            "SELECT coalesce((SELECT w.step FROM pgapace.switchover w \
               JOIN pgapace.subscription s ON s.id = w.subscription WHERE s.name = '{name}'), '')"
        );
        value(self.cluster(to), DB, &sql)
    }

    fn ensure_process(&mut self) {
        if !self.process.is_running() {
            let log = self.log("run");
            self.process = self.tool.start(log);
        }
    }

    /// Moves writes to this side, without a fault.
    fn go_to(&mut self, side: Side) {
        if self.side != side {
            let done = self.switch();
            done.expect(0, &[]);
            self.side = side;
        }
    }

    /// Writes work on this side, and arrive at the other one.
    fn expect_alive(&mut self, what: &str) {
        self.ensure_process();
        self.number += 1;
        let (here, there) = (self.cluster(self.side), self.cluster(self.side.other()));
        let read_only = "SELECT current_setting('default_transaction_read_only')";
        assert_eq!(value(here, DB, read_only), "off", "{what}");
        let mark = -i64::from(self.number);
        let insert = format!("INSERT INTO orders (client, n) VALUES (-1, {mark})");
        must(here.sql(DB, &insert));
        let arrived = format!("SELECT count(*) FROM orders WHERE client = -1 AND n = {mark}");
        let waited =
            wait_until(PATIENCE, "a row to arrive", || Ok(value(there, DB, &arrived) == "1"));
        waited.unwrap_or_else(|error| panic!("{what}: {error}\n{}", self.process.log()));
    }
}

/// Keeps a verb in the statement that records a step.
struct Hold {
    holder: Option<Client>,
}

impl Hold {
    const INSTALL: &'static str = "CREATE OR REPLACE FUNCTION pgapace.hold() RETURNS trigger \
         LANGUAGE plpgsql AS $$ BEGIN \
             IF EXISTS (SELECT FROM public.held_step h WHERE h.step = NEW.step) \
           THEN PERFORM pg_catalog.pg_advisory_xact_lock(7, 7); END IF; RETURN NEW; END $$; \
         CREATE TABLE IF NOT EXISTS public.held_step (step text); TRUNCATE public.held_step; \
         DROP TRIGGER IF EXISTS hold ON pgapace.switchover; \
         CREATE TRIGGER hold BEFORE INSERT OR UPDATE ON pgapace.switchover \
           FOR EACH ROW EXECUTE FUNCTION pgapace.hold(); \
         ALTER TABLE pgapace.switchover ENABLE ALWAYS TRIGGER hold; \
         SELECT pg_advisory_lock(7, 7);";

    fn install(cluster: &Cluster, step: &str) -> Self {
        let mut holder = must(cluster.connect(DB));
        must(holder.batch_execute("SET default_transaction_read_only = off"));
        must(holder.batch_execute(Self::INSTALL));
        must(holder.batch_execute(&format!("INSERT INTO public.held_step VALUES ('{step}')")));
        Self { holder: Some(holder) }
    }

    /// Waits until the verb is held. Returns whether it is, and has not ended before.
    fn wait(cluster: &Cluster, verb: &mut Process) -> bool {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                   AND classid = 7 AND objid = 7";
        let held = || value(cluster, DB, sql) == "1";
        let waited =
            wait_until(PATIENCE, "the verb to be held", || Ok(!verb.is_running() || held()));
        waited.unwrap_or_else(|error| panic!("{error}\n{}", verb.log()));
        verb.is_running()
    }

    /// The verb goes on, and is held no more.
    fn release(&mut self) {
        self.holder = None;
    }

    /// After the server has started again.
    fn remove(cluster: &Cluster) {
        let mut client = must(cluster.connect(DB));
        must(client.batch_execute("SET default_transaction_read_only = off"));
        must(client.batch_execute("TRUNCATE public.held_step"));
    }
}

/// Starts the verb, and waits until it is held. Servers that stay away are waited for until its deadline, which
/// is short for that: on a busy machine it may be over before the step.
fn start_held(arena: &mut Arena, fault: Fault, to: Side) -> Process {
    let short = matches!(fault, Fault::SourceStaysAway | Fault::TargetStaysAway);
    let mut deadlines = if short { vec!["5", "15", "50", "150"] } else { vec!["300"] }.into_iter();
    loop {
        let deadline = deadlines.next().expect("another deadline");
        let log = arena.log("switchover");
        let program = arena.tool.program("switchover").args(arena.arguments());
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
    // A statement of a killed verb may be under way still.
    std::thread::sleep(Duration::from_millis(200));
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
    // Only the end of the verb was interrupted, and the process has turned round.
    let is_back = arena.side == Side::New && done.log.contains("Writes are on the publisher");
    assert!(done.code == Some(0) || is_back, "{what}: {done:?}\n{}", arena.process.log());
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
    let program = arena.tool.program("switchover").args(arena.arguments());
    let mut verb = must(program.args(["--deadline", "60"]).spawn_logged(log));
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
            let again = log.contains("The same command again opens the new side");
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
