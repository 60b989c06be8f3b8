//! What a subscription remembers, on the subscriber: its row, its tables, its progress.

pub(crate) mod conflicts;
pub(crate) mod ownership;
pub(crate) mod prepared;
pub(crate) mod progress;
pub(crate) mod published;
pub(crate) mod schema;
pub(crate) mod statistics;

use engine::sync_lsn::SyncLsn;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::SystemIdentity;
use crate::subscriber::catalogue::{boolean, field, parse_name_array};

/// How far the set-up of a subscription has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The slot may or may not exist yet.
    Creating,
    /// The slot exists; tables are being copied.
    Copying,
    /// All tables are copied; the stream goes on from the progress.
    Streaming,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Copying => "copying",
            Self::Streaming => "streaming",
        }
    }
}

/// What of the publisher's schema is still to be made on the subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SchemaCopy {
    /// All of it.
    Before,
    /// What comes after the copy of the tables.
    After,
    /// The same, and some of it may be there.
    Begun,
}

impl SchemaCopy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
            Self::Begun => "begun",
        }
    }
}

/// Id of a subscription in `pgapace.subscription`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriptionId(pub(crate) i32);

/// A row of `pgapace.subscription`.
#[derive(Debug, Clone)]
pub(crate) struct Subscription {
    pub(crate) id: SubscriptionId,
    pub(crate) name: String,
    pub(crate) slot_name: String,
    pub(crate) publications: Vec<String>,
    pub(crate) phase: Phase,
    pub(crate) owns_slot: bool,
    /// Where the slot begins, if it is or was about to be made.
    pub(crate) slot_made_at: Option<Lsn>,
    pub(crate) copy_data: bool,
    pub(crate) epoch: i64,
    pub(crate) system_identifier: Option<String>,
    pub(crate) timeline: Option<u32>,
    /// Why it does not run until the user says so.
    pub(crate) disabled: Option<String>,
    /// Commit LSN of a transaction that is left out.
    pub(crate) skip: Option<Lsn>,
    /// What of the schema is to be made; `None` if it is not ours to make, or made.
    pub(crate) schema_copy: Option<SchemaCopy>,
}

const COLUMNS: &str = "id, name, slot_name, publications, phase, owns_slot, copy_data, epoch, \
                       system_identifier, timeline, disabled_reason, skip_lsn, schema_copy, \
                       slot_made_at";

/// The subscription of this name, if the subscriber has one.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Subscription>> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.subscription WHERE name = $1");
    let rows = session.query(&sql, &[Some(name)]).map_err(|e| reading(&e))?;
    rows.first().map(|row| subscription(&row)).transpose()
}

/// The same, on a subscriber of which the schema may be older, which is then brought up to date; or that
/// has none.
pub(crate) fn find_in_any(session: &mut Session, name: &str) -> Result<Option<Subscription>> {
    match schema::version(session)? {
        0 => return Ok(None),
        version => schema::upgrade(session, version)?,
    }
    find(session, name)
}

/// All subscriptions of the subscriber.
pub(crate) fn all(session: &mut Session) -> Result<Vec<Subscription>> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.subscription ORDER BY name");
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    rows.iter().map(|row| subscription(&row)).collect()
}

fn subscription(row: &wire::Row<'_>) -> Result<Subscription> {
    Ok(Subscription {
        id: SubscriptionId(field(row, 0)?),
        name: field(row, 1)?,
        slot_name: field(row, 2)?,
        publications: parse_name_array(&field::<String>(row, 3)?)?,
        phase: match row.get(4) {
            Some("creating") => Phase::Creating,
            Some("copying") => Phase::Copying,
            Some("streaming") => Phase::Streaming,
            other => return Err(Failure::internal(format!("unknown phase {other:?}"))),
        },
        owns_slot: boolean(row, 5)?,
        copy_data: boolean(row, 6)?,
        epoch: field(row, 7)?,
        system_identifier: row.get(8).map(str::to_owned),
        timeline: row.get(9).map(|_| field(row, 9)).transpose()?,
        disabled: row.get(10).map(str::to_owned),
        skip: row.get(11).map(|_| field(row, 11)).transpose()?,
        schema_copy: match row.get(12) {
            None => None,
            Some("before") => Some(SchemaCopy::Before),
            Some("after") => Some(SchemaCopy::After),
            Some("begun") => Some(SchemaCopy::Begun),
            other => return Err(Failure::internal(format!("unknown schema_copy {other:?}"))),
        },
        slot_made_at: row.get(13).map(|_| field(row, 13)).transpose()?,
    })
}

