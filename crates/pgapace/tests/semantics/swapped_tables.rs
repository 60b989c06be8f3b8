//! Tables of the subscriber that take the name of another one, which nothing announces.

use std::process::Command;

use testbed::program::events;

use crate::adopt::NativeSubscription;
use crate::support::{Case, PATIENCE, expect_exit, must, on_versions, skipped, wait_for_event};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// A table with rows of a copy.
const COPIED: &str = "CREATE TABLE t (id int PRIMARY KEY, v int)";

fn copied(case: &Case) {
    case.publisher
        .sql(&format!("{COPIED}; INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i"));
    case.subscriber.sql(COPIED);
    case.publish("FOR ALL TABLES");
    case.run_until_current();
}

fn is_stale(case: &Case) -> bool {
    let stale = "SELECT stale_lsn IS NOT NULL FROM pgapace.relation WHERE table_name = 't'";
    case.subscriber.value(stale) == "t"
}

/// The message of the run that the missing table ends tells how to get its rows, and so does the next start.
#[test]
fn a_table_that_was_dropped_and_created_is_stale() {
    on_versions(&BOTH, |case| {
        copied(&case);
        let mut process = case.start();
        case.subscriber.sql("DROP TABLE t");
        case.publisher.sql("INSERT INTO t VALUES (101, 1)");
        must(expect_exit(&mut process, 6, &["has no table public.t", "pgapace resync 'public.t'"]));
        case.subscriber.sql(COPIED);
        let log = case.run_until_current();
        assert_eq!(events(&log, "table_stale"), 1, "{log}");
        assert!(is_stale(&case));
        let status = case.tool.finish("status", &[]).expect(0, &[]).stdout.clone();
        assert!(status.contains("it lacks the rows from before"), "{status}");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert!(!is_stale(&case));
    });
}

/// The changes go on into the new table at once.
#[test]
fn a_table_that_is_created_anew_during_a_run_is_stale() {
    on_versions(&BOTH, |case| {
        copied(&case);
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (101, 1)");
        case.wait_until_applied(&mut process);
        case.subscriber.sql(&format!("BEGIN; DROP TABLE t; {COPIED}; COMMIT"));
        case.publisher.sql("INSERT INTO t VALUES (102, 1)");
        must(wait_for_event(&mut process, "table_stale", PATIENCE));
        case.publisher.sql("INSERT INTO t VALUES (103, 1)");
        case.wait_until_applied(&mut process);
        assert!(is_stale(&case));
        case.tool.finish("verify", &[]).expect(18, &[]);
        assert!(is_stale(&case));
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &["stale_mark_ended"]);
        case.stop(process);
        // It is not marked again.
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert!(!is_stale(&case));
    });
}

/// Nothing is applied meanwhile, so that the start is the first to see it.
#[test]
fn an_empty_table_that_takes_the_name_before_a_start_is_stale() {
    on_versions(&BOTH, |case| {
        copied(&case);
        case.subscriber.sql(
            "CREATE TABLE new (LIKE t INCLUDING ALL); ALTER TABLE t RENAME TO old; ALTER TABLE new RENAME TO t",
        );
        case.publisher.sql("INSERT INTO t VALUES (101, 1)");
        case.run_until_current();
        assert!(is_stale(&case));
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t"]);
        assert!(!is_stale(&case));
    });
}

/// The user has filled the table, or a native subscription.
#[test]
fn a_table_that_was_never_copied_is_stale_when_it_is_created_again() {
    let rows = "INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i";
    for is_adopted in [false, true] {
        on_versions(&BOTH, |mut case| {
            case.both(COPIED);
            case.publisher.sql(rows);
            case.publish("FOR ALL TABLES");
            if is_adopted {
                NativeSubscription::ready(&case, "").adopt(&[]).expect(0, &[]);
            } else {
                case.subscriber.sql(rows);
                case.tool.args = vec!["--copy-data=false".to_owned()];
            }
            case.run_until_current();
            case.publisher.sql("UPDATE t SET v = 1 WHERE id = 7");
            case.run_until_current();
            assert!(!is_stale(&case));
            case.subscriber.sql(&format!("BEGIN; DROP TABLE t; {COPIED}; COMMIT"));
            case.publisher.sql("INSERT INTO t VALUES (101, 1)");
            let log = case.run_until_current();
            assert_eq!(events(&log, "table_stale"), 1, "{log}");
            assert!(is_stale(&case));
            case.tool.finish("resync", &["t"]).expect(0, &[]);
            case.run_until_current();
            case.expect_equal(&["t"]);
            assert!(!is_stale(&case));
        });
    }
}

const PARTITIONED: &str = "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
                           CREATE TABLE low PARTITION OF p FOR VALUES FROM (0) TO (100); \
                           CREATE TABLE high PARTITION OF p FOR VALUES FROM (100) TO (200)";

/// As partitions, and as rows of their root.
const PUBLISHED: [&str; 2] = ["FOR TABLE p", "FOR TABLE p WITH (publish_via_partition_root)"];

fn partitioned(case: &Case, published: &str) {
    case.both(PARTITIONED);
    case.publisher.sql("INSERT INTO p VALUES (1, 0), (101, 0)");
    case.publish(published);
    case.run_until_current();
}

fn stale_tables(case: &Case) -> Vec<String> {
    case.subscriber.rows("SELECT table_name FROM pgapace.relation WHERE stale_lsn IS NOT NULL")
}

