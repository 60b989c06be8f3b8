//! What happens on the publisher between its snapshot and the read of its rows. Meanwhile a session of the
//! subscriber that is opened between them waits in a login trigger.

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::recorded;
use crate::support::{Case, PATIENCE, must};

/// Rows that the publisher has under another file: a snapshot from before shows none of them.
const REWRITE: &str = "ALTER TABLE t ALTER v TYPE text USING v || ''";

/// Logins of sessions with this purpose wait until it is dropped.
struct HeldLogins<'c> {
    case: &'c Case,
    holder: Client,
}

impl<'c> HeldLogins<'c> {
    fn of(case: &'c Case, purpose: &str) -> Self {
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute("SELECT pg_advisory_lock(4711)"));
        case.subscriber.sql(&format!(
            "DROP EVENT TRIGGER IF EXISTS held; \
             CREATE OR REPLACE FUNCTION held() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF pg_catalog.current_setting('application_name') LIKE 'pgapace % {purpose}' THEN \
                 PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); END IF; END $$; \
             CREATE EVENT TRIGGER held ON login EXECUTE FUNCTION held()"
        ));
        Self { case, holder }
    }

    /// Starts a verb, and waits until one of its logins waits.
    fn start(&self, verb: &str, args: &[&str]) -> Process {
        let program = self.case.tool.program(verb).args(args);
        let mut process = must(program.spawn_logged(self.case.log_file(verb)));
        let sql = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                   WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objid = 4711 \
                     AND NOT l.granted";
        let waits = wait_until(PATIENCE, "a login to wait", || {
            Ok(!process.is_running() || self.case.subscriber.value(sql) != "0")
        });
        assert!(waits.is_ok() && process.is_running(), "{}", process.log());
        process
    }

    fn release(mut self) {
        must(self.holder.batch_execute("SELECT pg_advisory_unlock(4711)"));
    }
}

#[track_caller]
fn ends(mut process: Process, code: i32) -> String {
    let status = must(process.wait(PATIENCE));
    assert_eq!(status.code(), Some(code), "{}", process.log());
    process.log()
}

/// Both servers have rows 1 to 100, but for two of them.
fn damaged(case: &Case) -> Process {
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publisher.sql("INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 100) i");
    let mut process = case.start();
    case.wait_until_applied(&mut process);
    case.subscriber.sql("UPDATE t SET v = 'x' WHERE id = 5; DELETE FROM t WHERE id = 6");
    case.tool.finish("verify", &[]).expect(18, &[]);
    process
}

#[test]
fn a_table_that_is_rewritten_after_the_snapshot() {
    let case = Case::new(15, 18);
    let process = damaged(&case);
    let held = HeldLogins::of(&case, "apply");
    let repair = held.start("repair", &["--delete-extra"]);
    case.publisher.sql(REWRITE);
    held.release();
    ends(repair, 0);
    case.expect_equal(&["t"]);
    case.stop(process);

    case.subscriber.sql("UPDATE t SET v = 'x' WHERE id = 5; DELETE FROM t WHERE id = 6");
    rebase_compares_again(&case, "copy", || case.publisher.sql(REWRITE));
}

/// Loses the slot, and changes tables while a rebase opens sessions of this purpose.
fn rebase_compares_again(case: &Case, purpose: &str, change: impl FnOnce()) {
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    let held = HeldLogins::of(case, purpose);
    let rebase = held.start("rebase", &[]);
    change();
    held.release();
    let log = ends(rebase, 0);
    assert!(log.contains("table_copy_repeated"), "{log}");
    case.expect_equal(&["t"]);
}

/// Nobody has asked for the comparison of a rebase by itself: it begins again.
#[test]
fn a_table_that_is_altered_while_a_rebase_compares_it() {
    let case = Case::new(15, 18);
    let process = damaged(&case);
    case.stop(process);
    rebase_compares_again(&case, "look", || case.both("ALTER TABLE t ADD more int DEFAULT 7"));
}

/// While a repair reads, the stream waits.
#[test]
fn a_lock_of_the_publisher_ends_a_repair_and_so_does_a_signal() {
    let case = Case::new(15, 18);
    let process = damaged(&case);
    for (signal, code, named) in
        [(false, 8, "is locked on the publisher"), (true, 11, "stopped during")]
    {
        let held = HeldLogins::of(&case, "apply");
        let mut repair = held.start("repair", &[]);
        let mut locker = case.publisher.connect();
        must(locker.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE"));
        if signal {
            must(repair.interrupt());
        }
        held.release();
        let log = ends(repair, code);
        assert!(log.contains(named), "{log}");
        must(locker.batch_execute("ROLLBACK"));
    }
    assert_eq!(recorded(&case), "2");
    case.tool.finish("repair", &[]).expect(0, &[]);
    case.expect_equal(&["t"]);
    case.stop(process);
}
