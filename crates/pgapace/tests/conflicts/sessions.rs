//! Conflicts are resolved exactly once, even if the sessions that resolve them are lost.

use std::time::{Duration, Instant};

use crate::support::{Case, PATIENCE, must};

const ROWS: usize = 6000;
const REST: usize = 1000;

/// Every tenth insert conflicts with an existing row, while the workers' sessions are terminated.
fn lost_sessions(publisher: u16, subscriber: u16, args: &[&str]) {
    let mut case = Case::new(publisher, subscriber);
    case.tool.args = ["--workers", "3", "--on-conflict", "insert_exists=skip"]
        .iter()
        .chain(args)
        .map(|arg| (*arg).to_owned())
        .collect();
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.subscriber
        .sql(&format!("INSERT INTO t SELECT g, 't' FROM generate_series(0, {ROWS}, 10) g"));
    let mut process = case.start();
    let insert = |from: usize, to: usize| {
        case.publisher.sql(&format!(
            "DO $$ BEGIN FOR i IN {from}..{to} LOOP INSERT INTO t VALUES (i, 'p'); COMMIT; END LOOP; END $$"
        ));
    };
    insert(0, ROWS - REST);
    // The rest is not applied until some sessions were killed.
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE"));
    insert(ROWS - REST + 1, ROWS);
    let end = case.publisher.value("SELECT pg_current_wal_lsn()");
    let mut random = fastrand::Rng::with_seed(u64::from(subscriber));
    let mut killed = 0;
    let started = Instant::now();
    let kill = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity \
         WHERE application_name = 'pgapace {} apply' ORDER BY random() LIMIT 1) a",
        case.tool.name
    );
    let applied = format!(
        "SELECT count(*) FROM pg_stat_replication \
         WHERE application_name = '{}' AND replay_lsn >= '{end}'",
        case.tool.name
    );
    while case.publisher.value(&applied) != "1" {
        assert!(process.is_running(), "{}", process.log());
        assert!(started.elapsed() < PATIENCE, "{}", process.log());
        // The intervals grow, so that the test ends.
        std::thread::sleep(Duration::from_millis(random.u64(5..50 + 5 * killed)));
        if killed > 2 {
            must(user.batch_execute("ROLLBACK"));
        }
        killed += case.subscriber.value(&kill).parse::<u64>().expect("a number");
    }
    let log = case.stop(process);
    let row = case.subscriber.value(
        "SELECT count(*) || ' ' || count(*) FILTER (WHERE v = 't') || ' ' \
           || (SELECT count(*) || ' ' || count(DISTINCT key) FROM pgapace.conflict) FROM t",
    );
    let tenth = ROWS / 10 + 1;
    assert_eq!(row, format!("{} {tenth} {tenth} {tenth}", ROWS + 1), "{killed} killed:\n{log}");
    assert!(killed > 2, "{killed} killed");
}

#[test]
fn sessions_lost_during_resolution_15() {
    lost_sessions(15, 15, &[]);
}

#[test]
fn sessions_lost_during_resolution_18() {
    lost_sessions(18, 18, &[]);
}

#[test]
fn sessions_lost_during_resolution_without_commit_order() {
    lost_sessions(15, 18, &["--preserve-commit-order=false"]);
}
