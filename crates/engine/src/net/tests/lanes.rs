//! Which changes close the segments of other tables.

use pgoutput::RelId;

use super::{check, keyed, rules};
use crate::net::{TableFolding, TableRules};

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
