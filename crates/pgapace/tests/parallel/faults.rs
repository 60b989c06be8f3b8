//! Workers that lose their sessions, and restarts with another number of workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;
use testbed::program::events;

use testbed::workload::ledger;
use testbed::{Error, Result};

use crate::support::{
    DB, Load, PATIENCE, Reader, Site, long, must, on_versions, random_pause, wait_while_running,
};

const RATE: f64 = 150.0;

/// Only the groups of that worker are applied again; the run continues.
#[test]
fn sessions_of_workers_are_terminated_under_load() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let program = site.program().args(["--workers", "3", "--group-transactions", "3"]);
    let mut run = site.spawn_streaming(&program)?;
    let reader = Reader::start(&site.subscriber);
    let mut random = fastrand::Rng::with_seed(5);
    let mut ended = 0;
    for _ in 0..if long() { 300 } else { 30 } {
        random_pause(&mut random, 20..250);
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity \
                   WHERE application_name LIKE 'pgapace % apply' ORDER BY random() LIMIT 1) s";
        ended += site.subscriber.query_one_text(DB, sql)?.parse::<u32>().unwrap_or(0);
    }
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    assert!(reader.stop()? >= 10);
    let log = run.log();
    let reconnects = events(&log, "session_lost");
    assert!(reconnects >= 10, "{reconnects} reconnects after {ended} sessions ended:\n{log}");
    assert!(!log.contains("retry_in_ms"), "the run restarted:\n{log}");
    // Counts by table include transactions that were committed without an answer.
    let even = "SELECT (SELECT sum(inserts + updates + deletes) FROM pgapace.stat_table) = \
                (SELECT sum(inserts + updates + deletes) FROM pgapace.stat_subscription)";
    wait_while_running(&mut run, "the counts by table", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, even)? == "t")
    })?;
    site.expect_equal_load()
}

/// Number of workers, group size and commit order change at every start, usually after a kill.
#[test]
fn restarts_with_other_workers_and_orders() -> Result<()> {
    let site = Site::start(&[], &[])?;
    site.load_tables()?;
    let load = Load::start(&site.publisher, RATE)?;
    let mut random = fastrand::Rng::with_seed(6);
    let mut program = |ordered: Option<bool>| {
        let ordered = ordered.unwrap_or_else(|| random.bool());
        let workers = match random.u32(0..6) {
            0 => "auto".to_owned(),
            number => number.to_string(),
        };
        let groups = if random.bool() { "auto".to_owned() } else { random.u32(1..9).to_string() };
        site.program()
            .args(["--workers", &workers])
            .args(["--group-transactions", &groups])
            .arg(format!("--preserve-commit-order={ordered}"))
    };
    let mut run = site.spawn_streaming(&program(Some(false)))?;
    // From here on, tables are copied one by one.
    let stop = Arc::new(AtomicBool::new(false));
    let reader = {
        let (conninfo, stop) = (site.subscriber.conninfo(DB), Arc::clone(&stop));
        // Not in commit order, but transactions are complete at any moment.
        std::thread::spawn(move || -> Result<u64> {
            let mut client =
                testbed::postgres::Client::connect(&conninfo, testbed::postgres::NoTls)
                    .map_err(|e| Error::other(e.to_string()))?;
            let mut sound = 0;
            while !stop.load(Ordering::Relaxed) {
                match ledger::check_atomicity(&mut client) {
                    Ok(_) => sound += 1,
                    Err(ledger::Violation::Unreadable(_)) => {}
                    Err(violation) => return Err(Error::other(violation.to_string())),
                }
                // The pace of the reader.
                sleep(Duration::from_millis(10));
            }
            Ok(sound)
        })
    };
    let mut pauses = fastrand::Rng::with_seed(7);
    for _ in 0..if long() { 150 } else { 15 } {
        random_pause(&mut pauses, 100..900);
        run.kill9()?;
        run = site.spawn(&program(None))?;
    }
    load.stop()?;
    site.wait_until_applied(&mut run)?;
    stop.store(true, Ordering::Relaxed);
    let checks = reader.join().map_err(|_| Error::other("the reader panicked"))??;
    assert!(checks >= 10, "{checks} checks");
    site.expect_equal_load()
}

/// Six sessions: those for control, durability and detection of blockers, and three apply workers.
#[test]
fn workers_start_one_by_one_where_connections_are_few() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let role = format!("{}_few", case.tool.name);
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.subscriber.change_setting_privileges(&format!(
            "CREATE ROLE {role} LOGIN CONNECTION LIMIT 6; ALTER TABLE t OWNER TO {role}; \
             GRANT CREATE ON DATABASE {} TO {role}; \
             GRANT SET ON PARAMETER session_replication_role TO {role}",
            case.subscriber.name
        ));
        case.tool.subscriber =
            case.tool.subscriber.replace("user=postgres", &format!("user={role}"));
        case.tool.args = ["--workers", "4"].map(str::to_owned).to_vec();
        case.publish("FOR ALL TABLES");
        let mut run = case.start();
        assert_eq!(run.events("connections_limit_workers"), 1, "{}", run.log());
        let workers = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace {} apply'",
            case.tool.name
        );
        assert_eq!(case.subscriber.value(&workers), "1");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        case.wait_until_applied(&mut run);
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE"));
        case.publisher.sql("UPDATE t SET v = 1");
        case.publisher.sql(
            "DO $$ BEGIN FOR i IN 2..400 LOOP INSERT INTO t VALUES (i, 0); COMMIT; END LOOP; END $$",
        );
        must(wait_while_running(&mut run, "another worker", PATIENCE, || {
            Ok(case.subscriber.value(&workers) != "1")
        }));
        must(user.batch_execute("COMMIT"));
        case.wait_until_applied(&mut run);
        case.expect_equal(&["t"]);
        case.stop(run);
    });
}
