//! As in PostgreSQL's tests 022 and 023: large prepared transactions.

use std::time::Duration;

use testbed::wait_until;

use super::{Trigger, each, expect_streamed, on_triggers, streaming_case};
use crate::support::{Case, PATIENCE, holds_for, must};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";

fn replicate(case: &mut Case) {
    // Half of the cases prepare on the subscriber.
    let hold = if case.publisher.major() >= 18 { "0" } else { "3600" };
    case.tool.args.extend(["--two-phase", "--two-phase-hold", hold].map(str::to_owned));
    case.replicate(TABLE);
}

/// Prepares a large transaction, half of which is rolled back.
fn prepare(case: &Case, gid: &str, from: u32) {
    let mut client = case.publisher.connect();
    let rows = |from: u32| {
        format!(
            "INSERT INTO t SELECT i, repeat(md5(i::text), 3) \
             FROM generate_series({from}, {from} + 1000) i"
        )
    };
    each(
        &mut client,
        &[
            "BEGIN",
            &rows(from),
            "SAVEPOINT s",
            &rows(from + 2000),
            "ROLLBACK TO s",
            &rows(from + 4000),
            &format!("PREPARE TRANSACTION '{}_{gid}'", case.tool.name),
        ],
    );
}

fn resolve(case: &Case, what: &str, gid: &str) {
    case.publisher.sql(&format!("{what} PREPARED '{}_{gid}'", case.tool.name));
}

#[test]
fn streamed_transactions_are_prepared_and_resolved() {
    on_triggers(|mut case| {
        replicate(&mut case);
        let mut process = case.start();
        for (number, gid) in (1..).zip(["one", "two", "three"]) {
            prepare(&case, gid, number * 10_000);
        }
        case.publisher.sql("INSERT INTO t VALUES (1, 'between')");
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.value("SELECT string_agg(v, ',') FROM t"), "between");
        resolve(&case, "COMMIT", "two");
        resolve(&case, "ROLLBACK", "one");
        case.publisher.sql("UPDATE t SET v = 'changed' WHERE id % 2 = 0");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // It is sent again, and recognised when it is resolved.
        must(process.kill9());
        case.run_until_current();
        resolve(&case, "COMMIT", "three");
        case.publisher.sql("DELETE FROM t WHERE id % 3 = 0");
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_streamed(&case);
    });
}

/// The PREPARE is not acknowledged until the changes of COMMIT PREPARED are durable. After a crash
/// the publisher would otherwise send COMMIT PREPARED without the transaction's changes.
#[test]
fn a_crash_during_commit_prepared_loses_nothing() {
    for (major, trigger) in [(15, Trigger::Size), (18, Trigger::Size), (18, Trigger::Immediate)] {
        let mut case = streaming_case(major, major, trigger);
        replicate(&mut case);
        let mut process = case.start();
        prepare(&case, "one", 1000);
        each(
            &mut case.publisher.connect(),
            &[
                "BEGIN",
                "INSERT INTO t VALUES (-1, 'small')",
                &format!("PREPARE TRANSACTION '{}_small'", case.tool.name),
            ],
        );
        // The transactions between them are applied and durable.
        case.publisher.sql("INSERT INTO t VALUES (1, 'blocked')");
        case.wait_until_applied(&mut process);
        let mut holder = case.subscriber.connect();
        each(&mut holder, &["BEGIN", "SELECT FROM t WHERE id = 1 FOR UPDATE"]);
        case.publisher.sql("UPDATE t SET v = 'waits' WHERE id = 1");
        let blocked = case.publisher.value("SELECT pg_current_wal_flush_lsn()");
        resolve(&case, "COMMIT", "one");
        resolve(&case, "COMMIT", "small");
        let waits = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND wait_event_type = 'Lock'",
            case.subscriber.name
        );
        must(wait_until(PATIENCE, "apply to wait", || Ok(case.subscriber.value(&waits) == "1")));
        // After an acknowledgement the publisher would not send the transaction again.
        let acknowledged = format!(
            "SELECT confirmed_flush_lsn > '{blocked}' FROM pg_replication_slots WHERE slot_name = '{}'",
            case.tool.name
        );
        let time = Duration::from_secs(3);
        must(holds_for(time, "unacknowledged", || Ok(case.publisher.value(&acknowledged) == "f")));
        must(process.kill9());
        each(&mut holder, &["COMMIT"]);
        case.run_until_current();
        case.expect_equal(&["t"]);
    }
}

/// A transaction that only locked rows has no changes to send, but some publishers send its end.
#[test]
fn prepared_transactions_without_changes_are_resolved() {
    for (major, trigger) in [(15, Trigger::Size), (18, Trigger::Size)] {
        let mut case = streaming_case(major, major, trigger);
        replicate(&mut case);
        case.publisher.sql("INSERT INTO t VALUES (1, 'a')");
        let name = case.tool.name.clone();
        for (gid, end) in [("one", "COMMIT"), ("two", "ROLLBACK")] {
            each(
                &mut case.publisher.connect(),
                &[
                    "BEGIN",
                    "SELECT FROM t FOR UPDATE",
                    &format!("PREPARE TRANSACTION '{name}_{gid}'"),
                ],
            );
            resolve(&case, end, gid);
        }
        case.publisher.sql("INSERT INTO t VALUES (2, 'b')");
        case.run_until_current();
        case.expect_equal(&["t"]);
    }
}
