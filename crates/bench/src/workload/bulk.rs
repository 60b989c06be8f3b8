//! A million rows inserted or updated by transactions of a thousand rows each.

use super::{Backlog, ROWS, Scale};

const ROWS_EACH: u64 = 1000;

pub(super) fn insert(scale: Scale) -> Backlog {
    let transactions = scale.of(1000, 3);
    Backlog {
        schema: "CREATE TABLE foo (id int PRIMARY KEY, value double precision)".into(),
        load: String::new(),
        write: format!(
            "BEGIN
               FOR i IN 0..{transactions} - 1 LOOP
                 INSERT INTO foo SELECT i * {ROWS_EACH} + j, random()
                   FROM generate_series(1, {ROWS_EACH}) j;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions * ROWS_EACH,
        unit: ROWS,
        changes: transactions * ROWS_EACH,
        ..Backlog::default()
    }
}

pub(super) fn update(scale: Scale) -> Backlog {
    let transactions = scale.of(1000, 3);
    let rows = transactions * ROWS_EACH;
    Backlog {
        schema: "CREATE TABLE foo (id int PRIMARY KEY, value double precision)".into(),
        load: format!("INSERT INTO foo SELECT i, i FROM generate_series(1, {rows}) i"),
        write: format!(
            "BEGIN
               FOR i IN 0..{transactions} - 1 LOOP
                 UPDATE foo SET value = random()
                   WHERE id > i * {ROWS_EACH} AND id <= (i + 1) * {ROWS_EACH};
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: rows,
        unit: ROWS,
        changes: rows,
        ..Backlog::default()
    }
}
