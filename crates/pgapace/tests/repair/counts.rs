//! What `repair` leaves in the counts of verifications, and says of differences that were not recorded.

use testbed::wait_until;

use super::{VERSIONS, recorded};
use crate::support::{Case, PATIENCE, must, on_versions};
use crate::verbs::json;

/// The result and the number of differences of the last complete verification.
fn known(case: &Case) -> String {
    case.subscriber.value(
        "SELECT concat(result, ' ', missing + extra + different) FROM pgapace.verification WHERE kind = 'verb'",
    )
}

#[test]
fn differences_that_were_not_recorded_are_named() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE n (a int)");
        case.publisher.sql(
            "INSERT INTO t SELECT i, i FROM generate_series(1, 100) i; \
             INSERT INTO n SELECT i % 5 FROM generate_series(1, 20) i",
        );
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = -1 WHERE id <= 30; DELETE FROM n WHERE a = 3");
        case.tool.finish("verify", &["--max-differences", "10"]).expect(18, &["34 rows differ"]);
        // Copies of a row are one difference that is recorded.
        assert_eq!(recorded(&case), "11");
        let left = ["20 differences were counted and not recorded", "public.t", "pgapace verify"];
        let repaired = case.tool.finish("repair", &["--json"]);
        repaired.expect(18, &left);
        let said = json(&repaired);
        let tables = said[0]["tables"].as_array().expect("tables");
        let t = tables.iter().find(|table| table["name"] == "t").expect("table t");
        assert_eq!((&t["updated"], &t["unrecorded"]), (&10.into(), &20.into()), "{said:#}");
        let n = tables.iter().find(|table| table["name"] == "n").expect("table n");
        assert_eq!((&n["inserted"], &n["unrecorded"]), (&4.into(), &0.into()), "{said:#}");
        // They are known without recorded differences, too.
        let again = case.tool.finish("repair", &[]);
        again.expect(18, &left);
        assert!(again.stdout.contains("public.t: 0 inserted"), "{}", again.stdout);
        assert!(again.stdout.contains("20 not recorded"), "{}", again.stdout);
        case.tool.finish("repair", &["--table", "n"]).expect(0, &[]);
        case.tool.finish("verify", &["--table", "t"]).expect(18, &["20 rows differ"]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t", "n"]);
        let verified = json(&case.tool.finish("status", &["--json"]))[0]["verified"].clone();
        assert_eq!(
            (&verified["tables_equal"], &verified["tables_different"]),
            (&2.into(), &0.into()),
            "{verified:#}"
        );
        case.tool.finish("verify", &[]).expect(0, &[]);
    });
}

/// Unique values have moved between rows, of which the verification recorded a part: no row is extra.
#[test]
fn a_value_that_a_row_without_a_record_uses_is_explained() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)");
        case.publisher.sql("INSERT INTO t SELECT i, i FROM generate_series(1, 40) i");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET u = -u; UPDATE t SET u = 1 - u");
        case.tool.finish("verify", &["--max-differences", "10"]).expect(18, &["40 rows differ"]);
        for args in [&[][..], &["--delete-extra"]] {
            let failed = case.tool.finish("repair", args);
            failed.expect(5, &["23505", "one of 30 that differ", "a greater --max-differences"]);
            assert!(!failed.log.contains("--delete-extra"), "{}", failed.log);
        }
        case.tool.finish("verify", &["--max-differences", "1000"]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.expect_equal(&["t"]);
        // A row that only the subscriber has is another case.
        case.subscriber.sql("UPDATE t SET id = 100 WHERE id = 7");
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(5, &["23505", "repair with --delete-extra"]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
        // Another error is not about values in use.
        case.subscriber.sql(
            "DELETE FROM t WHERE id = 8; ALTER TABLE t ADD own int NOT NULL DEFAULT 0; \
             ALTER TABLE t ALTER own DROP DEFAULT",
        );
        case.tool.finish("verify", &[]).expect(18, &[]);
        let failed = case.tool.finish("repair", &[]);
        failed.expect(5, &["23502"]);
        assert!(!failed.log.contains("--delete-extra"), "{}", failed.log);
    });
}

#[test]
fn rows_that_only_the_subscriber_has_stay_counted() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t SELECT generate_series(1, 9)");
    case.run_until_current();
    case.subscriber.sql("DELETE FROM t WHERE id < 3; INSERT INTO t VALUES (100)");
    case.tool.finish("verify", &[]).expect(18, &[]);
    assert_eq!(known(&case), "different 3");
    let left = case.tool.finish("repair", &[]);
    left.expect(18, &["1 rows that only the subscriber has were left"]);
    assert!(!left.log.contains("not recorded"), "{}", left.log);
    assert_eq!(known(&case), "different 1");
    case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
    assert_eq!(known(&case), "equal 0");
}

/// As the hints of both verbs say.
#[test]
fn a_verification_that_goes_on_after_a_repair_finds_nothing_that_was_repaired() {
    on_versions(&[(15, 18), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO t SELECT i, i FROM generate_series(1, 120000) i");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = -1 WHERE id <= 3 OR id = 119999");
        let slow = ["--max-rate", "20000", "--jobs", "1"];
        let log = case.log_file("verify");
        let mut verify = must(case.tool.program("verify").args(slow).spawn_logged(log));
        let chunks = "SELECT count(*) FROM pgapace.verification WHERE chunks = 1";
        must(wait_until(PATIENCE, "a chunk to be compared", || {
            assert!(verify.is_running(), "{}", verify.log());
            Ok(case.subscriber.value(chunks) == "1")
        }));
        must(verify.terminate());
        assert_eq!(must(verify.wait(PATIENCE)).code(), Some(11), "{}", verify.log());
        assert_eq!(recorded(&case), "3");
        case.tool.finish("repair", &[]).expect(17, &["never compared", "verify --resume"]);
        assert_eq!(recorded(&case), "0");
        // The row of a later chunk is the only one that differs.
        case.tool.finish("verify", &["--resume"]).expect(18, &["1 row differs"]);
        assert_eq!((recorded(&case), known(&case)), ("1".to_owned(), "different 1".to_owned()));
        case.tool.finish("repair", &[]).expect(0, &[]);
        assert_eq!(known(&case), "equal 0");
        case.expect_equal(&["t"]);
    });
}
