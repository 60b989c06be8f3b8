//! A subscriber whose lock table is small.

use testbed::Cluster;

use crate::support::{Case, Database, PATIENCE, must, one_or_all};

/// An UPDATE locks each index of its table. A transaction needs a hundred locks of the subscriber, which has room
/// for some of these. The next run would put the same group together.
#[test]
fn a_group_that_needs_more_locks_than_there_are_is_made_smaller() {
    for &major in one_or_all(&[15, 18]) {
        let binaries = must(testbed::servers::find_or_fetch(major));
        let cluster = Cluster::builder(&binaries)
            .name("subscriber with few locks")
            .setting("max_locks_per_transaction", "10")
            .setting("max_connections", "30")
            .setting("max_prepared_transactions", "0")
            .setting("max_worker_processes", "4")
            .setting("max_wal_senders", "4");
        let cluster = must(cluster.start());
        let mut case = Case::new(major, major);
        let subscriber = Database::create(&cluster, "few_locks", "");
        let tables = |then: &str, indexes: u32| {
            format!(
                "DO $$ BEGIN FOR t IN 1..60 LOOP \
                 EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, v int)', t); \
                 {then} \
                 FOR i IN 1..{indexes} LOOP \
                 EXECUTE format('CREATE INDEX t%s_%s ON t%s (v)', t, i, t); COMMIT; \
                 END LOOP; END LOOP; END $$"
            )
        };
        let insert = "EXECUTE format('INSERT INTO t%s VALUES (1, 0)', t);";
        case.publisher.sql(&tables(insert, 0));
        subscriber.sql(&tables("", 100));
        case.publish("FOR ALL TABLES");
        case.tool.subscriber = subscriber.conninfo();
        case.tool.args = vec!["--workers=1".to_owned()];
        case.run_until_current();
        let mut process = case.start();
        // While the first transaction waits, the others become one group.
        let mut user = subscriber.connect();
        must(user.batch_execute("BEGIN; LOCK TABLE t1 IN SHARE MODE"));
        case.publisher.sql(
            "DO $$ BEGIN FOR i IN 0..299 LOOP \
             EXECUTE format('UPDATE t%s SET v = %s', i % 60 + 1, i); COMMIT; \
             END LOOP; END $$",
        );
        let end = case.publisher.value("SELECT pg_current_wal_lsn()");
        let received = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{}' AND write_lsn >= '{end}'",
            case.tool.name
        );
        must(testbed::wait_until(PATIENCE, "all changes to be received", || {
            Ok(case.publisher.value(&received) == "1")
        }));
        must(user.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        let log = case.stop(process);
        let retried = "SELECT count(*) FROM pgapace.stat_retry WHERE sqlstate = '53200'";
        assert_eq!(subscriber.value(retried), "1", "the group was not too large: {log}");
        for table in 1..=60 {
            let rows = format!("SELECT count(*), sum(v) FROM t{table}");
            assert_eq!(subscriber.value(&rows), case.publisher.value(&rows));
        }
        case.tool.finish("drop", &[]).expect(0, &[]);
    }
}
