//! Tables that were truncated on the publisher since the snapshot of their copy.
//!
//! TRUNCATE gives a table new files, of which an older snapshot shows no row. So do ALTER TABLE and `pg_repack`, whose new
//! files hold the rows that the snapshot lacks. Files do not tell which it was, so a table with new files is copied again
//! under another snapshot. One that is truncated again and again would never be copied.
//!
//! The temporary slot of the snapshot tells: whatever the publisher sends of the transactions behind the snapshot, it
//! sends to the subscription too. If a TRUNCATE of the table is among them, the table needs no copy. Its sync LSN is the
//! position X of the TRUNCATE in the WAL, and it begins there without rows. Why the rows are right:
//!
//! * From X until its transaction ends, the TRUNCATE holds the lock of the table. So a transaction with changes of the
//!   table that commits before X has changed rows that the TRUNCATE has removed. It is not applied.
//! * Each one that commits behind X is applied: that with the TRUNCATE first, which leaves the table empty, and then
//!   those that changed it as it was from there on. A transaction that is prepared, too, is prepared behind X.
//!
//! An UPDATE or DELETE before the TRUNCATE in its own transaction finds no row, which is counted as a conflict. It does not
//! matter what else has happened to the files. A native copy begins with the empty table of the snapshot
//! instead, whatever has rewritten it.
//!
//! So each snapshot completes a table or finds what has rewritten it, and a table that is truncated all the time is
//! complete with the first snapshot of a temporary slot. Without such a TRUNCATE the table is copied again: its
//! publications may leave out TRUNCATE, or only a partition of it was truncated.

use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::CURRENT_LSN;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::tablesync::SyncContext;
use crate::tablesync::snapshot::TemporarySlot;
use crate::tablesync::table_state::Complete;

/// Bytes of WAL behind the first snapshot that are decoded at most. If there are more, the next snapshot has fewer: only
/// tables that have changed are copied under it. Behind each next one, four times as many are decoded: the transaction of
/// the TRUNCATE may be large.
const DECODED_BYTES: u64 = 64 << 20;

/// A table that has changed since the snapshot of its copy.
#[derive(Debug)]
pub(super) struct ChangedTable {
    /// The error that names the change.
    pub(super) failure: Failure,
    /// `None` if it was compared instead of copied.
    pub(super) copy: Option<ChangedCopy>,
}

#[derive(Debug)]
pub(super) struct ChangedCopy {
    pub(super) table: PublishedTable,
    /// The generation of the copy; `None` if it has not begun.
    pub(super) generation: Option<u32>,
    /// Whether some parts of the table may be copied.
    pub(super) is_split: bool,
}

impl ChangedTable {
    /// A table whose copy has not begun.
    pub(super) fn not_begun(failure: Failure, table: PublishedTable) -> Self {
        Self { failure, copy: Some(ChangedCopy { table, generation: None, is_split: false }) }
    }

    /// A table that was compared.
    pub(super) fn compared(failure: Failure) -> Self {
        Self { failure, copy: None }
    }

    /// Logs that its copy is left to the time when others stream.
    pub(super) fn log_added_later(&self) {
        tracing::warn!(
            event = "table_added_later",
            table = self.copy.as_ref().map(|copy| copy.table.name.to_string()),
            reason = self.failure.message,
            "table changed under each snapshot of the first copy; it is copied while the others stream"
        );
    }

    /// The table and the generation of its copy, if that has begun as a whole. Rows of a part would be in the way of the
    /// transaction with the TRUNCATE; the next copy removes them.
    fn whole(&self) -> Option<(&PublishedTable, u32)> {
        let copy = self.copy.as_ref().filter(|copy| !copy.is_split)?;
        Some((&copy.table, copy.generation?))
    }

    /// Its name, if some parts of it may be copied.
    pub(super) fn split(&self) -> Option<&TableName> {
        self.copy.as_ref().filter(|copy| copy.is_split).map(|copy| &copy.table.name)
    }
}

