//! The tables and views `pgapace.stat_*` say what SQL says, also while a subscription is blocked.

use std::time::{Duration, Instant};

use crate::see::wait_for;
use crate::support::{Case, must, on_versions};
use crate::verbs::json;

const VERSIONS: [(u16, u16); 3] = [(14, 14), (15, 15), (18, 18)];

/// Rows, joined by a blank.
fn rows(case: &Case, sql: &str) -> Vec<String> {
    case.subscriber.rows(sql)
}

#[test]
fn counts_by_table_operation_and_conflict_are_exact() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, v int); CREATE TABLE b (id int PRIMARY KEY); \
             CREATE TABLE unused (id int PRIMARY KEY)",
        );
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO a SELECT i, i FROM generate_series(1, 1000) i");
        case.publisher.sql("UPDATE a SET v = 0 WHERE id <= 100");
        case.publisher
            .sql("DELETE FROM a WHERE id > 990; INSERT INTO b SELECT generate_series(1, 7)");
        case.publisher.sql("TRUNCATE b");
        case.wait_until_applied(&mut process);
        case.subscriber.sql("DELETE FROM a WHERE id IN (1, 2)");
        case.publisher.sql("UPDATE a SET v = 5 WHERE id IN (1, 2, 3)");
        case.wait_until_applied(&mut process);
        wait_for(
            &case,
            &mut process,
            "all changes to be counted",
            "SELECT sum(inserts + updates + deletes + truncates) = 1121 FROM pgapace.stat_table",
        );
        let sql = "SELECT concat_ws(' ', table_name, inserts, updates, deletes, truncates) \
                   FROM pgapace.stat_table ORDER BY table_name";
        assert_eq!(rows(&case, sql), ["a 1000 103 10 0", "b 7 0 0 1"]);
        let sql =
            "SELECT concat_ws(' ', table_name, conflict, conflicts) FROM pgapace.stat_conflict";
        assert_eq!(rows(&case, sql), ["a update_missing 2"]);
        wait_for(
            &case,
            &mut process,
            "the lag to be small at all stages, whatever other tests write",
            "SELECT count(*) = 4 AND bool_and(lag_bytes >= 0 AND lag_seconds < 8) \
               AND sum(transactions) = 15 FROM pgapace.stat_stage",
        );
        let stages = "SELECT concat_ws(' ', stage, transactions, changes) FROM pgapace.stat_stage";
        assert_eq!(
            rows(&case, stages),
            ["received", "decoded 5 1121", "committed 5 1121", "durable 5 1121"]
        );
        wait_for(
            &case,
            &mut process,
            "shares to add up to 100 % for each thread",
            "SELECT count(*) >= 2 AND bool_and(abs(sum - 100) < 0.001) FROM ( \
               SELECT sum(percent_1min) FROM pgapace.stat_wait \
               WHERE thread IN ('leader', 'apply 0') GROUP BY thread) t",
        );
        wait_for(
            &case,
            &mut process,
            "the slot to be seen",
            "SELECT wal_status = 'reserved' AND retained_bytes >= 0 AND publisher_lsn IS NOT NULL \
             FROM pgapace.stat_slot",
        );
        case.stop(process);
        // Nothing is left of a subscription that is dropped.
        case.tool.finish("drop", &[]).expect(0, &[]);
        for table in ["figures", "history", "table", "conflict", "retry"] {
            let sql = format!("SELECT count(*) FROM pgapace.stat_{table}");
            assert_eq!(case.subscriber.value(&sql), "0", "{table}");
        }
    });
}

