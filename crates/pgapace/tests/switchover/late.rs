//! A client writes after the end message, although writes are stopped: everything is undone, and the late changes
//! are applied.

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::failures::expect_before;
use super::{Clients, LATE, Slots, expect_equal_soon, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, must, one_or_all};

/// How a late change is committed.
#[derive(Clone, Copy, Debug)]
enum Late {
    Plain,
    /// A two-phase slot has no Commit of it.
    Prepared,
    /// It stays prepared.
    OnlyPrepared,
}

impl Late {
    fn write(self, case: &Case) {
        let insert = "INSERT INTO orders (client, n) SELECT -1, count(*) FROM orders";
        let prepare = format!("BEGIN; {insert}; PREPARE TRANSACTION '{}'", case.tool.name);
        match self {
            Self::Plain => case.publisher.sql(insert),
            Self::Prepared => {
                case.publisher.sql(&prepare);
                self.commit(case);
            }
            Self::OnlyPrepared => case.publisher.sql(&prepare),
        }
    }

    fn commit(self, case: &Case) {
        case.publisher.sql(&format!("COMMIT PREPARED '{}'", case.tool.name));
    }
}

/// Where the verb is held while the late change is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The process that applies is about to stand aside: it applies the change.
    Aside,
    /// Nothing is applied any more: the change is in the slot.
    Quiet,
    /// The slot of the way back is being created, which waits for a transaction.
    Slot,
}

/// Starts the verb, and waits until it waits for the lock that `blocker` has.
fn held(case: &Case, blocker: &mut Client) -> Process {
    must(blocker.batch_execute("BEGIN; LOCK TABLE pgapace.hand_over IN SHARE ROW EXCLUSIVE MODE"));
    let commands = ["--stop-writes", "true", "--resume-writes", "true"];
    let program = case.tool.program("switchover").args(["--go", "--deadline", LATE]).args(commands);
    let mut verb = must(program.spawn_logged(case.log_file("late")));
    wait_in(case, &mut verb, "aside");
    verb
}

/// Waits until the verb waits for a lock, with this step recorded.
fn wait_in(case: &Case, verb: &mut Process, step: &str) {
    let sql = format!(
        "SELECT count(*) > 0 FROM pgapace.switchover WHERE step = '{step}' AND EXISTS \
           (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
              AND datname = current_database() AND application_name LIKE 'pgapace % control')"
    );
    let held = wait_until(PATIENCE, "the verb to wait", || {
        assert!(verb.is_running(), "{}", verb.log());
        Ok(value(case.subscriber.cluster, &case.subscriber.name, &sql) == "t")
    });
    held.unwrap_or_else(|error| panic!("{error}\n{}", verb.log()));
}

/// Waits until a statement like this of the verb waits for a lock.
pub(super) fn wait_for_lock(case: &Case, verb: &mut Process, query: &str) {
    let waits = format!(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
         AND datname = current_database() AND query LIKE '{query}' \
         AND application_name LIKE 'pgapace % control'"
    );
    let waits = wait_until(PATIENCE, "the verb to wait for a lock", || {
        assert!(verb.is_running(), "{query}: {}", verb.log());
        Ok(value(case.subscriber.cluster, &case.subscriber.name, &waits) == "t")
    });
    waits.unwrap_or_else(|error| panic!("{query}: {error}\n{}", verb.log()));
}

fn try_one(case: &Case, process: &mut Process, late: Late, at: At) {
    let what = format!("{late:?}, {at:?}");
    let mut blocker = case.subscriber.connect();
    let mut verb = held(case, &mut blocker);
    let mut second = case.subscriber.connect();
    if at == At::Slot {
        must(second.batch_execute("BEGIN; SELECT pg_current_xact_id()"));
        must(blocker.batch_execute("ROLLBACK"));
        wait_for_lock(case, &mut verb, "%_create_logical_replication_slot%");
    }
    if at == At::Quiet {
        // The next step cannot be recorded, so the record stays at the step before.
        must(second.batch_execute("BEGIN; SELECT FROM pgapace.switchover FOR UPDATE"));
        must(blocker.batch_execute("ROLLBACK"));
        wait_for_lock(case, &mut verb, "%pgapace.switchover%");
    }
    late.write(case);
    if at == At::Aside {
        expect_equal_soon(case, process);
    }
    must(blocker.batch_execute("ROLLBACK"));
    must(second.batch_execute("ROLLBACK"));
    must(verb.wait(PATIENCE));
    let log = verb.log();
    assert_eq!(verb.exit_code(), Some(8), "{what}: {log}");
    let why = match late {
        Late::OnlyPrepared => "1 prepared transactions",
        _ => "a client still writes",
    };
    assert!(log.contains(why) && log.contains("Everything was undone"), "{what}: {log}");
    if let Late::OnlyPrepared = late {
        late.commit(case);
    }
    // The process applies again, before the next switchover begins.
    Late::Plain.write(case);
    expect_equal_soon(case, process);
}

#[test]
fn a_late_change_undoes_everything_however_it_is_committed() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        for (two_phase, lates) in [
            (false, &[Late::Plain, Late::Prepared][..]),
            (true, &[Late::Plain, Late::Prepared, Late::OnlyPrepared]),
        ] {
            let mut case = two_way_case(publisher, subscriber);
            if two_phase {
                case.tool.args.push("--two-phase".to_owned());
            }
            let mut process = case.start();
            case.tool.args.clear();
            let _slots = Slots(&case);
            if !two_phase {
                try_one(&case, &mut process, Late::Plain, At::Slot);
            }
            for late in lates {
                try_one(&case, &mut process, *late, At::Quiet);
                if !matches!(late, Late::OnlyPrepared) {
                    try_one(&case, &mut process, *late, At::Aside);
                }
            }
            case.stop(process);
        }
    }
}

/// Clients go on writing, although the command has stopped writes.
#[test]
fn late_writes_undo_everything() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = two_way_case(publisher, subscriber);
        let mut process = case.start();
        let never = case.log_file("never");
        let side = case.publisher.conninfo();
        let clients = Clients::start(3, (side.clone(), side), &never, 0);
        clients.wait_for_more();
        let resumed = case.log_file("resumed");
        let resume = format!("touch {}", resumed.display());
        let failed =
            switchover(&case.tool, &["--go", "--stop-writes", "true", "--resume-writes", &resume]);
        failed.expect(8, &["a client still writes", "Everything was undone"]);
        assert!(resumed.exists());
        clients.stop();
        expect_before(&case, &mut process);
        case.stop(process);
    }
}
