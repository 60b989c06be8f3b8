//! Limits of the writeset.

use std::time::{Duration, Instant};

use pgoutput::decode_change;

use super::bed::{Bed, bytes, key, prerequisites, table};
use crate::writeset::{LockRules, RowLock, WritesetLimits};

#[test]
fn a_group_with_too_many_keys_locks_the_table() {
    let rules = &table(1);
    let mut bed = Bed::new(WritesetLimits { keys_per_table: 2, keys: 1000 }, true);
    let two = [(rules, "U 1 a"), (rules, "U 2 a"), (rules, "U 1 b")];
    assert_eq!(bed.group(None, &two).0, "...");
    // Row 5 itself is not locked, but another group has locks in the table.
    let three = [(rules, "U 3 a"), (rules, "U 4 a"), (rules, "U 5 a"), (rules, "U 6 a")];
    assert_eq!(bed.group(None, &three), ("..xx".into(), prerequisites(1, &[])));
    assert_eq!(bed.group(None, &[(rules, "U 7 a")]), ("x".into(), prerequisites(2, &[])));
    assert_eq!(bed.group(None, &[(&table(2), "U 7 a")]).0, ".");
    for group in 1..=4 {
        bed.committed(group);
    }
    assert_eq!(bed.group(None, &three).0, "....");
    assert_eq!(bed.group(None, &[(rules, "U 6 a")]).0, "x");
}

#[test]
fn a_writeset_is_full_until_the_oldest_group_commits() {
    let rules = &table(1);
    let mut bed = Bed::new(WritesetLimits { keys_per_table: 1000, keys: 3 }, true);
    bed.group(None, &[(rules, "U 1 a"), (rules, "U 2 a")]);
    assert!(!bed.set.is_full());
    bed.group(None, &[(rules, "U 3 a"), (rules, "U 4 a")]);
    assert!(bed.set.is_full());
    bed.committed(1);
    assert!(!bed.set.is_full());
    assert_eq!(bed.set.len(), 2);
}

#[test]
fn locks_of_committed_groups_are_swept_out() {
    let rules = &table(1);
    let mut bed = Bed::ordered();
    for group in 1..=200_u64 {
        bed.open(None);
        for row in 0..100 {
            // Half of the rows are those of the group before.
            let row = group * 50 + row;
            let expected = if group > 1 && row < group * 50 + 50 { 'x' } else { '.' };
            assert_eq!(bed.change(rules, &format!("U {row} a")), expected);
        }
        bed.set.close();
        assert_eq!(bed.set.len(), if group > 1 { 200 } else { 100 });
        if group > 1 {
            bed.committed(group - 1);
        }
        assert_eq!(bed.set.table.bytes(), 1024 * 16);
    }
}

/// The time is in proportion to the columns of a row, not to their square.
///
/// Other processes may have the processor at any moment, but hardly in all of many short runs, which alternate.
#[test]
fn locks_of_wide_rows_take_as_long_for_each_column_as_those_of_narrow_ones() {
    let rows = |columns: usize| {
        let rules =
            LockRules { row: RowLock::WholeRow((0..columns).map(key).collect()), ..table(1) };
        (columns, rules, bytes(&format!("I {}", "value ".repeat(columns))))
    };
    let run = |(columns, rules, row): &(usize, LockRules, Vec<u8>)| {
        let change = decode_change(row, false).unwrap();
        let mut bed = Bed::ordered();
        bed.open(None);
        let begun = Instant::now();
        for _ in 0..16_000 / columns {
            bed.set.change(rules, &change);
        }
        begun.elapsed()
    };
    let kinds = [rows(100), rows(1600)];
    let (mut narrow, mut wide) = (Duration::MAX, Duration::MAX);
    for _ in 0..50 {
        narrow = narrow.min(run(&kinds[0]));
        wide = wide.min(run(&kinds[1]));
    }
    assert!(
        wide < narrow * 4,
        "16000 columns took {narrow:?} in rows of 100, {wide:?} in rows of 1600"
    );
}
