//! Which changes conflict.

use super::bed::{Bed, after, column, key, prerequisites, table, with_unique};
use crate::key::KeyForm;
use crate::writeset::{LockColumn, LockRules, RowLock, UniqueLock};

/// Each case has a first change, a second change, and the verdict of the second.
fn check(rules: &LockRules, cases: &[(&str, &str, char)]) {
    for &(first, second, verdict) in cases {
        assert_eq!(after((rules, first), (rules, second)), verdict, "{first:?} then {second:?}");
    }
}

#[test]
fn changes_of_one_row() {
    check(
        &table(1),
        &[
            ("I 1 a", "U 1 b", 'x'),
            ("I 1 a", "D K 1 -", 'x'),
            ("D K 1 -", "I 1 a", 'x'),
            ("U 1 a", "U 1 b", 'x'),
            ("U 1 a", "U 2 a", '.'),
            ("I 1 a", "I 2 a", '.'),
            ("U K 1 - > 2 a", "I 1 a", 'x'),
            ("U K 1 - > 2 a", "U 2 a", 'x'),
            ("U 2 a", "U K 1 - > 2 a", 'x'),
            ("U 1 a", "U K 1 - > 2 a", 'x'),
            ("U K 1 - > 2 a", "U 3 a", '.'),
            // The key is TOASTed and was not sent again.
            ("U K 1 - > ~ a", "U 1 a", 'x'),
            ("U K 1 - > ~ a", "U 2 a", '.'),
            // The key is unknown.
            ("U ~ a", "U 2 a", 'x'),
            ("I - a", "U 2 a", 'x'),
            ("D K - a", "U 2 a", 'x'),
        ],
    );
}

#[test]
fn the_columns_of_a_key_stay_distinct() {
    let rules = LockRules { row: RowLock::Key(vec![key(1), key(0)]), ..table(1) };
    check(
        &rules,
        &[
            ("U a b", "U a b", 'x'),
            ("U a b", "U b a", '.'),
            ("U ab c", "U a bc", '.'),
            ("U a b", "D K a b", 'x'),
        ],
    );
}

#[test]
fn keys_are_compared_by_value() {
    let keyed =
        |form| LockRules { row: RowLock::Key(vec![LockColumn { form, ..key(0) }]), ..table(1) };
    check(&keyed(KeyForm::Numeric), &[("U 1.0", "U 1.00", 'x'), ("U 1.0", "U 1.01", '.')]);
    check(&keyed(KeyForm::Float8), &[("U 0", "U -0", 'x')]);
    // A key with an unexpected spelling may equal any other.
    check(
        &keyed(KeyForm::Integer),
        &[("U 1", "U 1", 'x'), ("U 1", "U 2", '.'), ("U 1", "U +2", 'x')],
    );
}

#[test]
fn changes_of_different_tables_are_independent() {
    assert_eq!(after((&table(1), "U 1 a"), (&table(2), "U 1 a")), '.');
    assert_eq!(after((&table(1), "T"), (&table(2), "U 1 a")), '.');
}

#[test]
fn rows_identified_by_all_columns() {
    let rules = LockRules { row: RowLock::WholeRow(vec![key(0), key(1)]), ..table(1) };
    check(
        &rules,
        &[
            ("I 1 -", "D O 1 -", 'x'),
            ("I 1 -", "I 1 -", 'x'),
            ("I 1 a", "D O 1 -", '.'),
            ("U O 1 a > 1 b", "U O 1 b > 1 c", 'x'),
            ("U O 1 a > 1 b", "U O 1 d > 1 c", '.'),
            ("U O 1 a > 2 ~", "D O 2 a", 'x'),
            ("U O 1 a > 2 ~", "D O 2 b", '.'),
            // An incomplete old row may be any row.
            ("U 1 a", "I 2 b", 'x'),
            ("D K 1 -", "I 2 b", 'x'),
        ],
    );
}

#[test]
fn rows_without_an_identity() {
    let rules = LockRules { row: RowLock::Table, ..table(1) };
    check(
        &rules,
        &[
            ("I 1 a", "I 1 a", '.'),
            ("I 1 a", "U 2 a", 'x'),
            ("U 1 a", "I 2 a", 'x'),
            ("D K 1 -", "D K 2 -", 'x'),
        ],
    );
}

