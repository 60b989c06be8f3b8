//! Streaming apply: rows on the subscriber before the commit, and the conditions under which
//! pgapace abandons a stream.

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::{Trigger, each, expect_streamed, streaming_case};
use crate::support::{Case, PATIENCE, must, one_or_all};

const VERSIONS: [(u16, Trigger); 3] =
    [(15, Trigger::Size), (18, Trigger::Size), (18, Trigger::Immediate)];

pub(super) fn on_publishers(body: impl Fn(Case)) {
    for &(major, trigger) in one_or_all(&VERSIONS) {
        body(streaming_case(major, major, trigger));
    }
}

pub(super) fn rows(from: u32, count: u32) -> String {
    format!(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 6) \
         FROM generate_series({from}, {from} + {count} - 1) i"
    )
}

/// Begins a transaction on the publisher and waits until the subscriber has some of its rows, which
/// are not visible.
pub(super) fn begin(case: &Case, process: &mut Process, statements: &[&str]) -> Client {
    let mut open = case.publisher.connect();
    each(&mut open, &["BEGIN"]);
    each(&mut open, statements);
    wait_for_rows(case, process, 1);
    open
}

/// Waits until the subscriber's table has this many pages.
pub(super) fn wait_for_rows(case: &Case, process: &mut Process, pages: u32) {
    let size = format!("SELECT pg_relation_size('t') / 8192 >= {pages}");
    let applied = wait_until(PATIENCE, "rows of the open transaction", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(case.subscriber.value(&size) == "t")
    });
    applied.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
}

pub(super) fn pages(case: &Case) -> u32 {
    must(case.subscriber.value("SELECT pg_relation_size('t') / 8192").parse())
}

/// The session of the subscriber that applies a stream of this subscription.
pub(super) fn stream_session(case: &Case) -> String {
    let sql = format!(
        "SELECT a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid) \
         WHERE a.datname = '{}' AND l.relation = 't'::regclass AND l.mode = 'RowExclusiveLock' \
           AND a.application_name LIKE '%apply%'",
        case.subscriber.name
    );
    case.subscriber.rows(&sql).first().cloned().unwrap_or_else(|| "0".to_owned())
}

#[test]
fn rows_are_applied_before_the_commit() {
    on_publishers(|case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE o (id int)");
        let mut process = case.start();
        let mut open = begin(&case, &mut process, &[&rows(1, 2000)]);
        // Other transactions commit meanwhile, on the same table, too.
        case.publisher.sql("INSERT INTO o VALUES (1)");
        case.publisher.sql("INSERT INTO t VALUES (0, 'small')");
        case.publisher.sql("UPDATE t SET v = 'again' WHERE id = 0");
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.rows("SELECT * FROM t"), ["0|again"]);
        // The stream also changes rows that others inserted in between.
        each(&mut open, &[&rows(5000, 2000), "UPDATE t SET v = v || 'x' WHERE id % 3 = 0"]);
        wait_for_rows(&case, &mut process, pages(&case) + 10);
        each(&mut open, &["DELETE FROM t WHERE id % 7 = 0", "COMMIT"]);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "o"]);
        case.stop(process);
        assert_eq!(case.statistic("retries || '|' || victims"), "0|0");
        assert_eq!(case.statistic("update_missing + delete_missing"), "0");
        assert_ne!(case.statistic("groups_parallel"), "0");
        assert_eq!(case.statistic("inserts"), "4002");
        expect_streamed(&case);
    });
}

/// A rolled back subtransaction is also rolled back on the subscriber, and later changes of its
/// rows by others are not lost.
#[test]
fn rolled_back_subtransactions_are_rolled_back_on_the_subscriber() {
    on_publishers(|case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t VALUES (0, 'zero')");
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        let mut open = begin(&case, &mut process, &[&rows(1, 1000)]);
        for round in 1..=3_u32 {
            let from = round * 10_000;
            each(
                &mut open,
                &[
                    &format!("SAVEPOINT a{round}"),
                    &rows(from, 600),
                    &format!("SAVEPOINT b{round}"),
                    &rows(from + 1000, 600),
                    "UPDATE t SET v = 'undone' WHERE id = 0",
                    &rows(from + 2000, 600),
                ],
            );
            wait_for_rows(&case, &mut process, pages(&case) + 20);
            each(&mut open, &[&format!("ROLLBACK TO b{round}")]);
            case.publisher.sql(&format!("UPDATE t SET v = v || '{round}' WHERE id = 0"));
            case.wait_until_applied(&mut process);
            assert_eq!(case.subscriber.rows("SELECT id FROM t"), ["0"]);
            each(&mut open, &[&rows(from + 3000, 600)]);
            if round == 2 {
                each(&mut open, &[&format!("ROLLBACK TO a{round}")]);
            }
        }
        each(&mut open, &["COMMIT"]);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        case.stop(process);
        assert_eq!(case.subscriber.value("SELECT v FROM t WHERE id = 0"), "zero123");
        assert_eq!(case.statistic("update_missing + delete_missing"), "0");
        assert_eq!(case.statistic("inserts"), "3401");
        expect_streamed(&case);
    });
}

