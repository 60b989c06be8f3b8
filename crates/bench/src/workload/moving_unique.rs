//! Values of UNIQUE columns that move between rows.
//!
//! The stream has the new values of a row, and of the old ones only the key. A subscriber that
//! applies several transactions at once must reach their common result although each value may be
//! in use by another row until then.

use super::{Backlog, Scale, TRANSACTIONS};

const SCHEMA: &str =
    "CREATE TABLE t (id int PRIMARY KEY, place int UNIQUE, code text UNIQUE, payload text)";

/// Of 20 transactions, 12 are plain updates. 4 swap the values of two rows, 2 rotate those of three,
/// one takes what another row gives up, one deletes a row and inserts another one with its values.
pub(super) fn often(scale: Scale) -> Backlog {
    backlog(
        scale,
        "coalesce((ARRAY['swap', 'swap', 'swap', 'swap', 'rotate', 'rotate', 'take', 'replace'])
                    [1 + floor(random() * 20)::int], 'plain')",
        // A plain one has one change, a swap 3, a rotation 4, the others 2.
        |transactions| transactions * (12 + 4 * 3 + 2 * 4 + 2 * 2) / 20,
        150_000,
    )
}

/// Plain updates, among which one in 2000 swaps.
pub(super) fn rare(scale: Scale) -> Backlog {
    backlog(
        scale,
        "CASE i % 2000 WHEN 100 THEN 'swap' ELSE 'plain' END",
        |transactions| transactions + transactions / 2000 * 2,
        250_000,
    )
}

fn backlog(scale: Scale, kind: &str, changes: fn(u64) -> u64, transactions: u64) -> Backlog {
    let (rows, transactions) = (scale.of(200_000, 1000), scale.of(transactions, 300));
    Backlog {
        schema: SCHEMA.into(),
        // The last row has no values: the spare one, which takes those that another row gives up.
        load: format!(
            "INSERT INTO t SELECT i, i, 'code ' || i, 'payload ' || i
               FROM generate_series(1, {rows} - 1) i;
             INSERT INTO t VALUES ({rows}, NULL, NULL, 'spare')"
        ),
        write: write(rows, transactions, kind).into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: changes(transactions),
        ..Backlog::default()
    }
}

/// The transactions. Of three different rows, each is found under one of two ids, because `replace`
/// gives the new row the other one.
fn write(rows: u64, transactions: u64, kind: &str) -> String {
    format!(
        "DECLARE a t; b t; c t; k int; kind text; spare int := {rows};
         BEGIN
           FOR i IN 1..{transactions} LOOP
             k := floor(random() * {rows});
             SELECT * INTO a FROM t WHERE id IN (k + 1, k + 1 + {rows});
             k := (k + 1 + floor(random() * ({rows} / 2 - 1))::int) % {rows};
             SELECT * INTO b FROM t WHERE id IN (k + 1, k + 1 + {rows});
             kind := {kind};
             CASE kind
             WHEN 'plain' THEN
               UPDATE t SET payload = 'payload ' || -i WHERE id = a.id;
             WHEN 'swap' THEN
               UPDATE t SET place = NULL, code = 'moving' WHERE id = a.id;
               UPDATE t SET place = a.place, code = a.code WHERE id = b.id;
               UPDATE t SET place = b.place, code = b.code WHERE id = a.id;
               spare := CASE spare WHEN a.id THEN b.id WHEN b.id THEN a.id ELSE spare END;
             WHEN 'rotate' THEN
               k := (k + 1 + floor(random() * ({rows} / 2 - 1))::int) % {rows};
               SELECT * INTO c FROM t WHERE id IN (k + 1, k + 1 + {rows});
               UPDATE t SET place = NULL, code = 'moving' WHERE id = a.id;
               UPDATE t SET place = a.place, code = a.code WHERE id = b.id;
               UPDATE t SET place = b.place, code = b.code WHERE id = c.id;
               UPDATE t SET place = c.place, code = c.code WHERE id = a.id;
               spare := CASE spare WHEN a.id THEN b.id WHEN b.id THEN c.id WHEN c.id THEN a.id
                        ELSE spare END;
             WHEN 'take' THEN
               UPDATE t SET place = NULL, code = NULL WHERE id = a.id;
               UPDATE t SET place = a.place, code = a.code WHERE id = spare;
               spare := a.id;
             ELSE
               DELETE FROM t WHERE id = a.id;
               k := CASE WHEN a.id > {rows} THEN a.id - {rows} ELSE a.id + {rows} END;
               INSERT INTO t VALUES (k, a.place, a.code, a.payload);
               spare := CASE spare WHEN a.id THEN k ELSE spare END;
             END CASE;
             COMMIT;
           END LOOP;
         END"
    )
}
