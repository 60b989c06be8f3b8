//! Tables that were not published for some time: the changes of that time are never sent.

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, on_versions};
use crate::verbs::json;

pub(super) const ALL: [(u16, u16); 3] = [(14, 18), (15, 15), (18, 18)];

/// The exit code when tables are blocked.
pub(super) const BLOCKED: i32 = 6;

pub(super) const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v int); \
                      CREATE TABLE other (id int PRIMARY KEY, v int)";

/// Two tables in two publications, with rows.
pub(super) fn replicate(case: &mut Case) {
    case.both(TABLES);
    case.publisher.sql(
        "INSERT INTO t SELECT i, 0 FROM generate_series(1, 10) i; INSERT INTO other SELECT * FROM t; \
         CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION others FOR TABLE other",
    );
    case.tool.publications = "pub,others".to_owned();
    case.run_until_current();
}

/// The recorded state of a table.
pub(super) fn state(case: &Case, table: &str) -> String {
    case.subscriber.value(&format!(
        "SELECT state || ' ' || (stale_lsn IS NOT NULL) FROM pgapace.relation \
         WHERE table_name = '{table}'"
    ))
}

/// Removes the table from the publication, changes it, and adds it again.
pub(super) const OUT_AND_BACK: &str = "ALTER PUBLICATION pub DROP TABLE t; UPDATE t SET v = v + 1; \
                            INSERT INTO other SELECT max(id) + 1, 0 FROM other; \
                            ALTER PUBLICATION pub ADD TABLE t";

/// Removes the table from the publication, and changes it.
pub(super) const AWAY: &str = "ALTER PUBLICATION pub DROP TABLE t; UPDATE t SET v = v + 1; \
                    INSERT INTO other SELECT max(id) + 1, 0 FROM other";

/// Changes the table, and adds it to the publication again.
pub(super) const BACK: &str = "UPDATE t SET v = v + 1; ALTER PUBLICATION pub ADD TABLE t";

/// Drops the publication and creates it again.
pub(super) const MADE_ANEW: &str = "DROP PUBLICATION pub; UPDATE t SET v = v + 1; \
                         CREATE PUBLICATION pub FOR TABLE t";

/// Runs each statement separately, so that the change commits while the table is not published.
pub(super) fn one_by_one(case: &Case, statements: &str) {
    statements.split("; ").for_each(|statement| case.publisher.sql(statement));
}

/// Checks that the table is blocked, the other one streams on, and a resync repairs it.
pub(super) fn expect_blocked_and_repair(case: &Case) {
    let finished = case.run();
    finished.expect(BLOCKED, &["public.t"]);
    assert_eq!(state(case, "t"), "blocked true");
    case.expect_equal(&["other"]);
    let shown = json(&case.tool.finish("status", &["--json"]));
    let tables = shown[0]["tables"].as_array().cloned().unwrap_or_default();
    let table = tables.iter().find(|table| table["name"] == "t").expect("the table is shown");
    assert!(table["stale_lsn"].is_string(), "{table:#}");
    let said = case.tool.finish("status", &[]).stdout;
    let lines: Vec<_> = said.lines().filter(|line| line.contains("may lack changes")).collect();
    assert!(!lines.is_empty(), "{said}");
    assert!(lines.iter().all(|line| line.matches("may lack changes").count() == 1), "{said}");
    case.publisher.sql("INSERT INTO t VALUES (1000, 0)");
    case.tool.finish("resync", &["t"]).expect(0, &[]);
    case.run_until_current();
    assert_eq!(state(case, "t"), "ready false");
    case.expect_equal(&["t", "other"]);
}

#[test]
fn a_table_removed_and_added_again_while_stopped_is_stale() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        one_by_one(&case, OUT_AND_BACK);
        expect_blocked_and_repair(&case);
    });
}

#[test]
fn tables_of_a_recreated_publication_are_stale() {
    // Before PostgreSQL 18 the walsender does not send changes that were written without the
    // publication.
    on_versions(&[(18, 18), (18, 15)], |mut case| {
        replicate(&mut case);
        one_by_one(&case, MADE_ANEW);
        expect_blocked_and_repair(&case);
    });
}

/// The check at the end of `--until` finds the gap, although the check at the start found none.
#[test]
fn a_gap_during_a_run_is_found_before_until_is_reached() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        let mut process = case.start();
        let what = if case.publisher.major() >= 18 { MADE_ANEW } else { OUT_AND_BACK };
        one_by_one(&case, what);
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        case.wait_until_applied(&mut process);
        // The changes after the gap are applied, and then the end check runs.
        must(process.kill9());
        expect_blocked_and_repair(&case);
    });
}

