//! Disk: WAL that slots of others retain on the publisher, and the size of the tables that are
//! copied.
//!
//! No function of PostgreSQL tells how much of a server's disk is free, so sizes are all that can
//! be said. The disk where pgapace runs is checked with its spool directory.

use wire::Session;

use crate::check::report::{Reporter, Side};
use crate::check::{SubscriptionState, failed};
use crate::cli::output::size;
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{field, oid_array};

const TOPIC: &str = "disk";
/// In bytes. Less WAL is usual for a slot whose reader comes and goes.
const MUCH: i64 = 1 << 30;

/// Reports slots without a reader that retain much WAL.
pub(super) fn idle_slots(
    session: &mut Session,
    config: &Config,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let rows = session
        .query(
            "SELECT slot_name, pg_catalog.pg_wal_lsn_diff(CASE \
               WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() \
               ELSE pg_catalog.pg_current_wal_lsn() END, restart_lsn)::pg_catalog.int8 \
             FROM pg_catalog.pg_replication_slots \
             WHERE NOT active AND restart_lsn IS NOT NULL ORDER BY 2 DESC",
            &[],
        )
        .map_err(|e| failed(Side::Publisher, &e, "reading its slots"))?;
    for row in rows.iter() {
        let (slot, bytes): (String, i64) = (field(&row, 0)?, field(&row, 1)?);
        if slot == config.slot || bytes < MUCH {
            continue;
        }
        let bytes = size(bytes);
        let name = wire::quote_literal(&slot);
        reporter
            .warn(
                TOPIC,
                format!(
                    "nobody reads slot {slot}, which retains {bytes} of WAL: if its subscriber is \
                     gone, drop it, or the disk will be full"
                ),
            )
            .on(&slot)
            .sql(format!("SELECT pg_catalog.pg_drop_replication_slot({name}); -- if it is unused"));
    }
    Ok(())
}

/// Says how much a first run would copy.
pub(super) fn copied(
    publisher_session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let oids: Vec<_> = published
        .iter()
        .filter(|table| known.to_copy(config, table))
        .map(|table| table.oid)
        .collect();
    if oids.is_empty() {
        return Ok(());
    }
    // Partitions belong to the table that is published in their place.
    let rows = publisher_session
        .query(
            "SELECT coalesce(pg_catalog.sum(pg_catalog.pg_table_size(tree.relid)), 0) \
               ::pg_catalog.int8, coalesce(pg_catalog.sum(pg_catalog.pg_indexes_size(tree.relid)), \
               0)::pg_catalog.int8 \
             FROM (SELECT p.relid FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS t (oid) \
               CROSS JOIN LATERAL pg_catalog.pg_partition_tree(t.oid::pg_catalog.regclass) p \
               UNION SELECT t.oid FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS t (oid)) tree",
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(Side::Publisher, &e, "reading the sizes of its tables"))?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (rows, indexes): (i64, i64) = (field(&row, 0)?, field(&row, 1)?);
    let tables = oids.len();
    reporter.ok(
        TOPIC,
        format!(
            "a run copies {tables} tables: {} of rows, and {} of indexes, on the publisher. WAL of \
             the copy and of the changes meanwhile comes on top",
            size(rows),
            size(indexes)
        ),
    );
    Ok(())
}
