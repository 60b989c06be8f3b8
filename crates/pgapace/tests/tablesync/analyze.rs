//! ANALYZE of copied tables.

use testbed::program::events;
use testbed::wait_until;

use crate::support::{PATIENCE, VERSIONS, must, on_versions};

/// A statistics expression fails for a copied row. Only this table has no statistics, and nothing
/// else fails.
#[test]
fn a_failed_analyze_affects_only_its_table() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE a (v int); CREATE TABLE b (v int); CREATE TABLE c (v int PRIMARY KEY)",
        );
        case.subscriber.sql("CREATE STATISTICS inverse ON (10 / v), (v + 1) FROM b");
        case.publisher.sql(
            "INSERT INTO a VALUES (1); INSERT INTO b VALUES (0); INSERT INTO c VALUES (1), (2)",
        );
        case.publish("FOR ALL TABLES WITH (publish = 'insert')");
        let log = case.run_until_current();
        let failures: Vec<_> =
            log.lines().filter(|line| events(line, "analyze_failed") == 1).collect();
        let [failure] = failures[..] else { panic!("{log}") };
        assert!(failure.contains("public.b") && failure.contains("22012"), "{failure}");
        let analyzed = "SELECT relname || ' ' || reltuples FROM pg_class \
                        WHERE relname IN ('a', 'b', 'c') AND reltuples >= 0 ORDER BY 1";
        assert_eq!(case.subscriber.rows(analyzed), ["a 1", "c 2"]);
        case.expect_equal(&["a", "b", "c"]);
    });
}

/// pgapace cancels its own ANALYZE, which waits for a lock.
#[test]
fn an_analyze_that_a_stop_cancels_is_no_failure() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE a (v int); CREATE TABLE b (v int)");
        case.publisher.sql("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)");
        case.publish("FOR ALL TABLES WITH (publish = 'insert')");
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute("BEGIN; LOCK TABLE a, b IN SHARE UPDATE EXCLUSIVE MODE"));
        let process = case.tool.start(case.log_file("run"));
        let waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
                     AND mode = 'ShareUpdateExclusiveLock'";
        must(wait_until(PATIENCE, "ANALYZE to wait", || Ok(case.subscriber.value(waits) == "t")));
        let log = case.stop(process);
        assert_eq!(
            (events(&log, "analyze_failed"), events(&log, "analyze_stopped")),
            (0, 1),
            "{log}"
        );
        drop(holder);
        case.run_until_current();
        case.expect_equal(&["a", "b"]);
    });
}
