//! The rows of a subscription in `pgapace.relation`: one for each table.

use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use super::{SubscriptionId, published, reading, table_name_arrays, writing};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::replaced_tables;

/// A row of `pgapace.relation`: one table of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelationState {
    pub(crate) name: TableName,
    pub(crate) state: TableSyncState,
    /// `None` until the table is copied.
    pub(crate) sync_lsn: Option<SyncLsn>,
    /// Rows copied so far, counted per completed part.
    pub(crate) copied_rows: Option<i64>,
    /// Size in bytes on the publisher, if it was read.
    pub(crate) publisher_bytes: Option<i64>,
    pub(crate) parts: i32,
    pub(crate) parts_done: i32,
    /// Whether the table is still catching up. It was copied while other tables were applied, and
    /// its changes are deferred.
    pub(crate) joins: bool,
    /// The table has rows of an earlier copy, which must be removed before the next copy.
    pub(crate) empty_first: bool,
    /// Set if the user allowed pgapace to empty the table: removes only rows that this snapshot of
    /// the subscriber sees.
    pub(crate) empty_snapshot: Option<String>,
    /// When `resync` requested another copy; `None` once that copy has begun.
    pub(crate) requested: Option<String>,
    /// A copy was requested or begun, or a blocked table waits for one: it is made, also if added tables are not
    /// copied (`--copy-data=false`).
    pub(crate) copy_wanted: bool,
    /// Why the table is blocked.
    pub(crate) reason: Option<String>,
    pub(crate) blocked_since: Option<String>,
    /// The table may lack changes of transactions that commit at or after this LSN.
    pub(crate) stale_from: Option<Lsn>,
    pub(crate) stale_reason: Option<String>,
    /// The oid of the subscriber's table that holds what is copied so far.
    pub(crate) copied_into: Option<u32>,
    /// The publications did not contain the table any more when they were read last.
    pub(crate) unpublished: bool,
}

impl RelationState {
    /// Whether pgapace retries a blocked table by itself. It does if the copy failed, because the
    /// cause may pass. A table that lacks changes, and that no copy was to bring, needs a decision of the user.
    pub(crate) fn is_tried_again(&self) -> bool {
        self.state == TableSyncState::Blocked && self.copy_wanted
    }

    /// Whether the table was ever part of the subscription: it was copied, a copy of it is wanted, or it lacks changes.
    pub(crate) fn has_joined(&self) -> bool {
        self.state != TableSyncState::Init || self.copy_wanted || self.requested.is_some()
    }

    /// Whether the subscriber's table may have rows of this subscription, or the user wants it emptied and copied: then
    /// another table of its name is not simply new.
    pub(crate) fn holds_rows(&self) -> bool {
        self.state.is_copied()
            || self.is_partly_copied()
            || self.stale_from.is_some()
            || self.requested.is_some()
    }

    /// Whether the table is copied, and has all changes up to the progress, as far as is known.
    pub(crate) fn is_complete(&self) -> bool {
        self.state == TableSyncState::Ready && self.requested.is_none() && self.stale_from.is_none()
    }

    /// Whether the table was copied, and has all changes since, as far as is known.
    pub(crate) fn is_copied_without_gap(&self) -> bool {
        self.sync_lsn.is_some() && self.copied_rows.is_some() && self.stale_from.is_none()
    }

    /// Whether rows of an incomplete copy are to be removed.
    pub(crate) fn is_partly_copied(&self) -> bool {
        !self.state.is_copied() && (self.empty_first || self.parts_done > 0)
    }

    /// Whether the subscriber's table with this oid has rows of an incomplete copy.
    pub(crate) fn is_partly_copied_into(&self, oid: u32) -> bool {
        self.is_partly_copied() && self.copied_into.is_none_or(|into| into == oid)
    }
}

/// The tables of a subscription by name.
pub(crate) type RelationsByName = FxHashMap<TableName, RelationState>;

