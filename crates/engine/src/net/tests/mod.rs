//! The rules of each kind of fold, and properties of random histories.

mod history;
mod missing;
mod model;
mod random;

use history::{History, shown};

use pgoutput::RelId;

use super::{Seek, Step, TableFolding, TableRules};
use crate::key::KeyForm;

fn rules(root: u32, columns: usize, fold: TableFolding) -> TableRules {
    let published = RelId(root);
    TableRules {
        published,
        root,
        storage: None,
        columns,
        fold,
        updates_alone: false,
        moves: false,
        seeks: false,
        told_apart: Vec::new(),
        written: Vec::new(),
    }
}

fn keyed(lane: u32) -> TableRules {
    rules(lane, 2, TableFolding::Key(vec![(0, KeyForm::Numeric)]))
}

#[track_caller]
fn check(rules: &[TableRules], history: &str, expected: &[&str]) {
    assert_eq!(shown(&History::new(history).fold(rules)), expected, "{history}");
}

#[track_caller]
fn check_keyed(history: &str, expected: &[&str]) {
    check(&[keyed(0)], history, expected);
}

#[track_caller]
fn check_whole(history: &str, expected: &[&str]) {
    check(&[rules(0, 2, TableFolding::WholeRow)], history, expected);
}

#[test]
fn changes_of_one_row_fold_into_one() {
    check_keyed("I 1 a; U 1 b", &["0 | insert 1 b"]);
    check_keyed("I 1 a; D 1 -", &["0 | absent 1 -"]);
    check_keyed("I 1 a; D 1 -; I 1 b", &["0 | insert 1 b"]);
    check_keyed("U 1 a; U 1 b", &["0 | update 1 b"]);
    check_keyed("U 1 a; D 1 -", &["0 | delete 1 -"]);
    check_keyed("D 1 -; I 1 a", &["0 | delete 1 - | insert 1 a"]);
    check_keyed("D 1 -; I 1 a; U 1 b", &["0 | delete 1 - | insert 1 b"]);
    check_keyed("D 1 -; I 1 a; D 1 -", &["0 | delete 1 -"]);
    check_keyed("D 1 -; I 1 a; D 1 -; I 1 b", &["0 | delete 1 - | insert 1 b"]);
}

#[test]
fn a_value_that_must_be_written_is_not_replaced_by_a_later_one() {
    let check = |history: &str, expected: &[&str]| {
        check(&[TableRules { moves: true, written: vec![1], ..keyed(0) }], history, expected);
    };
    check("I 1 a; U 1 a; U 1 u", &["0 | insert 1 a"]);
    check("I 1 a; U 1 b; I 2 b", &["0 | insert 1 a", "alone 1", "0 | insert 2 b"]);
    check("I 1 a; D 1 -", &["0 | insert 1 a", "alone 1"]);
    check("D 1 -; I 1 a; U 1 b", &["0 | delete 1 - | insert 1 a", "alone 2"]);
    check("U 1 u; U 1 a; U 1 b", &["0 | update 1 a", "alone 2"]);
    check("U 1 a; D 1 -", &["0 | update 1 a", "alone 1"]);
    check("U 1 u; D 1 -", &["0 | delete 1 -"]);
    check("I 1 a; U K 1 - N 2 b", &["0 | insert 1 a", "alone 1"]);
    check("I 1 a; U K 1 - N 2 u", &["0 | absent 1 - | insert 2 a"]);
    check("U K 1 - N 2 a; U 2 b", &["0 | move 1 - to 2 a", "alone 1"]);
}

#[test]
fn a_change_that_does_not_fit_its_row_is_executed_alone_after_the_segment() {
    check_keyed("I 1 a; I 1 b; U 1 c", &["0 | insert 1 a", "alone 1", "0 | update 1 c"]);
    check_keyed("U 1 a; I 1 b", &["0 | update 1 a", "alone 1"]);
    check_keyed("D 1 -; D 1 -", &["0 | delete 1 -", "alone 1"]);
    check_keyed("D 1 -; U 1 a", &["0 | delete 1 -", "alone 1"]);
    check_keyed("D 1 -; I 1 a; I 1 b", &["0 | delete 1 - | insert 1 a", "alone 2"]);
    for late in ["U 1 b", "D 1 -"] {
        check_keyed(&format!("I 1 a; D 1 -; {late}"), &["0 | absent 1 -", "alone 2"]);
    }
}

