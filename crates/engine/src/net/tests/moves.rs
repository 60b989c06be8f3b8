//! Updates of keys that move rows.

use super::{check, keyed};
use crate::net::TableRules;

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
