//! The list of workloads, and how workloads are selected from it.

use anyhow::{Result, bail};

use super::tablesync::Tables;
use super::{
    Kind, Workload, bulk, first_touch, full_update, hot, indexes, many_tables, moving_unique,
    old_snapshot, partitions, random, rollback, tenants, tpcb, trigger_row, twophase, user_locks,
    wide,
};

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
        name: "tenants",
        about: "updates of a table with key (tenant, id) and an index on (tenant); one tenant is large",
        kind: Kind::Backlog(tenants::tenants),
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
        name: "moving-unique",
        about: "updates of a table with two UNIQUE columns, four in ten move values between rows",
        kind: Kind::Backlog(moving_unique::often),
    },
    Workload {
        name: "moving-unique-rare",
        about: "the same table, one update in 2000 swaps the values of two rows",
        kind: Kind::Backlog(moving_unique::rare),
    },
    Workload {
        name: "trigger-row",
        about: "an update of a table with an ALWAYS trigger, an update and an insert of plain ones",
        kind: Kind::Backlog(trigger_row::trigger_row),
    },
    Workload {
        name: "partitions-24",
        about: "an update and an insert each, spread over 24 partitions, published as leaves",
        kind: Kind::Backlog(|scale| partitions::leaves(scale, 24)),
    },
    Workload {
        name: "partitions-24-root",
        about: "the same, published through the root",
        kind: Kind::Backlog(|scale| partitions::root(scale, 24)),
    },
    Workload {
        name: "partitions-240",
        about: "an update and an insert each, spread over 240 partitions, published as leaves",
        kind: Kind::Backlog(|scale| partitions::leaves(scale, 240)),
    },
    Workload {
        name: "partitions-240-root",
        about: "the same, published through the root",
        kind: Kind::Backlog(|scale| partitions::root(scale, 240)),
    },
    Workload {
        name: "many-tables",
        about: "three changes each, spread over 400 small tables",
        kind: Kind::Backlog(many_tables::many_tables),
    },
    Workload {
        name: "first-touch-1000",
        about: "one insert into each of 1000 tables, from the start to the last one",
        kind: Kind::Backlog(|scale| first_touch::first_touch(scale, 1000)),
    },
    Workload {
        name: "first-touch-10000",
        about: "the same with 10000 tables",
        kind: Kind::Backlog(|scale| first_touch::first_touch(scale, 10_000)),
    },
    Workload {
        name: "row-mode",
        about: "tpcb, with --apply-mode row",
        kind: Kind::Backlog(tpcb::row_mode),
    },
    Workload {
        name: "old-snapshot",
        about: "tpcb, while a session keeps a snapshot on the subscriber",
        kind: Kind::Backlog(old_snapshot::tpcb),
    },
    Workload {
        name: "old-snapshot-simple",
        about: "simple-update, which has no hot rows, while a session keeps a snapshot",
        kind: Kind::Backlog(old_snapshot::simple_update),
    },
    Workload {
        name: "old-snapshot-single",
        about: "old-snapshot-simple, with pgapace committing each transaction alone",
        kind: Kind::Backlog(old_snapshot::single),
    },
    Workload {
        name: "user-locks",
        about: "random-update, while a session of the subscriber locks the table in SHARE MODE again and again",
        kind: Kind::Backlog(user_locks::user_locks),
    },
    Workload {
        name: "resume",
        about: "1 GB of WAL acknowledged, the publisher crashes: until the first new change",
        kind: Kind::Resume,
    },
    Workload {
        name: "verify-1x1GB",
        about: "pgapace verify of one table of 1 GB, with one session on each server",
        kind: Kind::Verify(Tables { number: 1, megabytes: 1024 }),
    },
    Workload {
        name: "sync",
        about: "40 clients, with the subscriber in synchronous_standby_names: publisher's rate",
        kind: Kind::Synchronous(40),
    },
    Workload { name: "sync-few", about: "the same with 4 clients", kind: Kind::Synchronous(4) },
    Workload { name: "sync-lone", about: "the same with one client", kind: Kind::Synchronous(1) },
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

/// A quick run leaves these out: it has similar ones that are smaller.
const NOT_QUICK: [&str; 6] = [
    "moving-unique-rare",
    "partitions-240",
    "partitions-240-root",
    "first-touch-10000",
    "old-snapshot-simple",
    "old-snapshot-single",
];

/// Selects workloads by name, or by a prefix that a dash follows. Without names it selects all; at
/// a small scale only few sizes of `large`, and not the largest numbers of tables; at scale 0 those
/// of a quick run.
pub(crate) fn select(names: &[String], scale: f64) -> Result<Vec<Workload>> {
    let wanted = |workload: &&Workload| match workload.kind {
        _ if scale >= FEW_SIZES_BELOW => true,
        _ if scale == 0.0 && NOT_QUICK.contains(&workload.name) => false,
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
        assert_eq!(names(&[], 0.0).len(), ALL.len() - 10 - NOT_QUICK.len());
        assert_eq!(names(&["partitions-240"], 0.0), ["partitions-240"]);
    }
}
