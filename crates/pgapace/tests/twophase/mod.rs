//! Prepared transactions: held from PREPARE and applied at COMMIT PREPARED, or prepared on the
//! subscriber, too.

mod catching_up;
mod crashes;
mod durable;
mod ends;
mod held;
mod left_out;
mod places;
mod restored;
mod row_filters;
mod skipped;
mod synchronous;
mod undecodable;

use testbed::postgres::Client;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";
const CONFIRMED: &str = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = ";

/// Holds transactions longer than any test takes.
fn held(case: &mut Case) {
    case.tool.args.extend(["--two-phase", "--two-phase-hold", "3600"].map(str::to_owned));
}

/// Prepares transactions on the subscriber at once.
fn prepared(case: &mut Case) {
    case.tool.args.extend(["--two-phase", "--two-phase-hold", "0"].map(str::to_owned));
}

/// Number of prepared transactions on the subscriber.
fn prepared_count(case: &Case) -> String {
    case.subscriber
        .value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()")
}

fn wait_until_prepared(case: &Case, number: u32) {
    let there = || Ok(prepared_count(case) == number.to_string());
    must(wait_until(PATIENCE, "transactions to be prepared on the subscriber", there));
}

fn wait_until_value(case: &Case, sql: &str, value: &str) {
    must(wait_until(PATIENCE, sql, || Ok(case.subscriber.value(sql) == value)));
}

/// Checks that no prepared transaction and no record of one remains.
#[track_caller]
fn expect_nothing_left(case: &Case) {
    assert_eq!((prepared_count(case).as_str(), notes(case).as_str()), ("0", "0"));
}

fn notes(case: &Case) -> String {
    case.subscriber.value("SELECT count(*) FROM pgapace.prepared")
}

fn resolve(case: &Case, what: &str, name: &str) {
    case.publisher.sql(&format!("{what} PREPARED '{}_{name}'", case.tool.name));
}

/// Whether the slot has advanced to this position of the publisher.
fn is_acknowledged(case: &Case, lsn: &str) -> bool {
    let sql = format!("SELECT ({CONFIRMED}'{}') >= '{lsn}'::pg_lsn", case.tool.name);
    case.publisher.value(&sql) == "t"
}

/// Opens a session of the subscriber and runs `sql` in a transaction that stays open.
fn holder(case: &Case, sql: &str) -> Client {
    let mut client = case.subscriber.connect();
    must(client.batch_execute("BEGIN").map_err(|e| e.to_string()));
    must(client.batch_execute(sql).map_err(|e| e.to_string()));
    client
}

fn release(mut holder: Client) {
    must(holder.batch_execute("COMMIT").map_err(|e| e.to_string()));
}

/// Transactions are resolved in another order than prepared, with other transactions in between and
/// with restarts.
#[test]
fn prepared_transactions_are_applied_when_they_are_committed() {
    on_versions(&VERSIONS, |mut case| {
        held(&mut case);
        case.replicate(TABLE);
        let slot = format!("'{}'", case.tool.name);
        let two_phase =
            format!("SELECT two_phase FROM pg_replication_slots WHERE slot_name = {slot}");
        assert_eq!(case.publisher.value(&two_phase), "t");

        let now = || case.publisher.value("SELECT pg_current_wal_lsn()");
        let mut prepared = Vec::new();
        for gid in ["one", "two", "three"] {
            // PREPARE TRANSACTION cannot be sent in one message with other statements.
            for statement in [
                "BEGIN",
                &format!(
                    "INSERT INTO t SELECT hashtext('{gid}') + g, '{gid}' FROM generate_series(1, 100) g"
                ),
                &format!("PREPARE TRANSACTION '{}_{gid}'", case.tool.name),
            ] {
                case.publisher.sql(statement);
            }
            prepared.push(now());
        }
        case.publisher.sql("INSERT INTO t VALUES (1, 'ordinary')");
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT string_agg(v, ',') FROM t"), "ordinary");
        let confirmed_before = |lsn: &str| {
            case.publisher.value(&format!("SELECT ({CONFIRMED}{slot}) < '{lsn}'::pg_lsn"))
        };
        assert_eq!(confirmed_before(&prepared[0]), "t", "the slot waits for what is held");

        case.publisher.sql(&format!("COMMIT PREPARED '{}_two'", case.tool.name));
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE v = 'two'"), "100");
        // The transactions are sent again and recognised as applied.
        case.publisher.sql("UPDATE t SET v = 'changed' WHERE v = 'two' AND id % 2 = 0");
        case.run_until_current();
        case.expect_equal(&["t"]);

        case.publisher.sql(&format!("ROLLBACK PREPARED '{}_one'", case.tool.name));
        let mut process = case.start();
        case.publisher.sql(&format!("COMMIT PREPARED '{}_three'", case.tool.name));
        case.publisher.sql("DELETE FROM t WHERE id = 1");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        case.stop(process);
        let end = now();
        case.run_until_current();
        assert_eq!(confirmed_before(&end), "f", "nothing is held any more");
        case.expect_equal(&["t"]);
    });
}

