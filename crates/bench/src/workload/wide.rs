//! Wide rows: most updates do not change the TOASTed columns, which are then not sent.

use super::{Backlog, Scale, TRANSACTIONS};

pub(super) fn wide(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(20_000, 50), scale.of(60_000, 100));
    Backlog {
        schema: "CREATE TABLE t (id int PRIMARY KEY, n int, note text, body text, extra text);
                 ALTER TABLE t ALTER body SET STORAGE EXTERNAL, ALTER extra SET STORAGE EXTERNAL"
            .into(),
        load: format!(
            "INSERT INTO t SELECT i, 0, 'note ' || i, repeat(md5(i::text), 128),
               repeat(md5((-i)::text), 96) FROM generate_series(1, {rows}) i"
        ),
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := 1 + floor(random() * {rows});
                 IF i % 10 = 0 THEN
                   UPDATE t SET n = i, body = repeat(md5(i::text), 128) WHERE id = k;
                 ELSE
                   UPDATE t SET n = i, note = 'note ' || i WHERE id = k;
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
