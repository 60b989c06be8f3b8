//! Half of the transactions update ten rows: dependent changes cannot be applied in parallel.

use super::{Backlog, Scale, TRANSACTIONS};

pub(super) fn hot(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(1_000_000, 1000), scale.of(300_000, 300));
    Backlog {
        schema: "CREATE TABLE t (id int PRIMARY KEY, value bigint, filler text)".into(),
        load: format!(
            "INSERT INTO t SELECT i, 0, repeat('x', 40) FROM generate_series(1, {rows}) i"
        ),
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := 1 + floor(random() * CASE WHEN i % 2 = 0 THEN 10 ELSE {rows} END);
                 UPDATE t SET value = value + i WHERE id = k;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions,
        ..Backlog::default()
    }
}
