//! Conflict rules give the same result for every size of apply groups.

use std::fmt::Write as _;

use crate::support::{Case, on_versions};

/// The apply settings with which each test runs.
pub(super) const MODES: [&[&str]; 3] =
    [&[], &["--group-transactions", "1"], &["--apply-mode", "row"]];

pub(super) const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Runs a body on each pair of versions with each setting.
pub(super) fn in_every_mode(rules: &[&str], body: impl Fn(&Case)) {
    for mode in MODES {
        on_versions(&BOTH, |mut case| {
            case.tool.args = mode.iter().map(|arg| (*arg).to_owned()).collect();
            for rule in rules {
                case.tool.args.extend(["--on-conflict".to_owned(), (*rule).to_owned()]);
            }
            body(&case);
        });
    }
}

/// Runs each statement as a separate transaction.
pub(super) fn transactions(case: &Case, statements: &[&str]) {
    let mut sql = String::new();
    for statement in statements {
        write!(sql, "BEGIN; {statement}; COMMIT; ").expect("a string");
    }
    case.publisher.sql(&sql);
}

/// Rows 1 to 20 exist on both sides, except that the subscriber lacks 5 to 8. It has 31 to 33 in
/// addition.
pub(super) fn diverge(case: &Case) {
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)");
    case.publisher.sql("INSERT INTO t SELECT g, 10 * g, 'p' FROM generate_series(1, 20) g");
    case.run_until_current();
    case.subscriber.sql(
        "INSERT INTO t VALUES (31, 310, 't'), (32, 320, 't'), (33, 330, 't'); \
         DELETE FROM t WHERE id BETWEEN 5 AND 8",
    );
}

pub(super) fn conflicts(case: &Case) -> Vec<String> {
    case.subscriber.rows(
        "SELECT concat_ws(' ', c.conflict, c.action, c.applied, c.operation, c.key, c.sqlstate) \
         FROM pgapace.conflict c JOIN pgapace.subscription s ON s.id = c.subscription \
         WHERE c.schema_name = 'public' AND c.table_name = 't' ORDER BY c.id",
    )
}

pub(super) fn subscriber_rows(case: &Case, condition: &str) -> Vec<String> {
    case.subscriber.rows(&format!("SELECT id, u, v FROM t WHERE {condition} ORDER BY id"))
}

/// Only the subscriber has the rows whose unique values the publisher writes, and replaces or removes soon after.
#[test]
fn a_value_that_is_soon_replaced_conflicts_in_every_group() {
    let rules =
        ["insert_exists=skip", "update_exists=skip", "update_missing=skip", "delete_missing=skip"];
    in_every_mode(&rules, |case| {
        diverge(case);
        let others: Vec<_> =
            (100..160).map(|id| format!("INSERT INTO t VALUES ({id}, {id}0, 'p')")).collect();
        let mut statements = vec![
            "INSERT INTO t VALUES (50, 310, 'p'); UPDATE t SET u = 500 WHERE id = 50",
            "INSERT INTO t VALUES (51, 320, 'p')",
            "DELETE FROM t WHERE id = 51",
            "UPDATE t SET u = 330 WHERE id = 1",
            "UPDATE t SET u = 11 WHERE id = 1",
        ];
        statements.extend(others.iter().map(String::as_str));
        transactions(case, &statements);
        let log = case.run_until_current();
        assert_eq!(
            conflicts(case),
            [
                "insert_exists skip f INSERT (id)=(50) 23505",
                "update_missing skip f UPDATE (id)=(50)",
                "insert_exists skip f INSERT (id)=(51) 23505",
                "delete_missing skip f DELETE (id)=(51)",
                "update_exists skip f UPDATE (id)=(1) 23505",
            ],
            "{log}"
        );
        assert_eq!(subscriber_rows(case, "id IN (1, 50, 51, 159)"), ["1|11|p", "159|1590|p"]);
    });
}

