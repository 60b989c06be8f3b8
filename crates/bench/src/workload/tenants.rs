//! A key of two columns, beside an index on the first of them. Most tenants have one row, one has many.
//!
//! The subscriber's planner expects one row for each tenant and takes either index. By the wrong one, each change of a
//! row of the large tenant reads all of its rows.

use super::{Backlog, Scale, TRANSACTIONS};

pub(super) fn tenants(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(200_000, 1000), scale.of(150_000, 300));
    let large = rows / 30;
    Backlog {
        schema: "CREATE TABLE t (tenant int, id int, value bigint, filler text, PRIMARY KEY (tenant, id));
                 CREATE INDEX ON t (tenant)"
            .into(),
        load: format!(
            "INSERT INTO t SELECT i, 1, 0, repeat('x', 40) FROM generate_series(1, {rows}) i;
             INSERT INTO t SELECT 0, i, 0, repeat('x', 40) FROM generate_series(1, {large}) i"
        ),
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := 1 + floor(random() * CASE WHEN i % 2 = 0 THEN {large} ELSE {rows} END);
                 IF i % 2 = 0 THEN
                   UPDATE t SET value = value + i WHERE tenant = 0 AND id = k;
                 ELSE
                   UPDATE t SET value = value + i WHERE tenant = k AND id = 1;
                 END IF;
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
