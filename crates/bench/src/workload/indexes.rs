//! Index maintenance: every change updates five indexes, two of them unique.

use super::{Backlog, Scale, TRANSACTIONS};

pub(super) fn indexes(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(1_000_000, 1000), scale.of(150_000, 200));
    Backlog {
        schema: "CREATE TABLE t (id int PRIMARY KEY, code text UNIQUE, a int, b int, c text);
                 CREATE INDEX ON t (a); CREATE INDEX ON t (b); CREATE INDEX ON t (c)"
            .into(),
        load: format!(
            "INSERT INTO t SELECT i, md5(i::text), i * 7919 % 1000003, i * 104729 % 1000003,
               md5((i / 10)::text) FROM generate_series(1, {rows}::bigint) i"
        ),
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN {rows} + 1..{rows} + {transactions} LOOP
                 k := 1 + floor(random() * {rows});
                 INSERT INTO t VALUES
                   (i, md5(i::text), floor(random() * 1000003), floor(random() * 1000003),
                    md5((i / 10)::text));
                 UPDATE t SET a = floor(random() * 1000003), b = floor(random() * 1000003),
                   code = md5(i::text || k) WHERE id = k;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions * 2,
        ..Backlog::default()
    }
}
