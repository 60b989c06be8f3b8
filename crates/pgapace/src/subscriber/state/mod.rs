//! The state of a subscription in schema `pgapace` of the subscriber: its row, its tables, its
//! progress.

pub(crate) mod adoption;
pub(crate) mod advisory_lock;
pub(crate) mod conflicts;
pub(crate) mod error_detail;
pub(crate) mod events;
pub(crate) mod exposed;
pub(crate) mod figures;
pub(crate) mod heartbeat;
pub(crate) mod membership;
mod migrations;
pub(crate) mod ownership;
pub(crate) mod prepared;
pub(crate) mod privileges;
pub(crate) mod progress;
pub(crate) mod published;
mod relations;
pub(crate) mod repertoire;
pub(crate) mod schema;
pub(crate) mod statistics;
pub(crate) mod verification;
pub(crate) mod workers_in_use;

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::publisher::session::SystemIdentity;
use crate::publisher::watch::TimelineSwitch;
use crate::subscriber::catalogue::{boolean, field, parse_name_array};
use crate::subscriber::state::ownership::OwnedEpoch;
pub(crate) use relations::{
    RelationMode, RelationState, RelationsByName, copied_at, forget, forget_relation, forget_sql,
    forget_superseded_sql, forget_verifications, modes, relations, relations_and,
    relations_and_published, relations_by_name, set_modes,
};
use repertoire::Repertoire;

/// The phases in which a subscription is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The slot may or may not exist yet.
    Creating,
    /// The slot exists; tables are being copied.
    Copying,
    /// All tables are copied; changes are applied from the recorded progress on.
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

/// The part of the publisher's schema that pgapace must still create on the subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SchemaCopy {
    /// The whole schema.
    Before,
    /// The indexes, constraints and other objects that are created after the table copy.
    After,
    /// Like `After`, but some of these objects may already exist.
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
    /// The slot's start position, recorded before the slot is created.
    pub(crate) slot_made_at: Option<Lsn>,
    pub(crate) copy_data: bool,
    pub(crate) epoch: i64,
    pub(crate) system_identifier: Option<String>,
    pub(crate) timeline: Option<u32>,
    /// Why the subscription does not run until the user enables it.
    pub(crate) disabled: Option<String>,
    /// Commit LSN of a transaction that is skipped.
    pub(crate) skip: Option<Lsn>,
    /// Whether a run has found it.
    pub(crate) skip_found: bool,
    /// The part of the schema to create; `None` if it exists, or if pgapace does not create it.
    pub(crate) schema_copy: Option<SchemaCopy>,
    /// The settings that decided which transactions the publisher sent in the last run.
    pub(crate) sent_as: Option<String>,
    /// The texts of the last run's [`Manner`], in the order of its fields.
    pub(crate) manner: [Option<String>; 4],
    /// Tables that hold rows are compared with the publisher's, until all are ready.
    pub(crate) rebasing: bool,
    /// Whether the last run received prepared transactions at their PREPARE, or the slot before a rebase did. `None` if
    /// nothing has streamed since an earlier version of pgapace.
    pub(crate) two_phase: Option<bool>,
}

impl Subscription {
    /// The subscription under the epoch with which it was read.
    pub(crate) fn owned_epoch(&self) -> OwnedEpoch {
        OwnedEpoch { id: self.id, epoch: self.epoch }
    }

    /// Whether a first start has recorded the subscription, and no start has recorded its slot. A rebase knows the
    /// publisher that it follows.
    pub(crate) fn is_first_start(&self) -> bool {
        self.phase == Phase::Creating && self.system_identifier.is_none()
    }

    /// The transaction that is still to be skipped, if everything up to `applied` is applied. A later position means that
    /// it was skipped already; the next start forgets it.
    pub(crate) fn pending_skip(&self, applied: Option<Lsn>) -> Option<Lsn> {
        self.skip.filter(|skip| applied.is_none_or(|applied| *skip >= applied))
    }

