//! Changes of tables whose rows have a key.

use super::{check, check_keyed, keyed, rules};
use crate::key::KeyForm;
use crate::net::{TableFolding, TableRules};

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
