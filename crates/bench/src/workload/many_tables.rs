//! Changes of many small tables, a few in each transaction.

use super::{Backlog, Scale, TRANSACTIONS};

const TABLES: u64 = 400;
const ROWS_EACH: u64 = 500;

pub(super) fn many_tables(scale: Scale) -> Backlog {
    let (tables, transactions) = (scale.of(TABLES * 100, 20).min(TABLES), scale.of(120_000, 200));
    Backlog {
        schema: format!(
            "DO $$ BEGIN
               FOR i IN 0..{tables} - 1 LOOP
                 EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, n int, note text)', i);
               END LOOP;
             END $$"
        ),
        load: format!(
            "DO $$ BEGIN
               FOR i IN 0..{tables} - 1 LOOP
                 EXECUTE format('INSERT INTO t%s SELECT j, 0, ''note '' || j
                                   FROM generate_series(1, {ROWS_EACH}) j', i);
               END LOOP;
             END $$"
        ),
        // Two updates and an insert, each in another table.
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := floor(random() * {tables});
                 FOR j IN 0..1 LOOP
                   EXECUTE format('UPDATE t%s SET n = n + 1, note = $1 WHERE id = $2',
                                  (k + j * 7) % {tables})
                     USING 'change ' || i, 1 + floor(random() * {ROWS_EACH})::int;
                 END LOOP;
                 EXECUTE format('INSERT INTO t%s VALUES ($1, 0, $2)', (k + 13) % {tables})
                   USING {ROWS_EACH} + i, 'new ' || i;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions * 3,
        ..Backlog::default()
    }
}
