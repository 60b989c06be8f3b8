//! Transactions that are prepared on the subscriber: acknowledged while prepared, and resolved
//! there.

use super::{
    TABLE, expect_nothing_left, is_acknowledged, notes, prepare, prepared, prepared_count, release,
    resolve, wait_until_prepared,
};
use crate::support::{Case, Database, Tool, VERSIONS, on_versions, one_or_all};
use testbed::program::events;

pub(super) fn now(case: &Case) -> String {
    case.publisher.value("SELECT pg_current_wal_lsn()")
}

#[test]
fn prepared_transactions_are_acknowledged_and_resolved_in_any_order() {
    on_versions(&VERSIONS, |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.publisher.sql("INSERT INTO t VALUES (1, 'before'), (2, 'before'), (3, 'before')");
        prepare(&case, "one", "UPDATE t SET v = 'one' WHERE id = 1");
        prepare(
            &case,
            "two",
            "UPDATE t SET v = 'two' WHERE id = 2; INSERT INTO t VALUES (20, 'two')",
        );
        prepare(&case, "three", "DELETE FROM t WHERE id = 3");
        let end = now(&case);
        case.publisher.sql("INSERT INTO t VALUES (4, 'ordinary')");
        case.run_until_current();
        assert_eq!((prepared_count(&case), notes(&case)), ("3".to_owned(), "3".to_owned()));
        assert!(is_acknowledged(&case, &end), "the slot moves on");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE v = 'before'"), "3");
        resolve(&case, "COMMIT", "two");
        // Later transactions change the same rows.
        case.publisher.sql("UPDATE t SET v = v || '!' WHERE id IN (2, 20)");
        resolve(&case, "ROLLBACK", "three");
        case.publisher.sql("UPDATE t SET v = 'not deleted' WHERE id = 3");
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert_eq!((prepared_count(&case), notes(&case)), ("1".to_owned(), "1".to_owned()));
        let mut process = case.start();
        resolve(&case, "COMMIT", "one");
        case.publisher.sql("DELETE FROM t WHERE id = 1");
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'again')");
        wait_until_prepared(&case, 1);
        resolve(&case, "COMMIT", "one");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
        case.stop(process);
    });
}

/// A transaction that only locked rows, one without published changes, and an empty identifier.
#[test]
fn prepared_transactions_without_changes() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.both("CREATE TABLE other (id int)");
        case.both(TABLE);
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t VALUES (1, 'a')");
        for end in ["COMMIT", "ROLLBACK"] {
            for sql in ["SELECT FROM t FOR UPDATE", "INSERT INTO other VALUES (1)"] {
                prepare(&case, "empty", sql);
                case.run_until_current();
                resolve(&case, end, "empty");
                case.run_until_current();
                expect_nothing_left(&case);
            }
        }
        for statement in
            ["BEGIN", "UPDATE t SET v = 'b'", "PREPARE TRANSACTION ''", "COMMIT PREPARED ''"]
        {
            case.publisher.sql(statement);
        }
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
    });
}

#[test]
fn two_phase_is_switched_while_one_is_pending() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate(TABLE);
        let off = case.tool.args.clone();
        let two_phase = format!(
            "SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{}'",
            case.tool.name
        );
        assert_eq!(case.publisher.value(&two_phase), "f");
        // Prepared before two_phase is switched on, so it is sent at its commit.
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        prepare(&case, "two", "INSERT INTO t VALUES (2, 'two')");
        case.run_until_current();
        prepared(&mut case);
        case.run_until_current();
        assert_eq!(case.publisher.value(&two_phase), "t");
        resolve(&case, "COMMIT", "one");
        prepare(&case, "three", "INSERT INTO t VALUES (3, 'three')");
        prepare(&case, "four", "INSERT INTO t VALUES (4, 'four')");
        case.run_until_current();
        assert_eq!(
            (
                prepared_count(&case).as_str(),
                case.subscriber.value("SELECT count(*) FROM t").as_str()
            ),
            ("2", "1")
        );
        case.tool.args = off;
        case.tool.args.push("--two-phase=false".to_owned());
        let log = case.run_until_current();
        if case.publisher.major() < 18 {
            assert!(events(&log, "two_phase_kept") == 1, "{log}");
            assert_eq!(case.publisher.value(&two_phase), "t");
        } else {
            assert_eq!(case.publisher.value(&two_phase), "f");
            expect_nothing_left(&case);
        }
        resolve(&case, "COMMIT", "three");
        resolve(&case, "COMMIT", "two");
        resolve(&case, "ROLLBACK", "four");
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
        prepared(&mut case);
        case.tool.args.retain(|arg| arg != "--two-phase=false");
        prepare(&case, "five", "INSERT INTO t VALUES (5, 'five')");
        case.run_until_current();
        resolve(&case, "COMMIT", "five");
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
    });
}

