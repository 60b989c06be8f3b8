//! Detection of tables whose rows are stored elsewhere: Citus, TimescaleDB, foreign partitions.
//!
//! Citus and TimescaleDB keep the rows of a table in other relations or on other servers, and so do
//! foreign tables used as partitions. Their hooks do not act on a replica's changes. TRUNCATE does
//! not reach the rows, a table with rows looks empty, and `ONLY` finds no row. A commit on another
//! server is not part of the commit of the progress row. So pgapace refuses such tables, except those of
//! Citus for which [`citus`] has what they need.
//!
//! They are recognized by the triggers that the extensions create on each of these tables. These
//! triggers cannot be missing, and reading them takes no lock.

use engine::table_name::TableName;

use crate::error::{Class, Failure};
use crate::subscriber::citus::{self, FoundPlacement, Placement};

/// The value of [`elsewhere`] for a table of Citus.
pub(crate) const CITUS: &str = "citus";

/// SQL expression over the CTE `$tree` of `relid`s: why rows of one of them are stored elsewhere,
/// or NULL.
///
/// `OFFSET 0` keeps the planner from beginning with a catalogue, as in the queries of which this is a part.
macro_rules! elsewhere {
    ($tree:literal) => {
        concat!(
            "coalesce((SELECT CASE p.proname WHEN 'citus_truncate_trigger' THEN 'citus' ELSE 'timescaledb' END
   FROM ", $tree, " e
   CROSS JOIN LATERAL (
     SELECT g.tgfoid FROM pg_catalog.pg_trigger g WHERE g.tgrelid = e.relid OFFSET 0
   ) g CROSS JOIN LATERAL (
     SELECT p.proname, p.pronamespace FROM pg_catalog.pg_proc p WHERE p.oid = g.tgfoid OFFSET 0
   ) p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
   WHERE p.proname = 'citus_truncate_trigger' AND n.nspname = 'pg_catalog'
      OR p.proname = 'insert_blocker' AND pg_catalog.starts_with(n.nspname, '_timescaledb')
   LIMIT 1),
  (SELECT 'foreign ' || c.relname FROM ", $tree, " e
   CROSS JOIN LATERAL (
     SELECT c.relname, c.relkind FROM pg_catalog.pg_class c WHERE c.oid = e.relid OFFSET 0
   ) c WHERE c.relkind = 'f'
   ORDER BY c.relname LIMIT 1))"
        )
    };
}
pub(crate) use elsewhere;

/// The placement of such a table, or why it is refused. `found` is the value of [`elsewhere`], `by_citus` what
/// Citus says of the table itself.
pub(crate) fn placement(
    table: &TableName,
    found: &str,
    by_citus: Option<&FoundPlacement>,
) -> Result<Placement, Failure> {
    if found != CITUS {
        return Err(refused(table, found));
    }
    match by_citus {
        Some(Ok(placement)) => Ok(placement.clone()),
        Some(Err(why)) => Err(citus::unsupported(table, why)),
        None => Err(citus::unsupported(table, "it has partitions that Citus manages")),
    }
}

fn refused(table: &TableName, found: &str) -> Failure {
    let refuse = |what: String, hint: String| {
        Failure::new(Class::Mismatch, format!("subscriber table {table} {what}")).hint(hint)
    };
    match found {
        "timescaledb" => refuse(
            "is a hypertable of TimescaleDB: its rows are in chunks, which cannot be replicated into"
                .to_owned(),
            "Make it a plain table on the subscriber, or take it out of the publication.".to_owned(),
        ),
        other => {
            let partition = other.strip_prefix("foreign ").unwrap_or(other);
            refuse(
                format!(
                    "has the foreign table {partition} as a partition: its commits are not part of \
                     the subscriber's"
                ),
                format!(
                    "Detach it (ALTER TABLE {table} DETACH PARTITION {partition}), or take the table \
                     out of the publication."
                ),
            )
        }
    }
}
