//! The workloads. A backlog workload is data: tables, rows, and the transactions to apply.

mod bulk;
mod full_update;
mod hot;
mod indexes;
mod random;
mod rollback;
pub(crate) mod tablesync;
pub(crate) mod tpcb;
pub(crate) mod twophase;
mod wide;

use anyhow::{Result, bail};

use self::tablesync::Tables;
use crate::regime::ServerSettings;

/// A workload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    /// A description for the list and the report.
    pub(crate) about: &'static str,
    pub(crate) kind: Kind,
}

/// How a workload is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// A backlog, replayed in every round from copies of one slot.
    Backlog(fn(Scale) -> Backlog),
    /// The first run of a subscription.
    TableSync(Tables),
    /// The publisher's transaction rate while its commits wait for the subscriber.
    Synchronous,
    /// One large transaction with this logical_decoding_work_mem.
    Large(&'static str),
    /// One small transaction at a time.
    Latency,
    /// Two-phase transactions and the resulting lag.
    TwoPhase,
}

/// A multiplier for the sizes of a workload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale(pub(crate) f64);

impl Scale {
    /// Scales `base`, the number at scale 1; the result is at least `min`.
    #[expect(clippy::cast_possible_truncation, reason = "the number is positive and small")]
    #[expect(clippy::cast_sign_loss, reason = "the number is positive")]
    pub(crate) fn of(self, base: u64, min: u64) -> u64 {
        ((base as f64 * self.0).round() as u64).max(min)
    }
}

/// Tables and the transactions that change them, the same in every run.
#[derive(Debug)]
pub(crate) struct Backlog {
    /// DDL for both sides.
    pub(crate) schema: String,
    /// SQL that fills the tables, for both sides.
    pub(crate) load: String,
    pub(crate) write: Write,
    /// The unit of the rate: transactions or rows of the backlog.
    pub(crate) units: u64,
    pub(crate) unit: &'static str,
    /// Number of rows that the backlog changes.
    pub(crate) changes: u64,
    /// A logical_decoding_work_mem of the publisher that makes it stream the transactions. The
    /// native subscription is then measured in both of its modes for streamed transactions.
    pub(crate) streamed_from: Option<&'static str>,
    /// Settings of the subscriber that the workload requires.
    pub(crate) subscriber_settings: ServerSettings,
}

/// How the backlog is written.
#[derive(Debug)]
pub(crate) enum Write {
    /// Declarations and body of a PL/pgSQL procedure.
    Procedure(String),
    /// By many concurrent connections, which prepare and commit their transactions. The slot is
    /// read with two_phase on.
    TwoPhase {
        /// Number of transactions of each connection.
        each: u64,
    },
}

impl From<String> for Write {
    fn from(procedure: String) -> Self {
        Self::Procedure(procedure)
    }
}

/// Transactions per second.
const TRANSACTIONS: &str = "tx/s";
/// Rows per second.
const ROWS: &str = "rows/s";

/// Every workload, in the order of the report.
pub(crate) const ALL: &[Workload] = &[
    Workload {
        name: "tpcb",
        about: "pgbench's default transactions: three updates and an insert each",
        kind: Kind::Backlog(tpcb::tpcb),
    },
    Workload {
        name: "simple-update",
        about: "pgbench's simple-update: an update and an insert each",
        kind: Kind::Backlog(tpcb::simple_update),
    },
    Workload {
        name: "random-update",
        about: "single-row updates all over a table larger than shared_buffers",
        kind: Kind::Backlog(random::update),
    },
    Workload {
        name: "random-insert",
        about: "single-row inserts of random keys into a table larger than shared_buffers",
        kind: Kind::Backlog(random::insert),
    },
    Workload {
        name: "bulk-insert",
        about: "1000 transactions that insert 1000 rows each",
        kind: Kind::Backlog(bulk::insert),
    },
    Workload {
        name: "bulk-update",
        about: "1000 transactions that update 1000 rows each",
        kind: Kind::Backlog(bulk::update),
    },
    Workload {
        name: "full-update",
        about: "bulk-update without any key: REPLICA IDENTITY FULL, no index",
        kind: Kind::Backlog(full_update::full_update),
    },
    Workload {
        name: "hot",
        about: "single-row updates, half of them of ten rows",
        kind: Kind::Backlog(hot::hot),
    },
    Workload {
        name: "indexes",
        about: "an insert and an update each, five indexes, two of them unique",
        kind: Kind::Backlog(indexes::indexes),
    },
    Workload {
        name: "wide",
        about: "updates of rows with two TOASTed columns; one in ten changes one of those",
        kind: Kind::Backlog(wide::wide),
    },
    Workload {
        name: "rollback",
        about: "ten streamed transactions, every other savepoint of 1000 rows rolled back",
        kind: Kind::Backlog(rollback::rollback),
    },
    Workload {
        name: "sync",
        about: "publisher tps with the subscriber in synchronous_standby_names",
        kind: Kind::Synchronous,
    },
    Workload {
        name: "latency",
        about: "one update at a time, all else idle: from COMMIT to visible on the subscriber",
        kind: Kind::Latency,
    },
    large("large-64kB", "64kB"),
    large("large-128kB", "128kB"),
    large("large-256kB", "256kB"),
    large("large-512kB", "512kB"),
    large("large-1MB", "1MB"),
    large("large-2MB", "2MB"),
    large("large-4MB", "4MB"),
    large("large-8MB", "8MB"),
    large("large-16MB", "16MB"),
    large("large-32MB", "32MB"),
    large("large-64MB", "64MB"),
    table_sync("tablesync-empty-10", "10 empty tables", 10, 0),
    table_sync("tablesync-empty-100", "100 empty tables", 100, 0),
    table_sync("tablesync-empty-1000", "1000 empty tables", 1000, 0),
    table_sync("tablesync-empty-10000", "10000 empty tables", 10_000, 0),
    table_sync("tablesync-10x10MB", "10 tables of 10 MB", 10, 10),
    table_sync("tablesync-100x10MB", "100 tables of 10 MB", 100, 10),
    table_sync("tablesync-10x100MB", "10 tables of 100 MB", 10, 100),
    table_sync("tablesync-1x1GB", "1 table of 1 GB", 1, 1024),
    Workload {
        name: "twophase",
        about: "80 connections, an update per two-phase transaction: lag over time",
        kind: Kind::TwoPhase,
    },
    Workload {
        name: "twophase-drain",
        about: "a backlog of the same two-phase transactions",
        kind: Kind::Backlog(twophase::drain),
    },
];

