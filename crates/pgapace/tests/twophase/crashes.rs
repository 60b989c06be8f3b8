//! Crashes between any two steps of a transaction that is prepared on the subscriber. The state of
//! the subscriber shows which steps were completed.

use std::time::Duration;

use testbed::program::events;
use testbed::workload::ledger;
use testbed::{Result, Stop};

use super::{
    TABLE, expect_nothing_left, holder, is_acknowledged, notes, prepare, prepared, prepared_count,
    release, resolve, wait_until_prepared, wait_until_value,
};
use crate::support::{
    Case, DB, Reader, Site, holds_for, must, on_versions, one_or_all, random_pause,
};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];
/// A lock that blocks the durability session, which deletes these rows, so that nothing becomes
/// durable.
const NOT_DURABLE: &str = "SELECT FROM pgapace.progress FOR SHARE";
/// A lock that prevents recording the end of a prepared transaction.
const NO_END: &str = "SELECT FROM pgapace.prepared FOR SHARE";

fn start(case: &mut Case) {
    prepared(case);
    case.replicate(TABLE);
    case.publisher.sql("INSERT INTO t VALUES (1, 'before'), (2, 'before')");
    case.run_until_current();
}

/// Checks the result: every transaction was applied once, and no prepared transaction remains.
fn expect_settled(case: &Case) {
    case.publisher.sql("UPDATE t SET v = v || ', and after' WHERE id < 10");
    case.run_until_current();
    case.expect_equal(&["t"]);
    expect_nothing_left(case);
}

/// It is recorded, and its changes are being applied.
#[test]
fn a_crash_before_the_prepare() {
    on_versions(&BOTH, |mut case| {
        start(&mut case);
        for end in ["COMMIT", "ROLLBACK", "later COMMIT"] {
            let mut process = case.start();
            let blocked = holder(&case, "SELECT FROM t WHERE id = 1 FOR UPDATE");
            prepare(&case, "one", "UPDATE t SET v = v || ' one' WHERE id <= 2");
            let lsn = case.publisher.value("SELECT pg_current_wal_lsn()");
            wait_until_value(&case, "SELECT count(*) FROM pgapace.prepared", "1");
            must(holds_for(Duration::from_millis(300), "not acknowledged", || {
                Ok(!is_acknowledged(&case, &lsn))
            }));
            must(process.kill9());
            assert_eq!(prepared_count(&case), "0");
            assert!(!is_acknowledged(&case, &lsn));
            release(blocked);
            if let Some(end) = end.strip_prefix("later ") {
                case.run_until_current();
                assert_eq!((prepared_count(&case).as_str(), notes(&case).as_str()), ("1", "1"));
                resolve(&case, end, "one");
            } else {
                resolve(&case, end, "one");
            }
            expect_settled(&case);
        }
    });
}

/// It is prepared, but the publisher has no acknowledgement and sends it again.
#[test]
fn a_crash_before_the_acknowledgement() {
    on_versions(&BOTH, |mut case| {
        start(&mut case);
        for end in ["COMMIT", "ROLLBACK", "later COMMIT", "later ROLLBACK"] {
            let mut process = case.start();
            let blocked = holder(&case, NOT_DURABLE);
            prepare(&case, "one", "UPDATE t SET v = v || ' one' WHERE id <= 2");
            let lsn = case.publisher.value("SELECT pg_current_wal_lsn()");
            wait_until_prepared(&case, 1);
            must(process.kill9());
            assert!(!is_acknowledged(&case, &lsn));
            release(blocked);
            match end.strip_prefix("later ") {
                None => resolve(&case, end, "one"),
                Some(end) => {
                    case.run_until_current();
                    assert_eq!((prepared_count(&case).as_str(), notes(&case).as_str()), ("1", "1"));
                    assert!(is_acknowledged(&case, &lsn));
                    resolve(&case, end, "one");
                }
            }
            expect_settled(&case);
        }
    });
}

