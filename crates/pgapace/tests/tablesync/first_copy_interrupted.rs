//! A first copy is interrupted, and tables are added, dropped or renamed before the next start.

use testbed::program::Process;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};
use crate::tablesync::blocked::{reason, with_state};
use crate::tablesync::first_copy::{kill, start_into_lock};
use crate::tablesync::while_streaming::{holder, wait_for};

const VERSIONS: [(u16, u16); 2] = [(14, 14), (18, 18)];

/// Table `first` is copied, table `t` is not.
fn interrupted(tables: &str, publication: &str) -> impl Fn(&mut Case) {
    let ddl = format!(
        "CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE t (id int PRIMARY KEY); {tables}"
    );
    let publication = publication.to_owned();
    move |case| {
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        case.both(&ddl);
        case.publisher.sql("INSERT INTO first VALUES (1); INSERT INTO t VALUES (1)");
        case.publish(&publication);
        let mut copying = holder(case, "BEGIN; LOCK TABLE t IN SHARE MODE");
        let process = start_into_lock(case);
        kill(case, process);
        must(copying.batch_execute("COMMIT"));
    }
}

/// The next run streams, and applies later changes of tables `first` and `t`.
fn goes_on(case: &Case) -> Process {
    let mut process = case.tool.start(case.log_file("next"));
    must(wait_for_event(&mut process, "streaming", PATIENCE));
    case.publisher.sql("INSERT INTO first VALUES (2)");
    case.wait_until_applied(&mut process);
    case.expect_equal(&["first"]);
    process
}

#[test]
fn new_tables_that_cannot_be_copied_keep_no_other_from_anything() {
    on_versions(&VERSIONS, |mut case| {
        interrupted("", "FOR ALL TABLES")(&mut case);
        case.publisher.sql(
            "CREATE TABLE absent (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); \
             CREATE TABLE unfit (id int PRIMARY KEY); INSERT INTO absent VALUES (1); \
             INSERT INTO unfit VALUES (1)",
        );
        case.subscriber.sql(
            "CREATE TABLE filled (id int PRIMARY KEY); INSERT INTO filled VALUES (7); \
             CREATE TABLE unfit (other int PRIMARY KEY)",
        );
        let mut process = goes_on(&case);
        case.expect_equal(&["t"]);
        let blocked = with_state("blocked", "absent filled unfit");
        wait_for(&case, &mut process, "the new tables to be blocked", &blocked);
        for (table, named) in [("absent", "lacks"), ("filled", "not empty"), ("unfit", "lacks")] {
            let reason = reason(&case, table);
            assert!(reason.contains(named), "{table}: {reason}");
        }
        case.subscriber.sql(
            "CREATE TABLE absent (id int PRIMARY KEY); TRUNCATE filled; ALTER TABLE unfit RENAME other TO id",
        );
        let ready = with_state("ready", "absent filled first t unfit");
        wait_for(&case, &mut process, "the new tables to be copied", &ready);
        case.publisher.sql("INSERT INTO absent VALUES (2); INSERT INTO filled VALUES (2)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["absent", "filled", "unfit"]);
        case.stop(process);
    });
}

/// Nothing is copied of it, but its changes may not be lost.
#[test]
fn a_new_table_of_a_subscription_without_a_copy_is_blocked() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        // As if it had been interrupted before it was recorded that it streams.
        case.subscriber.sql("UPDATE pgapace.subscription SET phase = 'copying'");
        case.publisher.sql("CREATE TABLE absent (id int PRIMARY KEY)");
        let mut process = goes_on(&case);
        wait_for(&case, &mut process, "the new table", &with_state("blocked", "absent"));
        case.stop(process);
    });
}

#[test]
fn a_table_that_is_no_longer_published_is_not_missed() {
    for gone in
        ["ALTER PUBLICATION pub DROP TABLE t", "DROP TABLE t", "ALTER TABLE t RENAME TO other"]
    {
        on_versions(&VERSIONS, |mut case| {
            interrupted("", "FOR TABLE first, t")(&mut case);
            case.publisher.sql(gone);
            let process = goes_on(&case);
            case.stop(process);
        });
    }
}

/// It is copied when it has the name again.
#[test]
fn a_table_that_was_renamed_or_dropped_on_the_subscriber_is_blocked() {
    for (gone, back) in [
        ("ALTER TABLE t RENAME TO other", "ALTER TABLE other RENAME TO t"),
        ("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)"),
    ] {
        on_versions(&VERSIONS, |mut case| {
            interrupted("", "FOR ALL TABLES")(&mut case);
            case.subscriber.sql(gone);
            let mut process = goes_on(&case);
            wait_for(&case, &mut process, "the table", &with_state("blocked", "t"));
            case.subscriber.sql(back);
            wait_for(&case, &mut process, "the copy", &with_state("ready", "first t"));
            case.wait_until_applied(&mut process);
            case.expect_equal(&["first", "t"]);
            case.stop(process);
        });
    }
}
