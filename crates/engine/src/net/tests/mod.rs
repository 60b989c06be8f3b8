//! The rules of each kind of fold, and properties of random histories.

mod history;
mod keyed;
mod lanes;
mod missing;
mod model;
mod moves;
mod random;
mod seeks;
mod whole_row;

use history::{History, shown};

use pgoutput::RelId;

use super::{TableFolding, TableRules};
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
fn an_unchanged_value_in_an_insert_becomes_null() {
    check_keyed("I 1 u", &["0 | insert 1 -"]);
    check_keyed("I 1 u; U 1 u", &["0 | insert 1 -"]);
    check_whole("I 1 u", &["0 | insert 1 -"]);
    check(&[rules(0, 2, TableFolding::Append)], "I 1 u", &["0 | insert 1 -"]);
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

#[test]
fn only_inserts_are_collected_where_rows_cannot_be_identified() {
    check(
        &[rules(0, 2, TableFolding::Append)],
        "I 1 a; I 1 a; DO 1 a; I 1 a; I 1; U 1 b",
        &["0 | insert 1 a | insert 1 a", "alone 2", "0 | insert 1 a", "alone 4", "alone 5"],
    );
}
