//! Slots that decode two-phase transactions: held at PREPARE, applied at COMMIT PREPARED.

use crate::support::{Case, VERSIONS, on_versions};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";
const CONFIRMED: &str = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = ";

/// Resolved in another order than prepared, with other transactions in between, over restarts.
#[test]
fn prepared_transactions_are_applied_when_they_are_committed() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args.push("--two-phase".to_owned());
        case.replicate(TABLE);
        let slot = format!("'{}'", case.tool.name);
        let two_phase =
            format!("SELECT two_phase FROM pg_replication_slots WHERE slot_name = {slot}");
        assert_eq!(case.publisher.value(&two_phase), "t");

        let now = || case.publisher.value("SELECT pg_current_wal_lsn()");
        let mut prepared = Vec::new();
        for gid in ["one", "two", "three"] {
            // A transaction cannot be prepared together with other statements of one message.
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
        assert_eq!(case.target.value("SELECT string_agg(v, ',') FROM t"), "ordinary");
        let confirmed_before = |lsn: &str| {
            case.publisher.value(&format!("SELECT ({CONFIRMED}{slot}) < '{lsn}'::pg_lsn"))
        };
        assert_eq!(confirmed_before(&prepared[0]), "t", "the slot waits for what is held");

        case.publisher.sql(&format!("COMMIT PREPARED '{}_two'", case.tool.name));
        case.run_until_current();
        assert_eq!(case.target.value("SELECT count(*) FROM t WHERE v = 'two'"), "100");
        // Sent again, and known to be applied.
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

/// After a reconnect what was applied is sent again before the PREPARE that is still held is known
/// again: nothing may be acknowledged before that, however long it takes.
#[test]
fn what_is_held_survives_reconnects_behind_a_backlog() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args.push("--two-phase".to_owned());
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

/// A goal between PREPARE and COMMIT PREPARED leaves the transaction for the next run.
#[test]
fn a_goal_before_commit_prepared_keeps_it_held() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args.push("--two-phase".to_owned());
        case.replicate(TABLE);
        prepare(&case, "one", "INSERT INTO t VALUES (1, 'one')");
        case.publisher.sql("INSERT INTO t VALUES (2, 'before')");
        let goal = case.publisher.value("SELECT pg_current_wal_lsn()");
        case.publisher.sql(&format!("COMMIT PREPARED '{}_one'", case.tool.name));
        case.publisher.sql("INSERT INTO t VALUES (3, 'after')");
        case.tool.finish("run", &["--until", &goal]).expect(0, &[]);
        assert_eq!(case.target.value("SELECT string_agg(v, ',') FROM t"), "before");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

fn prepare(case: &Case, name: &str, sql: &str) {
    // A transaction cannot be prepared together with other statements of one message.
    for statement in ["BEGIN", sql, &format!("PREPARE TRANSACTION '{}_{name}'", case.tool.name)] {
        case.publisher.sql(statement);
    }
}

/// What is prepared is kept until it is resolved: in the spool, as far as it does not fit into
/// memory; and if it does not fit there either, the run stops and says so.
#[test]
fn held_transactions_beyond_memory_are_spooled() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args.extend(["--two-phase", "--memory-limit", "16"].map(str::to_owned));
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
        assert_eq!(case.target.value("SELECT count(*) FROM t"), "0");
        case.publisher.sql(&format!("COMMIT PREPARED '{}'", case.tool.name));
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}
