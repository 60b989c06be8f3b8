//! Tables that were another table for a while, or not published: renamed, replaced, unlogged, detached.

use std::time::Duration;

use testbed::program::Process;
use testbed::wait_until;

use super::gaps::{ALL, BLOCKED, TABLES, one_by_one, replicate, state};
use crate::support::{Case, PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::wait_for;

/// A change carries the name that the table had when it was written.
#[test]
fn a_table_renamed_and_renamed_back_is_stale() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        for meanwhile in [
            "ALTER TABLE t RENAME TO u; INSERT INTO u SELECT max(id) + 1 FROM u; \
             ALTER TABLE u RENAME TO t",
            "ALTER TABLE t SET SCHEMA away; UPDATE away.t SET v = 3; ALTER TABLE away.t SET SCHEMA public",
            "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 7); \
             ALTER PUBLICATION pub ADD TABLE t",
        ] {
            case.publisher.sql("CREATE SCHEMA IF NOT EXISTS away");
            one_by_one(&case, meanwhile);
            case.run().expect(BLOCKED, &["public.t"]);
            assert_eq!(state(&case, "t"), "blocked true", "{meanwhile}");
            case.tool.finish("resync", &["t"]).expect(0, &[]);
            case.run_until_current();
            assert_eq!(state(&case, "t"), "ready false");
            case.expect_equal(&["t", "other"]);
        }
    });
}

/// With FOR ALL TABLES the catalogue has no entry for a single table.
#[test]
fn a_table_replaced_by_another_of_its_name_is_stale() {
    on_versions(&ALL, |case| {
        case.replicate(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1); INSERT INTO other VALUES (1, 1)");
        case.run_until_current();
        case.publisher.sql(
            "BEGIN; CREATE TABLE filled (LIKE t INCLUDING ALL); \
             INSERT INTO filled SELECT i, i FROM generate_series(1, 10) i; \
             DROP TABLE t; ALTER TABLE filled RENAME TO t; COMMIT",
        );
        case.publisher.sql("INSERT INTO t VALUES (11, 1); INSERT INTO other VALUES (2, 1)");
        case.run().expect(BLOCKED, &["public.t"]);
        assert_eq!(state(&case, "t"), "blocked true");
        case.expect_equal(&["other"]);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
    });
}