/// Two transactions each delete one of two equal rows, and both find the same row. The one that
/// commits first deletes it.
#[test]
fn a_stream_that_blocks_another_transaction_is_abandoned() {
    on_publishers(|case| {
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (a int); \
             ALTER TABLE n REPLICA IDENTITY FULL",
        );
        case.publisher.sql("INSERT INTO n VALUES (1), (1), (1)");
        let mut process = case.start();
        let mut open =
            begin(&case, &mut process, &["DELETE FROM n WHERE ctid = '(0,1)'", &rows(1, 1000)]);
        case.publisher.sql("DELETE FROM n WHERE ctid = '(0,2)'");
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM n"), "2");
        each(&mut open, &[&rows(5000, 1000), "COMMIT"]);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "n"]);
        case.stop(process);
        assert_ne!(case.statistic("victims"), "0");
        assert_eq!(case.statistic("update_missing + delete_missing"), "0");
    });
}

/// When a stream's session ends for any reason, the spooled transaction is applied when it commits.
#[test]
fn a_stream_that_loses_its_session_is_applied_from_the_spool() {
    on_publishers(|case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        let mut process = case.start();
        let mut open = begin(&case, &mut process, &[&rows(1, 2000)]);
        let session = stream_session(&case);
        assert_eq!(case.subscriber.value(&format!("SELECT pg_terminate_backend({session})")), "t");
        case.publisher.sql("INSERT INTO t VALUES (0, 'small')");
        each(&mut open, &[&rows(5000, 1000), "COMMIT"]);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        // The next stream has a session again.
        let mut open = case.publisher.connect();
        let before = pages(&case);
        each(&mut open, &["BEGIN", &rows(10_000, 2000)]);
        wait_for_rows(&case, &mut process, before + 10);
        each(&mut open, &["ROLLBACK"]);
        case.publisher.sql(&rows(10_000, 10));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        let log = case.stop(process);
        assert!(!log.contains("ERROR"), "{log}");
    });
}

/// A constraint violation in a stream is an error only after its commit, and then it is reported.
#[test]
fn errors_of_a_stream_are_reported_at_its_commit() {
    on_publishers(|mut case| {
        case.tool.args.push("--disable-on-error".to_owned());
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql("INSERT INTO t VALUES (1500, 'in the way')");
        let mut process = case.start();
        let mut open = begin(&case, &mut process, &[&rows(1, 2000)]);
        case.publisher.sql("INSERT INTO t VALUES (0, 'small')");
        case.wait_until_applied(&mut process);
        each(&mut open, &["ROLLBACK"]);
        let mut open = case.publisher.connect();
        each(&mut open, &["BEGIN", &rows(1, 2000)]);
        case.publisher.sql("UPDATE t SET v = 'again' WHERE id = 0");
        case.wait_until_applied(&mut process);
        each(&mut open, &["COMMIT"]);
        let status = must(process.wait(PATIENCE));
        let log = process.log();
        assert!(!status.success() && log.contains("1500"), "{log}");
        // The subscription is disabled; the error names the transaction, which can be skipped.
        case.run().expect(13, &["disabled"]);
        let lsn = log.split("LSN ").nth(1).and_then(|rest| {
            rest.split(|c: char| !c.is_ascii_hexdigit() && c != '/').next().map(str::to_owned)
        });
        let lsn = lsn.unwrap_or_else(|| panic!("no LSN in:\n{log}"));
        case.tool.finish("skip", &["--lsn", &lsn]).expect(0, &[]);
        case.tool.finish("enable", &[]).expect(0, &[]);
        case.publisher.sql("INSERT INTO t VALUES (9000, 'behind')");
        case.run_until_current();
        let seen = case.subscriber.rows("SELECT id, v FROM t ORDER BY id");
        assert_eq!(seen, ["0|again", "1500|in the way", "9000|behind"]);
        expect_streamed(&case);
    });
}
