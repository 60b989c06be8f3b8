//! Rows that differ, of tables with columns that were not compared: no row is taken for another one.

use super::recorded;
use crate::support::{Case, on_versions};

const BOTH_WAYS: [(u16, u16); 2] = [(15, 18), (18, 15)];

#[track_caller]
fn expect_rows(case: &Case, table: &str, rows: &[&str]) {
    let sql = format!("SELECT t FROM {table} t ORDER BY 1");
    assert_eq!(case.subscriber.rows(&sql), rows, "{table}");
}

/// Without the key, and without columns that tell copies apart, it is not known which row is missing or extra.
#[test]
fn rows_that_cannot_be_told_apart_are_not_repaired() {
    on_versions(&BOTH_WAYS, |case| {
        case.both(
            "CREATE TABLE keyed (id int PRIMARY KEY, v text); CREATE TABLE keyless (id int, v text); \
             CREATE TABLE second (id int PRIMARY KEY, k int NOT NULL UNIQUE, v text); \
             CREATE TABLE several (id int, k int NOT NULL, v text); CREATE TABLE apart (id int, v text)",
        );
        case.publisher.sql(
            "ALTER TABLE several ADD PRIMARY KEY (k); INSERT INTO keyed VALUES (1, 'a'), (2, 'b'), (3, 'b'); \
             INSERT INTO keyless TABLE keyed; INSERT INTO several SELECT id, id, v FROM keyed; \
             INSERT INTO second SELECT id, id, v FROM keyed; INSERT INTO apart TABLE keyed",
        );
        case.subscriber.sql("ALTER TABLE keyed ADD note text");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql(
            "UPDATE keyed SET note = 'kept' WHERE id = 1; INSERT INTO keyed VALUES (4, 'a'); \
             DELETE FROM keyless WHERE id = 3; INSERT INTO several VALUES (9, 2, 'b'); \
             UPDATE second SET k = 9 WHERE id = 3; DELETE FROM apart WHERE v = 'b'; INSERT INTO apart VALUES (7, 'c')",
        );
        let except = ["keyed", "keyless", "second", "several", "apart"];
        let except: Vec<_> =
            except.iter().flat_map(|t| ["--except-column".into(), format!("{t}.id")]).collect();
        let except: Vec<_> = except.iter().map(String::as_str).collect();
        case.tool.finish("verify", &except).expect(18, &[]);
        for dry_run in [true, false] {
            let mut args = vec!["--delete-extra"];
            args.extend(dry_run.then_some("--dry-run"));
            let repaired = case.tool.finish("repair", &args);
            repaired.expect(6, &["cannot be told apart", "not compared: id", "pgapace resync"]);
            for table in ["keyed", "keyless", "second", "several"] {
                let said = format!("public.{table}: 0 inserted, 0 updated, 0 deleted");
                assert!(repaired.stdout.contains(&said), "{said}: {}", repaired.stdout);
            }
        }
        // The other columns still tell these rows apart, so they are repaired.
        expect_rows(&case, "apart", &["(1,a)", "(2,b)", "(3,b)"]);
        expect_rows(&case, "keyed", &["(1,a,kept)", "(2,b,)", "(3,b,)", "(4,a,)"]);
        expect_rows(&case, "keyless", &["(1,a)", "(2,b)"]);
        expect_rows(&case, "second", &["(1,1,a)", "(2,2,b)", "(3,9,b)"]);
        expect_rows(&case, "several", &["(1,1,a)", "(2,2,b)", "(3,3,b)", "(9,2,b)"]);
        // As the error says.
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        assert_eq!(recorded(&case), "0");
        expect_rows(&case, "keyed", &["(1,a,kept)", "(2,b,)", "(3,b,)"]);
        case.expect_equal(&["keyless", "second", "several", "apart"]);
    });
}

#[test]
fn a_key_that_cannot_be_compared_names_no_rows() {
    on_versions(&BOTH_WAYS, |case| {
        case.publisher.sql(
            "CREATE TABLE t (id text PRIMARY KEY, v text); INSERT INTO t VALUES ('(1)', 'a'), ('(2)', 'b')",
        );
        case.subscriber.sql(
            "CREATE TYPE number AS (n int); CREATE TABLE t (id number PRIMARY KEY, v text, note text)",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET note = 'kept'; INSERT INTO t VALUES ('(3)', 'a')");
        let found = case.tool.finish("verify", &[]);
        found.expect(18, &[]);
        assert!(found.stdout.contains("id was not compared"), "{}", found.stdout);
        let said = ["rows of public.t cannot be told apart", "pgapace resync public.t"];
        case.tool.finish("repair", &["--delete-extra"]).expect(6, &said);
        expect_rows(&case, "t", &[r#"("(1)",a,kept)"#, r#"("(2)",b,kept)"#, r#"("(3)",a,)"#]);
        assert_ne!(recorded(&case), "0");
    });
}
