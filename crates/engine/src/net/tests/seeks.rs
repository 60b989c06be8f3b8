//! Which changes look for a row.

use super::history::{self, History};
use super::{keyed, rules};
use crate::key::KeyForm;
use crate::net::{Seek, Step, TableFolding, TableRules};

/// One by one, these are the changes that would find nothing if the row is missing.
#[test]
fn the_changes_that_look_for_a_row_are_listed_up_to_its_next_insert() {
    let rules = [TableRules { seeks: true, ..keyed(0) }];
    let history = "U 2 a; D 1 -; U 3 a; I 1 b; U 3 b; U 1 c; D 3 -; I 4 a; D 4 -; D 1 -; I 1 d";
    let history = History::new(history);
    let steps = history.fold(&rules);
    let [Step::Segment(segment)] = &steps[..] else { panic!("{steps:?}") };
    let changes = |rows: &[Seek<'_>]| -> Vec<Vec<u32>> {
        rows.iter().map(|row| row.changes.iter().map(|at| at.change).collect()).collect()
    };
    assert_eq!(changes(&segment.seeks.deletes), [vec![1], vec![2, 4, 6]]);
    assert_eq!(changes(&segment.seeks.updates), [vec![0]]);
}

/// If such a row is missing, its changes find nothing, unless they would find another row.
#[test]
fn rows_without_a_key_are_looked_for_as_each_change_would() {
    #[track_caller]
    fn check(told_apart: &[usize], history: &str, deletes: &[&str], updates: &[&str]) {
        let told_apart = told_apart.iter().map(|column| (*column, KeyForm::Numeric)).collect();
        let rules = [TableRules { seeks: true, told_apart, ..rules(0, 2, TableFolding::WholeRow) }];
        let history = History::new(history);
        let steps = history.fold(&rules);
        let [Step::Segment(segment)] = &steps[..] else { panic!("{steps:?}") };
        let shown = |seeks: &[Seek<'_>]| -> Vec<String> {
            let of_row = |seek: &Seek<'_>| {
                let changes = seek.changes.iter().map(|at| at.change.to_string());
                let passed = seek.passed.iter().map(history::shown_row);
                changes.chain(passed).collect::<Vec<_>>().join(", ")
            };
            seeks.iter().map(of_row).collect()
        };
        assert_eq!(shown(&segment.seeks.deletes), deletes);
        assert_eq!(shown(&segment.seeks.updates), updates);
    }
    let by_first = &[0][..];
    check(by_first, "U O 1 1 N 1 2; U O 2 1 N 2 2; U O 1 2 N 1 3", &[], &["0, 2, 1 2", "1"]);
    check(
        by_first,
        "U O 1 1 N 3 1; DO 2 1; DO 3 1; I 4 1; U O 4 1 N 4 2",
        &["0, 2, 3 1", "1"],
        &[],
    );
    // Another row may be equal, is equal, was equal, or will be.
    check(by_first, "U O 1 1 N 1 2; U O 1.0 5 N 2 2; DO 3 1", &["2"], &["", ""]);
    check(by_first, "DO 1 1; DO 1 1; DO 3 1", &["", "", "2"], &[]);
    check(by_first, "I 1 1; DO 1 2; DO 3 1", &["", "2"], &[]);
    check(by_first, "DO 3 1; U O 1 1 N 2 1; U O 2 2 N 2 3", &["0"], &["", ""]);
    // Nothing tells rows apart.
    check(&[], "U O 1 1 N 1 2; DO 2 1", &[""], &[""]);
    check(&[], "U O 1 1 N 1 2", &[], &["0"]);
    // A value that cannot be read may equal any other one. NULL equals NULL.
    check(by_first, "U O x 1 N x 2; DO 2 1", &[""], &[""]);
    check(by_first, "U O - 1 N - 2; DO 2 1; DO 3 2", &["1", "2"], &["0"]);
    check(by_first, "U O - 1 N - 2; DO 2 1; DO - 3", &["1", ""], &[""]);
}
