//! Updates of a table without a key: the native apply worker scans the whole table for every row.

use super::{Backlog, ROWS, Scale};

const ROWS_EACH: u64 = 1000;

pub(super) fn full_update(scale: Scale) -> Backlog {
    let transactions = scale.of(1000, 2);
    let rows = transactions * ROWS_EACH;
    Backlog {
        schema: "CREATE TABLE foo (id int, value double precision);
                 ALTER TABLE foo REPLICA IDENTITY FULL"
            .into(),
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
