//! Tables whose changes came under the name of another table, which is not part of the subscription. The catalogue does
//! not show that afterwards.

use testbed::program::Process;
use testbed::wait_until;

use super::gaps::{ALL, BLOCKED, one_by_one, replicate, state};
use crate::support::{Case, PATIENCE, must, on_versions};

const REASON: &str = "its changes came under another name";

/// The root is published for a moment. Then its partition is published under its own name, as before.
const ADDED: &str = "ALTER PUBLICATION pub ADD TABLE root; INSERT INTO leaf VALUES (2, 0); UPDATE leaf SET v = 1; \
                     ALTER PUBLICATION pub DROP TABLE root; INSERT INTO leaf VALUES (3, 0)";
const MOVED: &str = "ALTER TABLE x.root SET SCHEMA public; INSERT INTO leaf VALUES (2, 0); UPDATE leaf SET v = 1; \
                     ALTER TABLE root SET SCHEMA x; INSERT INTO leaf VALUES (3, 0)";

/// A partition is published through a publication of roots, but its root is not published.
fn replicate_leaf(case: &mut Case, root: &str, publication: &str) {
    case.both(&format!(
        "CREATE SCHEMA x; CREATE TABLE {root} (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
         CREATE TABLE leaf PARTITION OF {root} DEFAULT; CREATE TABLE other (id int)"
    ));
    case.publisher.sql("INSERT INTO leaf VALUES (1, 0)");
    case.publish(&format!("{publication} WITH (publish_via_partition_root = true)"));
    case.tool.args = ["--refresh-interval", "2s"].map(str::to_owned).to_vec();
    case.run_until_current();
}

fn resync(case: &Case, table: &str) {
    case.tool.finish("resync", &[table]).expect(0, &[]);
    case.run_until_current();
    assert_eq!(state(case, table), "ready false");
}

#[test]
fn a_table_renamed_and_renamed_back_under_a_new_owner_is_stale() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        one_by_one(
            &case,
            "ALTER TABLE t OWNER TO pg_monitor; ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (100, 0); \
             ALTER TABLE u RENAME TO t; INSERT INTO t VALUES (101, 0); INSERT INTO other VALUES (100, 0)",
        );
        case.run().expect(BLOCKED, &["public.t", REASON, "table_changes_skipped"]);
        assert_eq!(state(&case, "t"), "blocked true");
        case.expect_equal(&["other"]);
        resync(&case, "t");
        case.expect_equal(&["t", "other"]);
    });
}

/// Only PostgreSQL 18 and later send the new name.
#[test]
fn tables_of_a_schema_renamed_and_renamed_back_are_stale() {
    let mut case = Case::new(18, 18);
    replicate(&mut case);
    one_by_one(
        &case,
        "ALTER SCHEMA public RENAME TO away; UPDATE away.t SET v = 7; ALTER SCHEMA away RENAME TO public",
    );
    case.run().expect(BLOCKED, &["public.t", REASON]);
    assert_eq!([state(&case, "t"), state(&case, "other")], ["blocked true", "ready false"]);
    resync(&case, "t");
    case.expect_equal(&["t", "other"]);
}

#[test]
fn a_partition_whose_root_was_published_for_a_moment_is_stale() {
    let publish = |case: &mut Case| replicate_leaf(case, "root", "FOR TABLE leaf, other");
    on_versions(&ALL, |mut case| {
        publish(&mut case);
        one_by_one(&case, ADDED);
        case.run().expect(BLOCKED, &["public.leaf", REASON, "table_changes_skipped"]);
        resync(&case, "leaf");
        case.expect_equal(&["leaf"]);
    });
    on_versions(&ALL, |mut case| {
        publish(&mut case);
        let process = case.start();
        one_by_one(&case, ADDED);
        expect_stale(&case, process);
    });
}

/// Whether the run looks while the root is published, or later.
fn expect_stale(case: &Case, process: Process) {
    let blocked = || Ok(state(case, "leaf") == "blocked true");
    must(wait_until(PATIENCE, "the partition to be blocked", blocked));
    case.stop(process);
    resync(case, "leaf");
    case.expect_equal(&["leaf"]);
}

#[test]
fn a_partition_whose_root_was_in_a_published_schema_for_a_moment_is_stale() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        replicate_leaf(&mut case, "x.root", "FOR TABLES IN SCHEMA public");
        let process = case.start();
        one_by_one(&case, MOVED);
        expect_stale(&case, process);
    });
}

#[test]
fn a_partition_whose_root_left_a_published_schema_for_a_moment_is_stale() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both(
            "CREATE SCHEMA x; CREATE SCHEMA o; CREATE TABLE root (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
             CREATE TABLE o.leaf PARTITION OF root DEFAULT",
        );
        case.publish("FOR TABLES IN SCHEMA public");
        case.tool.args = ["--refresh-interval", "2s"].map(str::to_owned).to_vec();
        case.run_until_current();
        let process = case.start();
        // A new owner alone is no gap, and does not hide the one that follows.
        case.publisher.sql("ALTER TABLE root OWNER TO pg_monitor");
        let looked = "SELECT published_lsn >= '{end}' FROM pgapace.subscription";
        let end = case.publisher.value("SELECT pg_current_wal_lsn()");
        let looked = looked.replace("{end}", &end);
        must(wait_until(PATIENCE, "a look", || Ok(case.subscriber.value(&looked) == "t")));
        assert_eq!(state(&case, "leaf"), "ready false");
        one_by_one(
            &case,
            "ALTER TABLE root SET SCHEMA x; INSERT INTO o.leaf VALUES (1, 0); ALTER TABLE x.root SET SCHEMA public",
        );
        let blocked = || Ok(state(&case, "leaf") == "blocked true");
        must(wait_until(PATIENCE, "the partition to be blocked", blocked));
        case.stop(process);
        case.tool.finish("resync", &["o.leaf"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["o.leaf"]);
    });
}
