//! What changes in the row of a subscription after it was created.

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use wire::Session;

use super::ownership::OwnedEpoch;
use super::repertoire::Repertoire;
use super::{
    SchemaCopy, Subscription, SubscriptionId, name_array, progress, reading, statistics,
    table_name_arrays, writing,
};
use crate::error::Result;
use crate::publisher::session::SystemIdentity;
use crate::publisher::watch::TimelineSwitch;

/// Records the start position of the slot that is about to be created.
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

/// Records in one transaction that the slot exists. After that, pgapace never drops it to create
/// another. An error of a start before that is over. `sent_as` identifies the changes that the publisher is asked to
/// send. With `takes_slot` the slot, which
/// was not created by this run, belongs to the subscription.
pub(crate) fn set_copying(
    session: &mut Session,
    owner: OwnedEpoch,
    start: Lsn,
    (publisher, database): (&SystemIdentity, Option<u32>),
    sent_as: &str,
    takes_slot: bool,
) -> Result<()> {
    let database = database.map_or("NULL".to_owned(), |oid| oid.to_string());
    session
        .simple(&format!(
            "BEGIN; {}; UPDATE pgapace.subscription \
             SET phase = 'copying', system_identifier = {}, timeline = {}, \
               publisher_database = {database}, sent_as = {}, \
               owns_slot = owns_slot OR {takes_slot} WHERE id = {}; {}; COMMIT",
            progress::start_sql(owner.id, start, owner.epoch),
            wire::quote_literal(&publisher.system_identifier),
            publisher.timeline,
            wire::quote_literal(sent_as),
            owner.id.0,
            statistics::forget_error_sql(owner.id)
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records the part of the schema that must still be created.
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

/// Records that all tables are copied. This synchronous commit also makes the copies durable, whose
/// commits were asynchronous. A way back (`takes_slot`) has copied none, and may copy those that are added from here on.
pub(crate) fn set_streaming(
    session: &mut Session,
    id: SubscriptionId,
    takes_slot: bool,
) -> Result<()> {
    session
        .simple(&format!(
            "UPDATE pgapace.subscription SET phase = 'streaming', rebasing = false, \
               copy_data = copy_data OR {takes_slot} WHERE id = {}",
            id.0
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Forgets how far a subscription has come: the next run creates a slot, compares the tables that hold
/// rows with those of this publisher, and makes them equal. No transaction may be prepared on the subscriber: the
/// new slot does not send the end of one that is resolved already. Tables that are `blocked` stay so. The new slot is to
/// have two_phase as the old one.
///
/// `drop_slot` is called before the commit, when no lock is left to be waited for: the slot is not dropped where another
/// session keeps that from being recorded.
pub(crate) fn set_rebasing(
    session: &mut Session,
    id: SubscriptionId,
    publisher: &SystemIdentity,
    (blocked, had_two_phase): (&[TableName], bool),
    drop_slot: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let [schemas, names] = table_name_arrays(blocked).map(|names| wire::quote_literal(&names));
    session
        .simple(&format!(
            "BEGIN; \
             DELETE FROM pgapace.progress WHERE subscription = {id} OR subscription IN \
               (SELECT catch_up FROM pgapace.relation WHERE subscription = {id}); \
             DELETE FROM pgapace.relation WHERE subscription = {id} \
               AND (schema_name, table_name) NOT IN (SELECT b.schema_name, b.table_name \
                 FROM ROWS FROM (pg_catalog.unnest({schemas}::pg_catalog.text[]), \
                                 pg_catalog.unnest({names}::pg_catalog.text[])) \
                   AS b (schema_name, table_name)); \
             UPDATE pgapace.relation SET catch_up = NULL, requested = NULL WHERE subscription = {id}; \
             DELETE FROM pgapace.prepared WHERE subscription = {id}; \
             UPDATE pgapace.stat_subscription SET error_exit_code = NULL WHERE subscription = {id}; \
             UPDATE pgapace.subscription \
             SET phase = 'creating', rebasing = true, owns_slot = true, slot_made_at = NULL, \
               system_identifier = {}, timeline = {}, sent_as = NULL, published_lsn = NULL, \
               skip_lsn = NULL, two_phase = two_phase IS TRUE OR {had_two_phase} \
             WHERE id = {id}",
            wire::quote_literal(&publisher.system_identifier),
            publisher.timeline,
            id = id.0
        ))
        .map_err(|e| writing(&e))?;
    drop_slot()?;
    session.simple("COMMIT").map_err(|e| writing(&e))?;
    Ok(())
}

/// Disables a subscription with a reason, or enables it (`None`).
pub(crate) fn set_disabled(
    session: &mut Session,
    id: SubscriptionId,
    reason: Option<&str>,
) -> Result<()> {
    let repertoire = Repertoire::of(session);
    let reason = reason.map(|reason| repertoire.storable(reason));
    session
        .execute(
            "UPDATE pgapace.subscription SET disabled_reason = $2::pg_catalog.text, \
               disabled_at = CASE WHEN $2::pg_catalog.text IS NOT NULL THEN pg_catalog.now() END \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), reason.as_deref()],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Sets the transaction to skip, by its commit LSN.
pub(crate) fn set_skip(session: &mut Session, id: SubscriptionId, lsn: Option<Lsn>) -> Result<()> {
    session
        .execute(
            "UPDATE pgapace.subscription SET skip_lsn = $2::pg_catalog.pg_lsn, skip_found = false \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string()), lsn.map(|lsn| lsn.to_string()).as_deref()],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// A run has found the transaction to skip. It is not applied, however often it is sent again.
pub(crate) fn skip_found(session: &mut Session, id: SubscriptionId, lsn: Lsn) -> Result<()> {
    update_skip(session, id, lsn, "skip_found = true")
}

/// Nothing is to be skipped any more, unless another request has come.
pub(crate) fn clear_skip(session: &mut Session, id: SubscriptionId, lsn: Lsn) -> Result<()> {
    update_skip(session, id, lsn, "skip_lsn = NULL, skip_found = false")
}

/// `lsn`: of the request that is changed.
fn update_skip(session: &mut Session, id: SubscriptionId, lsn: Lsn, set: &str) -> Result<()> {
    session
        .execute(
            &format!(
                "UPDATE pgapace.subscription SET {set} WHERE id = $1::pg_catalog.int4 \
                   AND skip_lsn = $2::pg_catalog.pg_lsn"
            ),
            &[Some(&id.0.to_string()), Some(&lsn.to_string())],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// The format in which the publisher sends values in a run, and when large transactions are
/// applied, each with its reason; and whether prepared transactions are sent at their PREPARE.
pub(crate) struct Manner<'a> {
    pub(crate) format: &'a str,
    pub(crate) format_reason: &'a str,
    pub(crate) streaming: &'a str,
    pub(crate) streaming_reason: &'a str,
    pub(crate) two_phase: bool,
}

/// Records which publisher and timeline the progress belongs to, and how the run applies changes. `row`
/// is the row that the owner of the subscription has read: if it has all of that, nothing is written.
pub(crate) fn set_run(
    session: &mut Session,
    row: &Subscription,
    publisher: &SystemIdentity,
    manner: &Manner<'_>,
) -> Result<()> {
    let Manner { format, format_reason, streaming, streaming_reason, two_phase } = *manner;
    // A reason may name a type of the publisher.
    let repertoire = Repertoire::of(session);
    let [format, format_reason, streaming, streaming_reason] =
        [format, format_reason, streaming, streaming_reason].map(|text| repertoire.storable(text));
    let same = [&format, &format_reason, &streaming, &streaming_reason]
        .iter()
        .zip(&row.manner)
        .all(|(now, recorded)| recorded.as_deref() == Some(now));
    if same
        && row.two_phase == Some(two_phase)
        && row.system_identifier.as_deref() == Some(&publisher.system_identifier)
        && row.timeline == Some(publisher.timeline)
    {
        return Ok(());
    }
    let id = row.id;
    session
        .execute(
            "UPDATE pgapace.subscription \
             SET system_identifier = $2, timeline = $3::pg_catalog.int8, \
               format = $4, format_reason = $5, streaming = $6, streaming_reason = $7, \
               two_phase = $8::pg_catalog.bool \
             WHERE id = $1::pg_catalog.int4 \
               AND (system_identifier, timeline, format, format_reason, streaming, \
                 streaming_reason, two_phase) \
               IS DISTINCT FROM ($2, $3::pg_catalog.int8, $4, $5, $6, $7, $8::pg_catalog.bool)",
            &[
                Some(&id.0.to_string()),
                Some(&publisher.system_identifier),
                Some(&publisher.timeline.to_string()),
                Some(&format),
                Some(&format_reason),
                Some(&streaming),
                Some(&streaming_reason),
                Some(if two_phase { "t" } else { "f" }),
            ],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Records the timeline of the publisher from which tables are copied. Another owner of the subscription records its own.
pub(crate) fn set_timeline(session: &mut Session, owner: OwnedEpoch, timeline: u32) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.subscription SET timeline = {timeline} WHERE id = {} AND epoch = {}",
        owner.id.0, owner.epoch
    );
    session.execute(&sql, &[]).map_err(|e| writing(&e))?;
    Ok(())
}

/// Records that the publisher of the running stream is on another timeline. The stream has nothing of the old
/// timeline behind the switch, because one server sends all of it. A copied table may have: another host of the
/// connection string may have sent its rows. Then nothing is recorded, and the next run compares. Returns whether
/// it was recorded.
pub(crate) fn follow_timeline(
    session: &mut Session,
    owner: OwnedEpoch,
    switch: &TimelineSwitch,
) -> Result<bool> {
    let to_be_copied = [TableSyncState::Init, TableSyncState::DataSync, TableSyncState::CatchUp];
    let to_be_copied = to_be_copied.map(|state| wire::quote_literal(state.name())).join(", ");
    let sql = format!(
        "UPDATE pgapace.subscription s SET timeline = {to} \
         WHERE s.id = {id} AND s.epoch = {epoch} AND s.timeline = {from} \
           AND NOT EXISTS (SELECT FROM pgapace.relation r WHERE r.subscription = s.id \
             AND (r.state IN ({to_be_copied}) OR r.sync_lsn > '{at}'))",
        to = switch.to,
        id = owner.id.0,
        epoch = owner.epoch,
        from = switch.from,
        at = switch.at,
    );
    Ok(session.execute(&sql, &[]).map_err(|e| writing(&e))? == 1)
}

/// Records the publications of the subscription.
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

/// How the last run received values and applied large transactions, each with the reason.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastRun {
    /// The format in which the publisher sent values.
    pub(crate) format: Option<String>,
    pub(crate) format_reason: Option<String>,
    /// When large transactions were applied.
    pub(crate) streaming: Option<String>,
    pub(crate) streaming_reason: Option<String>,
}

pub(crate) fn last_run(session: &mut Session, id: SubscriptionId) -> Result<LastRun> {
    let rows = session
        .query(
            "SELECT format, format_reason, streaming, streaming_reason FROM pgapace.subscription \
             WHERE id = $1::pg_catalog.int4",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| reading(&e))?;
    let text = |column| rows.first().and_then(|row| row.get(column).map(str::to_owned));
    Ok(LastRun {
        format: text(0),
        format_reason: text(1),
        streaming: text(2),
        streaming_reason: text(3),
    })
}
