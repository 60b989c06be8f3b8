//! The record of a verification, and its continuation after an interruption.

use testbed::wait_until;

use super::{BOTH_WAYS, differences, expect_equal, verify};
use crate::support::{Case, PATIENCE, must, on_versions};
use crate::verbs::json;

fn two_tables(case: &Case) {
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE n (id int, v text)");
    case.publisher.sql(
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 120000) i; \
         INSERT INTO n SELECT * FROM t WHERE id <= 1000",
    );
    case.publish("FOR ALL TABLES");
    case.run_until_current();
}

#[test]
fn status_shows_the_last_verification_of_each_table() {
    on_versions(&[(15, 18)], |case| {
        two_tables(&case);
        expect_equal(&case, &["n", "t"], &[]);
        case.subscriber.sql("DELETE FROM t WHERE id = 5");
        verify(&case, 18, &["--table", "t", "--except-column", "t.v"]);
        let status = json(&case.tool.finish("status", &["--json"]))[0].clone();
        let (n, t) = (&status["verifications"][0], &status["verifications"][1]);
        assert_eq!(
            (&n["name"], &n["result"], &n["rows"]),
            (&"n".into(), &"equal".into(), &1000.into())
        );
        assert_eq!(
            (&t["result"], &t["missing"], &t["columns_left"][0]),
            (&"different".into(), &1.into(), &"v".into())
        );
        assert_ne!(n["number"], t["number"]);
        assert!(t["lsn"].as_str().is_some_and(|lsn| lsn.contains('/')), "{t:#}");
        let text = case.tool.finish("status", &[]).stdout;
        assert!(
            text.contains("public.t: different (1 missing, 0 extra, 0 different) at "),
            "{text}"
        );
        assert!(text.contains("public.n: equal at "), "{text}");
        case.tool.finish("drop", &[]).expect(0, &[]);
        let left = "SELECT (SELECT count(*) FROM pgapace.verification) + (SELECT count(*) FROM pgapace.difference)";
        assert_eq!(case.subscriber.value(left), "0");
    });
}

/// A signal, or the loss of the process, leaves a position from which `--resume` goes on.
#[test]
fn an_interrupted_verification_goes_on() {
    on_versions(&BOTH_WAYS, |case| {
        two_tables(&case);
        case.subscriber.sql(
            "DELETE FROM t WHERE id IN (5, 100000); UPDATE t SET v = 'x' WHERE id IN (60000, 119999); DELETE FROM n WHERE id = 7",
        );
        for (number, kill) in [(0, false), (1, true)] {
            let slow = ["--max-rate", "50000", "--jobs", "2"];
            let log = case.log_file(&format!("verify{number}"));
            let mut process = must(case.tool.program("verify").args(slow).spawn_logged(log));
            let begun_row =
                "FROM pgapace.verification WHERE table_name = 't' AND kind = 'verb_begun'";
            let begun = format!("SELECT chunks BETWEEN 1 AND 2 AND result IS NULL {begun_row}");
            let compared = wait_until(PATIENCE, "a chunk to be compared", || {
                let known = format!("SELECT count(*) {begun_row}");
                Ok(case.subscriber.value(&known) == "1" && case.subscriber.value(&begun) == "t")
            });
            must(compared);
            if kill {
                must(process.kill9());
            } else {
                must(process.terminate());
                let status = must(process.wait(PATIENCE));
                assert_eq!(status.code(), Some(11), "{}", process.log());
                assert!(process.log().contains("--resume"), "{}", process.log());
            }
            let before: u64 = case
                .subscriber
                .value(&format!("SELECT rows {begun_row}"))
                .parse()
                .unwrap_or_default();
            assert!((50_000..120_000).contains(&before), "{before}");
            let other = case.tool.finish("verify", &["--resume", "--where", "id > 0"]);
            other.expect(3, &["was not one of table"]);
            let result = verify(&case, 18, &["--resume"]);
            let (n, t) = (&result["tables"][0], &result["tables"][1]);
            assert_eq!((&t["rows"], &t["chunks"]), (&120_000.into(), &3.into()), "{result:#}");
            assert_eq!(
                (&t["missing"], &t["different"], &n["missing"]),
                (&2.into(), &2.into(), &1.into())
            );
            assert_eq!(
                differences(&case),
                [
                    "n|missing|{\"a\": \"7\"}|∅|1".replace("{\"a\": \"7\"}", &row(&case)),
                    "t|different|{\"id\": \"119999\"}|{v}|1".to_owned(),
                    "t|different|{\"id\": \"60000\"}|{v}|1".to_owned(),
                    "t|missing|{\"id\": \"100000\"}|∅|1".to_owned(),
                    "t|missing|{\"id\": \"5\"}|∅|1".to_owned(),
                ]
            );
        }
    });
}