/// The walsender of PostgreSQL 18 warns when it skips a publication. pgapace then checks at once.
#[test]
fn a_warning_of_the_walsender_triggers_a_check() {
    on_versions(&[(18, 18)], |mut case| {
        replicate(&mut case);
        // The database does not tell its clients of warnings.
        let quiet = "ALTER DATABASE {} SET client_min_messages = error";
        case.publisher.sql(&quiet.replace("{}", &case.publisher.name));
        let process = case.start();
        case.publisher.sql("DROP PUBLICATION pub");
        case.publisher.sql("UPDATE t SET v = v + 1");
        case.publisher.sql("CREATE PUBLICATION pub FOR TABLE t");
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        let blocked = || Ok(state(&case, "t") == "blocked true");
        must(wait_until(PATIENCE, "the table to be blocked", blocked));
        assert!(process.events("table_stale") > 0, "{}", process.log());
        // The other table streams on.
        case.publisher.sql("INSERT INTO other VALUES (500, 0)");
        let there =
            || Ok(case.subscriber.value("SELECT count(*) FROM other WHERE id = 500") == "1");
        must(wait_until(PATIENCE, "the other table to continue", there));
        case.stop(process);
    });
}

#[test]
fn on_missed_changes_decides_about_stale_tables() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        one_by_one(&case, OUT_AND_BACK);
        case.publisher.sql("INSERT INTO t VALUES (500, 0)");
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready true");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE v = 0"), "11");
        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        one_by_one(&case, OUT_AND_BACK);
        case.publisher.sql("INSERT INTO t VALUES (501, 0)");
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);
    });
}

/// The stream may bring a change that conflicts with a row whose DELETE was not published, before pgapace has looked at the
/// publications.
#[test]
fn a_conflict_because_of_a_missed_change_is_treated_as_a_gap() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.both("UPDATE t SET v = id; CREATE UNIQUE INDEX ON t (v)");
        case.run_until_current();
        let miss_a_delete = |case: &Case, id: u32| {
            let [hidden, shown] = ["insert, update", "insert, update, delete, truncate"]
                .map(|operations| format!("ALTER PUBLICATION pub SET (publish = '{operations}')"));
            let delete = format!("DELETE FROM t WHERE id = {id}");
            let insert = format!("INSERT INTO t VALUES ({}, {id})", id + 100);
            one_by_one(case, &[hidden, delete, shown, insert].join("; "));
        };
        let becomes = |case: &Case, expected: &str| {
            must(wait_until(PATIENCE, expected, || Ok(state(case, "t") == expected)));
        };

        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        let mut process = case.start();
        miss_a_delete(&case, 1);
        case.wait_until_applied(&mut process);
        becomes(&case, "ready false");
        assert_eq!(process.events("missed_changes_suspected"), 1, "{}", process.log());
        case.stop(process);
        case.expect_equal(&["t", "other"]);

        case.tool.args.clear();
        let mut process = case.start();
        miss_a_delete(&case, 2);
        becomes(&case, "blocked true");
        case.publisher.sql("INSERT INTO other VALUES (500, 0)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        let said = case.tool.finish("status", &[]).stdout;
        assert!(said.contains("may lack changes") && said.contains("pgapace resync"), "{said}");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        becomes(&case, "ready false");
        case.stop(process);
        case.expect_equal(&["t", "other"]);

        // Then the conflict stays, and its error says why.
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        let mut process = case.start();
        miss_a_delete(&case, 3);
        let status = must(process.wait(PATIENCE));
        assert_eq!(status.code(), Some(9), "{}", process.log());
        case.run().expect(9, &["may lack changes", "pgapace resync 'public.t'"]);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);
    });
}

/// The copy would begin with TRUNCATE.
#[test]
fn no_stale_table_is_copied_again_with_keep() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args =
            vec!["--if-not-empty=keep".to_owned(), "--on-missed-changes=resync".to_owned()];
        replicate(&mut case);
        case.subscriber.sql("INSERT INTO t VALUES (-1, 7)");
        one_by_one(&case, OUT_AND_BACK);
        case.run().expect(BLOCKED, &["public.t"]);
        assert_eq!(state(&case, "t"), "blocked true");
        assert_eq!(case.subscriber.value("SELECT v FROM t WHERE id = -1"), "7");
        // The user decides.
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);
    });
}

/// A changed filter or list: rows and columns that were not published before are missing.
#[test]
fn a_changed_filter_or_list_makes_its_table_stale() {
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