/// What a new subscription starts with.
pub(crate) struct NewSubscription<'a> {
    pub(crate) name: &'a str,
    pub(crate) slot_name: &'a str,
    pub(crate) publications: &'a [String],
    pub(crate) owns_slot: bool,
    pub(crate) copy_data: bool,
    pub(crate) schema_copy: Option<SchemaCopy>,
}

/// Records a new subscription, before anything is created for it on the publisher. One of this name
/// that another process has recorded meanwhile is returned as it is.
pub(crate) fn create(session: &mut Session, new: &NewSubscription<'_>) -> Result<Subscription> {
    let created = session
        .query(
            &format!(
                "INSERT INTO pgapace.subscription \
                   (name, slot_name, publications, phase, owns_slot, copy_data, schema_copy) \
                 VALUES ($1, $2, $3::pg_catalog.text[], 'creating', $4::pg_catalog.bool, \
                   $5::pg_catalog.bool, $6) \
                 ON CONFLICT (name) DO NOTHING RETURNING {COLUMNS}"
            ),
            &[
                Some(new.name),
                Some(new.slot_name),
                Some(&name_array(new.publications)),
                Some(if new.owns_slot { "t" } else { "f" }),
                Some(if new.copy_data { "t" } else { "f" }),
                new.schema_copy.map(SchemaCopy::name),
            ],
        )
        .map_err(|e| writing(&e))?;
    match created.first() {
        Some(row) => subscription(&row),
        None => find(session, new.name)?
            .ok_or_else(|| Failure::internal("a created subscription is gone")),
    }
}

/// Records where the slot will begin that is about to be made.
pub(crate) fn set_slot_made_at(
    session: &mut Session,
    id: SubscriptionId,
    lsn: Option<Lsn>,
) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET slot_made_at = $2::pg_catalog.pg_lsn \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), lsn.map(|lsn| lsn.to_string()).as_deref()],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records that the slot exists, in one transaction: from here on it is never dropped for another.
/// `sent_as` is what the publisher is asked for.
pub(crate) fn set_copying(
    session: &mut Session,
    id: SubscriptionId,
    epoch: i64,
    start: Lsn,
    publisher: &SystemIdentity,
    sent_as: &str,
) -> Result<()> {
    session
        .simple(&format!(
            "BEGIN; {}; UPDATE pgapace.subscription \
             SET phase = 'copying', system_identifier = {}, timeline = {}, sent_as = {} WHERE id = {}; COMMIT",
            progress::start_sql(id, start, epoch),
            wire::quote_literal(&publisher.system_identifier),
            publisher.timeline,
            wire::quote_literal(sent_as),
            id.0
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records how much of the schema is made.
pub(crate) fn set_schema_copy(
    session: &mut Session,
    id: SubscriptionId,
    left: Option<SchemaCopy>,
) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET schema_copy = $2 WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), left.map(SchemaCopy::name)],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records that all tables are copied. What was committed before it is durable with it.
pub(crate) fn set_streaming(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .simple(&format!("UPDATE pgapace.subscription SET phase = 'streaming' WHERE id = {}", id.0))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Keeps a subscription from running until the user says so (`None`).
pub(crate) fn set_disabled(
    session: &mut Session,
    id: SubscriptionId,
    reason: Option<&str>,
) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET disabled_reason = $2::pg_catalog.text, \
               disabled_at = CASE WHEN $2::pg_catalog.text IS NOT NULL THEN pg_catalog.now() END \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), reason],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Names the transaction that is left out, by its commit LSN.
pub(crate) fn set_skip(session: &mut Session, id: SubscriptionId, lsn: Option<Lsn>) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET skip_lsn = $2::pg_catalog.pg_lsn \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), lsn.map(|lsn| lsn.to_string()).as_deref()],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// In which form the publisher sends values in a run, and when large transactions are applied; with
/// the reasons.
pub(crate) struct Manner<'a> {
    pub(crate) format: &'a str,
    pub(crate) format_reason: &'a str,
    pub(crate) streaming: &'a str,
    pub(crate) streaming_reason: &'a str,
}

