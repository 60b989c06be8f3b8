//! Several concurrent large transactions, with small ones in between.

use testbed::postgres::Client;

use super::{each, expect_streamed, on_triggers};

/// As in PostgreSQL's test 015: two large transactions on one table, one of them rolled back, and
/// small ones on the same and another table.
#[test]
fn large_and_small_transactions_interleave() {
    on_triggers(|case| {
        case.replicate(
            "CREATE TABLE t (a int PRIMARY KEY, b text); CREATE TABLE other (a int PRIMARY KEY); \
             CREATE TABLE nokey (a int, b text); ALTER TABLE nokey REPLICA IDENTITY FULL",
        );
        let mut process = case.start();
        let mut sessions: Vec<Client> = (0..4).map(|_| case.publisher.connect()).collect();
        for session in &mut sessions {
            each(session, &["BEGIN"]);
        }
        for round in 0..4_u32 {
            for (number, session) in (0..).zip(&mut sessions) {
                let from = number * 100_000 + round * 1000;
                let sql = format!(
                    "SAVEPOINT s{round}; \
                     INSERT INTO t SELECT i, repeat(md5(i::text), 4) \
                       FROM generate_series({from}, {from} + 600) i; \
                     INSERT INTO nokey SELECT i % 10, 'x' \
                       FROM generate_series({from}, {from} + 20) i; \
                     UPDATE t SET b = b || 'u' WHERE a BETWEEN {from} AND {from} + 100;"
                );
                each(session, &[&sql]);
                if round % 2 == 1 {
                    each(session, &[&format!("ROLLBACK TO s{round}")]);
                }
            }
            // Small transactions on the same table and on others, which must not wait for the open
            // ones.
            case.publisher.sql(&format!("INSERT INTO t VALUES (-{round} - 1, 'small')"));
            case.publisher.sql(&format!("INSERT INTO other VALUES ({round})"));
            case.publisher.sql(&format!("UPDATE t SET b = 'again' WHERE a = -{round} - 1"));
            case.wait_until_applied(&mut process);
            let small = "SELECT count(*), min(b), max(b) FROM t";
            assert_eq!(case.subscriber.value(small), format!("{}|again|again", round + 1));
        }
        // In another order than they began.
        for (number, end) in [(2, "COMMIT"), (0, "COMMIT"), (3, "ROLLBACK"), (1, "COMMIT")] {
            each(&mut sessions[number], &[end]);
            case.publisher
                .sql("DELETE FROM t WHERE a % 7 = 0; UPDATE nokey SET b = b || 'y' WHERE a = 3");
        }
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "other", "nokey"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.stop(process);
        expect_streamed(&case);
    });
}

/// When a run ends, nothing of the open transactions remains, and a later run applies all of them.
#[test]
fn runs_that_end_while_transactions_are_open_lose_nothing() {
    on_triggers(|case| {
        case.replicate("CREATE TABLE t (a int PRIMARY KEY, b text)");
        let mut open = case.publisher.connect();
        each(
            &mut open,
            &["BEGIN", "INSERT INTO t SELECT i, repeat('a', 99) FROM generate_series(1, 3000) i"],
        );
        case.publisher.sql("INSERT INTO t VALUES (-1, 'small')");
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "1");
        let process = case.start();
        each(
            &mut open,
            &["INSERT INTO t SELECT i, repeat('b', 99) FROM generate_series(3001, 6000) i"],
        );
        case.publisher.sql("INSERT INTO t VALUES (-2, 'small')");
        case.stop(process);
        // The `--until` position is before its commit.
        let goal = case.publisher.value("SELECT pg_current_wal_insert_lsn()");
        each(&mut open, &["COMMIT"]);
        case.tool.finish("run", &["--until", &goal]).expect(0, &[]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "2");
        case.run_until_current();
        case.expect_equal(&["t"]);
        expect_streamed(&case);
    });
}