const fn large(name: &'static str, memory: &'static str) -> Workload {
    let about = "one insert of five million rows: until the synchronous COMMIT returns; the name \
                 says logical_decoding_work_mem";
    Workload { name, about, kind: Kind::Large(memory) }
}

const fn table_sync(
    name: &'static str,
    about: &'static str,
    number: u64,
    megabytes: u64,
) -> Workload {
    Workload { name, about, kind: Kind::TableSync(Tables { number, megabytes }) }
}

/// Below this scale, a workload with several sizes is measured at its smallest and largest size
/// only, unless it is named.
const FEW_SIZES_BELOW: f64 = 0.5;

/// Selects workloads by name, or by a prefix that a dash follows. Without names it selects all; at
/// a small scale only few sizes of `large`, and not the largest numbers of tables.
pub(crate) fn select(names: &[String], scale: f64) -> Result<Vec<Workload>> {
    let wanted = |workload: &&Workload| match workload.kind {
        _ if scale >= FEW_SIZES_BELOW => true,
        Kind::Large(memory) => matches!(memory, "64kB" | "64MB"),
        // At a small scale this would be one of 1000.
        Kind::TableSync(tables) => tables.number <= 1000,
        _ => true,
    };
    if names.is_empty() {
        return Ok(ALL.iter().filter(wanted).copied().collect());
    }
    let mut selected = Vec::new();
    for name in names {
        let exact = ALL.iter().filter(|workload| workload.name == name);
        let of_group = |workload: &&Workload| {
            workload.name.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('-'))
        };
        let mut found: Vec<_> = exact.copied().collect();
        if found.is_empty() {
            found.extend(ALL.iter().filter(of_group).filter(wanted).copied());
        }
        if found.is_empty() {
            let known: Vec<_> = ALL.iter().map(|workload| workload.name).collect();
            bail!("there is no workload {name}; there are: {}", known.join(", "))
        }
        selected.extend(found);
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        let names: HashSet<_> = ALL.iter().map(|workload| workload.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert_eq!(select(&["hot".into()], 1.0).unwrap()[0].name, "hot");
        assert!(select(&["hat".into()], 1.0).is_err());
        assert_eq!(select(&[], 1.0).unwrap().len(), ALL.len());
    }

    #[test]
    fn a_group_has_few_sizes_at_a_small_scale() {
        let names = |names: &[&str], scale| -> Vec<_> {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            select(&names, scale).unwrap().iter().map(|workload| workload.name).collect()
        };
        assert_eq!(names(&["large"], 1.0).len(), 11);
        assert_eq!(names(&["large"], 0.1), ["large-64kB", "large-64MB"]);
        assert_eq!(names(&["large-2MB", "hot"], 0.1), ["large-2MB", "hot"]);
        assert_eq!(names(&["tablesync"], 0.1).len(), 7);
        assert_eq!(names(&[], 0.1).len(), ALL.len() - 10);
    }

    #[test]
    fn scale_keeps_a_minimum() {
        assert_eq!(Scale(0.5).of(1000, 10), 500);
        assert_eq!(Scale(0.001).of(1000, 10), 10);
    }
}
