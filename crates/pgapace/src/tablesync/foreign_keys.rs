//! Foreign keys that are checked while tables are copied.
//!
//! Their triggers do not run in sessions of replicas, unless a user has enabled them there (ENABLE ALWAYS or ENABLE REPLICA).
//! Then a table can be copied only behind those to which it refers. All are copied under one snapshot, so each row finds
//! the one to which it refers. A table that refers to itself is checked at the end of its COPY: it must be one.
//!
//! Tables that refer to each other cannot be ordered, and fail.

use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;
use crate::tablesync::plan::Item;

/// The next step for a row that refers to one which is not there.
pub(super) const HINT: &str = "The triggers of the foreign key are enabled for replica sessions (pg_trigger: tgenabled A or R), \
    and the row to which it refers is not copied yet, or not published. On the subscriber: ALTER TABLE … ENABLE TRIGGER …, and \
    ENABLE ALWAYS TRIGGER again when all tables are copied.";

/// The order of the tables of a copy, by index.
#[derive(Debug, Default)]
pub(super) struct CopyOrder {
    /// For each table, those that are copied before it.
    before: Vec<Vec<usize>>,
    to_themselves: FxHashSet<usize>,
}

impl CopyOrder {
    /// Whether all rows must come with one COPY.
    pub(super) fn refers_to_itself(&self, table: usize) -> bool {
        self.to_themselves.contains(&table)
    }

    /// The tables that are copied before this one.
    pub(super) fn before(&self, table: usize) -> &[usize] {
        &self.before[table]
    }
}

/// Reads which foreign keys are checked. A partition counts as its root.
pub(super) fn read(control: &mut Session, items: &[Item]) -> Result<CopyOrder> {
    let oids: Vec<_> = items.iter().map(|item| item.subscriber.oid.to_string()).collect();
    let root =
        |oid: &str| format!("coalesce(pg_catalog.pg_partition_root({oid})::pg_catalog.oid, {oid})");
    let sql = format!(
        "WITH copied AS MATERIALIZED ( \
           SELECT c.oid, {} AS root FROM pg_catalog.pg_class c \
           WHERE c.oid = ANY ('{{{}}}'::pg_catalog.oid[]) \
         ), checked AS MATERIALIZED ( \
           SELECT DISTINCT {} AS child, {} AS parent \
           FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_constraint f ON f.oid = t.tgconstraint \
           WHERE t.tgenabled IN ('A', 'R') AND f.contype = 'f' AND t.tgrelid = f.conrelid \
         ) \
         SELECT c.oid, p.oid FROM checked \
         JOIN copied c ON c.root = checked.child JOIN copied p ON p.root = checked.parent",
        root("c.oid"),
        oids.join(","),
        root("f.conrelid"),
        root("f.confrelid"),
    );
    let results = control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "reading which foreign keys are checked"))?;
    let places = items.iter().enumerate().map(|(place, item)| (item.subscriber.oid, place));
    let places: FxHashMap<u32, usize> = places.collect();
    let mut order =
        CopyOrder { before: vec![Vec::new(); items.len()], to_themselves: FxHashSet::default() };
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let (child, parent) = (places.get(&field(&row, 0)?), places.get(&field(&row, 1)?));
        match (child, parent) {
            (Some(child), Some(parent)) if child == parent => {
                order.to_themselves.insert(*child);
            }
            (Some(child), Some(parent)) => order.before[*child].push(*parent),
            _ => {}
        }
    }
    Ok(order)
}
