//! Whether and how a blocked table is copied later.

use super::blocked::{BOTH, reason, shown, with_state};
use crate::support::{Case, PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// Resync of a table that is blocked because it contains rows removes these rows.
#[test]
fn resync_truncates_and_copies_a_blocked_table() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.both("CREATE TABLE filled (id int PRIMARY KEY)");
        case.subscriber.sql("INSERT INTO filled VALUES (7)");
        case.publisher.sql("INSERT INTO filled VALUES (1)");
        case.run().expect(6, &["public.filled"]);
        assert_eq!(case.subscriber.value("SELECT id FROM filled"), "7");
        case.tool.finish("resync", &["filled", "public.filled"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["filled"]);
    });
}

/// Another session has locked a table that is being added. Neither the other tables nor other new
/// tables wait for it.
/// Nothing looks at the tables by itself.
#[test]
fn refresh_copies_a_blocked_table_whose_obstacle_is_gone() {
    on_versions(&BOTH, |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=0".to_owned()];
        let mut process = case.start();
        case.publisher.sql(
            "CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1); \
             CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)",
        );
        let blocked = with_state("blocked", "late other");
        wait_for(&case, &mut process, "the tables to be blocked", &blocked);
        case.subscriber.sql("CREATE TABLE late (id int PRIMARY KEY)");
        let refreshed = case.tool.finish("refresh", &[]);
        assert!(refreshed.stdout.contains("public.late: the process"), "{}", refreshed.stdout);
        refreshed.expect(6, &["the subscriber lacks published tables: public.other"]);
        let ready = with_state("ready", "first late");
        wait_for(&case, &mut process, "the table to be copied", &ready);
        case.expect_equal(&["late"]);
        case.subscriber
            .sql("CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (7)");
        case.tool
            .finish("refresh", &[])
            .expect(6, &["public.other is not empty", "--if-not-empty rebase"]);
        case.stop(process);
        case.subscriber.sql("TRUNCATE other");
        let refreshed = case.tool.finish("refresh", &[]);
        refreshed.expect(0, &[]);
        assert!(refreshed.stdout.contains("public.other: the next run"), "{}", refreshed.stdout);
        case.run_until_current();
        case.expect_equal(&["late", "other"]);
    });
}

/// With --copy-data=false no copy contains the changes that were skipped while the table was
/// blocked, so it stays blocked until a resync.
#[test]
fn a_blocked_table_is_not_added_without_a_copy() {
    on_versions(&BOTH, |mut case| {
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.publisher.sql("CREATE TABLE late (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO late VALUES (1)");
        case.run().expect(6, &["public.late"]);
        case.subscriber.sql("CREATE TABLE late (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO late VALUES (2); INSERT INTO first VALUES (2)");
        case.run().expect(6, &["public.late"]);
        assert!(shown(&case, "late")["stale_lsn"].is_string());
        case.expect_equal(&["first"]);
        case.tool.finish("resync", &["late"]).expect(0, &[]);
        case.run_until_current();
        case.publisher.sql("INSERT INTO late VALUES (3)");
        case.run_until_current();
        case.expect_equal(&["first", "late"]);
    });
}

/// With --copy-data=false, the copy that a resync asked for fails after the TRUNCATE. So does the copy of a table that
/// was added before. Only a copy brings the changes that were skipped meanwhile.
#[test]
fn a_copy_that_failed_once_is_made_without_copy_data() {
    on_versions(&BOTH, |mut case| {
        case.both("CREATE TABLE first (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO first VALUES (1), (2)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)");
        case.run().expect(6, &["public.late"]);

        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.tool.finish("resync", &["first"]).expect(0, &[]);
        case.subscriber.sql("ALTER TABLE first ADD CONSTRAINT other CHECK (id <> 1) NOT VALID");
        case.run().expect(6, &["public.first", "public.late"]);
        assert!(reason(&case, "first").contains("other"), "{}", reason(&case, "first"));
        case.publisher.sql("INSERT INTO first VALUES (3); INSERT INTO late VALUES (2)");
        case.run().expect(6, &["public.first", "public.late"]);
        case.subscriber
            .sql("ALTER TABLE first DROP CONSTRAINT other; CREATE TABLE late (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO first VALUES (4); INSERT INTO late VALUES (3)");
        case.run_until_current();
        case.expect_equal(&["first", "late"]);
        assert!(shown(&case, "late")["stale_lsn"].is_null());
    });
}

/// With --copy-data=false, a table whose copy is still wanted is published again before --until is reached.
#[test]
fn a_blocked_table_that_is_published_again_has_not_reached_the_goal() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE first (id int PRIMARY KEY)");
    case.publisher.sql("CREATE TABLE late (id int PRIMARY KEY)");
    case.publish("FOR TABLE first");
    case.run_until_current();
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
    case.run().expect(6, &["public.late"]);
    case.publisher.sql("ALTER PUBLICATION pub DROP TABLE late");
    case.tool.args = vec!["--copy-data=false".to_owned()];
    case.run_until_current();
    let mut holder = holder(&case, "BEGIN; LOCK TABLE first");
    case.publisher.sql("INSERT INTO first VALUES (1)");
    case.tool.args.extend(["--until", "current"].map(str::to_owned));
    let mut process = case.start();
    wait_for_a_waiter(&case, &mut process, "relation");
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
    must(holder.batch_execute("COMMIT"));
    let status = must(process.wait(PATIENCE));
    assert_eq!(status.code(), Some(6), "{}", process.log());
}