/// Records which publisher, and which of its timelines, the progress belongs to, and the manner of
/// the run.
pub(crate) fn set_run(
    session: &mut Session,
    id: SubscriptionId,
    publisher: &SystemIdentity,
    manner: &Manner<'_>,
) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription \
             SET system_identifier = $2, timeline = $3::pg_catalog.int8, \
               format = $4, format_reason = $5, streaming = $6, streaming_reason = $7 \
             WHERE id = $1::pg_catalog.int4 \
               AND (system_identifier, timeline, format, format_reason, streaming, \
                 streaming_reason) \
               IS DISTINCT FROM ($2, $3::pg_catalog.int8, $4, $5, $6, $7)",
            &[
                Some(&id.0.to_string()),
                Some(&publisher.system_identifier),
                Some(&publisher.timeline.to_string()),
                Some(manner.format),
                Some(manner.format_reason),
                Some(manner.streaming),
                Some(manner.streaming_reason),
            ],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records the publications that the subscription reads.
pub(crate) fn set_publications(
    session: &mut Session,
    id: SubscriptionId,
    publications: &[String],
) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET publications = $2::pg_catalog.text[] \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), Some(&name_array(publications))],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// A table of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelationState {
    pub(crate) schema: String,
    pub(crate) name: String,
    pub(crate) state: TableSyncState,
    /// `None` until the table is copied.
    pub(crate) sync_lsn: Option<SyncLsn>,
    /// So far, if it is copied in parts.
    pub(crate) copied_rows: Option<i64>,
    /// Bytes on the publisher, if they were looked at.
    pub(crate) publisher_bytes: Option<i64>,
    pub(crate) parts: i32,
    pub(crate) parts_done: i32,
    /// Whether it is behind the others: its changes are put off while it is copied beside the stream.
    pub(crate) joins: bool,
    /// Rows of an earlier copy are to be removed before the next.
    pub(crate) empty_first: bool,
    /// If a user has decided to have it emptied: only rows that this snapshot of the subscriber sees.
    pub(crate) empty_snapshot: Option<String>,
    /// When `resync` asked for another copy; `None` once that is taken up.
    pub(crate) requested: Option<String>,
    /// Why it is blocked, and since when.
    pub(crate) reason: Option<String>,
    pub(crate) blocked_since: Option<String>,
    /// It may lack changes of transactions that commit from there on.
    pub(crate) stale_from: Option<Lsn>,
    pub(crate) stale_reason: Option<String>,
}

impl RelationState {
    /// Whether it is blocked because it could not be copied: that may change by itself. One that lacks
    /// changes needs a decision.
    pub(crate) fn is_tried_again(&self) -> bool {
        self.state == TableSyncState::Blocked && self.stale_from.is_none()
    }

    /// Whether an earlier copy has left rows in the table, which are of no use.
    pub(crate) fn is_partly_copied(&self) -> bool {
        self.sync_lsn.is_none() && (self.empty_first || self.parts_done > 0)
    }
}

/// The tables of a subscription.
pub(crate) fn relations(session: &mut Session, id: SubscriptionId) -> Result<Vec<RelationState>> {
    let rows = session
        .query(
            "SELECT schema_name, table_name, sync_lsn, copied_rows, publisher_bytes, parts, \
               parts_done, catch_up IS NOT NULL, state, empty_first, requested, reason, \
               blocked_since, stale_lsn, stale_reason, empty_snapshot FROM pgapace.relation \
             WHERE subscription = $1::pg_catalog.int4 ORDER BY schema_name, table_name",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| reading(&e))?;
    rows.iter()
        .map(|row| {
            Ok(RelationState {
                schema: field(&row, 0)?,
                name: field(&row, 1)?,
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
            })
        })
        .collect()
}

fn state_of(row: &wire::Row<'_>, column: usize) -> Result<TableSyncState> {
    let name: String = field(row, column)?;
    TableSyncState::from_name(&name)
        .ok_or_else(|| Failure::internal(format!("unknown state {name:?} of a table")))
}