/// A cascade from A to B to C: a transaction prepared on B is also prepared on C.
#[test]
fn a_prepared_transaction_cascades_to_a_second_subscriber() {
    for &major in one_or_all(&[15, 18]) {
        let mut case = Case::new(major, major);
        prepared(&mut case);
        case.replicate(TABLE);
        let name = format!("{}_c", case.tool.name);
        let last = Database::create(case.publisher.cluster, &name, "");
        last.sql(TABLE);
        case.subscriber.sql("CREATE PUBLICATION pub FOR TABLE t");
        let mut next = Tool::new(case.subscriber.conninfo(), last.conninfo(), &name);
        next.args = case.tool.args.clone();
        next.run_until_current();
        for end in ["COMMIT", "ROLLBACK"] {
            prepare(&case, "one", &format!("INSERT INTO t VALUES ({}, '{end}')", end.len()));
            case.run_until_current();
            next.run_until_current();
            let prepared =
                "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()";
            assert_eq!(
                (prepared_count(&case), last.value(prepared)),
                ("1".to_owned(), "1".to_owned())
            );
            resolve(&case, end, "one");
            case.run_until_current();
            next.run_until_current();
            assert_eq!(last.value("SELECT string_agg(v, ',') FROM t"), "COMMIT");
            assert_eq!(
                (prepared_count(&case), last.value(prepared)),
                ("0".to_owned(), "0".to_owned())
            );
        }
        case.expect_equal(&["t"]);
        let drop = format!("SELECT pg_drop_replication_slot('{name}')");
        case.subscriber.sql(&drop);
    }
}

/// A session of the subscriber waits for a lock of the prepared transaction, and others wait behind
/// it. COMMIT PREPARED does not have to wait.
#[test]
fn waits_behind_a_prepared_transaction_end_with_it() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.publisher.sql("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 100) i");
        let mut process = case.start();
        prepare(&case, "one", "UPDATE t SET v = 'one' WHERE id <= 50");
        wait_until_prepared(&case, 1);
        case.publisher.sql("UPDATE t SET v = 'b' WHERE id > 50");
        let blocked = super::holder(&case, "SELECT FROM t WHERE id = 100 FOR UPDATE");
        case.publisher.sql("UPDATE t SET v = 'c' WHERE id = 100");
        resolve(&case, "COMMIT", "one");
        for id in 1..=100 {
            case.publisher.sql(&format!("UPDATE t SET v = v || 'd' WHERE id = {id}"));
        }
        release(blocked);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        case.stop(process);
    });
}

/// A new slot never sends the end of a transaction that has ended before. Copies and a release would wait for it.
fn a_rebase_forgets_them(case: &Case) {
    let gid = |name: &str| format!("{}_{name}", case.tool.name);
    for (id, name) in [(11, "eleven"), (12, "twelve")] {
        prepare(case, name, &format!("INSERT INTO t VALUES ({id}, '{name}')"));
    }
    case.run_until_current();
    case.tool.finish("rebase", &[]).expect(8, &["is prepared on the subscriber"]);
    case.tool.finish("prepared", &["--commit", &gid("eleven")]).expect(0, &[]);
    case.tool.finish("prepared", &["--rollback", &gid("twelve")]).expect(0, &[]);
    resolve(case, "ROLLBACK", "eleven");
    resolve(case, "COMMIT", "twelve");
    case.tool.finish("rebase", &[]).expect(0, &[]);
    expect_nothing_left(case);
    case.tool.finish("resync", &["t"]).expect(0, &[]);
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (13, 'later')");
    case.run_until_current();
    case.expect_equal(&["t"]);
    let connection = format!("--connection={}", case.tool.publisher);
    case.tool.finish("release", &["--dry-run", &connection]).expect(0, &[]);
}

/// A user resolves transactions with `pgapace prepared`, whether the program runs or not. The
/// publisher's COMMIT PREPARED or ROLLBACK PREPARED arrives later.
#[test]
fn transactions_that_a_user_resolves_are_not_applied_again() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        for (id, name) in [(1, "one"), (2, "two"), (3, "three"), (4, "four")] {
            prepare(&case, name, &format!("INSERT INTO t VALUES ({id}, '{name}')"));
        }
        case.run_until_current();
        let gid = |name: &str| format!("{}_{name}", case.tool.name);
        let status = case.tool.finish("status", &[]).expect(0, &[]).stdout.clone();
        assert!(status.contains(&gid("three")) && status.contains("prepared       4"), "{status}");
        case.tool.finish("prepared", &["--commit", &gid("one")]).expect(0, &[]);
        case.tool.finish("prepared", &["--rollback", &gid("two")]).expect(0, &[]);
        // It is too late for the other way.
        let late = case.tool.finish("prepared", &["--rollback", &gid("one")]);
        late.expect(3, &["is committed on the subscriber already"]);
        assert!(!late.stdout.contains("rolled back"), "{}", late.stdout);
        case.tool.finish("prepared", &["--commit", &gid("two")]).expect(5, &["is not prepared"]);
        case.tool.finish("prepared", &["--commit", &gid("nobody")]).expect(3, &["nobody"]);
        assert_eq!(case.subscriber.value("SELECT string_agg(v, ',') FROM t"), "one");
        let listed = case.tool.finish("prepared", &[]).expect(0, &[]).stdout.clone();
        for state in ["_one\" for ", ": committed", ": rolled back", ": prepared"] {
            assert!(listed.contains(state), "{listed}");
        }
        let mut process = case.start();
        case.tool.finish("prepared", &["--commit", &gid("three")]).expect(0, &[]);
        for name in ["one", "three", "four"] {
            resolve(&case, "COMMIT", name);
        }
        resolve(&case, "ROLLBACK", "two");
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["t"]);
        expect_nothing_left(&case);
        a_rebase_forgets_them(&case);
        // Dropping the subscription also ends prepared transactions, so that no locks remain.
        prepare(&case, "five", "INSERT INTO t VALUES (5, 'five')");
        case.run_until_current();
        assert_eq!(prepared_count(&case), "1");
        case.tool.finish("drop", &[]).expect(0, &[]);
        assert_eq!(prepared_count(&case), "0");
        resolve(&case, "ROLLBACK", "five");
    });
}