    /// Whether it has ever streamed.
    pub(crate) fn has_streamed(&self) -> bool {
        self.phase == Phase::Streaming || self.manner[0].is_some()
    }

    /// Refuses a subscription that was disabled because of an error.
    pub(crate) fn check_enabled(&self, session: &mut Session) -> Result<()> {
        if self.disabled.is_none() {
            return Ok(());
        }
        let reason = error_detail::read(session, self.id)?
            .of(error_detail::DISABLED, self.disabled.clone())
            .unwrap_or_default();
        Err(Failure::new(
            Class::Disabled,
            format!("subscription {} was disabled because of an error", self.name),
        )
        .detail(reason)
        .hint(
            "When its cause is gone, or the transaction is to be left out (pgapace skip): pgapace \
             enable.",
        ))
    }
}

const COLUMNS: &str = "id, name, slot_name, publications, phase, owns_slot, copy_data, epoch, \
                       system_identifier, timeline, disabled_reason, skip_lsn, schema_copy, \
                       slot_made_at, sent_as, format, format_reason, streaming, streaming_reason, rebasing, \
                       two_phase, skip_found";

/// Returns the subscription with this name, if the subscriber has one.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Subscription>> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.subscription WHERE name = $1");
    let rows = session.query(&sql, &[Some(name)]).map_err(|e| reading(&e))?;
    rows.first().map(|row| subscription(&row)).transpose()
}

/// The same, and the rows of another query, in one round trip.
pub(crate) fn find_and(
    session: &mut Session,
    name: &str,
    other: &str,
) -> Result<(Option<Subscription>, wire::Rows)> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.subscription WHERE name = $1");
    let [rows, others] =
        session.query_each([(&sql, &[Some(name)]), (other, &[])]).map_err(|e| reading(&e))?;
    Ok((rows.first().map(|row| subscription(&row)).transpose()?, others))
}

/// Finds a subscription on a subscriber whose schema `pgapace` may be missing or older. An older
/// schema is upgraded first.
pub(crate) fn find_in_any(session: &mut Session, name: &str) -> Result<Option<Subscription>> {
    match schema::version(session)? {
        0 => return Ok(None),
        version => schema::upgrade(session, version)?,
    }
    find(session, name)
}

/// The same for a subscription that must exist.
pub(crate) fn find_existing(session: &mut Session, name: &str) -> Result<Subscription> {
    find_in_any(session, name)?.ok_or_else(|| missing(name))
}

/// The failure of a verb that needs a subscription of this name.
pub(crate) fn missing(name: &str) -> Failure {
    Failure::new(Class::Config, format!("the subscriber has no subscription {name:?}"))
        .hint("pgapace status lists the subscriptions of a subscriber.")
}

/// Returns all subscriptions of the subscriber.
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
        sent_as: row.get(14).map(str::to_owned),
        manner: [15, 16, 17, 18].map(|column| row.get(column).map(str::to_owned)),
        rebasing: boolean(row, 19)?,
        two_phase: row.get(20).map(|_| boolean(row, 20)).transpose()?,
        skip_found: boolean(row, 21)?,
    })
}

/// The settings of a new subscription.
pub(crate) struct NewSubscription<'a> {
    pub(crate) name: &'a str,
    pub(crate) slot_name: &'a str,
    pub(crate) publications: &'a [String],
    pub(crate) owns_slot: bool,
    pub(crate) copy_data: bool,
    pub(crate) schema_copy: Option<SchemaCopy>,
    /// See [`Subscription::rebasing`].
    pub(crate) rebasing: bool,
}

