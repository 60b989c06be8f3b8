//! What is asked for: tables copied again, tables that joined the publication.

use testbed::wait_until;

use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions};

/// The arguments of verbs that need no more than to find the subscription.
fn finish(case: &Case, verb: &str, more: &[&str]) -> String {
    let finished = case.tool.finish(verb, more);
    finished.expect(0, &[]);
    finished.stdout
}

#[test]
fn resync_of_a_stopped_and_of_a_running_subscription() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)",
        );
        case.publisher.sql("INSERT INTO a SELECT i, 'a' FROM generate_series(1, 1000) i; INSERT INTO b SELECT * FROM a");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.target.sql("DELETE FROM a WHERE id % 2 = 0; UPDATE a SET v = 'damaged'");
        case.publisher
            .sql("INSERT INTO a VALUES (2000, 'new'); INSERT INTO b VALUES (2000, 'new')");
        assert!(finish(&case, "resync", &["a"]).contains("the next run copies them"));
        case.run_until_current();
        case.expect_equal(&["a"]);
        assert_eq!(case.target.value("SELECT count(*) FROM b"), "1001");

        let mut process = case.start();
        let mut writer = case.publisher.connect();
        let changes = "UPDATE b SET v = v || '.' WHERE id % 7 = 0; INSERT INTO a SELECT max(id) + 1, 'more' FROM a; DELETE FROM b WHERE id = (SELECT min(id) FROM b)";
        must(writer.batch_execute(changes));
        case.target.sql("UPDATE b SET v = 'damaged'");
        assert!(finish(&case, "resync", &["public.b"]).contains("within seconds"));
        let mut look = case.target.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            must(writer.batch_execute(changes));
            let copied = "SELECT count(*) FROM pgapace.relation WHERE table_name = 'b' AND gate_lsn IS NOT NULL";
            Ok(look.query_one(copied, &[])?.get::<_, i64>(0) == 1)
        }));
        must(writer.batch_execute(changes));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["a", "b"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        case.stop(process);
        case.tool.finish("resync", &["nosuch"]).expect(6, &["no table nosuch"]);
    });
}

#[test]
fn refresh_copies_new_tables_before_their_first_change() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        assert!(finish(&case, "refresh", &[]).contains("no new tables"));
        case.publisher.sql("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later SELECT generate_series(1, 100)");
        case.tool.finish("refresh", &[]).expect(6, &["public.later"]);
        case.target.sql("CREATE TABLE later (id int PRIMARY KEY)");
        let mut process = case.start();
        finish(&case, "refresh", &[]);
        let mut look = case.target.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            Ok(look.query_one("SELECT count(*) FROM later", &[])?.get::<_, i64>(0) == 100)
        }));
        case.publisher.sql("INSERT INTO later VALUES (101); DELETE FROM later WHERE id < 10; INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        case.stop(process);
    });
}

#[test]
fn new_tables_are_found_by_looking() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        case.target.sql(
            "CREATE TABLE later (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); INSERT INTO filled VALUES (7); \
             CREATE TABLE unfit (other int PRIMARY KEY)",
        );
        case.publisher.sql(
            "CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later SELECT generate_series(1, 100); \
             CREATE TABLE absent (id int PRIMARY KEY); CREATE TABLE filled (id int PRIMARY KEY); CREATE TABLE unfit (id int PRIMARY KEY)",
        );
        let mut look = case.target.connect();
        must(wait_until(PATIENCE, "the table to be copied", || {
            Ok(look.query_one("SELECT count(*) FROM later", &[])?.get::<_, i64>(0) == 100)
        }));
        case.publisher.sql("UPDATE later SET id = 1000 WHERE id = 1; INSERT INTO first VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "later"]);
        case.stop(process);
        let tables = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM pgapace.relation";
        assert_eq!(case.target.value(tables), "first later");
    });
}