/// Starts a verification, and stops it while a transaction of the publisher keeps its snapshot from being taken.
fn interrupt_before_it_compares(case: &Case, log: &str) {
    let mut open = case.publisher.connect();
    must(open.batch_execute("BEGIN; SELECT pg_current_xact_id()"));
    let mut verb = must(case.tool.program("verify").spawn_logged(case.log_file(log)));
    must(wait_until(PATIENCE, "the verification to wait", || {
        assert!(verb.is_running(), "{}", verb.log());
        let asked = "SELECT (SELECT count(*) FROM pgapace.verification) > 0 \
                     AND (SELECT count(*) FROM pgapace.barrier) > 0";
        Ok(case.subscriber.value(asked) == "t")
    }));
    must(verb.terminate());
    assert_eq!(must(verb.wait(PATIENCE)).code(), Some(11), "{}", verb.log());
}

/// It says nothing about the tables: what is known of them stays, and `repair` does not take that for no difference.
#[test]
fn a_verification_that_ends_before_it_compares_forgets_nothing() {
    on_versions(&[(18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE n (id int PRIMARY KEY)");
        let process = case.start();
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 100)");
        let applied = "SELECT count(*) FROM t";
        must(wait_until(PATIENCE, "the rows", || Ok(case.subscriber.value(applied) == "100")));
        case.subscriber.sql("DELETE FROM t WHERE id = 5");
        interrupt_before_it_compares(&case, "first");
        let unknown = "tables were never compared to the end: public.n, public.t";
        case.tool
            .finish("repair", &[])
            .expect(17, &[unknown, "verify --resume with the same options"]);
        let of_t = ["--table", "t"];
        case.tool.finish("repair", &of_t).expect(17, &["compared to the end: public.t"]);
        verify(&case, 18, &["--resume"]);
        let found = ["t|missing|{\"id\": \"5\"}|∅|1"];
        assert_eq!(differences(&case), found);
        interrupt_before_it_compares(&case, "second");
        assert_eq!(differences(&case), found);
        let status = json(&case.tool.finish("status", &["--json"]))[0]["verified"].clone();
        assert_eq!((&status["tables_different"], &status["tables_equal"]), (&1.into(), &1.into()));
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
        expect_equal(&case, &["n", "t"], &["--resume"]);
        let kinds = "SELECT DISTINCT kind FROM pgapace.verification";
        assert_eq!(case.subscriber.rows(kinds), ["verb"]);
        case.stop(process);
    });
}

