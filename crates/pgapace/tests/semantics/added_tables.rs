//! Tables that are added to a publication, or dropped.

use crate::support::{VERSIONS, on_versions};
use crate::tablesync::while_streaming::wait_for;

/// Tables that are added to the publication later are copied at their first change.
#[test]
fn added_tables_are_copied_at_their_first_change() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE later (id int PRIMARY KEY, v text); \
             CREATE TABLE absent (id int PRIMARY KEY)",
        );
        case.publish("FOR TABLE first");
        case.publisher.sql("INSERT INTO later SELECT g, 'old' FROM generate_series(1, 1000) g");
        case.run_until_current();
        let mut process = case.start();
        case.publisher
            .sql("INSERT INTO first VALUES (1); UPDATE later SET v = 'before' WHERE id = 1");
        case.publisher.sql(
            "BEGIN; ALTER PUBLICATION pub ADD TABLE later; COMMIT; \
             BEGIN; UPDATE later SET v = 'after' WHERE id = 2; INSERT INTO first VALUES (2); COMMIT",
        );
        for round in 0..20 {
            case.publisher.sql(&format!(
                "UPDATE later SET v = v || '{round}' WHERE id < 4; INSERT INTO later VALUES (2000 + {round}, 'new'); \
                 DELETE FROM later WHERE id = 100 + {round}; INSERT INTO first VALUES (100 + {round})"
            ));
        }
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        // The table is removed again: later changes are not published.
        case.publisher.sql("ALTER PUBLICATION pub DROP TABLE later; DELETE FROM later WHERE id = 1; INSERT INTO first VALUES (3)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM later WHERE id = 1"), "1");
        case.stop(process);
        // The error names a table that the subscriber does not have.
        case.subscriber.sql("DROP TABLE absent");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE absent; INSERT INTO absent VALUES (1)");
        case.run().expect(6, &["public.absent"]);
        case.subscriber.sql("CREATE TABLE absent (id int PRIMARY KEY)");
        case.run_until_current();
        case.expect_equal(&["absent", "first"]);
    });
}

/// With --copy-data=false, every change of an added table is applied.
#[test]
fn added_tables_without_copy_apply_every_change() {
    on_versions(&VERSIONS, |case| {
        let mut case = case;
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.both(
            "CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE later (id int PRIMARY KEY, v text)",
        );
        case.publish("FOR TABLE first");
        case.publisher.sql("INSERT INTO first VALUES (1); INSERT INTO later VALUES (1, 'old')");
        case.subscriber.sql("INSERT INTO first VALUES (1); INSERT INTO later VALUES (1, 'old')");
        case.run_until_current();
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE later");
        case.publisher.sql("INSERT INTO later VALUES (2, 'new')");
        case.publisher
            .sql("UPDATE later SET v = 'changed' WHERE id = 1; INSERT INTO first VALUES (2)");
        case.run_until_current();
        case.expect_equal(&["first", "later"]);
        case.publisher.sql("DELETE FROM later WHERE id = 2");
        case.run_until_current();
        case.expect_equal(&["first", "later"]);
    });
}

/// Short-lived tables under FOR ALL TABLES do not stop the stream, whether the subscriber has them
/// or not. Permanent ones are copied.
#[test]
fn tables_dropped_before_their_changes_arrive_do_not_stop_the_stream() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql(
            "BEGIN; CREATE TABLE scratch AS SELECT 1 AS a; INSERT INTO t SELECT a FROM scratch; DROP TABLE scratch; COMMIT; \
             CREATE TABLE old_name (id int PRIMARY KEY); INSERT INTO old_name VALUES (1); ALTER TABLE old_name RENAME TO new_name; \
             CREATE TABLE again (id int); INSERT INTO again VALUES (1); DROP TABLE again; \
             INSERT INTO t VALUES (2)",
        );
        let gone = ["public.scratch", "public.old_name", "public.again"];
        case.run().expect(6, &gone).expect(6, &["but these: public.new_name"]);
        case.expect_equal(&["t"]);
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        case.both("CREATE TABLE again (id int PRIMARY KEY)");
        case.subscriber.sql("CREATE TABLE new_name (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO again VALUES (7); INSERT INTO new_name VALUES (2); INSERT INTO t VALUES (3)");
        let ready = "SELECT count(*) = 3 FROM pgapace.relation WHERE state = 'ready'";
        wait_for(&case, &mut process, "the tables to be copied", ready);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "again", "new_name"]);
        case.stop(process);
    });
}
