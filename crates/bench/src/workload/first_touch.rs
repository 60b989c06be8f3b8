//! One insert into each of many tables: the cost of the first change of a table after a start.

use std::fmt::Write as _;

use super::{Backlog, SECONDS, Scale};

/// Below this scale, only the result counts and few tables are enough.
const TINY: f64 = 0.01;
/// At other scales there are at least as many tables, because a run is short.
const MANY: u64 = 1000;
const FEW: u64 = 20;
/// Tables per transaction: each table holds locks until the end of the transaction.
const AT_ONCE: usize = 500;

pub(super) fn first_touch(scale: Scale, number: u64) -> Backlog {
    let tables = if scale.0 < TINY { FEW } else { scale.of(number, MANY).min(number) };
    let mut schema = String::new();
    for first in (0..tables).step_by(AT_ONCE) {
        schema.push_str("BEGIN;");
        for table in first..tables.min(first + AT_ONCE as u64) {
            let _ = write!(
                schema,
                "CREATE TABLE t{table} (id int PRIMARY KEY, state text DEFAULT 'new', note text);"
            );
        }
        schema.push_str("COMMIT;");
    }
    Backlog {
        schema,
        write: format!(
            "BEGIN
               FOR i IN 0..{tables} - 1 LOOP
                 EXECUTE format('INSERT INTO t%s (id, note) VALUES (%s, ''first'')', i, i);
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: tables,
        unit: SECONDS,
        changes: tables,
        ..Backlog::default()
    }
}