/// With thousands of tables, each statement for one of them counts.
#[test]
fn nothing_is_looked_for_where_nothing_can_be_forgotten() {
    let case = Case::new(18, 18);
    let names: Vec<_> = (1..=40).map(|number| format!("t{number}")).collect();
    let tables: Vec<_> =
        names.iter().map(|name| format!("CREATE TABLE {name} (id int PRIMARY KEY)")).collect();
    case.replicate(&tables.join("; "));
    case.publisher.sql("INSERT INTO t1 VALUES (1); INSERT INTO t2 VALUES (1)");
    case.run_until_current();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let verifies = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                    AND application_name LIKE 'pgapace %'";
    // A session that has ended has added its counts.
    let looks = || -> u64 {
        must(wait_until(PATIENCE, "the sessions to end", || {
            Ok(case.subscriber.value(verifies) == "0")
        }));
        let looks = "SELECT seq_scan + idx_scan FROM pg_stat_all_tables \
                     WHERE relid = 'pgapace.difference'::regclass";
        must(case.subscriber.value(looks).parse())
    };
    let before = looks();
    expect_equal(&case, &names, &[]);
    let first = looks() - before;
    assert!(first < 20, "{first} looks for differences of 40 tables that have none");
    // From now on, there are earlier results.
    case.subscriber.sql("DELETE FROM t1; DELETE FROM t2");
    verify(&case, 18, &[]);
    let missing = |table: &str| format!("{table}|missing|{{\"id\": \"1\"}}|∅|1");
    assert_eq!(differences(&case), [missing("t1"), missing("t2")]);
    case.subscriber.sql("INSERT INTO t1 VALUES (1)");
    verify(&case, 18, &["--table", "t1", "--table", "t2", "--table", "t3"]);
    assert_eq!(differences(&case), [missing("t2")]);
    let kinds = "SELECT kind, result, count(*) FROM pgapace.verification GROUP BY 1, 2 ORDER BY 3";
    assert_eq!(case.subscriber.rows(kinds), ["verb|different|1", "verb|equal|39"]);
}

/// The missing row of the table without a key.
fn row(case: &Case) -> String {
    case.publisher.value("SELECT jsonb_build_object('id', '7', 'v', md5('7'))")
}

/// Snapshots are renewed, and each chunk is compared under its own pair.
#[test]
fn snapshots_are_renewed() {
    on_versions(&[(15, 18)], |case| {
        two_tables(&case);
        let log = case.log_file("verify");
        let slow = ["--max-rate", "50000", "--jobs", "1", "--snapshot-lifetime", "1", "--json"];
        let mut process = must(case.tool.program("verify").args(slow).spawn_logged(log));
        let lsns = "SELECT DISTINCT lsn FROM pgapace.verification WHERE table_name = 't' AND lsn IS NOT NULL";
        let known = "SELECT count(*) FROM pg_class WHERE relname = 'verification'";
        let mut seen = std::collections::HashSet::new();
        let renewed = wait_until(PATIENCE, "the verification to end", || {
            if case.subscriber.value(known) == "1" {
                seen.extend(case.subscriber.rows(lsns));
            }
            Ok(!process.is_running())
        });
        must(renewed);
        assert!(must(process.wait(PATIENCE)).success(), "{}", process.log());
        assert!(seen.len() > 1, "{seen:?}");
    });
}

/// A table that is truncated, or a publication that changes, between two pairs.
#[test]
fn definitions_that_change_meanwhile() {
    on_versions(&[(15, 18)], |case| {
        two_tables(&case);
        let slow = ["--max-rate", "100000", "--jobs", "1", "--snapshot-lifetime", "1"];
        let mut process =
            must(case.tool.program("verify").args(slow).spawn_logged(case.log_file("verify")));
        let begun = wait_until(PATIENCE, "a chunk to be compared", || {
            let known = "SELECT count(*) FROM pg_class WHERE relname = 'verification'";
            let rows =
                "SELECT count(*) FROM pgapace.verification WHERE table_name = 't' AND chunks > 0";
            Ok(case.subscriber.value(known) == "1" && case.subscriber.value(rows) == "1")
        });
        must(begun);
        case.publisher.sql("ALTER TABLE t ADD more int");
        let status = must(process.wait(PATIENCE));
        assert_eq!(status.code(), Some(6), "{}", process.log());
        assert!(
            process.log().contains("public.t changed during the comparison"),
            "{}",
            process.log()
        );
    });
}
