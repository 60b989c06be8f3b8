//! Many tables, empty or filled, for the initial copy of a subscription.

use std::fmt;

/// The tables to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) number: u64,
    /// Size of each table in megabytes.
    pub(crate) megabytes: u64,
}

/// Rows per megabyte: each has 128 bytes including its header.
const ROWS_PER_MEGABYTE: u64 = 8192;

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.number == 1 { "" } else { "s" };
        match self.megabytes {
            0 => write!(f, "{} empty table{plural}", self.number),
            megabytes => write!(f, "{} table{plural} of {megabytes} MB", self.number),
        }
    }
}

impl Tables {
    /// DDL of table `number`.
    pub(crate) fn create(number: u64) -> String {
        format!("CREATE TABLE t{number} (id int PRIMARY KEY, a int, filler text);")
    }

    /// Fills one table.
    pub(crate) fn fill(number: u64, rows: u64) -> String {
        format!(
            "INSERT INTO t{number} SELECT i, {number}, repeat('x', 88) \
             FROM generate_series(1, {rows}) i;"
        )
    }

    /// Rows in each table.
    pub(crate) fn rows(self) -> u64 {
        self.megabytes * ROWS_PER_MEGABYTE
    }
}
