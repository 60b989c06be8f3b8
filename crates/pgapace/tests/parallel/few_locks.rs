//! A subscriber whose lock table is small.

use testbed::Cluster;
use testbed::program::Process;

use crate::support::{Case, Database, PATIENCE, must, one_or_all};

/// An UPDATE locks each index of its table. A transaction needs 42 locks of the subscriber, which has room for some of
/// these. Groups leave half of them to others.
#[test]
fn groups_leave_locks_to_others() {
    let retries = retries("CREATE TABLE t%1$s (id int PRIMARY KEY, v int)", "t%s", 40);
    assert!(retries.iter().all(|retries| retries == "0"), "{retries:?}");
}

/// The indexes that only a partition has are not counted. The next run would put the same group together.
#[test]
fn a_group_that_needs_more_locks_than_there_are_is_made_smaller() {
    let table = "CREATE TABLE t%1$s (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
                 CREATE TABLE p%1$s PARTITION OF t%1$s DEFAULT";
    let retries = retries(table, "p%s", 100);
    assert!(retries.iter().all(|retries| retries != "0"), "{retries:?}");
}

/// Updates of 60 tables become groups, on some versions. Returns how often groups were tried again because there were
/// too few locks.
fn retries(table: &str, indexed: &str, indexes: u32) -> Vec<String> {
    let of_version = |&major: &u16| {
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
        case.publisher.sql(
            "DO $$ BEGIN FOR t IN 1..60 LOOP \
             EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, v int)', t); \
             EXECUTE format('INSERT INTO t%s VALUES (1, 0)', t); \
             END LOOP; END $$",
        );
        subscriber.sql(&format!(
            "DO $$ BEGIN FOR t IN 1..60 LOOP \
             EXECUTE format('{table}', t); \
             FOR i IN 1..{indexes} LOOP \
             EXECUTE format('CREATE INDEX ON {indexed} (v)', t); COMMIT; \
             END LOOP; END LOOP; END $$"
        ));
        case.publish("FOR ALL TABLES");
        case.tool.subscriber = subscriber.conninfo();
        case.tool.args = vec!["--workers=1".to_owned()];
        case.run_until_current();
        let mut process = case.start();
        apply_backlog(&case, &subscriber, &mut process);
        case.stop(process);
        for table in 1..=60 {
            let rows = format!("SELECT count(*), sum(v) FROM t{table}");
            assert_eq!(subscriber.value(&rows), case.publisher.value(&rows));
        }
        let retries =
            "SELECT coalesce(sum(retries), 0) FROM pgapace.stat_retry WHERE sqlstate = '53200'";
        let retries = subscriber.value(retries);
        case.tool.finish("drop", &[]).expect(0, &[]);
        retries
    };
    one_or_all(&[15, 18]).iter().map(of_version).collect()
}

/// While the first transaction waits, the others become groups.
fn apply_backlog(case: &Case, subscriber: &Database<'_>, process: &mut Process) {
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
    case.wait_until_applied(process);
}
