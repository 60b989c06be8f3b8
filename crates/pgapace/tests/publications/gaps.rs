//! Tables that were not published all the time. What was written meanwhile never comes.

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};
use crate::verbs::json;

const ALL: [(u16, u16); 3] = [(14, 18), (15, 15), (18, 18)];
/// The exit code with tables that are blocked.
const BLOCKED: i32 = 6;
const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v int); \
                      CREATE TABLE other (id int PRIMARY KEY, v int)";

/// Two tables in two publications, with rows.
fn replicate(case: &mut Case) {
    case.both(TABLES);
    case.publisher.sql(
        "INSERT INTO t SELECT i, 0 FROM generate_series(1, 10) i; INSERT INTO other SELECT * FROM t; \
         CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION others FOR TABLE other",
    );
    case.tool.publications = "pub,others".to_owned();
    case.run_until_current();
}

/// What is recorded of a table.
fn state(case: &Case, table: &str) -> String {
    case.target.value(&format!(
        "SELECT state || ' ' || (stale_lsn IS NOT NULL) FROM pgapace.relation \
         WHERE table_name = '{table}'"
    ))
}

/// Takes the table out, changes it, and puts it back.
const OUT_AND_BACK: &str = "ALTER PUBLICATION pub DROP TABLE t; UPDATE t SET v = v + 1; \
                            INSERT INTO other SELECT max(id) + 1, 0 FROM other; \
                            ALTER PUBLICATION pub ADD TABLE t";
/// The publication is made anew.
const MADE_ANEW: &str = "DROP PUBLICATION pub; UPDATE t SET v = v + 1; \
                         CREATE PUBLICATION pub FOR TABLE t";

/// Each statement by itself, so that the change commits while the table is not published.
fn one_by_one(case: &Case, statements: &str) {
    statements.split("; ").for_each(|statement| case.publisher.sql(statement));
}

/// The table is blocked, the other one goes on, and a resync brings it back.
fn expect_blocked_and_repair(case: &Case) {
    let finished = case.run();
    finished.expect(BLOCKED, &["public.t"]);
    assert_eq!(state(case, "t"), "blocked true");
    case.expect_equal(&["other"]);
    let shown = json(&case.tool.finish("status", &["--json"]));
    let tables = shown[0]["tables"].as_array().cloned().unwrap_or_default();
    let table = tables.iter().find(|table| table["name"] == "t").expect("the table is shown");
    assert!(table["stale_lsn"].is_string(), "{table:#}");
    assert!(case.tool.finish("status", &[]).stdout.contains("may lack changes"));
    case.publisher.sql("INSERT INTO t VALUES (1000, 0)");
    case.tool.finish("resync", &["t"]).expect(0, &[]);
    case.run_until_current();
    assert_eq!(state(case, "t"), "ready false");
    case.expect_equal(&["t", "other"]);
}

#[test]
fn a_table_that_was_taken_out_and_put_back_while_stopped() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        one_by_one(&case, OUT_AND_BACK);
        expect_blocked_and_repair(&case);
    });
}

#[test]
fn a_publication_that_was_made_anew_while_stopped() {
    // Before 18 the walsender refuses to send what was written without the publication.
    on_versions(&[(18, 18), (18, 15)], |mut case| {
        replicate(&mut case);
        one_by_one(&case, MADE_ANEW);
        expect_blocked_and_repair(&case);
    });
}

/// At the end of `--until` too: the look of the start saw nothing wrong.
#[test]
fn a_gap_during_a_run_is_found_before_its_goal_is_reached() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        let mut process = case.start();
        let what = if case.publisher.major() >= 18 { MADE_ANEW } else { OUT_AND_BACK };
        one_by_one(&case, what);
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        case.wait_until_applied(&mut process);
        // What was published again is applied, and then the end is looked at.
        must(process.kill9());
        expect_blocked_and_repair(&case);
    });
}

