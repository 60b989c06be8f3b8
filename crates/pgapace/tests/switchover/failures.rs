//! A failure at each step ends in the state before.

use testbed::program::Process;
use testbed::{Cluster, wait_until};

use super::{LATE, Slots, switchover, two_way_case, until_deadline_runs_out, value};
use crate::support::{Case, Finished, PATIENCE, must, one_or_all};

/// Writes work on the publisher, and arrive.
pub(super) fn expect_before(case: &Case, process: &mut Process) {
    let database = case.publisher.name.as_str();
    let insert = "INSERT INTO orders (client, n) VALUES (-1, -1)";
    must(case.publisher.cluster.sql(database, insert));
    let count = |cluster: &Cluster| value(cluster, database, "SELECT count(*) FROM orders");
    let arrived = wait_until(PATIENCE, "the row to arrive", || {
        Ok(count(case.publisher.cluster) == count(case.subscriber.cluster))
    });
    arrived.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    let subscriber = case.subscriber.cluster;
    assert_eq!(value(subscriber, database, "SELECT count(*) FROM pgapace.switchover"), "0");
    let slots = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}_back'",
        case.tool.name
    );
    assert_eq!(value(subscriber, database, &slots), "0");
    assert!(process.is_running(), "{}", process.log());
}

/// A switchover whose `--stop-writes` waits, so that a test can break something after the checks.
pub(super) struct Held {
    pub(super) process: Process,
    pub(super) go_on: std::path::PathBuf,
    pub(super) output: std::path::PathBuf,
}

impl Held {
    pub(super) fn start(case: &Case, name: &str, args: &[&str]) -> Self {
        let (held, go_on) =
            (case.log_file(&format!("{name}-held")), case.log_file(&format!("{name}-go-on")));
        for file in [&held, &go_on] {
            let _ = std::fs::remove_file(file);
        }
        let stop = format!(
            "touch {}; while [ ! -e {} ]; do sleep 0.02; done",
            held.display(),
            go_on.display()
        );
        let output = case.log_file(&format!("{name}-switchover"));
        let late = if args.contains(&"--deadline") { &[][..] } else { &["--deadline", LATE] };
        let program = case
            .tool
            .program("switchover")
            .args(["--go", "--stop-writes", &stop, "--resume-writes", "true"])
            .args(late)
            .args(args);
        let mut process = must(program.spawn_logged(&output));
        must(wait_until(PATIENCE, "writes to be stopped", || {
            let is_held = held.exists();
            assert!(is_held || process.is_running(), "{}", process.log());
            Ok(is_held)
        }));
        Self { process, go_on, output }
    }

    pub(super) fn go_on(&self) {
        must(std::fs::write(&self.go_on, ""));
    }

    pub(super) fn finish(mut self) -> Finished {
        self.go_on();
        must(self.process.wait(PATIENCE));
        let log = must(std::fs::read_to_string(&self.output));
        Finished { code: self.process.exit_code(), stdout: log.clone(), log }
    }
}

/// SQL that breaks a step after the checks, and SQL that mends it; exit code and message.
struct Breakage {
    step: &'static str,
    args: &'static [&'static str],
    breaks: fn(&Case),
    mends: fn(&Case),
    expected: (i32, &'static str),
}

const BREAKAGES: &[Breakage] = &[
    Breakage {
        step: "added",
        args: &[],
        breaks: |case| case.publisher.sql("ALTER PUBLICATION pub ADD TABLE other"),
        mends: |case| case.publisher.sql("ALTER PUBLICATION pub DROP TABLE other"),
        expected: (6, "other"),
    },
    Breakage {
        step: "aside",
        args: &[],
        breaks: |case| {
            case.subscriber.sql(
                "SELECT pg_advisory_lock_shared(hashtext('pgapace.hand_over'), id) \
                   FROM pgapace.subscription; \
                 DELETE FROM pgapace.hand_over; \
                 INSERT INTO pgapace.hand_over (subscription, epoch, stands_aside) \
                 SELECT id, 0, false FROM pgapace.subscription",
            );
        },
        mends: |case| {
            case.subscriber.sql("DELETE FROM pgapace.hand_over; SELECT pg_advisory_unlock_all()");
        },
        expected: (8, "asks for subscription"),
    },
    Breakage {
        step: "verifying",
        args: &["--verify", "orders"],
        breaks: |case| {
            case.subscriber.sql("SET session_replication_role = replica; UPDATE orders SET n = -7");
        },
        mends: |case| case.subscriber.sql("UPDATE orders SET n = -1"),
        expected: (18, "rows differ at "),
    },
    Breakage {
        step: "sequences",
        args: &[],
        breaks: |case| {
            case.publisher.sql("SELECT setval('orders_id_seq', 1000000)");
            case.subscriber.sql("ALTER SEQUENCE orders_id_seq MAXVALUE 1000");
        },
        mends: |case| case.subscriber.sql("ALTER SEQUENCE orders_id_seq NO MAXVALUE"),
        expected: (6, "sequences that could not be set"),
    },
    Breakage {
        step: "slot",
        args: &[],
        breaks: |case| {
            case.subscriber.sql(&format!(
                "SELECT pg_create_logical_replication_slot('{}_back', 'pgoutput')",
                case.tool.name
            ));
        },
        mends: |case| {
            // The undo must not have dropped it: it was not created by the switchover.
            let drop = format!("SELECT pg_drop_replication_slot('{}_back')", case.tool.name);
            case.subscriber.sql(&drop);
        },
        expected: (3, "has a slot"),
    },
];

