//! Random updates, and inserts of random keys, in a table larger than shared_buffers.

use super::{Backlog, Scale, TRANSACTIONS};
use crate::regime::ServerSettings;

const SCHEMA: &str = "CREATE TABLE t (pk bigint PRIMARY KEY, value int, filler text)";

/// Rows of about 140 bytes including their index entry: more than three times `shared_buffers`.
const ROWS: u64 = 3_000_000;

fn small_buffers() -> ServerSettings {
    vec![("shared_buffers", "128MB".into())]
}

pub(super) fn update(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(ROWS, 1000), scale.of(300_000, 300));
    Backlog {
        schema: SCHEMA.into(),
        load: format!(
            "INSERT INTO t SELECT i, 0, repeat('x', 80) FROM generate_series(1, {rows}) i"
        ),
        write: format!(
            "DECLARE k bigint;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := 1 + floor(random() * {rows});
                 UPDATE t SET value = i WHERE pk = k;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions,
        subscriber_settings: small_buffers(),
        ..Backlog::default()
    }
}

pub(super) fn insert(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(ROWS, 1000), scale.of(300_000, 300));
    Backlog {
        schema: SCHEMA.into(),
        // A 64-bit hash scatters the keys. Among so few rows it is unique; otherwise the primary
        // key would be violated.
        load: format!(
            "INSERT INTO t SELECT hashint8extended(i, 0),
               0, repeat('x', 80) FROM generate_series(1, {rows}) i"
        ),
        write: format!(
            "BEGIN
               FOR i IN {rows} + 1..{rows} + {transactions} LOOP
                 INSERT INTO t VALUES (hashint8extended(i, 0), i, repeat('x', 80));
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions,
        subscriber_settings: small_buffers(),
        ..Backlog::default()
    }
}