#[test]
fn an_update_of_a_key_is_executed_alone_even_if_only_the_spelling_changes() {
    check_keyed("U 1 a; U K 1 - N 2 b; U 2 c", &["0 | update 1 a", "alone 1", "0 | update 2 c"]);
    check_keyed("U K 1.0 - N 1.00 b", &["alone 0"]);
    check_keyed("U K 1 - N b=1 b", &["alone 0"]);
    check_keyed("U K 1 - N 1 b", &["0 | update 1 b"]);
    check_keyed("U O 1 a N 1 u", &["0 | update 1 u"]);
}

#[track_caller]
fn check_moving(history: &str, expected: &[&str]) {
    check(&[TableRules { moves: true, ..keyed(0) }], history, expected);
}

#[test]
fn an_update_of_a_key_moves_the_row() {
    check_moving("U K 1 - N 2 b", &["0 | move 1 - to 2 b"]);
    check_moving("U 1 a; U K 1 - N 2 u; U 3 c", &["0 | move 1 - to 2 a | update 3 c"]);
    check_moving("U K 1 - N 2 a; U 2 b", &["0 | move 1 - to 2 b"]);
    check_moving("U K 1 - N 2 a; U K 2 - N 3 b", &["0 | absent 2 - | move 1 - to 3 b"]);
    check_moving("U K 1 - N 2 a; D 2 -", &["0 | absent 2 - | delete 1 -"]);
    check_moving("U K 1 - N 2 a; I 1 b", &["0 | move 1 - to 2 a | insert 1 b"]);
    check_moving("D 2 -; U K 1 - N 2 a", &["0 | delete 2 - | move 1 - to 2 a"]);
    check_moving("U O 1 a N 2 u", &["0 | move 1 a to 2 u"]);
    check_moving("U K 1.0 - N 1.00 b", &["0 | move 1.0 - to 1.00 b"]);
    check_moving("U K 1 - N 2 a; U K 2 - N 1 b", &["0 | absent 2 - | update 1 b"]);
    check_moving("U K 1.0 - N 2 a; U K 2 - N 1 b", &["0 | absent 2 - | move 1.0 - to 1 b"]);
}

#[test]
fn an_inserted_row_that_moves_is_inserted_with_its_last_key() {
    check_moving("I 1 a; U K 1 - N 2 u", &["0 | absent 1 - | insert 2 a"]);
    check_moving("I 1 a; I 3 c; U K 1 - N 2 b", &["0 | absent 1 - | insert 3 c | insert 2 b"]);
    check_moving("D 1 -; I 1 a; U K 1 - N 2 b", &["0 | delete 1 - | insert 2 b"]);
    check_moving("I 1.0 a; U K 1.0 - N 1 u", &["0 | insert 1 a"]);
    check_moving("U K 1 - N 2 a; I 1 b; U K 1 - N 3 c", &["0 | move 1 - to 2 a | insert 3 c"]);
}

#[test]
fn rows_that_take_the_keys_of_each_other_are_chained() {
    let swap = "U K 1 - N 9 a; U K 2 - N 1 b; U K 9 - N 2 u";
    check_moving(swap, &["0 | absent 9 - | move 1 - to 2 a | move 2 - to 1 b | chained"]);
    let shift = "U K 2 - N 3 b; U K 1 - N 2 a";
    check_moving(shift, &["0 | move 1 - to 2 a | move 2 - to 3 b | chained"]);
    let deleted = "U K 2 - N 3 b; D 3 -; U K 1 - N 2 a";
    check_moving(deleted, &["0 | absent 3 - | delete 2 - | move 1 - to 2 a"]);
}

#[test]
fn a_move_that_does_not_fit_is_executed_alone() {
    check_moving("U 1 a; U K 2 - N 1 b", &["0 | update 1 a", "alone 1"]);
    check_moving("D 1 -; U K 1 - N 2 b", &["0 | delete 1 -", "alone 1"]);
    check_moving("U 5 a; U K - - N 1 a", &["0 | update 5 a", "alone 1"]);
    check_moving("U 5 a; U K 1 - N - a", &["0 | update 5 a", "alone 1"]);
    let tables = [TableRules { moves: true, seeks: true, ..keyed(0) }];
    check(&tables, "U K 1 - N 2 b", &["alone 0"]);
}

