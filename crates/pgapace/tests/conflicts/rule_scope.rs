//! To which changes a rule applies.

use super::rules::{BOTH, conflicts, diverge, in_every_mode, subscriber_rows, transactions};
use crate::support::{Case, on_versions};

/// Rules for one table do not affect others, and missing rows may stop the run.
#[test]
fn rules_apply_to_their_table_only() {
    in_every_mode(&["public.t:insert_exists=skip", "public.t:update_missing=error"], |case| {
        case.both("CREATE TABLE other (id int PRIMARY KEY)");
        diverge(case);
        case.subscriber.sql("INSERT INTO other VALUES (1)");
        transactions(
            case,
            &["INSERT INTO t VALUES (31, 310, 'p')", "UPDATE t SET v = 'x5' WHERE id = 5"],
        );
        let failed = case.run();
        failed.expect(9, &["conflict=update_missing", "UPDATE on public.t", "(id)=(5)"]);
        // Transactions before the stop stay committed.
        let recorded = [
            "insert_exists skip f INSERT (id)=(31) 23505",
            "update_missing error f UPDATE (id)=(5)",
        ];
        assert_eq!(conflicts(case), recorded);
        case.subscriber.sql("INSERT INTO t VALUES (5, 50, 'p')");
        transactions(case, &["INSERT INTO t VALUES (32, 320, 'p'); INSERT INTO other VALUES (1)"]);
        case.run().expect(9, &["INSERT on public.other", "(id)=(1)", "23505"]);
        assert_eq!(conflicts(case), recorded);
        assert_eq!(subscriber_rows(case, "id = 5"), ["5|50|x5"]);
        case.subscriber.sql("DELETE FROM other");
        case.run_until_current();
        assert_eq!(conflicts(case).len(), 3);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM other"), "1");
    });
}

/// Rules never apply to errors that are not conflicts.
#[test]
fn other_errors_stop() {
    in_every_mode(&["insert_exists=skip", "update_exists=skip"], |case| {
        diverge(case);
        case.subscriber.sql("ALTER TABLE t ADD CHECK (v <> 'bad')");
        transactions(
            case,
            &["INSERT INTO t VALUES (31, 310, 'p')", "INSERT INTO t VALUES (50, 500, 'bad')"],
        );
        case.run().expect(9, &["23514", "(id)=(50)"]);
        assert_eq!(conflicts(case).len(), 1);
        case.subscriber.sql("ALTER TABLE t DROP CONSTRAINT t_v_check");
        // Neither do they apply to an error of the same class that a trigger caused in another
        // table.
        case.subscriber.sql(
            "CREATE TABLE log (id int PRIMARY KEY); INSERT INTO log VALUES (51); \
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
               'BEGIN INSERT INTO public.log VALUES (NEW.id); RETURN NEW; END'; \
             CREATE TRIGGER note AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER note",
        );
        transactions(case, &["INSERT INTO t VALUES (51, 510, 'p')"]);
        case.run().expect(9, &["23505", "(id)=(51)"]);
        assert_eq!(subscriber_rows(case, "id > 40"), ["50|500|bad"]);
    });
}

/// A transaction that does not fit into memory, with conflicts in several of its parts, and a
/// transaction with many conflicts.
#[test]
fn rules_apply_to_large_transactions() {
    on_versions(&BOTH, |mut case| {
        case.tool.args = ["--memory-limit", "16", "--on-conflict", "insert_exists=skip"]
            .map(str::to_owned)
            .to_vec();
        diverge(&case);
        case.subscriber
            .sql("INSERT INTO t SELECT g, 10 * g, 't' FROM generate_series(1000, 9000, 1000) g");
        case.publisher.sql(
            "INSERT INTO t SELECT g, 10 * g, repeat('v', 1000) FROM generate_series(100, 10000) g",
        );
        case.run_until_current();
        assert_eq!(conflicts(&case).len(), 9);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE id >= 100"), "9901");
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM t WHERE id >= 100 AND v = 't'"),
            "9"
        );
        assert_eq!(case.statistic("insert_exists || ',' || t.inserts"), "9,9912");
        case.subscriber
            .sql("INSERT INTO t SELECT g, 10 * g, 't' FROM generate_series(20001, 20300) g");
        case.publisher
            .sql("INSERT INTO t SELECT g, 10 * g, 'p' FROM generate_series(20001, 20300) g");
        case.run_until_current();
        assert_eq!(conflicts(&case).len(), 309);
    });
}

/// Names that are mistyped would leave a conflict to the default. The list has commas within a name.
#[test]
fn a_rule_for_a_table_that_is_not_published_is_named() {
    let mut case = Case::new(18, 18);
    case.replicate("CREATE TABLE \"T,x\" (id int PRIMARY KEY, v int)");
    let rules = "public.\"T,x\":insert_exists=apply,public.nosuch:insert_exists=skip";
    case.tool.args = vec![format!("--on-conflict={rules}")];
    case.subscriber.sql("INSERT INTO \"T,x\" VALUES (1, 1)");
    case.publisher.sql("INSERT INTO \"T,x\" VALUES (1, 2)");
    let log = case.run_until_current();
    assert_eq!(log.matches("conflict_rule_unused").count(), 1, "{log}");
    assert!(log.contains("table=\"public.nosuch\""), "{log}");
    case.expect_equal(&["T,x"]);
    let check = case.tool.finish("check", &[]);
    check.expect(0, &[]);
    let named = "rule for public.nosuch: no such table is published";
    assert!(check.stdout.contains(named), "{}", check.stdout);
}
