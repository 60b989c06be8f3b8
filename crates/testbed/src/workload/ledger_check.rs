//! Checks of a ledger: complete transactions, in commit order.

use std::fmt;

use postgres::{Client, IsolationLevel};

use crate::error::{Error, Result};

/// Contents of a consistent ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerReport {
    /// Number of transactions; in an ordered ledger this is also the highest number.
    pub transactions: i64,
    /// Number of rows that they wrote.
    pub entries: i64,
}

/// An inconsistency in a ledger.
#[derive(Debug)]
#[non_exhaustive]
pub enum Violation {
    /// The numbers are not 1 to n: a later transaction is visible without an earlier one.
    Gap {
        /// A number that is missing.
        missing: i64,
        /// The highest number.
        last: i64,
    },
    /// Only some rows of a transaction are visible, or too many.
    Torn {
        /// The number of the transaction.
        id: i64,
        /// Number of rows that it wrote.
        expected: i64,
        /// Number of visible rows.
        found: i64,
    },
    /// Rows of a transaction without a header.
    Orphan {
        /// The transaction's key.
        txn: i64,
        /// Number of its rows.
        found: i64,
    },
    /// The sum of the balances changed: only some accounts of a transaction were updated.
    Balance {
        /// Expected sum of the balances.
        expected: i64,
        /// Actual sum of the balances.
        found: i64,
    },
    /// The ledger could not be read.
    Unreadable(Error),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gap { missing, last } => {
                write!(f, "transaction {last} is visible without transaction {missing}")
            }
            Self::Torn { id, expected, found } => {
                write!(f, "transaction {id} has {found} of its {expected} rows")
            }
            Self::Orphan { txn, found } => {
                write!(f, "{found} rows of transaction key {txn}, which has no header")
            }
            Self::Balance { expected, found } => {
                write!(f, "the accounts hold {found} instead of {expected}")
            }
            Self::Unreadable(error) => write!(f, "cannot read the ledger: {error}"),
        }
    }
}

impl std::error::Error for Violation {}

impl From<postgres::Error> for Violation {
    fn from(error: postgres::Error) -> Self {
        Self::Unreadable(error.into())
    }
}

/// Checks in one snapshot that the transactions are a prefix of the commit order and complete.
pub fn check(client: &mut Client) -> std::result::Result<LedgerReport, Violation> {
    check_ledger(client, true)
}

/// Checks in one snapshot that each transaction is complete, in any order. For an unordered writer,
/// or a subscriber that does not keep the commit order.
pub fn check_atomicity(client: &mut Client) -> std::result::Result<LedgerReport, Violation> {
    check_ledger(client, false)
}

fn check_ledger(
    client: &mut Client,
    ordered: bool,
) -> std::result::Result<LedgerReport, Violation> {
    let entries = entry_tables(client).map_err(Violation::Unreadable)?;
    let counts: Vec<String> = entries
        .iter()
        .map(|table| format!("SELECT txn, count(*) AS n FROM {table} GROUP BY txn"))
        .collect();
    let counts = counts.join(" UNION ALL ");
    let mut snapshot = client
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .read_only(true)
        .start()?;
    // The start of parallel workers costs more than they save.
    snapshot.batch_execute("SET LOCAL max_parallel_workers_per_gather = 0")?;
    if ordered {
        let gap = snapshot.query_opt(
            "SELECT n, (SELECT max(id) FROM ledger_header)
             FROM (SELECT row_number() OVER (ORDER BY id) AS n, id FROM ledger_header) AS numbered
             WHERE n <> id ORDER BY n LIMIT 1",
            &[],
        )?;
        if let Some(row) = gap {
            return Err(Violation::Gap { missing: row.get(0), last: row.get(1) });
        }
    }
    let wrong = snapshot.query_opt(
        &format!(
            "SELECT h.id, h.entries::bigint, coalesce(e.n, 0)::bigint, e.txn
             FROM ledger_header h
             FULL JOIN (SELECT txn, sum(n) AS n FROM ({counts}) AS c GROUP BY txn) AS e USING (txn)
             WHERE h.entries IS DISTINCT FROM e.n ORDER BY h.id LIMIT 1"
        ),
        &[],
    )?;
    if let Some(row) = wrong {
        let found = row.get(2);
        return Err(match row.get::<_, Option<i64>>(0) {
            Some(id) => Violation::Torn { id, expected: row.get(1), found },
            None => Violation::Orphan { txn: row.get(3), found },
        });
    }
    let money = snapshot.query_one(
        "SELECT count(*) * 1000, coalesce(sum(balance), 0)::bigint FROM ledger_account",
        &[],
    )?;
    let (expected, found): (i64, i64) = (money.get(0), money.get(1));
    if expected != found {
        return Err(Violation::Balance { expected, found });
    }
    let totals = snapshot
        .query_one("SELECT count(*), coalesce(sum(entries), 0)::bigint FROM ledger_header", &[])?;
    Ok(LedgerReport { transactions: totals.get(0), entries: totals.get(1) })
}

pub(super) fn entry_tables(client: &mut Client) -> Result<Vec<String>> {
    let rows = client.query(
        r"SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relname LIKE 'ledger\_entry\_%'
          ORDER BY 1",
        &[],
    )?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