#[test]
fn equal_keys_of_different_spelling_are_one_row() {
    check_keyed("D 1.0 -; I 1.00 a", &["0 | delete 1.0 - | insert 1.00 a"]);
    check_keyed("I 1.0 a; D 1 -", &["0 | absent 1 -"]);
}

#[test]
fn an_unchanged_key_column_is_filled_from_the_old_row() {
    check_keyed("U K 1 - N u b", &["0 | update 1 b"]);
    check_keyed("U 1 a; U K 1 - N u b", &["0 | update 1 b"]);
    check_keyed("I 1 a; U K 1 - N u u", &["0 | insert 1 a"]);
}

#[test]
fn an_unchanged_value_keeps_the_earlier_value_of_the_row() {
    check_keyed("U 1 a; U 1 u", &["0 | update 1 a"]);
    check_keyed("U 1 a; U 1 u; U 1 b; U 1 u", &["0 | update 1 b"]);
    check_keyed("U 1 u; U 1 u", &["0 | update 1 u"]);
    check_keyed("U 1 -; U 1 u", &["0 | update 1 -"]);
    check_keyed("I 1 a; U 1 u", &["0 | insert 1 a"]);
    check_keyed("U 1 a; D 1 -; I 1 u", &["0 | delete 1 - | insert 1 -"]);
}

#[test]
fn an_unchanged_value_in_an_insert_becomes_null() {
    check_keyed("I 1 u", &["0 | insert 1 -"]);
    check_keyed("I 1 u; U 1 u", &["0 | insert 1 -"]);
    check_whole("I 1 u", &["0 | insert 1 -"]);
    check(&[rules(0, 2, TableFolding::Append)], "I 1 u", &["0 | insert 1 -"]);
}

#[test]
fn rows_without_a_usable_key_are_executed_alone() {
    for odd in ["I - a", "I u a", "I 1e5 a", "I 1 a b", "I 1", "U u a", "D - a", "U K - - N 1 a"] {
        check_keyed(&format!("I 5 a; {odd}"), &["0 | insert 5 a", "alone 1"]);
    }
    check_keyed("U K 1 - - N 1 a", &["alone 0"]);
    check(&[rules(0, 2, TableFolding::Key(vec![]))], "I 1 a", &["alone 0"]);
    check(&[rules(0, 2, TableFolding::Key(vec![(2, KeyForm::Bytes)]))], "I 1 a", &["alone 0"]);
}

#[test]
fn the_columns_of_a_key_stay_distinct() {
    let key = vec![(2, KeyForm::Blanks), (0, KeyForm::Blanks)];
    let tables = [rules(0, 3, TableFolding::Key(key))];
    check(&tables, "U b x ca; U ab y c", &["0 | update ab y c | update b x ca"]);
    check(&tables, "U a x c; U a_ y c", &["0 | update a_ y c"]);
}

#[test]
fn deletes_and_updates_are_sorted_by_key_and_inserts_keep_stream_order() {
    check_keyed("U 3 a; U 1 b; U 2 c", &["0 | update 1 b | update 2 c | update 3 a"]);
    check_keyed("D 3 -; D 1 -", &["0 | delete 1 - | delete 3 -"]);
    check_keyed("I 3 a; I 1 b; U 3 c", &["0 | insert 3 c | insert 1 b"]);
    check_keyed("I 3 a; D 3 -; I 1 b; I 3 c", &["0 | insert 1 b | insert 3 c"]);
    let text = [rules(0, 1, TableFolding::Key(vec![(0, KeyForm::Bytes)]))];
    check(
        &text,
        "U 10; U 9; U longer-than-nine; U longer-than-eight; U longer-than-eighu",
        &["0 | update 9 | update 10 | update longer-than-nine | update longer-than-eight \
          | update longer-than-eighu"],
    );
}

#[test]
fn updates_are_executed_alone_where_a_column_cannot_be_set() {
    for fold in [TableFolding::Key(vec![(0, KeyForm::Bytes)]), TableFolding::WholeRow] {
        let tables = [TableRules { updates_alone: true, ..rules(0, 2, fold) }];
        check(
            &tables,
            "I 1 a; U O 1 a N 1 b; I 2 c",
            &["0 | insert 1 a", "alone 1", "0 | insert 2 c"],
        );
    }
}

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

