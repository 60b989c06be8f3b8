//! The row of a subscription: created once, read by every verb.

use pgoutput::Lsn;
use wire::Session;

use super::ownership::OwnedEpoch;
use super::{error_detail, name_array, reading, schema, writing};
use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, parse_name_array};

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
    /// The texts of the last run's [`Manner`](super::Manner), in the order of its fields.
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

    /// Whether its last run asked the publisher for changes without an origin only.
    pub(crate) fn filters_origins(&self) -> bool {
        self.sent_as.as_deref().is_some_and(|sent| sent.ends_with("origin none"))
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

/// What [`from_row`] reads.
pub(super) const COLUMNS: &str = "id, name, slot_name, publications, phase, owns_slot, copy_data, epoch, \
                       system_identifier, timeline, disabled_reason, skip_lsn, schema_copy, \
                       slot_made_at, sent_as, format, format_reason, streaming, streaming_reason, rebasing, \
                       two_phase, skip_found";

/// Returns the subscription with this name, if the subscriber has one.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Subscription>> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.subscription WHERE name = $1");
    let rows = session.query(&sql, &[Some(name)]).map_err(|e| reading(&e))?;
    rows.first().map(|row| from_row(&row)).transpose()
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
    Ok((rows.first().map(|row| from_row(&row)).transpose()?, others))
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
    rows.iter().map(|row| from_row(&row)).collect()
}

pub(super) fn from_row(row: &wire::Row<'_>) -> Result<Subscription> {
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
    created.first().map(|row| from_row(&row)).transpose()
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
    updated.first().map(|row| from_row(&row)).transpose()
}