/// It is committed or rolled back, but its progress is not recorded.
#[test]
fn a_crash_before_the_end_is_recorded() {
    on_versions(&BOTH, |mut case| {
        start(&mut case);
        for end in ["COMMIT", "ROLLBACK"] {
            prepare(&case, "one", "UPDATE t SET v = v || ' one' WHERE id <= 2");
            case.run_until_current();
            assert_eq!(prepared_count(&case), "1");
            let mut process = case.start();
            let blocked = holder(&case, NO_END);
            resolve(&case, end, "one");
            let lsn = case.publisher.value("SELECT pg_current_wal_lsn()");
            wait_until_prepared(&case, 0);
            must(process.kill9());
            assert!(!is_acknowledged(&case, &lsn));
            assert_eq!(notes(&case), if end == "COMMIT" { "2" } else { "1" });
            release(blocked);
            expect_settled(&case);
        }
    });
}

/// A user has rolled it back: pgapace must not silently skip its changes.
#[test]
fn a_transaction_that_a_user_rolled_back_stops_the_run() {
    on_versions(&BOTH, |mut case| {
        start(&mut case);
        prepare(&case, "one", "UPDATE t SET v = v || ' one' WHERE id <= 2");
        case.run_until_current();
        let sql = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()";
        let name = case.subscriber.value(sql);
        case.subscriber.sql(&format!("ROLLBACK PREPARED '{name}'"));
        resolve(&case, "COMMIT", "one");
        // Every start says so: a service manager's is the only one that anyone sees.
        for _ in 0..2 {
            case.run()
                .expect(9, &["rolled it back", "_one", "prepared --rollback", "pgapace resync"]);
        }
        let gid = format!("{}_one", case.tool.name);
        let listed = case.tool.finish("prepared", &["--json"]);
        assert!(listed.expect(0, &[]).stdout.contains("\"state\": \"absent\""), "{listed:?}");
        case.tool.finish("prepared", &["--rollback", &gid]).expect(0, &[]);
        let log = case.run_until_current();
        assert!(events(&log, "prepared_transaction_left_out") == 1 && log.contains(&gid), "{log}");
        assert_eq!(case.subscriber.value("SELECT v FROM t WHERE id = 1"), "before");
        expect_nothing_left(&case);
    });
}

/// All processes are killed in turn while the ledger prepares many of its transactions. A reader
/// always sees a consistent ledger, and no change is applied twice.
#[test]
fn crashes_of_all_processes_under_load() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.load_tables()?;
        let options = ledger::WriterOptions {
            seed: u64::from(major),
            rate: Some(100.0),
            two_phase_every: 3,
            large_every: 100,
            large_entries: 500,
            ..Default::default()
        };
        let program = site.program().args(["--two-phase", "--two-phase-hold", "0"]);
        let mut run = site.spawn_streaming(&program)?;
        let writer = ledger::Writer::start_with(&site.publisher.conninfo(DB), 4, options)?;
        let reader = Reader::start(&site.subscriber);
        let mut random = fastrand::Rng::with_seed(u64::from(major));
        for round in 0..9 {
            random_pause(&mut random, 200..1200);
            match round % 3 {
                0 => {
                    run.kill9()?;
                    run = site.spawn_streaming(&program)?;
                }
                1 => site.subscriber.restart(Stop::Immediate)?,
                _ => site.publisher.restart(Stop::Immediate)?,
            }
            assert!(run.is_running(), "pgapace ended:\n{}", run.log());
        }
        let written = writer.stop()?;
        // Ends transactions that the crash of the publisher left prepared.
        let left = "SELECT 'ROLLBACK PREPARED ''' || gid || '''' FROM pg_prepared_xacts";
        for row in site.publisher.query_texts(DB, left)? {
            if let Some(Some(sql)) = row.first() {
                site.publisher.sql(DB, sql)?;
            }
        }
        site.wait_until_applied(&mut run)?;
        assert!(written >= 50 && reader.stop()? >= 5);
        site.expect_equal_load()?;
        let rows = "SELECT (SELECT count(*) FROM pg_prepared_xacts) \
                    + (SELECT count(*) FROM pgapace.prepared)";
        assert_eq!(site.subscriber.query_one_text(DB, rows)?, "0");
    }
    Ok(())
}
