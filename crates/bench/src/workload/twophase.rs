//! Two-phase transactions with one update each, from many connections.

use anyhow::Result;
use testbed::Cluster;

use super::{Backlog, Scale, TRANSACTIONS, Write};

/// Number of concurrent transactions.
pub(crate) const CONNECTIONS: u64 = 80;
pub(crate) const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, value bigint)";
const ROWS: u64 = 100_000;

/// SQL that fills the table.
pub(crate) fn load() -> String {
    format!("INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i")
}

pub(super) fn drain(scale: Scale) -> Backlog {
    let each = scale.of(200_000 / CONNECTIONS, 3);
    Backlog {
        schema: SCHEMA.into(),
        load: load(),
        write: Write::TwoPhase { each },
        units: CONNECTIONS * each,
        unit: TRANSACTIONS,
        changes: CONNECTIONS * each,
        ..Backlog::default()
    }
}

/// Runs the transactions of one connection, one after the other, until `goes_on` returns false. It
/// receives the number of transactions so far.
pub(crate) fn client(
    publisher: &Cluster,
    database: &str,
    number: u64,
    mut goes_on: impl FnMut(u64) -> bool,
) -> Result<()> {
    let mut client = publisher.connect(database)?;
    let mut next = number;
    let mut done = 0;
    while goes_on(done) {
        // The updates are spread over the table. No two connections update the same row, because
        // their remainders differ.
        next = (next + CONNECTIONS * 617) % (ROWS / CONNECTIONS * CONNECTIONS);
        client.batch_execute(&format!(
            "BEGIN; UPDATE t SET value = value + 1 WHERE id = {}; PREPARE TRANSACTION 'c{number}'",
            next + 1
        ))?;
        client.batch_execute(&format!("COMMIT PREPARED 'c{number}'"))?;
        done += 1;
    }
    Ok(())
}