#[test]
fn equal_rows_without_a_key_are_counted() {
    check_whole(
        "DO 1 a; DO 1 a; U O 1 a N 1 b; DO 2 c; U O 2 c N 3 d",
        &["0 | delete 1 a | delete 1 a #0.1 | delete 2 c #1.0 | update 1 a to 1 b \
         | update 2 c #1.0 to 3 d"],
    );
    check_whole(
        "U O 1 a N 1 b; U O 1 a N 1 b",
        &["0 | update 1 a to 1 b | update 1 a #0.1 to 1 b"],
    );
}

#[test]
fn a_row_that_the_segment_produced_is_taken_first() {
    check_whole("I 1 a; U O 1 a N 1 b", &["0 | insert 1 b"]);
    check_whole("I 1 a; I 1 a; DO 1 a", &["0 | insert 1 a"]);
    check_whole("U O 1 a N 1 b; U O 1 b N 1 c", &["0 | update 1 a to 1 c"]);
    check_whole("U O 1 a N 1 b; DO 1 b", &["0 | delete 1 a"]);
    check_whole(
        "U O 1 a N 1 b; I 1 b; DO 1 b; DO 1 b; DO 1 b",
        &["0 | delete 1 a | delete 1 b #1.0"],
    );
    check_whole(
        "U O 1 b N 1 c; U O 1 a N 1 b",
        &["0 | update 1 b to 1 c | update 1 a #1.0 to 1 b"],
    );
}

#[test]
fn rows_inserted_and_deleted_without_a_key_leave_no_step() {
    check_whole("I 1 a; DO 1 a", &[]);
}

#[test]
fn an_update_that_changes_nothing_must_still_find_its_row() {
    check_whole("U O 1 a N 1 a", &["0 | update 1 a to 1 a"]);
    check_whole("U O 1 a N 1 u", &["0 | update 1 a to 1 a"]);
    check_whole("U O 1 a N 2 u; DO 2 a", &["0 | delete 1 a"]);
}

#[test]
fn changes_with_an_incomplete_old_row_are_executed_alone() {
    for odd in ["D 1 a", "DO 1 u", "DO 1", "U 1 a", "U K 1 - N 1 a", "U O 1 u N 1 a", "U O 1 a N 1"]
    {
        check_whole(&format!("I 1 a; {odd}"), &["0 | insert 1 a", "alone 1"]);
    }
}

#[test]
fn null_and_an_empty_value_are_different_rows() {
    let tables = [rules(0, 1, TableFolding::WholeRow)];
    let mut history = History::new("I -");
    history.push("DO b=");
    assert_eq!(shown(&history.fold(&tables)), ["0 | delete b= | insert -"]);
}

#[test]
fn only_inserts_are_collected_where_rows_cannot_be_identified() {
    check(
        &[rules(0, 2, TableFolding::Append)],
        "I 1 a; I 1 a; DO 1 a; I 1 a; I 1; U 1 b",
        &["0 | insert 1 a | insert 1 a", "alone 2", "0 | insert 1 a", "alone 4", "alone 5"],
    );
}

#[test]
fn another_table_of_the_lane_closes_the_segment() {
    check(
        &[keyed(7), keyed(7), keyed(8)],
        "I 1 a; 2:I 1 b; 1:I 2 c; I 3 d",
        &["0 | insert 1 a", "1 | insert 2 c", "2 | insert 1 b", "0 | insert 3 d"],
    );
}

#[test]
fn partitions_have_lanes_of_their_own_unless_their_parent_is_changed() {
    let leaf = |storage| {
        let published = RelId(storage);
        TableRules { published, storage: Some(storage), ..keyed(7) }
    };
    let history = "I 1 a; 1:I 2 b; I 3 c; 1:D 2 -; I 2 b";
    check(
        &[leaf(100), leaf(101)],
        history,
        &["0 | insert 1 a | insert 3 c | insert 2 b", "1 | absent 2 -"],
    );
    let apart =
        ["0 | insert 1 a", "1 | insert 2 b", "0 | insert 3 c", "1 | delete 2 -", "0 | insert 2 b"];
    check(&[leaf(100), leaf(101), keyed(7)], history, &apart);
    // Two versions of one table.
    check(&[leaf(100), leaf(100)], history, &apart);
    // Its name leads to another table of the subscriber, below another relation.
    let elsewhere = TableRules { root: 8, storage: Some(8), ..leaf(100) };
    check(&[leaf(100), elsewhere], history, &apart);
}