/// The walsender of 18 warns that it skips a publication: nobody waits for the next look.
#[test]
fn a_warning_of_the_walsender_is_heard() {
    on_versions(&[(18, 18)], |mut case| {
        replicate(&mut case);
        let process = case.start();
        case.publisher.sql("DROP PUBLICATION pub");
        case.publisher.sql("UPDATE t SET v = v + 1");
        case.publisher.sql("CREATE PUBLICATION pub FOR TABLE t");
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        let blocked = || Ok(state(&case, "t") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        assert!(process.log().contains("event=\"table_stale\""), "{}", process.log());
        // The other one goes on.
        case.publisher.sql("INSERT INTO other VALUES (500, 0)");
        let there = || Ok(case.target.value("SELECT count(*) FROM other WHERE id = 500") == "1");
        must(wait_until(PATIENCE, "the other table to go on", there));
        case.stop(process);
    });
}

#[test]
fn other_decisions() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        one_by_one(&case, OUT_AND_BACK);
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready true");
        assert_eq!(case.target.value("SELECT count(*) FROM t WHERE v = 0"), "11");
        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        one_by_one(&case, OUT_AND_BACK);
        case.publisher.sql("INSERT INTO t VALUES (501, 0)");
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);
    });
}

/// Another filter or list: rows and columns that were not published before are not there.
#[test]
fn filters_and_lists_that_change() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        replicate(&mut case);
        for set in ["t WHERE (id < 5)", "t WHERE (id < 50)", "t (id)", "t"] {
            case.publisher.sql(&format!("ALTER PUBLICATION pub SET TABLE {set}"));
            case.run().expect(BLOCKED, &["public.t"]);
            assert_eq!(state(&case, "t"), "blocked true");
            case.tool.finish("resync", &["t"]).expect(0, &[]);
            case.run_until_current();
            assert_eq!(state(&case, "t"), "ready false");
        }
        case.expect_equal(&["t", "other"]);
        case.publisher.sql("ALTER PUBLICATION others SET (publish = 'insert')");
        case.publisher.sql("UPDATE other SET v = v + 1");
        case.publisher
            .sql("ALTER PUBLICATION others SET (publish = 'insert, update, delete, truncate')");
        case.run().expect(BLOCKED, &["public.other"]);
    });
}

/// What publishes all of a table all the time is enough, and what has nothing to do with its rows is
/// no gap.
#[test]
fn changes_of_publications_that_lose_nothing() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.publisher.sql("CREATE ROLE keeper_of_publications");
        case.publisher.sql(
            "ALTER PUBLICATION others OWNER TO keeper_of_publications; \
             ALTER PUBLICATION others ADD TABLE t; ALTER PUBLICATION pub ADD TABLE other",
        );
        case.run_until_current();
        one_by_one(&case, OUT_AND_BACK);
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
        assert_eq!(
            (state(&case, "t"), state(&case, "other")),
            ("ready false".into(), "ready false".into())
        );
        case.publisher.sql(
            "DROP PUBLICATION others; ALTER PUBLICATION pub OWNER TO CURRENT_USER; \
             DROP ROLE keeper_of_publications",
        );
        case.tool.publications = "pub".to_owned();
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
    });
}

/// The copy goes on while the table is taken out and put back: what was written is not in its snapshot.
#[test]
fn a_gap_during_the_copy() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO late SELECT i, 0 FROM generate_series(1, 10) i");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
        let mut copying =
            crate::sync::beside::holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
        let mut process = case.start();
        crate::sync::beside::wait_for_a_waiter(&case, &mut process, "relation");
        case.publisher.sql("ALTER PUBLICATION pub DROP TABLE late");
        case.publisher.sql("UPDATE late SET v = 1");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE late");
        must(copying.batch_execute("COMMIT"));
        let copied = "SELECT count(*) = 1 FROM pgapace.relation \
                      WHERE table_name = 'late' AND state IN ('catchup', 'ready')";
        crate::sync::beside::wait_for(&case, &mut process, "the copy", copied);
        must(process.kill9());
        case.run().expect(BLOCKED, &["public.late"]);
        assert_eq!(state(&case, "late"), "blocked true");
    });
}