#[test]
fn skip_affects_only_the_conflicting_changes() {
    let rules =
        ["insert_exists=skip", "update_exists=skip", "update_missing=skip", "delete_missing=skip"];
    in_every_mode(&rules, |case| {
        diverge(case);
        transactions(
            case,
            &[
                "UPDATE t SET v = 'x1' WHERE id = 1; INSERT INTO t VALUES (31, 310, 'p'); \
                 UPDATE t SET v = 'x2' WHERE id = 2",
                "UPDATE t SET v = 'x5' WHERE id IN (5, 9)",
                "DELETE FROM t WHERE id IN (6, 10)",
                "INSERT INTO t VALUES (40, 400, 'p')",
                // The value of another row of the subscriber.
                "UPDATE t SET u = 320 WHERE id = 3; UPDATE t SET v = 'x4' WHERE id = 4",
                // Another row of the subscriber has one of its values.
                "INSERT INTO t VALUES (41, 330, 'p')",
                // Updates of rows whose insert was skipped.
                "UPDATE t SET v = 'later' WHERE id IN (31, 41)",
                "INSERT INTO t VALUES (42, 420, 'p')",
            ],
        );
        let log = case.run_until_current();
        assert_eq!(
            conflicts(case),
            [
                "insert_exists skip f INSERT (id)=(31) 23505",
                "update_missing skip f UPDATE (id)=(5)",
                "delete_missing skip f DELETE (id)=(6)",
                "update_exists skip f UPDATE (id)=(3) 23505",
                "insert_exists skip f INSERT (id)=(41) 23505",
                "update_missing skip f UPDATE (id)=(41)",
            ],
            "{log}"
        );
        assert_eq!(
            subscriber_rows(case, "id < 5 OR id IN (9, 10) OR id > 30"),
            [
                "1|10|x1",
                "2|20|x2",
                "3|30|p",
                "4|40|x4",
                "9|90|x5",
                "31|310|later",
                "32|320|t",
                "33|330|t",
                "40|400|p",
                "42|420|p"
            ]
        );
        let counted = "insert_exists || ',' || t.update_exists || ',' || t.update_missing || ',' \
                       || t.delete_missing || ',' || t.transactions";
        assert_eq!(case.statistic(counted), "2,1,2,1,9", "{log}");
        assert!(log.contains("insert_exists") && log.contains("(id)=(41)"), "{log}");
        // Nothing is applied twice.
        case.run_until_current();
        assert_eq!(conflicts(case).len(), 6);
    });
}

/// Foreign keys that are enabled for replicated changes, and exclusion constraints.
#[test]
fn rules_for_foreign_keys_and_exclusion_constraints() {
    let rules = ["foreign_key_violation=skip", "exclusion_violation=skip", "delete_missing=error"];
    in_every_mode(&rules, |case| {
        case.both(
            "CREATE TABLE parent (id int PRIMARY KEY); \
             CREATE TABLE t (id int PRIMARY KEY, parent int REFERENCES parent); \
             CREATE TABLE slot (id int PRIMARY KEY, during int4range)",
        );
        case.publish("FOR TABLE parent, t, slot");
        case.publisher.sql("INSERT INTO parent VALUES (1), (2), (3); INSERT INTO t VALUES (1, 1)");
        case.run_until_current();
        case.subscriber.sql(
            "DO $$ DECLARE r record; BEGIN FOR r IN SELECT tgrelid::regclass AS rel, tgname FROM pg_trigger \
               WHERE tgisinternal LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', r.rel, r.tgname); \
             END LOOP; END $$; \
             DELETE FROM t; DELETE FROM parent WHERE id = 2; INSERT INTO t VALUES (9, 3); \
             ALTER TABLE slot ADD EXCLUDE USING gist (during WITH &&)",
        );
        transactions(
            case,
            &[
                "INSERT INTO t VALUES (2, 2), (3, 1)",
                "DELETE FROM parent WHERE id = 3",
                "INSERT INTO slot VALUES (1, '[1,5)'), (2, '[4,8)'), (3, '[8,9)')",
            ],
        );
        case.run_until_current();
        let found = case.subscriber.rows(
            "SELECT concat_ws(' ', table_name, conflict, operation, key, sqlstate) \
             FROM pgapace.conflict ORDER BY id",
        );
        assert_eq!(
            found,
            [
                "t foreign_key_violation INSERT (id)=(2) 23503",
                "parent foreign_key_violation DELETE (id)=(3) 23503",
                "slot exclusion_violation INSERT (id)=(2) 23P01",
            ]
        );
        assert_eq!(
            case.subscriber.value("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"),
            "3,9"
        );
        assert_eq!(
            case.subscriber.value("SELECT string_agg(id::text, ',' ORDER BY id) FROM slot"),
            "1,3"
        );
        case.publisher.sql("DELETE FROM t WHERE id = 1");
        case.run().expect(9, &["conflict=delete_missing", "(id)=(1)"]);
    });
}
