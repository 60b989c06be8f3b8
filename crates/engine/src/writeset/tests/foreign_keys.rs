//! Which changes of referencing and referenced tables conflict.

use super::bed::{Bed, after, column, key, prerequisites, table};
use crate::writeset::{ForeignLock, LockRules, ReferencedLock};

/// A child table whose second column refers to the key of the parent.
fn family(certain: bool) -> (LockRules, LockRules) {
    let foreign = ForeignLock { id: 9, parent: 1, columns: vec![column(1)], certain };
    let referenced = ReferencedLock { id: 9, columns: vec![key(0)], certain };
    let parent = LockRules { referenced: vec![referenced], ..table(1) };
    (parent, LockRules { foreign: vec![foreign], ..table(2) })
}

#[test]
fn references_and_referenced_keys_conflict() {
    let (parent, child) = family(true);
    let (p, c) = (&parent, &child);
    for ((first_rules, first), (rules, second), verdict) in [
        ((p, "I 1 x"), (c, "I 5 1"), 'x'),
        ((p, "I 1 x"), (c, "I 5 2"), '.'),
        ((p, "I 1 x"), (c, "I 5 -"), '.'),
        // The key of the parent is unchanged.
        ((p, "U 1 x"), (c, "I 5 1"), '.'),
        ((p, "U K 1 - > 2 x"), (c, "I 5 2"), 'x'),
        ((c, "I 5 1"), (c, "I 6 1"), '.'),
        ((c, "I 5 1"), (p, "D K 1 -"), 'x'),
        ((c, "I 5 1"), (p, "U 1 x"), '.'),
        ((c, "D O 5 1"), (p, "D K 1 -"), 'x'),
        ((c, "U O 5 1 > 5 2"), (p, "D K 1 -"), 'x'),
        ((c, "U O 5 1 > 5 2"), (p, "D K 2 -"), 'x'),
        ((c, "U O 5 1 > 5 1"), (p, "D K 1 -"), '.'),
        ((c, "U 5 2"), (p, "D K 2 -"), 'x'),
        // The old reference is unknown: it may have been to this parent.
        ((c, "U 5 2"), (p, "D K 1 -"), 'x'),
        ((c, "D K 5 -"), (p, "D K 1 -"), 'x'),
        ((c, "D K 5 -"), (p, "U K 1 - > 2 x"), 'x'),
        ((c, "T"), (p, "D K 1 -"), 'x'),
        ((c, "D K 5 -"), (p, "U 1 x"), '.'),
        ((c, "D K 5 -"), (p, "I 1 x"), '.'),
        ((c, "U 5 ~"), (p, "D K 1 -"), '.'),
        ((c, "D O 5 2"), (p, "D K 1 -"), '.'),
        ((p, "D K 1 -"), (c, "D K 5 -"), '.'),
        ((p, "D K 1 -"), (c, "U 5 2"), '.'),
        // A lock on the whole parent table covers its keys.
        ((p, "T"), (c, "I 5 1"), 'x'),
        ((c, "I 5 1"), (p, "T"), 'x'),
        ((c, "I 5 ~"), (p, "U 1 x"), 'x'),
    ] {
        assert_eq!(after((first_rules, first), (rules, second)), verdict, "{first} {second}");
    }
    let (parent, child) = family(false);
    assert_eq!(after((&parent, "I 1 x"), (&child, "I 5 2")), 'x');
    assert_eq!(after((&child, "I 5 2"), (&parent, "U 1 x")), 'x');
    assert_eq!(after((&parent, "U 1 x"), (&parent, "U 2 x")), '.');
    let (certain, _) = family(true);
    assert_eq!(after((&child, "I 5 2"), (&certain, "I 1 x")), 'x');
    let (_, certain) = family(true);
    assert_eq!(after((&parent, "I 1 x"), (&certain, "I 5 2")), 'x');
}

#[test]
fn a_parent_with_an_unknown_key_waits_for_all_removed_references() {
    let (parent, child) = family(true);
    let columns = vec![column(1)];
    let referenced = ReferencedLock { columns, ..parent.referenced[0].clone() };
    let parent = LockRules { referenced: vec![referenced], ..parent };
    let (p, c) = (&parent, &child);
    for ((first_rules, first), (rules, second), verdict) in [
        ((c, "D O 5 a"), (p, "U 1 b"), 'x'),
        ((c, "D K 5 -"), (p, "U 1 b"), 'x'),
        ((c, "D K 5 -"), (p, "D K 1 -"), 'x'),
        ((c, "D K 5 -"), (p, "U 1 ~"), '.'),
        ((c, "I 5 a"), (p, "U 1 b"), '.'),
        ((p, "U 1 b"), (c, "D K 5 -"), '.'),
        ((p, "U 1 b"), (c, "I 5 b"), 'x'),
    ] {
        assert_eq!(after((first_rules, first), (rules, second)), verdict, "{first} {second}");
    }
}

#[test]
fn the_removal_of_a_parent_follows_a_dependent_child_of_its_group() {
    let (parent, child) = family(true);
    let mut bed = Bed::unordered();
    bed.group(None, &[(&child, "U 5 ~")]);
    let changes = [(&parent, "D K 3 -"), (&child, "D K 5 -"), (&parent, "D K 1 -")];
    assert_eq!(bed.group(None, &changes).0, ".xx");
    // Out of order, it waits only for the group of the child.
    bed.committed(1);
    assert_eq!(bed.group(None, &[(&parent, "D K 2 -")]), ("x".to_owned(), prerequisites(2, &[])));
    bed.committed(2);
    assert_eq!(bed.group(None, &[(&parent, "D K 4 -")]).0, ".");
}

#[test]
fn a_group_that_reads_and_then_writes_a_key_waits_for_the_other_readers() {
    let (parent, child) = family(true);
    let mut bed = Bed::ordered();
    bed.group(None, &[(&child, "I 5 1")]);
    bed.group(None, &[(&table(3), "U 1")]);
    let changes = [(&child, "I 6 1"), (&child, "D O 6 1"), (&parent, "D K 1 -")];
    assert_eq!(bed.group(None, &changes), ("..x".to_owned(), prerequisites(2, &[])));
}
