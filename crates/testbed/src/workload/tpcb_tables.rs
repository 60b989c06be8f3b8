//! The tables of TPC-B, as pgbench creates and fills them.

use std::fmt::Write as _;
use std::io::Write as _;

use postgres::Client;

use crate::compare::TableName;
use crate::error::{Context, Result};

pub(super) const BRANCHES_PER_SCALE: u64 = 1;

pub(super) const TELLERS_PER_SCALE: u64 = 10;

pub(super) const ACCOUNTS_PER_SCALE: u64 = 100_000;

const COPY_CHUNK: usize = 256 << 10;

const DROP_TABLES: &str =
    "DROP TABLE IF EXISTS pgbench_accounts, pgbench_branches, pgbench_tellers, pgbench_history;";

const TABLES: &str = "
CREATE TABLE pgbench_history
    (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
CREATE TABLE pgbench_tellers
    (tid int NOT NULL, bid int, tbalance int, filler char(84)) WITH (fillfactor=100);
CREATE TABLE pgbench_accounts
    (aid int NOT NULL, bid int, abalance int, filler char(84)) WITH (fillfactor=100);
CREATE TABLE pgbench_branches
    (bid int NOT NULL, bbalance int, filler char(88)) WITH (fillfactor=100);";

const KEYS: &str = "
ALTER TABLE pgbench_branches ADD PRIMARY KEY (bid);
ALTER TABLE pgbench_tellers ADD PRIMARY KEY (tid);
ALTER TABLE pgbench_accounts ADD PRIMARY KEY (aid);";

/// The four tables.
pub fn tables() -> Vec<TableName> {
    ["pgbench_accounts", "pgbench_branches", "pgbench_history", "pgbench_tellers"]
        .map(TableName::from)
        .to_vec()
}

/// Creates the empty tables, for a subscriber. Existing tables of these names are dropped.
pub fn create_schema(client: &mut Client) -> Result<()> {
    client
        .batch_execute(&format!("BEGIN; {DROP_TABLES} {TABLES} {KEYS} COMMIT"))
        .context(|| "create the pgbench tables".to_string())
}

/// Creates and fills the tables with 100 000 accounts per unit of scale. Existing tables of these
/// names are dropped.
pub fn create_tables(client: &mut Client, scale: u32) -> Result<()> {
    fill(client, u64::from(scale)).context(|| format!("fill the pgbench tables, scale {scale}"))?;
    client
        .batch_execute(
            "VACUUM (ANALYZE) pgbench_accounts, pgbench_branches, pgbench_tellers, pgbench_history",
        )
        .context(|| "vacuum the pgbench tables".to_string())
}

fn fill(client: &mut Client, scale: u64) -> std::result::Result<(), postgres::Error> {
    let mut transaction = client.transaction()?;
    transaction.batch_execute(&format!("{DROP_TABLES} {TABLES}"))?;
    let parts: [(&str, u64, u64); 3] = [
        ("pgbench_branches (bid, bbalance)", BRANCHES_PER_SCALE * scale, 0),
        ("pgbench_tellers (tid, bid, tbalance)", TELLERS_PER_SCALE * scale, TELLERS_PER_SCALE),
        // Like pgbench, store an empty filler instead of null, so that a row has its full width.
        (
            "pgbench_accounts (aid, bid, abalance, filler)",
            ACCOUNTS_PER_SCALE * scale,
            ACCOUNTS_PER_SCALE,
        ),
    ];
    for (columns, rows, per_branch) in parts {
        let copy = format!("COPY {columns} FROM STDIN WITH (FREEZE)");
        let mut writer = transaction.copy_in(&copy)?;
        let mut chunk = String::with_capacity(COPY_CHUNK + 100);
        for id in 1..=rows {
            let _ = match per_branch {
                0 => writeln!(chunk, "{id}\t0"),
                ACCOUNTS_PER_SCALE => writeln!(chunk, "{id}\t{}\t0\t", (id - 1) / per_branch + 1),
                _ => writeln!(chunk, "{id}\t{}\t0", (id - 1) / per_branch + 1),
            };
            if chunk.len() >= COPY_CHUNK || id == rows {
                if writer.write_all(chunk.as_bytes()).is_err() {
                    // The server has reported an error, which finishing the COPY returns.
                    break;
                }
                chunk.clear();
            }
        }
        writer.finish()?;
    }
    transaction.batch_execute(KEYS)?;
    transaction.commit()
}