#[test]
fn large_and_streamed_transactions_are_counted_once() {
    on_versions(&VERSIONS[1..], |mut case| {
        case.publisher
            .cluster
            .sql(
                "postgres",
                &format!(
                    "ALTER DATABASE {} SET logical_decoding_work_mem = '64kB'",
                    case.publisher.name
                ),
            )
            .unwrap_or_else(|error| panic!("{error}"));
        case.tool.args = ["--workers", "2"].map(str::to_owned).into();
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql(
            "BEGIN; INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 40000) i; \
             SAVEPOINT s; INSERT INTO t SELECT i, '' FROM generate_series(50001, 60000) i; \
             ROLLBACK TO s; UPDATE t SET v = '' WHERE id <= 5000; COMMIT",
        );
        case.wait_until_applied(&mut process);
        wait_for(
            &case,
            &mut process,
            "the transaction to be counted",
            "SELECT inserts = 40000 AND updates = 5000 FROM pgapace.stat_table",
        );
        case.stop(process);
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_blocked_worker_names_who_blocks_it() {
    on_versions(&VERSIONS[1..], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; UPDATE t SET v = 77 WHERE id = 1"));
        case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
        wait_for(
            &case,
            &mut process,
            "the blocker to be named",
            "SELECT waiting = 'apply worker' AND query LIKE 'BEGIN; UPDATE t SET v = 77%' \
               AND state = 'idle in transaction' AND \"user\" = current_user \
               AND pid = (SELECT a.pid FROM pg_stat_activity a WHERE a.query LIKE 'BEGIN; UPDATE t%' \
                          AND a.datname = current_database()) \
             FROM pgapace.stat_blocker",
        );
        wait_for(
            &case,
            &mut process,
            "the wait to be the limit, and the lag to grow",
            "SELECT (SELECT limited_by = 'subscriber_lock' FROM pgapace.stat_slot) \
               AND (SELECT lag_seconds > 2 AND lag_bytes > 0 FROM pgapace.stat_stage \
                    WHERE stage = 'committed') \
               AND (SELECT \"table\" = 'public.t' AND waits_for = 'subscriber_lock' AND age_seconds > 1 \
                      AND pid IS NOT NULL FROM pgapace.stat_worker WHERE xid IS NOT NULL)",
        );
        assert!(process.log().contains("UPDATE t SET v = 77"), "{}", process.log());
        must(user.batch_execute("ROLLBACK"));
        case.wait_until_applied(&mut process);
        wait_for(
            &case,
            &mut process,
            "nothing to block any more",
            "SELECT NOT EXISTS (SELECT FROM pgapace.stat_blocker) \
               AND (SELECT lag_seconds < 8 FROM pgapace.stat_stage WHERE stage = 'committed')",
        );
        case.stop(process);
    });
}

#[test]
fn wal_without_changes_before_a_change_makes_it_no_older() {
    on_versions(&VERSIONS[1..], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        case.publish("FOR TABLE t");
        let mut process = case.start();
        for _ in 0..20 {
            case.publisher.sql("SELECT pg_logical_emit_message(false, 'other', repeat('x', 1000))");
            // WAL comes for longer than the time between two looks at its end.
            std::thread::sleep(Duration::from_millis(200));
        }
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; LOCK TABLE t"));
        let began = Instant::now();
        case.publisher.sql("UPDATE t SET v = 1");
        wait_for(
            &case,
            &mut process,
            "the change to wait",
            "SELECT EXISTS (SELECT FROM pgapace.stat_blocker) \
               AND (SELECT lag_seconds > 0 FROM pgapace.stat_stage WHERE stage = 'committed')",
        );
        let lag = "SELECT lag_seconds FROM pgapace.stat_stage WHERE stage = 'committed'";
        let lag: f64 = must(case.subscriber.value(lag).parse());
        let age = began.elapsed().as_secs_f64();
        assert!(lag <= age + 0.5, "{lag} s for a change of {age} s");
        must(user.batch_execute("ROLLBACK"));
        case.wait_until_applied(&mut process);
        case.stop(process);
    });
}

#[test]
fn a_role_with_pg_monitor_reads_all_but_rows() {
    on_versions(&VERSIONS[1..], |case| {
        // The role may not use the schema of a copied table.
        case.both("CREATE SCHEMA app; CREATE TABLE app.t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO app.t VALUES (1)");
        case.replicate("CREATE TABLE t (id text PRIMARY KEY)");
        let role = format!("{}_monitor", case.tool.name);
        case.subscriber.sql(&format!("CREATE ROLE {role} LOGIN IN ROLE pg_monitor"));
        for table in
            ["subscription", "stat_stage", "stat_table", "stat_wait", "stat_worker", "stat_slot"]
        {
            case.subscriber
                .sql(&format!("SET ROLE {role}; SELECT * FROM pgapace.{table}; RESET ROLE"));
        }
        let mut monitor = case.tool.clone();
        monitor.subscriber = format!("{} user={role}", monitor.subscriber);
        for (verb, argument) in [("status", "--json"), ("top", "--once")] {
            monitor.finish(verb, &[argument]).expect(0, &[]);
        }
        // A conflict, and an error that quotes the row.
        case.publisher.sql("INSERT INTO t VALUES ('secret 1')");
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t; ALTER TABLE t ADD CHECK (id <> 'secret 2')");
        case.publisher.sql("DELETE FROM t");
        case.publisher.sql("INSERT INTO t VALUES ('secret 2')");
        let run = case.tool.finish("run", &["--until", "current", "--disable-on-error"]);
        run.expect(9, &["secret 1", "Failing row contains (secret 2)"]);
        for table in ["event", "subscription", "stat_subscription", "relation"] {
            let quoted =
                format!("SELECT count(*) FROM pgapace.{table} r WHERE r::text LIKE '%secret%'");
            assert_eq!(case.subscriber.value(&quoted), "0", "{table}");
        }
        let conflicts = "SELECT count(*) FROM pgapace.event WHERE event = 'conflict'";
        assert_eq!(case.subscriber.value(conflicts), "1");
        for (tool, quotes) in [(&monitor, false), (&case.tool, true)] {
            let status = json(&tool.finish("status", &["--json"]));
            for text in ["disabled", "last_error"].map(|name| status[0][name].to_string()) {
                assert!(text.contains("23514"), "{text}");
                assert_eq!(text.contains("contains (secret 2)"), quotes, "{text}");
            }
        }
        let mut session = case.subscriber.connect();
        must(session.batch_execute(&format!("SET ROLE {role}")));
        for table in ["conflict", "error_detail"] {
            let read = session.batch_execute(&format!("SELECT * FROM pgapace.{table}"));
            assert!(read.is_err(), "rows of users: {table}");
        }
        drop(session);
        case.subscriber.sql(&format!("DROP ROLE {role}"));
    });
}