/// After a reconnect the publisher sends applied transactions again, before it sends the PREPARE
/// that is still held. Until then nothing may be acknowledged, however long it takes.
#[test]
fn held_transactions_survive_reconnects_with_a_backlog() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        held(&mut case);
        case.replicate(TABLE);
        let work = |from: u32| {
            case.publisher.sql(&format!(
                "DO $$ BEGIN FOR i IN {from}..{from} + 2000 LOOP \
                   INSERT INTO t VALUES (i, repeat('x', 500)); COMMIT; END LOOP; END $$"
            ));
        };
        work(10_000);
        prepare(&case, "first", "INSERT INTO t VALUES (1, 'first')");
        let prepared = case.publisher.value("SELECT pg_current_wal_lsn()");
        work(20_000);
        for _ in 0..3 {
            case.run_until_current();
            let confirmed = format!("SELECT ({CONFIRMED}'{}') < '{prepared}'", case.tool.name);
            assert_eq!(case.publisher.value(&confirmed), "t", "the slot waits for what is held");
        }
        case.publisher.sql(&format!("COMMIT PREPARED '{}_first'", case.tool.name));
        work(30_000);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// If a run ends between PREPARE and COMMIT PREPARED, the next run applies the transaction.
#[test]
fn a_run_that_ends_before_commit_prepared_leaves_the_transaction_to_the_next() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        held(&mut case);
        case.replicate(TABLE);
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        case.publisher.sql("INSERT INTO t VALUES (2, 'before')");
        let goal = case.publisher.value("SELECT pg_current_wal_lsn()");
        case.publisher.sql(&format!("COMMIT PREPARED '{}_one'", case.tool.name));
        case.publisher.sql("INSERT INTO t VALUES (3, 'after')");
        case.tool.finish("run", &["--until", &goal]).expect(0, &[]);
        assert_eq!(case.subscriber.value("SELECT string_agg(v, ',') FROM t"), "before");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

fn prepare(case: &Case, name: &str, sql: &str) {
    // PREPARE TRANSACTION cannot be sent in one message with other statements.
    for statement in ["BEGIN", sql, &format!("PREPARE TRANSACTION '{}_{name}'", case.tool.name)] {
        case.publisher.sql(statement);
    }
}

/// A prepared transaction is kept until it is resolved, in the spool if it does not fit into
/// memory. If it does not fit into the spool either, the run ends with an error.
#[test]
fn held_transactions_beyond_memory_are_spooled() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        held(&mut case);
        case.tool.args.extend(["--memory-limit", "16"].map(str::to_owned));
        case.tool.args.extend(["--streaming", "off"].map(str::to_owned));
        case.replicate(TABLE);
        for statement in [
            "BEGIN",
            "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g",
            &format!("PREPARE TRANSACTION '{}'", case.tool.name),
        ] {
            case.publisher.sql(statement);
        }
        case.tool
            .finish("run", &["--until", "current", "--spool-limit", "1"])
            .expect(12, &["--spool-limit", "Nothing is lost"]);
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0");
        case.publisher.sql(&format!("COMMIT PREPARED '{}'", case.tool.name));
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// Rows that a prepared transaction missed on the subscriber count, even if it is rolled back: they were
/// missing when it was prepared there. They count once, whatever comes in between.
#[test]
fn missing_rows_of_a_prepared_transaction_are_counted_once() {
    on_versions(&VERSIONS, |mut case| {
        prepared(&mut case);
        case.replicate(TABLE);
        case.publisher.sql("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 20) g");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id <= 10");
        for (name, rows, end) in
            [("one", "id <= 15", "COMMIT"), ("two", "id IN (2, 3, 16)", "ROLLBACK")]
        {
            let mut process = case.start();
            prepare(&case, name, &format!("UPDATE t SET v = '{name}' WHERE {rows}"));
            wait_until_prepared(&case, 1);
            case.wait_until_applied(&mut process);
            case.stop(process);
            resolve(&case, end, name);
            case.run_until_current();
            expect_nothing_left(&case);
        }
        assert_eq!(case.statistic("update_missing"), "12");
        let changed = "SELECT string_agg(id || v, ' ' ORDER BY id) FROM t WHERE v <> 'v'";
        assert_eq!(case.subscriber.value(changed), "11one 12one 13one 14one 15one");
    });
}