/// Records a new subscription before anything is created for it on the publisher. Returns `None` if another
/// process has recorded one with this name in the meantime.
pub(crate) fn create(
    session: &mut Session,
    new: &NewSubscription<'_>,
) -> Result<Option<Subscription>> {
    let created = session
        .query(
            &format!(
                "INSERT INTO pgapace.subscription \
                   (name, slot_name, publications, phase, owns_slot, copy_data, schema_copy, rebasing) \
                 VALUES ($1, $2, $3::pg_catalog.text[], 'creating', $4::pg_catalog.bool, \
                   $5::pg_catalog.bool, $6, $7::pg_catalog.bool) \
                 ON CONFLICT (name) DO NOTHING RETURNING {COLUMNS}"
            ),
            &[
                Some(new.name),
                Some(new.slot_name),
                Some(&name_array(new.publications)),
                Some(if new.owns_slot { "t" } else { "f" }),
                Some(if new.copy_data { "t" } else { "f" }),
                new.schema_copy.map(SchemaCopy::name),
                Some(if new.rebasing { "t" } else { "f" }),
            ],
        )
        .map_err(|e| writing(&e))?;
    created.first().map(|row| subscription(&row)).transpose()
}

/// The subscription that another process has recorded in the meantime.
pub(crate) fn find_of_other(session: &mut Session, name: &str) -> Result<Subscription> {
    find(session, name)?.ok_or_else(|| Failure::internal("the new subscription no longer exists"))
}

/// Gives a subscription whose slot does not exist yet the settings of another first start, and forgets which tables
/// the earlier one was to empty. Returns `None` if this process is not its owner any more.
pub(crate) fn begin_anew(
    session: &mut Session,
    owner: OwnedEpoch,
    new: &NewSubscription<'_>,
) -> Result<Option<Subscription>> {
    session
        .simple(&format!(
            "DELETE FROM pgapace.relation WHERE subscription = {} AND empty_snapshot IS NOT NULL",
            owner.sql()
        ))
        .map_err(|e| writing(&e))?;
    let updated = session
        .query(
            &format!(
                "UPDATE pgapace.subscription SET owns_slot = $1::pg_catalog.bool, \
                   copy_data = $2::pg_catalog.bool, schema_copy = $3, rebasing = $4::pg_catalog.bool \
                 WHERE id = {} AND phase = 'creating' RETURNING {COLUMNS}",
                owner.sql()
            ),
            &[
                Some(if new.owns_slot { "t" } else { "f" }),
                Some(if new.copy_data { "t" } else { "f" }),
                new.schema_copy.map(SchemaCopy::name),
                Some(if new.rebasing { "t" } else { "f" }),
            ],
        )
        .map_err(|e| writing(&e))?;
    updated.first().map(|row| subscription(&row)).transpose()
}

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
/// commits were asynchronous.
pub(crate) fn set_streaming(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .simple(&format!(
            "UPDATE pgapace.subscription SET phase = 'streaming', rebasing = false WHERE id = {}",
            id.0
        ))
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// Forgets how far a subscription has come: the next run creates a slot, compares the tables that hold
/// rows with those of this publisher, and makes them equal. No transaction may be prepared on the subscriber: the
/// new slot does not send the end of one that is resolved already. Tables that are `blocked` stay so. The new slot is to
/// have two_phase as the old one.
pub(crate) fn set_rebasing(
    session: &mut Session,
    id: SubscriptionId,
    publisher: &SystemIdentity,
    blocked: &[TableName],
    had_two_phase: bool,
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
             WHERE id = {id}; \
             COMMIT",
            wire::quote_literal(&publisher.system_identifier),
            publisher.timeline,
            id = id.0
        ))
        .map_err(|e| writing(&e))?;
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

/// The text form of an array of names.
pub(crate) fn name_array<S: AsRef<str>>(names: &[S]) -> String {
    let quoted: Vec<_> = names
        .iter()
        .map(|name| format!("\"{}\"", name.as_ref().replace('\\', "\\\\").replace('"', "\\\"")))
        .collect();
    format!("{{{}}}", quoted.join(","))
}

/// The schemas and the names of tables, as two arrays in the same order.
pub(crate) fn table_name_arrays<'t>(
    tables: impl IntoIterator<Item = &'t TableName>,
) -> [String; 2] {
    let (schemas, names): (Vec<_>, Vec<_>) =
        tables.into_iter().map(|table| (&table.schema, &table.name)).unzip();
    [name_array(&schemas), name_array(&names)]
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the state in schema pgapace")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing the state in schema pgapace")
}
