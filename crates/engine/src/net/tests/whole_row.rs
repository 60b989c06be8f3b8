//! Changes of tables whose rows are found by all columns.

use super::history::{History, shown};
use super::{check_whole, rules};
use crate::net::TableFolding;

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