/// A case with a row, and with a table that is not published.
pub(super) fn breakable_case(publisher: u16, subscriber: u16) -> Case {
    let case = two_way_case(publisher, subscriber);
    case.both("CREATE TABLE other (v int)");
    case.publisher.sql("INSERT INTO orders (client, n) VALUES (-1, -1)");
    case
}

/// All sessions of the publisher's database have begun in the future now.
fn set_clock_back(case: &Case) {
    case.publisher.sql(
        "ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO true_clock; \
         CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql \
           AS 'SELECT pg_catalog.true_clock() - interval ''1 hour'''",
    );
}

#[test]
fn a_failure_of_any_step_ends_in_the_state_before() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = breakable_case(publisher, subscriber);
        let _slots = Slots(&case);
        let mut process = case.start();
        for breakage in BREAKAGES {
            let Breakage { step, args, breaks, mends, expected: (code, message) } = breakage;
            let held = Held::start(&case, step, args);
            breaks(&case);
            let failed = held.finish();
            failed.expect(*code, &[message, "Everything was undone"]);
            mends(&case);
            expect_before(&case, &mut process);
        }
        // The command itself fails; the subscriber does not follow; somebody has a transaction open.
        let args = ["--go", "--resume-writes", "true", "--stop-writes"];
        switchover(&case.tool, &[&args[..], &["exit 7"]].concat())
            .expect(3, &["--stop-writes failed", "Everything was undone"]);
        expect_before(&case, &mut process);
        let mut writer = case.publisher.connect();
        let mut open = must(writer.transaction());
        must(open.batch_execute("INSERT INTO other VALUES (1)"));
        until_deadline_runs_out(|deadline| {
            let args = [&args[..], &["true", "--deadline", deadline]].concat();
            let failed = switchover(&case.tool, &args);
            if !failed.log.contains("1 open") {
                return Some(failed.log);
            }
            failed.expect(8, &["Everything was undone"]);
            None
        });
        must(open.rollback());
        expect_before(&case, &mut process);
        let mut user = case.subscriber.connect();
        until_deadline_runs_out(|deadline| {
            let held = Held::start(&case, "behind", &["--deadline", deadline]);
            let mut blocker = must(user.transaction());
            must(blocker.batch_execute("LOCK TABLE orders IN SHARE MODE"));
            case.publisher.sql("INSERT INTO orders (client, n) VALUES (-1, -1)");
            let failed = held.finish();
            must(blocker.rollback());
            expect_before(&case, &mut process);
            if !failed.log.contains("did not catch up") {
                return Some(failed.log);
            }
            failed.expect(14, &["Everything was undone"]);
            None
        });

        // Behind the end, only what is left is done again.
        set_clock_back(&case);
        let failed = switchover(&case.tool, &["--go", "--open", "exit 3"]);
        failed.expect(3, &["--open failed", "switchover is done"]);
        let late = writer.batch_execute("INSERT INTO orders (client, n) VALUES (-1, -2)");
        assert!(late.is_err(), "a session writes although writes are stopped");
        switchover(&case.tool, &["--abort"]).expect(3, &["nothing can be undone"]);
        let done = switchover(&case.tool, &["--go", "--open", "true"]);
        done.expect(0, &[]);
        assert!(done.stdout.contains("nobody could write for"), "{}", done.stdout);
        case.stop(process);
    }
}

/// Runs the verb as soon as the session of one that was killed has ended.
pub(super) fn when_free(case: &Case, args: &[&str]) -> Finished {
    let mut last = None;
    must(wait_until(PATIENCE, "the session of the killed process to end", || {
        let finished = switchover(&case.tool, args);
        let free = !finished.log.contains("another process switches");
        last = Some(finished);
        Ok(free)
    }));
    last.expect("it was run")
}

/// The slot of the way back cannot be created in time. A second switchover is refused meanwhile.
#[test]
fn the_last_step_can_fail() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = breakable_case(publisher, subscriber);
        let _slots = Slots(&case);
        let mut process = case.start();
        // A new slot waits for open transactions.
        let mut client = case.subscriber.connect();
        let mut open = must(client.transaction());
        must(open.batch_execute("INSERT INTO other VALUES (1)"));
        until_deadline_runs_out(|deadline| last_step_fails(&case, deadline));
        must(open.rollback());
        expect_before(&case, &mut process);
        case.stop(process);
    }
}

/// Returns the log of the first switchover if its deadline ran out too early for the second one.
fn last_step_fails(case: &Case, deadline: &str) -> Option<String> {
    let database = case.publisher.name.as_str();
    let args = ["--go", "--deadline", deadline];
    let program = case.tool.program("switchover").args(args);
    let mut failed = must(program.spawn_logged(case.log_file("failed")));
    let step = "SELECT coalesce(max(step), '') FROM pgapace.switchover";
    must(wait_until(PATIENCE, "the slot", || {
        let in_step = value(case.subscriber.cluster, database, step) == "slot";
        Ok(in_step || !failed.is_running())
    }));
    let read_only = "SELECT current_setting('default_transaction_read_only')";
    let stopped = value(case.publisher.cluster, database, read_only) == "on";
    let second = switchover(&case.tool, &args);
    must(failed.wait(PATIENCE));
    let log = failed.log();
    if !second.log.contains("another process switches") {
        return Some(log);
    }
    assert!(stopped, "{log}");
    second.expect(8, &[]);
    assert_eq!(failed.exit_code(), Some(5), "{log}");
    for text in ["creating the slot of the way back", "Everything was undone"] {
        assert!(log.contains(text), "{text}: {log}");
    }
    None
}