/// Completes those of the tables that need no copy, because a TRUNCATE of them follows the snapshot of the slot. Returns
/// the others. The publisher's session holds the slot, which is that of so many `snapshots`.
pub(super) fn complete(
    context: SyncContext<'_>,
    (control, publisher): (&mut Session, &mut Session),
    slot: &TemporarySlot,
    changed: Vec<ChangedTable>,
    snapshots: usize,
) -> Result<Vec<ChangedTable>> {
    let oids: Vec<_> = changed.iter().filter_map(|c| Some(c.whole()?.0.oid)).collect();
    if oids.is_empty() {
        return Ok(changed);
    }
    let bytes = (1..snapshots).fold(DECODED_BYTES, |bytes, _| bytes.saturating_mul(4));
    let truncated = match truncates(context, publisher, (slot, bytes), &oids) {
        Ok(truncated) => truncated,
        Err(failure) if failure.sqlstate.is_some() && !publisher.is_broken() => {
            tracing::debug!(%failure, "cannot look for a TRUNCATE behind a snapshot");
            return Ok(changed);
        }
        Err(failure) => return Err(failure),
    };
    let mut left = Vec::new();
    for changed in changed {
        let found = changed.whole().and_then(|whole| Some((whole, *truncated.get(&whole.0.oid)?)));
        let Some(((table, generation), at)) = found else {
            left.push(changed);
            continue;
        };
        let mut complete = Complete::default();
        complete.push(table, 0, generation);
        complete.record(control, context.owner(), at)?;
        tracing::info!(
            event = "truncate_replaces_copy",
            table = table.name.to_string(),
            lsn = %at,
            "table was truncated on the publisher since the snapshot; it is applied from there on"
        );
    }
    Ok(left)
}

/// The position of the last TRUNCATE of each of these tables that the publisher sends behind the snapshot of the slot; none
/// if it has more `bytes` of WAL behind it.
///
/// A transaction that was seen to have rewritten a table is in the WAL that can be decoded: one that removes files is
/// flushed before its locks end.
fn truncates(
    context: SyncContext<'_>,
    publisher: &mut Session,
    (slot, bytes): (&TemporarySlot, u64),
    oids: &[u32],
) -> Result<FxHashMap<u32, Lsn>> {
    let failed = |e: &wire::Error| Failure::publisher(e, "looking for a TRUNCATE");
    let much = format!(
        "SELECT pg_catalog.pg_wal_lsn_diff({CURRENT_LSN}, '{}') > {bytes}",
        slot.snapshot_lsn
    );
    let much = publisher.simple(&much).map_err(|e| failed(&e))?;
    if boolean(&first_row(&much, "pg_wal_lsn_diff")?, 0)? {
        return Ok(FxHashMap::default());
    }
    let origin_none = context.options.origin_none && publisher.server_version().major() >= 16;
    let sql = truncates_sql(&slot.name, context.publications, origin_none, oids);
    let results = publisher.simple(&sql).map_err(|e| failed(&e))?;
    let rows = results.first().ok_or_else(|| Failure::internal("no result of decoding"))?;
    rows.iter()
        .map(|row| {
            let at: Lsn = field(&row, 1)?;
            Ok((field(&row, 0)?, at.max(slot.snapshot_lsn)))
        })
        .collect()
}

/// The message of a TRUNCATE begins with `T`, the number of tables in four bytes, and a byte of options. Their OIDs follow.
fn truncates_sql(slot: &str, publications: &[String], origin_none: bool, oids: &[u32]) -> String {
    let names: Vec<_> = publications.iter().map(|name| quote_ident(name)).collect();
    let oids: Vec<_> = oids.iter().map(u32::to_string).collect();
    format!(
        "SELECT r.oid, pg_catalog.max(m.lsn) \
         FROM pg_catalog.pg_logical_slot_peek_binary_changes({}, NULL, NULL, \
           'proto_version', '1', 'publication_names', {}{}) m \
         CROSS JOIN LATERAL ( \
           SELECT ('x' || pg_catalog.encode(pg_catalog.substr(m.data, 7 + 4 * i, 4), 'hex')) \
             ::pg_catalog.bit(32)::pg_catalog.int8 AS oid \
           FROM pg_catalog.generate_series(0, (pg_catalog.length(m.data) - 6) / 4 - 1) i) r \
         WHERE pg_catalog.get_byte(m.data, 0) = {} AND r.oid = ANY ('{{{}}}'::pg_catalog.int8[]) \
         GROUP BY r.oid",
        quote_literal(slot),
        quote_literal(&names.join(",")),
        if origin_none { ", 'origin', 'none'" } else { "" },
        b'T',
        oids.join(",")
    )
}
