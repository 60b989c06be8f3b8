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
        case.run()
            .expect(9, &["conflict=insert_exists", "INSERT on public.t", "(id)=(41)", "23505"]);
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