#[test]
fn unique_keys() {
    check(
        &with_unique(1),
        &[
            ("I 1 a", "I 2 a", 'x'),
            ("I 1 a", "I 2 b", '.'),
            ("U 1 a", "U 2 a", 'x'),
            ("I 1 -", "I 2 -", '.'),
            // A delete frees a unique key, but only a complete old row contains it.
            ("D O 1 a", "I 2 a", 'x'),
            ("D K 1 -", "I 2 a", '.'),
            ("U O 1 a > 1 b", "I 2 a", 'x'),
            ("U O 1 a > 1 b", "I 2 b", 'x'),
            ("U O 1 a > 1 b", "I 2 c", '.'),
            // The unique key is certainly unchanged.
            ("U 1 ~", "I 2 a", '.'),
            ("U O 1 a > 1 a", "I 2 a", '.'),
            ("U O 1 a > 1 ~", "I 2 a", '.'),
            // The value is unknown.
            ("I 1 ~", "I 2 a", 'x'),
        ],
    );
    assert_eq!(after((&with_unique(1), "I 1 a"), (&with_unique(2), "I 1 a")), '.');
}

#[test]
fn nulls_not_distinct() {
    let mut rules = with_unique(1);
    rules.unique[0].nulls_not_distinct = true;
    check(&rules, &[("I 1 -", "I 2 -", 'x'), ("I 1 -", "I 2 a", '.')]);
}

#[test]
fn a_unique_key_within_the_replica_identity_is_unchanged_without_an_old_row() {
    let mut rules = with_unique(1);
    rules.row = RowLock::Key(vec![key(0)]);
    rules.unique[0].columns = vec![key(1)];
    check(
        &rules,
        &[
            ("U 1 a", "I 2 a", '.'),
            ("D K 1 a", "I 2 a", 'x'),
            ("U K 1 a > 1 b", "I 2 a", 'x'),
            ("U K 1 a > 3 a", "I 2 a", '.'),
        ],
    );
}

#[test]
fn a_unique_key_of_which_a_part_was_not_sent() {
    let mut rules = with_unique(1);
    rules.unique[0].columns = vec![column(1), column(2)];
    check(
        &rules,
        &[
            ("U 1 ~ ~", "I 2 a b", '.'),
            ("U 1 a ~", "I 2 a b", 'x'),
            ("U O 1 c d > 1 a ~", "I 2 a d", 'x'),
            ("U O 1 c d > 1 a ~", "I 2 a b", '.'),
            ("I 1 a -", "I 2 a -", '.'),
        ],
    );
}

#[test]
fn an_uncertain_constraint_is_one_lock() {
    for columns in [vec![column(1)], Vec::new()] {
        let unique = UniqueLock { id: 7, columns, certain: false, nulls_not_distinct: false };
        let provable = !unique.columns.is_empty();
        let rules = LockRules { unique: vec![unique], ..table(1) };
        check(
            &rules,
            &[
                ("I 1 a", "I 2 a", '.'),
                ("I 1 a", "U 2 b", 'x'),
                ("D K 1 -", "I 2 b", 'x'),
                ("U 1 a", "D K 2 -", 'x'),
                ("U O 1 a > 1 a", "I 2 a", if provable { '.' } else { 'x' }),
            ],
        );
    }
}

#[test]
fn a_table_that_every_change_locks() {
    let rules = LockRules { whole_table: true, ..table(1) };
    check(&rules, &[("I 1 a", "I 2 b", 'x'), ("U 1 a", "U 2 b", 'x')]);
    let mut bed = Bed::ordered();
    let group = bed.group(None, &[(&rules, "I 1 a"), (&rules, "I 2 a")]);
    assert_eq!(group, ("..".to_owned(), prerequisites(0, &[])));
}

#[test]
fn another_identity_of_rows_locks_the_table() {
    let other = LockRules { identity: 2, row: RowLock::Key(vec![key(1)]), ..table(1) };
    assert_eq!(after((&table(1), "U 1 a"), (&other, "U 2 b")), 'x');
    let mut bed = Bed::ordered();
    assert_eq!(bed.group(None, &[(&table(1), "U 1 a"), (&other, "U 2 b")]).0, "..");
    assert_eq!(bed.group(None, &[(&other, "U 3 c")]).0, "x");
}

#[test]
fn user_code_waits_for_all_groups_and_all_groups_for_it() {
    let code = LockRules { user_code: true, ..table(9) };
    let mut bed = Bed::ordered();
    assert_eq!(bed.group(None, &[(&table(1), "U 1 a")]).0, ".");
    let changes = [(&table(1), "U 5 a"), (&code, "U 1 a"), (&table(1), "U 6 a")];
    assert_eq!(bed.group(None, &changes), (".xx".to_owned(), prerequisites(1, &[])));
    assert_eq!(bed.group(None, &[(&table(3), "U 1 a")]), ("x".to_owned(), prerequisites(2, &[])));
    for group in 1..=3 {
        bed.committed(group);
    }
    assert_eq!(bed.group(None, &[(&code, "U 1 a"), (&table(1), "U 6 a")]).0, "..");
}