#[test]
fn a_truncate_closes_the_lanes_of_its_tables_only() {
    check(
        &[keyed(0), keyed(1), keyed(2)],
        "I 1 a; 1:I 1 b; 2:I 1 c; T 2 0; I 1 d",
        &["2 | insert 1 c", "0 | insert 1 a", "alone 3", "1 | insert 1 b", "0 | insert 1 d"],
    );
}

#[test]
fn what_two_truncates_enclose_is_left_out_with_the_second() {
    let stored = |root| TableRules { storage: Some(root), ..keyed(root) };
    let tables = [stored(0), stored(1), keyed(2)];
    // The rows before the first may conflict with the subscriber's; absent rows find nothing.
    let filled = "I 1 a; 1:I 1 b; T 0; I 1 c; I 2 d; D 2 -; T 0; I 1 e; T 0; T 0; I 3 f";
    let steps = ["0 | insert 1 a", "alone 2", "1 | insert 1 b", "0 | insert 3 f"];
    check(&tables, filled, &steps);
    // It looks for a row: the subscriber says whether it finds it.
    let sought = "T 0; I 1 a; D 2 -; T 0; I 1 b";
    let steps = ["alone 0", "0 | delete 2 - | insert 1 a", "alone 3", "0 | insert 1 b"];
    check(&tables, sought, &steps);
    // Only all tables of a TRUNCATE together.
    let both = ["alone 0", "0 | insert 1 a", "alone 2", "0 | insert 2 b", "alone 4"];
    check(&tables, "T 0; I 1 a; T 0 1; I 2 b; T 0 2", &both);
    // Its sequences start again.
    let restart = ["alone 0", "0 | insert 1 a", "alone 2", "0 | insert 2 b"];
    check(&tables, "T 0; I 1 a; TR 0; I 1 a; T 0; I 1 a; TR 0; I 2 b", &restart);
    // Lanes of several tables, and changes that were executed meanwhile.
    check(&tables, "T 2; 2:I 1 a; T 2", &["alone 0", "2 | insert 1 a", "alone 2"]);
    let alone = TableRules { updates_alone: true, ..stored(0) };
    let steps = ["alone 0", "0 | insert 1 a", "alone 2", "alone 3"];
    check(&[alone], "T 0; I 1 a; U 1 b; T 0", &steps);
}

#[test]
fn user_code_may_fill_a_table_between_two_truncates() {
    let stored = TableRules { storage: Some(0), ..keyed(0) };
    let user_code = rules(9, 2, TableFolding::Never { user_code: true });
    for code in ["1:I 1 x", "T 1"] {
        let steps = ["alone 0", "alone 1", "alone 2"];
        check(&[stored.clone(), user_code.clone()], &format!("T 0; {code}; T 0"), &steps);
    }
}

#[test]
fn a_table_in_row_mode_stops_its_lane_only() {
    let never = rules(0, 2, TableFolding::Never { user_code: false });
    check(
        &[keyed(0), keyed(1), never],
        "I 1 a; 1:I 1 b; 2:I 1 c; 2:U 1 d",
        &["0 | insert 1 a", "alone 2", "alone 3", "1 | insert 1 b"],
    );
}

#[test]
fn user_code_closes_all_segments_in_the_order_in_which_they_were_opened() {
    let user_code = rules(9, 2, TableFolding::Never { user_code: true });
    let tables = [keyed(0), keyed(1), keyed(2), user_code];
    for alone in ["3:U 1 x", "T 3"] {
        let history = format!("2:I 1 a; I 1 b; 1:I 1 c; {alone}; 1:I 1 d; I 1 e");
        check(
            &tables,
            &history,
            &[
                "2 | insert 1 a",
                "0 | insert 1 b",
                "1 | insert 1 c",
                "alone 3",
                "1 | insert 1 d",
                "0 | insert 1 e",
            ],
        );
    }
}