/// The same by schema and name.
pub(crate) fn relations_by_name(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<FxHashMap<(String, String), RelationState>> {
    let states = relations(session, id)?;
    Ok(states.into_iter().map(|s| ((s.schema.clone(), s.name.clone()), s)).collect())
}

/// When the copy of a table was committed, in microseconds since 1970; `None` if it never was, or
/// the server has forgotten. Only where the subscriber has commit timestamps.
pub(crate) fn copied_at(
    session: &mut Session,
    id: SubscriptionId,
    schema: &str,
    name: &str,
) -> Result<Option<i64>> {
    let rows = session
        .query(
            "SELECT (EXTRACT(epoch FROM pg_catalog.pg_xact_commit_timestamp( \
               copied_xid::pg_catalog.xid)) * 1000000)::pg_catalog.int8 \
             FROM pgapace.relation WHERE subscription = $1::pg_catalog.int4 \
               AND schema_name = $2 AND table_name = $3 AND copied_xid IS NOT NULL",
            &[Some(&id.0.to_string()), Some(schema), Some(name)],
        )
        .map_err(|e| reading(&e))?;
    let Some(row) = rows.first() else { return Ok(None) };
    row.get(0).map(|_| field(&row, 0)).transpose()
}

/// In which form the publisher sent values in the last run, and why.
pub(crate) fn format(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<(Option<String>, Option<String>)> {
    let rows = session
        .query(
            "SELECT format, format_reason FROM pgapace.subscription \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| reading(&e))?;
    let text = |column| rows.first().and_then(|row| row.get(column).map(str::to_owned));
    Ok((text(0), text(1)))
}

/// When large transactions were applied in the last run, and why then.
pub(crate) fn streaming_mode(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<(Option<String>, Option<String>)> {
    let rows = session
        .query(
            "SELECT streaming, streaming_reason FROM pgapace.subscription \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| reading(&e))?;
    let text = |column| rows.first().and_then(|row| row.get(column).map(str::to_owned));
    Ok((text(0), text(1)))
}

/// How the changes of a table are applied, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelationMode {
    pub(crate) schema: String,
    pub(crate) name: String,
    pub(crate) mode: String,
    /// `None` if it is the usual one.
    pub(crate) reason: Option<String>,
}

/// Records how changes of tables are applied, which is known when the first one comes.
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
            let (schema, name, mode) = (literal(&m.schema), literal(&m.name), literal(&m.mode));
            format!("({schema}, {name}, {mode}, {reason})")
        })
        .collect();
    session
        .simple(&format!(
            "UPDATE pgapace.relation r SET apply_mode = v.mode, apply_reason = v.reason \
             FROM (VALUES {}) AS v (schema_name, table_name, mode, reason) \
             WHERE r.subscription = {} AND r.schema_name = v.schema_name \
               AND r.table_name = v.table_name \
               AND (r.apply_mode, r.apply_reason) IS DISTINCT FROM (v.mode, v.reason)",
            rows.join(", "),
            id.0
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// How changes of tables were applied last; tables without a change so far are left out.
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
                schema: field(&row, 0)?,
                name: field(&row, 1)?,
                mode: field(&row, 2)?,
                reason: row.get(3).map(str::to_owned),
            })
        })
        .collect()
}

/// Forgets one table of a subscription.
pub(crate) fn forget_relation(
    session: &mut Session,
    id: SubscriptionId,
    schema: &str,
    name: &str,
) -> Result<()> {
    session
        .execute(
            "WITH forgotten AS (DELETE FROM pgapace.relation \
               WHERE subscription = $1::pg_catalog.int4 AND schema_name = $2 AND table_name = $3 \
               RETURNING catch_up) \
             DELETE FROM pgapace.progress WHERE subscription IN (SELECT catch_up FROM forgotten)",
            &[Some(&id.0.to_string()), Some(schema), Some(name)],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Forgets a subscription: everything that schema `pgapace` knows of it.
pub(crate) fn forget(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .simple(&format!(
            "BEGIN; \
             DELETE FROM pgapace.progress WHERE subscription = {id} OR subscription IN \
               (SELECT catch_up FROM pgapace.relation WHERE subscription = {id}); \
             DELETE FROM pgapace.relation WHERE subscription = {id}; \
             DELETE FROM pgapace.stat_subscription WHERE subscription = {id}; \
             DELETE FROM pgapace.conflict WHERE subscription = {id}; \
             DELETE FROM pgapace.prepared WHERE subscription = {id}; \
             DELETE FROM pgapace.subscription WHERE id = {id}; \
             COMMIT",
            id = id.0
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// The text form of an array of names.
pub(crate) fn name_array(names: &[String]) -> String {
    let quoted: Vec<_> = names
        .iter()
        .map(|name| format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"")))
        .collect();
    format!("{{{}}}", quoted.join(","))
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the state in schema pgapace")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing the state in schema pgapace")
}