/// One that is published as such is a table like others. Nothing tells one of a published root from a partition for new
/// values of the key.
#[test]
fn a_partition_that_was_created_again_is_stale_or_found_by_verify() {
    on_versions(&BOTH, |case| {
        for (published, stale) in PUBLISHED.into_iter().zip([&["low"][..], &[]]) {
            partitioned(&case, published);
            case.subscriber.sql("DROP TABLE low");
            case.subscriber.sql("CREATE TABLE low PARTITION OF p FOR VALUES FROM (0) TO (100)");
            case.publisher.sql("INSERT INTO p VALUES (2, 0), (102, 0)");
            case.run_until_current();
            assert_eq!(stale_tables(&case), stale, "{published}");
            let table = if stale.is_empty() { "p" } else { "low" };
            let range = ["--table", table, "--where", "id < 100"];
            case.tool.finish("verify", &range).expect(18, &[]);
            case.tool.finish("repair", &[]).expect(0, &[]);
            case.expect_equal(&["p"]);
            case.tool.finish("drop", &[]).expect(0, &[]);
            case.publisher.sql("DROP PUBLICATION pub");
            case.both("DROP TABLE p");
        }
    });
}

/// The old rows are still there, or the publisher has dropped them too.
#[test]
fn partitions_that_come_and_go_are_not_stale() {
    on_versions(&BOTH, |case| {
        for published in PUBLISHED {
            partitioned(&case, published);
            for statement in [
                "ALTER TABLE p DETACH PARTITION low",
                "ALTER TABLE p ATTACH PARTITION low FOR VALUES FROM (0) TO (100)",
                "VACUUM FULL low",
                "CLUSTER high USING high_pkey",
                "CREATE TABLE next (LIKE p INCLUDING ALL)",
                "ALTER TABLE p ATTACH PARTITION next FOR VALUES FROM (200) TO (300)",
            ] {
                case.subscriber.sql(statement);
            }
            case.publisher.sql("CREATE TABLE next PARTITION OF p FOR VALUES FROM (200) TO (300)");
            case.publisher.sql("INSERT INTO p VALUES (2, 0), (102, 0), (202, 0)");
            case.run_until_current();
            case.expect_equal(&["p"]);
            case.publisher.sql("TRUNCATE p");
            case.publisher.sql("INSERT INTO p VALUES (3, 0), (103, 0), (203, 0)");
            case.run_until_current();
            case.both("DROP TABLE high");
            case.publisher.sql("UPDATE p SET v = 1");
            case.run_until_current();
            case.expect_equal(&["p"]);
            assert!(stale_tables(&case).is_empty(), "{published}");
            case.tool.finish("drop", &[]).expect(0, &[]);
            case.publisher.sql("DROP PUBLICATION pub");
            case.both("DROP TABLE p");
        }
    });
}

/// A user has put the rows there: by a swap, or with a table that was partitioned.
#[test]
fn a_filled_table_that_takes_the_name_is_not_stale() {
    on_versions(&BOTH, |case| {
        copied(&case);
        let swap = "BEGIN; ALTER TABLE t RENAME TO old; ALTER TABLE new RENAME TO t; COMMIT; DROP TABLE old";
        let plain = "CREATE TABLE new (LIKE t INCLUDING ALL)";
        let partitioned = "CREATE TABLE new (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
                           CREATE TABLE leaf PARTITION OF new DEFAULT";
        for create in [plain, partitioned] {
            for statement in create.split("; ").chain(["INSERT INTO new TABLE t"]) {
                case.subscriber.sql(statement);
            }
            case.subscriber.sql(swap);
            // Judged before its rows are replaced by newer ones.
            case.run_until_current();
            case.publisher.sql("UPDATE t SET v = v + 1");
            case.run_until_current();
            case.run_until_current();
            assert!(!is_stale(&case), "{create}");
            case.expect_equal(&["t"]);
        }
        let mut process = case.start();
        case.publisher.sql("UPDATE t SET v = v + 1 WHERE id = 1");
        case.wait_until_applied(&mut process);
        case.subscriber.sql(&format!("BEGIN; {plain}; INSERT INTO new TABLE t; COMMIT"));
        case.subscriber.sql(swap);
        case.publisher.sql("UPDATE t SET v = v + 1 WHERE id < 10");
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.run_until_current();
        assert!(!is_stale(&case));
        case.expect_equal(&["t"]);
    });
}

/// All tables of a restored dump are new, that of the state too.
#[test]
fn tables_of_a_restored_dump_are_not_stale() {
    on_versions(&[(15, 15)], |case| {
        copied(&case);
        let binaries = case.subscriber.cluster.binaries();
        if !binaries.has("pg_dump") || !binaries.has("psql") {
            return skipped("tables_of_a_restored_dump_are_not_stale", "no pg_dump and psql");
        }
        let dump = must(
            Command::new(binaries.bin("pg_dump"))
                .args(["--clean", "--inserts", "--dbname"])
                .arg(case.subscriber.conninfo())
                .output(),
        );
        assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        let file = case.log_file("dump.sql");
        must(std::fs::write(&file, &dump.stdout));
        let oid = || case.subscriber.value("SELECT 't'::regclass::oid");
        let before = oid();
        let restored = must(
            Command::new(binaries.bin("psql"))
                .args(["--quiet", "--set=ON_ERROR_STOP=1", "--file"])
                .arg(&file)
                .arg("--dbname")
                .arg(case.subscriber.conninfo())
                .output(),
        );
        assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        assert_ne!(oid(), before);
        case.publisher.sql("INSERT INTO t VALUES (101, 1)");
        case.run_until_current();
        assert!(!is_stale(&case));
        case.expect_equal(&["t"]);
    });
}
