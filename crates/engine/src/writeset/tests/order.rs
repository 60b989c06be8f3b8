//! The order within a group, within a session, and with commits in and out of order.

use super::bed::{Bed, prerequisites, table, with_unique};
use crate::writeset::LockRules;

#[test]
fn dependence_is_transitive() {
    let rules = &table(1);
    let mut bed = Bed::ordered();
    assert_eq!(bed.group(None, &[(rules, "U 3 a"), (rules, "U 5 a")]).0, "..");
    let changes =
        [(rules, "U K 2 - > 3 a"), (rules, "U K 5 - > 2 a"), (rules, "U 2 b"), (rules, "U 7 b")];
    assert_eq!(bed.group(None, &changes), ("xxxx".to_owned(), prerequisites(1, &[])));
}

#[test]
fn dependence_is_transitive_over_locks_of_any_kind() {
    let rules = &with_unique(1);
    let mut bed = Bed::ordered();
    bed.group(None, &[(rules, "U 1 a")]);
    // The second change has no conflict on its row, but on the unique key of the first.
    let changes =
        [(rules, "I 1 b"), (rules, "U 2 b"), (rules, "U 2 c"), (rules, "U 3 c"), (rules, "U 4 d")];
    assert_eq!(bed.group(None, &changes).0, "xxxx.");
}

#[test]
fn hot_rows_cost_a_short_tail() {
    let rules = &table(1);
    let mut bed = Bed::ordered();
    bed.group(None, &[(rules, "U 1 a"), (rules, "U 8 a")]);
    let changes = [(rules, "U 1 b"), (rules, "U 9 b"), (rules, "U 1 c"), (rules, "U 10 c")];
    assert_eq!(bed.group(None, &changes), ("x.x.".to_owned(), prerequisites(1, &[])));
    assert_eq!(bed.group(None, &[(rules, "U 9 b"), (rules, "U 8 b")]).0, "xx");
}

#[test]
fn after_a_dependent_truncate_further_changes_of_the_table_are_dependent() {
    let (rules, other) = (&table(1), &table(2));
    let mut bed = Bed::ordered();
    bed.group(None, &[(other, "U 1 a")]);
    let changes = [(rules, "U 1 b"), (rules, "T"), (rules, "I 2 b"), (other, "U 2 b")];
    assert_eq!(bed.group(None, &changes), (".xx.".to_owned(), prerequisites(1, &[])));
    bed.committed(1);
    bed.committed(2);
    assert_eq!(bed.group(None, &[(rules, "T"), (rules, "I 2 b")]).0, "..");
}

#[test]
fn groups_of_one_session_run_one_after_the_other() {
    let rules = &table(1);
    let mut bed = Bed::ordered();
    bed.group(None, &[(rules, "U 1 a")]);
    bed.group(None, &[(rules, "U 2 a")]);
    assert_eq!(bed.group(Some(1), &[(rules, "U 1 b"), (rules, "U 2 b")]).0, ".x");
    // In order, all groups before the group ahead have committed too.
    assert_eq!(
        bed.group(Some(2), &[(rules, "U 2 b"), (rules, "T")]),
        ("xx".into(), prerequisites(3, &[]))
    );
    assert_eq!(bed.group(Some(4), &[(rules, "U 1 b"), (rules, "T"), (rules, "U 4 b")]).0, "...");
}

#[test]
fn locks_end_with_their_group() {
    let rules = &table(1);
    let mut bed = Bed::ordered();
    bed.group(None, &[(rules, "U 1 a"), (rules, "U 1 b"), (rules, "U 2 b")]);
    assert_eq!(bed.set.len(), 2);
    bed.group(None, &[(rules, "U 3 a")]);
    bed.committed(1);
    assert_eq!(bed.set.len(), 1);
    assert_eq!(
        bed.group(None, &[(rules, "U 1 a"), (rules, "U 3 a")]),
        (".x".into(), prerequisites(2, &[]))
    );
    bed.committed(2);
    bed.committed(3);
    assert!(bed.set.is_empty());
}