/// The tables of a subscription, and the last reading of the publications, in one
/// round trip.
pub(crate) fn relations_and_published(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<(RelationsByName, published::PreviousReading)> {
    let id = id.0.to_string();
    let id = &[Some(id.as_str())][..];
    let [relations, recorded] = session
        .query_each([(RELATIONS, id), (published::PREVIOUS, id)])
        .map_err(|e| reading(&e))?;
    Ok((by_name(relation_states(&relations)?), published::previous(&recorded)?))
}

fn by_name(states: Vec<RelationState>) -> RelationsByName {
    states.into_iter().map(|s| (s.name.clone(), s)).collect()
}

/// Returns the tables of a subscription.
pub(crate) fn relations(session: &mut Session, id: SubscriptionId) -> Result<Vec<RelationState>> {
    let rows = session.query(RELATIONS, &[Some(&id.0.to_string())]).map_err(|e| reading(&e))?;
    relation_states(&rows)
}

/// The same, the rows of another query, and those of [`replaced_tables::REPLACED`], in one round trip with a query whose
/// result does not matter.
pub(crate) fn relations_and(
    session: &mut Session,
    id: SubscriptionId,
    setting: &str,
    other: (&str, &[Option<&str>]),
) -> Result<(Vec<RelationState>, wire::Rows, wire::Rows)> {
    let id = id.0.to_string();
    let id = &[Some(id.as_str())][..];
    let [rows, _, others, replaced] = session
        .query_each([(RELATIONS, id), (setting, &[]), other, (replaced_tables::REPLACED, id)])
        .map_err(|e| reading(&e))?;
    Ok((relation_states(&rows)?, others, replaced))
}

/// SQL: whether relation `r` was found to be unpublished, as [`engine::published::PublishedBy`] is recorded.
pub(crate) const UNPUBLISHED: &str =
    "coalesce(pg_catalog.strpos(r.published_by, 'unpublished ') > 0, false)";

const RELATIONS: &str = "\
    SELECT schema_name, table_name, sync_lsn, copied_rows, publisher_bytes, parts, \
      parts_done, catch_up IS NOT NULL, state, empty_first, requested, reason, \
      blocked_since, stale_lsn, stale_reason, empty_snapshot, copy_wanted, \
      coalesce(pg_catalog.strpos(published_by, 'unpublished ') > 0, false), copied_into \
    FROM pgapace.relation \
    WHERE subscription = $1::pg_catalog.int4 ORDER BY schema_name, table_name";

/// From the rows of [`RELATIONS`].
fn relation_states(rows: &wire::Rows) -> Result<Vec<RelationState>> {
    rows.iter()
        .map(|row| {
            Ok(RelationState {
                name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
                sync_lsn: row.get(2).map(|_| field::<Lsn>(&row, 2).map(SyncLsn)).transpose()?,
                copied_rows: row.get(3).map(|_| field(&row, 3)).transpose()?,
                publisher_bytes: row.get(4).map(|_| field(&row, 4)).transpose()?,
                parts: field(&row, 5)?,
                parts_done: field(&row, 6)?,
                joins: boolean(&row, 7)?,
                state: state_of(&row, 8)?,
                empty_first: boolean(&row, 9)?,
                requested: row.get(10).map(str::to_owned),
                reason: row.get(11).map(str::to_owned),
                blocked_since: row.get(12).map(str::to_owned),
                stale_from: row.get(13).map(|_| field(&row, 13)).transpose()?,
                stale_reason: row.get(14).map(str::to_owned),
                empty_snapshot: row.get(15).map(str::to_owned),
                copy_wanted: boolean(&row, 16)?,
                unpublished: boolean(&row, 17)?,
                copied_into: row.get(18).map(|_| field(&row, 18)).transpose()?,
            })
        })
        .collect()
}

pub(super) fn state_of(row: &wire::Row<'_>, column: usize) -> Result<TableSyncState> {
    let name: String = field(row, column)?;
    TableSyncState::from_name(&name)
        .ok_or_else(|| Failure::internal(format!("unknown state {name:?} of a table")))
}

/// Returns the tables of a subscription, by name.
pub(crate) fn relations_by_name(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<RelationsByName> {
    Ok(by_name(relations(session, id)?))
}

/// When the copies of these tables were committed, in microseconds since 1970. A table is left out if it
/// was never copied, or if the server no longer has the commit timestamp. Needs
/// `track_commit_timestamp`.
pub(crate) fn copied_at(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[TableName],
) -> Result<FxHashMap<TableName, i64>> {
    let [schemas, names] = table_name_arrays(tables);
    let rows = session
        .query(
            "SELECT r.schema_name, r.table_name, copied.at \
             FROM ROWS FROM (pg_catalog.unnest($2::pg_catalog.text[]), \
               pg_catalog.unnest($3::pg_catalog.text[])) AS w (schema_name, table_name) \
             JOIN pgapace.relation r ON r.schema_name = w.schema_name AND r.table_name = w.table_name \
             CROSS JOIN LATERAL (SELECT (EXTRACT(epoch FROM pg_catalog.pg_xact_commit_timestamp( \
               r.copied_xid::pg_catalog.xid)) * 1000000)::pg_catalog.int8 AS at) copied \
             WHERE r.subscription = $1::pg_catalog.int4 AND r.copied_xid IS NOT NULL \
               AND copied.at IS NOT NULL",
            &[Some(&id.0.to_string()), Some(&schemas), Some(&names)],
        )
        .map_err(|e| reading(&e))?;
    rows.iter()
        .map(|row| {
            Ok((TableName { schema: field(&row, 0)?, name: field(&row, 1)? }, field(&row, 2)?))
        })
        .collect()
}

/// How the changes of a table are applied, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelationMode {
    pub(crate) name: TableName,
    pub(crate) mode: String,
    /// `None` for mode `set`.
    pub(crate) reason: Option<String>,
}

/// Records how the changes of tables are applied, which the first change of each table decides.
pub(crate) fn set_modes(
    session: &mut Session,
    id: SubscriptionId,
    modes: &[RelationMode],
) -> Result<()> {
    let literal = |text: &str| wire::quote_literal(text);
    let rows: Vec<_> = modes
        .iter()
        .map(|m| {
            let reason = m.reason.as_deref().map_or("NULL".to_owned(), literal);
            let (schema, name, mode) =
                (literal(&m.name.schema), literal(&m.name.name), literal(&m.mode));
            format!("({}, {schema}, {name}, {mode}, {reason})", id.0)
        })
        .collect();
    // Each row is looked up by the whole key. A condition on the subscription alone seems to find few rows, as long as
    // the table has no statistics, and then each row of the subscription would be compared with each of these.
    session
        .simple(&format!(
            "UPDATE pgapace.relation r SET apply_mode = v.mode, apply_reason = v.reason \
             FROM (VALUES {}) AS v (subscription, schema_name, table_name, mode, reason) \
             WHERE r.subscription = ANY (ARRAY[v.subscription]) \
               AND r.schema_name = ANY (ARRAY[v.schema_name]) \
               AND r.table_name = ANY (ARRAY[v.table_name]) \
               AND (r.apply_mode, r.apply_reason) IS DISTINCT FROM (v.mode, v.reason)",
            rows.join(", ")
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Returns how the changes of tables were last applied; tables without any change are left out.
pub(crate) fn modes(session: &mut Session, id: SubscriptionId) -> Result<Vec<RelationMode>> {
    let rows = session
        .query(
            "SELECT schema_name, table_name, apply_mode, apply_reason FROM pgapace.relation \
             WHERE subscription = $1::pg_catalog.int4 AND apply_mode IS NOT NULL",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| reading(&e))?;
    rows.iter()
        .map(|row| {
            Ok(RelationMode {
                name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
                mode: field(&row, 2)?,
                reason: row.get(3).map(str::to_owned),
            })
        })
        .collect()
}

/// Deletes the state of one table of a subscription, and what its verifications found: nothing keeps its rows
/// equal from now on.
pub(crate) fn forget_relation(
    session: &mut Session,
    id: SubscriptionId,
    table: &TableName,
) -> Result<()> {
    session
        .execute(
            "WITH forgotten AS (DELETE FROM pgapace.relation \
               WHERE subscription = $1::pg_catalog.int4 AND schema_name = $2 AND table_name = $3 \
               RETURNING catch_up), \
             verified AS (DELETE FROM pgapace.verification \
               WHERE subscription = $1::pg_catalog.int4 AND schema_name = $2 AND table_name = $3), \
             differing AS (DELETE FROM pgapace.difference \
               WHERE subscription = $1::pg_catalog.int4 AND schema_name = $2 AND table_name = $3) \
             DELETE FROM pgapace.progress WHERE subscription IN (SELECT catch_up FROM forgotten)",
            &[Some(&id.0.to_string()), Some(&table.schema), Some(&table.name)],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Deletes what verifications found in tables that are not published any more: nothing keeps their rows equal.
pub(crate) fn forget_verifications<'r>(
    session: &mut Session,
    id: SubscriptionId,
    tables: impl IntoIterator<Item = &'r RelationState>,
) -> Result<()> {
    let tables: Vec<_> = tables.into_iter().map(|table| &table.name).collect();
    if tables.is_empty() {
        return Ok(());
    }
    let [schemas, names] = table_name_arrays(tables);
    let these = "subscription = $1::pg_catalog.int4 AND (schema_name, table_name) IN ( \
                   SELECT t.schema_name, t.table_name \
                   FROM ROWS FROM (pg_catalog.unnest($2::pg_catalog.text[]), \
                                   pg_catalog.unnest($3::pg_catalog.text[])) \
                     AS t (schema_name, table_name))";
    let sql = format!(
        "WITH verified AS (DELETE FROM pgapace.verification WHERE {these}) \
         DELETE FROM pgapace.difference WHERE {these}"
    );
    let arguments = [&id.0.to_string(), &schemas, &names];
    session.execute(&sql, &arguments.map(|text| Some(text.as_str()))).map_err(|e| writing(&e))?;
    Ok(())
}

/// Deletes a subscription and all its state from schema `pgapace`.
pub(crate) fn forget(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session.simple(&format!("BEGIN; {}; COMMIT", forget_sql(id))).map_err(|e| writing(&e))?;
    Ok(())
}

/// SQL for [`forget`], as a part of a transaction.
pub(crate) fn forget_sql(id: SubscriptionId) -> String {
    format!(
        "DELETE FROM pgapace.adoption a USING pgapace.subscription s \
             WHERE a.name = s.name AND s.id = {}; {}",
        id.0,
        forget_runs_sql(id)
    )
}

/// SQL that deletes a subscription in whose place another one of its name begins anew, with this slot. The native
/// subscription that it was adopted from is that of the new one.
pub(crate) fn forget_superseded_sql(id: SubscriptionId, slot: &str) -> String {
    format!(
        "UPDATE pgapace.adoption a SET slot_name = {} FROM pgapace.subscription s \
             WHERE a.name = s.name AND s.id = {}; {}",
        wire::quote_literal(slot),
        id.0,
        forget_runs_sql(id)
    )
}

fn forget_runs_sql(id: SubscriptionId) -> String {
    format!(
        "DELETE FROM pgapace.switchover WHERE subscription = {id}; \
             DELETE FROM pgapace.hand_over WHERE subscription = {id}; \
             DELETE FROM pgapace.progress WHERE subscription = {id} OR subscription IN \
               (SELECT catch_up FROM pgapace.relation WHERE subscription = {id}); \
             DELETE FROM pgapace.relation WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_subscription WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_figures WHERE subscription = {id}; \
             DELETE FROM pgapace.owner WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_history WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_table WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_conflict WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_retry WHERE subscription = {id}; \
             DELETE FROM pgapace.error_detail WHERE subscription = {id}; \
             DELETE FROM pgapace.event WHERE subscription = (SELECT s.name \
               FROM pgapace.subscription s WHERE s.id = {id}); \
             DELETE FROM pgapace.conflict WHERE subscription = {id}; \
             DELETE FROM pgapace.prepared WHERE subscription = {id}; \
             DELETE FROM pgapace.verification WHERE subscription = {id}; \
             DELETE FROM pgapace.difference WHERE subscription = {id}; \
             DELETE FROM pgapace.subscription WHERE id = {id}",
        id = id.0
    )
}
