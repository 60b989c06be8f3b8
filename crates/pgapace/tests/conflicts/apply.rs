//! The rule `apply`: the change of the publisher wins.

use super::rules::{conflicts, diverge, in_every_mode, subscriber_rows, transactions};

#[test]
fn apply_overwrites_the_existing_row() {
    in_every_mode(&["public.t:insert_exists=apply", "update_missing=apply"], |case| {
        diverge(case);
        transactions(
            case,
            &[
                "INSERT INTO t VALUES (31, 311, 'p')",
                "UPDATE t SET v = 'x5' WHERE id = 5",
                "UPDATE t SET id = 50, v = 'x6' WHERE id = 6",
                "DELETE FROM t WHERE id = 7",
                "INSERT INTO t VALUES (32, 321, 'p'); UPDATE t SET u = 322 WHERE id = 32",
            ],
        );
        let log = case.run_until_current();
        assert_eq!(
            conflicts(case),
            [
                "insert_exists apply t INSERT (id)=(31) 23505",
                "update_missing apply t UPDATE (id)=(5)",
                "update_missing apply t UPDATE (id)=(6)",
                "delete_missing skip f DELETE (id)=(7)",
                "insert_exists apply t INSERT (id)=(32) 23505",
            ],
            "{log}"
        );
        case.subscriber.sql("DELETE FROM t WHERE id = 33; INSERT INTO t VALUES (8, 80, 'p')");
        case.expect_equal(&["t"]);
        case.publisher.sql("UPDATE t SET v = v || '!'");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// The conflicting row has another key, so it is unclear which row is meant. Another change
/// conflicts with two rows.
#[test]
fn conflicts_with_a_row_of_another_key_stop() {
    in_every_mode(&["insert_exists=apply"], |case| {
        diverge(case);
        transactions(
            case,
            &["UPDATE t SET v = 'x' WHERE id = 1", "INSERT INTO t VALUES (41, 310, 'p')"],
        );
        let failed = case.run();
        failed.expect(9, &["conflict=insert_exists", "INSERT on public.t", "(id)=(41)", "23505"]);
        // The chosen action is no advice.
        failed.expect(9, &["Key (u)=(310) already exists", "choose insert_exists=skip"]);
        assert!(!failed.log.contains("an action for insert_exists"), "{}", failed.log);
        assert_eq!(subscriber_rows(case, "id IN (1, 41)"), ["1|10|x"]);
        case.subscriber.sql("DELETE FROM t WHERE id = 31");
        transactions(case, &["INSERT INTO t VALUES (32, 330, 'p')"]);
        case.run().expect(9, &["conflict=multiple_unique_conflicts", "(id)=(32)"]);
        assert_eq!(subscriber_rows(case, "id > 30"), ["32|320|t", "33|330|t", "41|310|p"]);
    });
    in_every_mode(&["insert_exists=apply", "multiple_unique_conflicts=skip"], |case| {
        diverge(case);
        transactions(case, &["INSERT INTO t VALUES (32, 330, 'p'), (43, 430, 'p')"]);
        case.run_until_current();
        assert_eq!(conflicts(case), ["multiple_unique_conflicts skip f INSERT (id)=(32) 23505"]);
        assert_eq!(
            subscriber_rows(case, "id > 30"),
            ["31|310|t", "32|320|t", "33|330|t", "43|430|p"]
        );
    });
}

/// The missing row cannot be inserted because other rows have its values. Then the rule for these counts.
#[test]
fn a_missing_row_whose_values_other_rows_have() {
    let update = "UPDATE t SET u = 310, v = 'x5' WHERE id = 5";
    let several = "UPDATE t SET id = 32, u = 330 WHERE id = 6";
    in_every_mode(&["update_missing=apply"], |case| {
        diverge(case);
        transactions(case, &[update]);
        case.run().expect(9, &["conflict=update_exists", "(id)=(5)", "for update_exists"]);
        case.subscriber.sql("DELETE FROM t WHERE id = 31");
        transactions(case, &[several]);
        let kind = "multiple_unique_conflicts";
        case.run().expect(9, &[&format!("conflict={kind}"), "(id)=(6)", &format!("for {kind}")]);
        assert_eq!(subscriber_rows(case, "id IN (5, 6, 32)"), ["5|310|x5", "32|320|t"]);
    });
    let all = ["insert_exists=skip", "update_exists=skip", "multiple_unique_conflicts=skip"];
    let only_several = "multiple_unique_conflicts=skip";
    for rules in [&all[..], &[only_several]] {
        let rules = [&["update_missing=apply"], rules].concat();
        in_every_mode(&rules, |case| {
            diverge(case);
            let first = if rules.len() == 2 { several } else { update };
            transactions(case, &["UPDATE t SET v = 'x7' WHERE id = 7", first]);
            transactions(case, &["UPDATE t SET v = 'x8' WHERE id = 8"]);
            case.run_until_current();
            let skipped = match rules.len() {
                2 => "multiple_unique_conflicts skip f UPDATE (id)=(6) 23505",
                _ => "update_exists skip f UPDATE (id)=(5) 23505",
            };
            let inserted = |id| format!("update_missing apply t UPDATE (id)=({id})");
            assert_eq!(conflicts(case), [inserted(7), skipped.to_owned(), inserted(8)]);
            assert_eq!(subscriber_rows(case, "id IN (5, 6, 7, 8)"), ["7|70|x7", "8|80|x8"]);
            let counted = case.statistic("update_missing || ' ' || t.update_exists");
            assert_eq!(counted, if rules.len() == 2 { "2 0" } else { "2 1" });
        });
    }
}

/// An insert that becomes an update, and an update that becomes an insert, violate a constraint of another kind.
#[test]
fn the_rule_of_another_constraint_counts() {
    let rules = ["insert_exists=apply", "update_missing=apply", "exclusion_violation=skip"];
    in_every_mode(&rules, |case| {
        diverge(case);
        case.subscriber.sql("ALTER TABLE t ADD EXCLUDE (v WITH =) WHERE (v = 'x')");
        transactions(
            case,
            &[
                "UPDATE t SET v = 'x' WHERE id = 1",
                "INSERT INTO t VALUES (31, 311, 'x')",
                "UPDATE t SET v = 'x' WHERE id = 5",
                "UPDATE t SET v = 'y' WHERE id = 6",
            ],
        );
        case.run_until_current();
        assert_eq!(
            conflicts(case),
            [
                "exclusion_violation skip f INSERT (id)=(31) 23P01",
                "exclusion_violation skip f UPDATE (id)=(5) 23P01",
                "update_missing apply t UPDATE (id)=(6)",
            ]
        );
        assert_eq!(subscriber_rows(case, "id IN (1, 5, 6, 31)"), ["1|10|x", "6|60|y", "31|310|t"]);
    });
}

/// Columns that UPDATE cannot set, equal keys with different text, tables with another key than the
/// publisher's, and partitions.
#[test]
fn apply_handles_all_kinds_of_rows() {
    in_every_mode(&["insert_exists=apply"], |case| {
        case.both(
            "CREATE TABLE ident (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v text); \
             CREATE TABLE number (id numeric PRIMARY KEY, v text); \
             CREATE TABLE only_key (id int PRIMARY KEY); \
             CREATE TABLE part (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (id); \
             CREATE TABLE part1 PARTITION OF part FOR VALUES FROM (0) TO (10)",
        );
        case.publisher.sql("CREATE TABLE t (a int, b int, v text, PRIMARY KEY (a, b))");
        case.subscriber.sql("CREATE TABLE t (v text, b int, a int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql(
            "INSERT INTO ident OVERRIDING SYSTEM VALUE VALUES (1, 77, 't'); \
             INSERT INTO number VALUES (1.0, 't'); INSERT INTO only_key VALUES (1); \
             INSERT INTO part VALUES (1, 1, 't'); INSERT INTO t (a, b, v) VALUES (1, 5, 't')",
        );
        transactions(
            case,
            &[
                "INSERT INTO ident (id, v) VALUES (1, 'p')",
                "INSERT INTO number VALUES (1.00, 'p')",
                "INSERT INTO only_key VALUES (1)",
                "INSERT INTO part VALUES (1, 1, 'p'), (2, 2, 'p')",
                "INSERT INTO t VALUES (1, 6, 'p')",
            ],
        );
        case.run_until_current();
        case.expect_equal(&["ident", "number", "only_key", "part", "t"]);
        assert_eq!(case.statistic("insert_exists"), "5");
    });
}

/// With REPLICA IDENTITY FULL, the old row has the TOASTed value that the new one leaves out.
#[test]
fn a_missing_row_with_an_unchanged_toasted_value() {
    in_every_mode(&["update_missing=apply"], |case| {
        diverge(case);
        case.both("ALTER TABLE t ADD c text; ALTER TABLE t ALTER c SET STORAGE EXTERNAL");
        case.publisher.sql(
            "ALTER TABLE t REPLICA IDENTITY FULL; \
             UPDATE t SET c = repeat('c', 3000) WHERE id IN (5, 6)",
        );
        case.run_until_current();
        case.subscriber.sql("DELETE FROM t WHERE id IN (5, 6)");
        transactions(case, &["UPDATE t SET v = 'x5' WHERE id = 5"]);
        case.run_until_current();
        let row = "SELECT concat_ws('|', v, c = repeat('c', 3000)) FROM t WHERE id = 5";
        assert_eq!(case.subscriber.value(row), "x5|t");

        case.publisher.sql("ALTER TABLE t REPLICA IDENTITY DEFAULT");
        transactions(case, &["UPDATE t SET v = 'x6' WHERE id = 6"]);
        let said = ["did not send its unchanged column \"c\"", "REPLICA IDENTITY FULL"];
        case.run().expect(6, &said);
    });
}