/// Rows of the old table would conflict with rows of the new one, and the error would also stop the
/// other tables.
#[test]
fn a_table_recreated_during_a_run_is_stale() {
    on_versions(&ALL, |case| {
        case.replicate(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO t VALUES (2, 1)");
        case.wait_until_applied(&mut process);
        recreate_and_resync(&case, &mut process);
        expect_to_go_on(&case, process);
    });
}

/// No change tells this run the oid of the table that it has copied, either before it streams or
/// meanwhile.
#[test]
fn a_table_recreated_before_its_first_change_is_stale() {
    on_versions(&ALL, |case| {
        case.both(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let mut process = case.start();
        recreate_and_resync(&case, &mut process);
        recreate_and_resync(&case, &mut process);
        expect_to_go_on(&case, process);
    });
}

/// The table that was copied again gets the next change.
fn expect_to_go_on(case: &Case, mut process: Process) {
    case.publisher.sql("INSERT INTO t VALUES (3, 1)");
    case.wait_until_applied(&mut process);
    case.expect_equal(&["t", "other"]);
    case.stop(process);
}

/// The transaction is applied in parts, and not all of them have changes of the table.
#[test]
fn a_table_recreated_within_a_large_transaction_is_stale() {
    for streaming in ["off", "on", "parallel"] {
        let mut case = Case::new(18, 18);
        case.both(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.publish("FOR ALL TABLES");
        case.tool.publisher += " options='-c logical_decoding_work_mem=64kB'";
        case.tool.args =
            ["--streaming", streaming, "--memory-limit", "16MB"].map(str::to_owned).into();
        case.run_until_current();
        let mut process = case.start();
        case.publisher.sql(
            "BEGIN; INSERT INTO other SELECT i, i FROM generate_series(1, 100000) i; DROP TABLE t; \
             CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (2, 7); COMMIT",
        );
        let blocked = || Ok(state(&case, "t") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        assert_eq!(case.subscriber.rows("SELECT id FROM t"), ["1"], "{streaming}");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        let ready = || Ok(state(&case, "t") == "ready false");
        must(wait_until(PATIENCE, "the table to be ready again", ready));
        case.stop(process);
        case.expect_equal(&["t", "other"]);
    }
}

/// Creates the table anew while pgapace streams, waits until it is blocked, and copies it again.
fn recreate_and_resync(case: &Case, process: &mut Process) {
    case.publisher.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher
        .sql("INSERT INTO t VALUES (1, 7); INSERT INTO other SELECT count(*), 1 FROM other");
    let blocked = || Ok(state(case, "t") == "blocked true");
    must(wait_until(PATIENCE, "the table to be blocked", blocked));
    case.wait_until_applied(process);
    case.expect_equal(&["other"]);
    case.tool.finish("resync", &["t"]).expect(0, &[]);
    let ready = || Ok(state(case, "t") == "ready false");
    must(wait_until(PATIENCE, "the table to be ready again", ready));
}

/// A deployment drops and creates a table on both servers.
#[test]
fn a_table_recreated_on_both_servers_is_copied() {
    const ANEW: &str = "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int)";
    on_versions(&ALL, |mut case| {
        case.both(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        // The stream has changes of both tables.
        case.publisher.sql("INSERT INTO t VALUES (2, 1)");
        case.both(ANEW);
        case.publisher.sql("INSERT INTO t VALUES (3, 1)");
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t"]);

        let mut process = case.start();
        let copied = |id: &str| {
            let copied = || {
                Ok(state(&case, "t") == "ready false"
                    && case.subscriber.rows("SELECT id FROM t") == [id])
            };
            must(wait_until(PATIENCE, "the table to be copied", copied));
        };
        case.subscriber.sql(ANEW);
        case.publisher.sql(ANEW);
        case.publisher.sql("INSERT INTO t VALUES (4, 1)");
        copied("4");
        // The publisher is first: the old rows of the subscriber stay until the user drops them.
        case.publisher.sql(ANEW);
        case.publisher.sql("INSERT INTO t VALUES (5, 1)");
        let blocked = || Ok(state(&case, "t") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        assert_eq!(case.subscriber.rows("SELECT id FROM t"), ["4"]);
        case.subscriber.sql(ANEW);
        case.tool.finish("refresh", &[]).expect(0, &[]);
        copied("5");
        case.publisher.sql("INSERT INTO t VALUES (6, 1)");
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["t", "other"]);

        // No copy is wanted but that of a resync.
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.both(ANEW);
        case.publisher.sql("INSERT INTO t VALUES (7, 1)");
        case.run().expect(BLOCKED, &["public.t"]);
        assert_eq!(state(&case, "t"), "blocked true");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
    });
}

/// The stream still has changes of the table that had the name before.
#[test]
fn a_recreated_table_may_be_ignored() {
    on_versions(&ALL, |mut case| {
        case.replicate(TABLES);
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.publisher.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t VALUES (2, 1)");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t VALUES (3, 1)");
        case.run_until_current();
        assert_eq!(case.subscriber.rows("SELECT id FROM t ORDER BY id"), ["1", "2", "3"]);
        assert_eq!(state(&case, "t"), "ready true");
    });
}

/// The catalogue entries stay, but no changes are sent.
#[test]
fn a_table_unlogged_during_a_run_is_stale() {
    on_versions(&ALL, |mut case| {
        case.replicate(TABLES);
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let process = case.start();
        case.publisher.sql("ALTER TABLE t SET UNLOGGED");
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        let seen =
            "SELECT published_by LIKE '%unpublished%' FROM pgapace.relation WHERE table_name = 't'";
        must(wait_until(PATIENCE, "a look", || Ok(case.subscriber.value(seen) == "t")));
        case.publisher.sql("ALTER TABLE t SET LOGGED");
        case.publisher.sql("INSERT INTO t VALUES (2, 1); INSERT INTO other VALUES (2, 1)");
        let blocked = || Ok(state(&case, "t") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        let there = || Ok(case.subscriber.value("SELECT count(*) FROM other") == "1");
        must(wait_until(PATIENCE, "the other table to continue", there));
        case.stop(process);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
    });
}

/// Changes of a detached partition are not published by the publication of its former parent.
#[test]
fn a_partition_detached_and_attached_again_makes_its_root_stale() {
    on_versions(&ALL, |case| {
        let ddl = "CREATE TABLE r (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
                   CREATE TABLE low PARTITION OF r FOR VALUES FROM (0) TO (100); \
                   CREATE TABLE high PARTITION OF r FOR VALUES FROM (100) TO (200)";
        let by_root = "CREATE PUBLICATION pub FOR TABLE r WITH (publish_via_partition_root)";
        for (publish, blocked) in [(by_root, "r"), ("CREATE PUBLICATION pub FOR TABLE r", "low")] {
            case.both(ddl);
            case.publisher.sql("INSERT INTO r VALUES (1, 0), (101, 0)");
            case.publisher.sql(publish);
            case.run_until_current();
            one_by_one(
                &case,
                "ALTER TABLE r DETACH PARTITION low; UPDATE low SET v = 1; INSERT INTO low VALUES (2, 0); \
                 ALTER TABLE r ATTACH PARTITION low FOR VALUES FROM (0) TO (100); \
                 INSERT INTO r VALUES (3, 0), (103, 0)",
            );
            case.run().expect(BLOCKED, &[&format!("public.{blocked}")]);
            assert_eq!(state(&case, blocked), "blocked true");
            case.tool.finish("resync", &[blocked]).expect(0, &[]);
            case.run_until_current();
            case.expect_equal(&["r"]);
            case.tool.finish("drop", &[]).expect(0, &[]);
            case.publisher.sql("DROP PUBLICATION pub");
            case.both("DROP TABLE r");
        }
    });
}

/// A look at the publications may be older than the record of a table that was copied meanwhile.
#[test]
fn tables_created_during_looks_are_not_stale() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        for i in 0..40 {
            // The pace of the tables, over some looks.
            std::thread::sleep(Duration::from_millis(80));
            case.both(&format!("CREATE TABLE t{i} (id int PRIMARY KEY)"));
            case.publisher.sql(&format!("INSERT INTO t{i} VALUES (1)"));
        }
        let ready = "SELECT count(*) = 41 FROM pgapace.relation WHERE state = 'ready'";
        wait_for(&case, &mut process, "the tables to be copied", ready);
        case.wait_until_applied(&mut process);
        assert_eq!(process.events("table_stale"), 0, "{}", process.log());
        case.stop(process);
    });
}