#[test]
fn out_of_order_a_group_waits_for_each_conflicting_group() {
    let rules = &table(1);
    let mut bed = Bed::unordered();
    for change in ["U 1 a", "U 2 a", "U 3 a"] {
        bed.group(None, &[(rules, change)]);
    }
    let changes = [(rules, "U 3 b"), (rules, "U 1 b"), (rules, "U 3 c"), (rules, "U 4 b")];
    assert_eq!(bed.group(None, &changes), ("xxx.".into(), prerequisites(0, &[1, 3])));
    bed.committed(3);
    assert_eq!(
        bed.group(None, &[(rules, "U 2 b"), (rules, "U 5 b")]),
        ("x.".into(), prerequisites(0, &[2]))
    );
    // Group 2 ran ahead in the session. Of the groups before it, only those that it waited for are
    // known.
    assert_eq!(bed.group(Some(2), &[(rules, "U 2 c")]), ("x".into(), prerequisites(0, &[5])));
    assert_eq!(
        bed.group(Some(6), &[(rules, "U 2 d"), (rules, "U 1 d")]),
        (".x".into(), prerequisites(0, &[4]))
    );
}

#[test]
fn groups_of_a_serialized_table_run_one_after_the_other() {
    let (one, other) = (&table(1), &table(2));
    for mut bed in [Bed::ordered(), Bed::unordered()] {
        assert_eq!(bed.group(None, &[(one, "U 1 a")]).0, ".");
        bed.set.serialize(1, true);
        assert_eq!(bed.group(None, &[(other, "U 1 a"), (one, "U 2 a")]).0, ".x");
        assert_eq!(bed.group(None, &[(one, "U 3 a"), (other, "U 2 a")]).0, "x.");
        bed.set.serialize(1, false);
        // The table is not serialized any more, but group 3 still locks the whole table.
        assert_eq!(bed.group(None, &[(one, "U 4 a")]).0, "x");
        (1..=3).for_each(|group| bed.committed(group));
        assert_eq!(bed.group(None, &[(one, "U 5 a")]).0, ".");
    }
}

#[test]
fn nothing_overtakes_an_isolated_group() {
    for mut bed in [Bed::ordered(), Bed::unordered()] {
        assert_eq!(bed.group(None, &[(&table(1), "U 1 a")]).0, ".");
        bed.open(None);
        bed.set.isolate();
        assert_eq!(bed.change(&table(2), "U 1 a"), 'x');
        assert_eq!(bed.set.close(), prerequisites(1, &[]));
        assert_eq!(bed.group(None, &[(&table(3), "U 1 a")]).0, "x");
        (1..=3).for_each(|group| bed.committed(group));
        bed.open(None);
        bed.set.isolate();
        assert_eq!(bed.change(&table(2), "U 1 a"), '.');
        assert!(bed.set.close().is_none());
    }
}

#[test]
fn out_of_order_a_table_lock_waits_for_all_row_locks() {
    let (rules, other) = (&table(1), &table(2));
    let mut bed = Bed::unordered();
    bed.group(None, &[(rules, "U 1 a")]);
    bed.group(None, &[(rules, "U 2 a")]);
    bed.committed(2);
    let whole = LockRules { whole_table: true, ..table(1) };
    // Group 2 has committed, group 1 has not.
    assert_eq!(bed.group(None, &[(&whole, "U 3 a")]), ("x".into(), prerequisites(2, &[])));
    assert_eq!(bed.group(None, &[(rules, "U 3 a")]), ("x".into(), prerequisites(0, &[3])));
    assert_eq!(bed.group(None, &[(other, "U 3 a")]), (".".into(), prerequisites(0, &[])));
    assert_eq!(bed.group(None, &[(other, "T")]), ("x".into(), prerequisites(5, &[])));
}

/// This is how a prepared transaction ends on the subscriber: its changes are not at hand.
#[test]
fn an_isolated_group_waits_for_all_groups_and_all_groups_for_it() {
    let rules = &table(1);
    for mut bed in [Bed::ordered(), Bed::unordered()] {
        bed.group(None, &[(rules, "U 1 a")]);
        bed.open(None);
        bed.set.isolate();
        assert_eq!(bed.set.close().through, prerequisites(1, &[]).through);
        assert_eq!(bed.group(None, &[(rules, "U 2 a"), (rules, "I 3 a")]).0, "xx");
        bed.committed(1);
        bed.committed(2);
        assert_eq!(bed.group(None, &[(rules, "U 4 a")]).0, ".");
    }
}
