//! The plan of an adoption: the native subscription, its slot, and the reasons against it.

use std::time::Duration;

use pgoutput::Lsn;
use wire::{Session, quote_ident};

use super::adopt::{AdoptRequest, alter};
use super::proof::unproven;
use super::requirements::{failure, problems, recorded, start};
use super::subscription::{
    AdoptionFacts, NativeSubscription, NativeTable, Wanted, durable_position, read_facts,
};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublicationContents};
use crate::publisher::session::is_standby;
use crate::publisher::slot::{self, Slot};
use crate::publisher::wal_end::WalEnd;
use crate::publisher::watch;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::{exposed, schema};

/// First key of the advisory lock of an adoption ("pgad"); the second is the OID of the subscription.
const LOCK: i32 = 0x7067_6164;
/// How long workers may take to end by themselves. One that applies a large transaction takes longer; it
/// is terminated, and its transaction is rolled back.
pub(super) const GRACE: Duration = Duration::from_secs(5);
/// Between two looks.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The facts of an adoption that is planned, or complete.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) native: NativeSubscription,
    pub(crate) role: String,
    pub(crate) slot: String,
    pub(crate) confirmed: Lsn,
    pub(crate) origin: Option<Lsn>,
    pub(crate) start: Lsn,
    /// See [`recorded`].
    pub(crate) recorded: Option<Lsn>,
    /// Bytes of WAL between the start and the end.
    pub(crate) behind: u64,
    pub(crate) tables: usize,
    /// Published tables that the native subscription does not have.
    pub(crate) unknown: Vec<String>,
    /// Tables of the native subscription that are not published.
    pub(crate) unpublished: Vec<String>,
    pub(crate) publisher_major: u32,
    /// Commits of the publisher may wait for the subscription (`synchronous_standby_names`).
    pub(crate) synchronous: bool,
    /// Why the publisher is not proven to be the one from which the native subscription reads.
    pub(crate) unproven: Option<String>,
}

/// Takes the lock of the adoption, so that two adopters exclude each other.
pub(super) fn lock(control: &mut Session, native: &NativeSubscription) -> Result<()> {
    let sql =
        format!("SELECT pg_catalog.pg_try_advisory_lock({LOCK}, {})", native.oid.cast_signed());
    let rows =
        control.query(&sql, &[]).map_err(|e| Failure::subscriber(&e, "locking the adoption"))?;
    if rows.first().is_some_and(|row| row.get(0) == Some("t")) {
        return Ok(());
    }
    Err(Failure::new(
        Class::Busy,
        format!(
            "another process adopts or releases native subscription {}",
            quote_ident(&native.name)
        ),
    )
    .hint(
        "Wait until it has ended: SELECT pid, client_addr FROM pg_stat_activity WHERE \
         application_name LIKE 'pgapace %'.",
    ))
}

/// The native subscription, free of problems.
pub(crate) fn sound(control: &mut Session, request: &AdoptRequest<'_>) -> Result<AdoptionFacts> {
    let wanted = Wanted::Name(request.native);
    let Some(facts) = read_facts(control, wanted)? else {
        return Err(super::subscription::missing(control, request.native)?);
    };
    match failure(&cannot(request.native), &problems(&facts)) {
        Some(failure) => Err(failure),
        None => Ok(facts),
    }
}

pub(super) fn cannot(native: &str) -> String {
    format!("native subscription {} cannot be adopted", quote_ident(native))
}

/// Looks at both sides and changes nothing.
pub(super) fn plan(
    control: &mut Session,
    source: &mut Session,
    facts: &AdoptionFacts,
    request: &AdoptRequest<'_>,
    shutdown: &Shutdown,
) -> Result<Plan> {
    let slot = slot_name(&facts.subscription, request)?;
    let state = usable_slot(source, &facts.subscription.name, &slot)?;
    if schema::version(control)? == 0 {
        exposed::warn(control, source, request.name)?;
    }
    let unproven = unproven(control, source, facts, (request.name, &slot), shutdown)?;
    let contents = publication::read_contents(source, &facts.subscription.publications)?;
    let origin = durable_position(control, facts.subscription.oid)?;
    make_plan(source, (facts, unproven), (request.name, slot, &state), &contents, origin)
}

/// Whether commits of the publisher may wait for a subscription that gets another owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    No,
    Yes,
    /// Only under the name of the former owner: without its session they would hang for good.
    ByFormerName,
}

/// `former` and `next` are the names of the walsenders.
pub(super) fn awaited(source: &mut Session, former: &str, next: &str) -> Result<Awaited> {
    if !watch::look_once(source, former)?.are_synchronous() {
        return Ok(Awaited::No);
    }
    Ok(match watch::look_once(source, next)?.are_synchronous() {
        true => Awaited::Yes,
        false => Awaited::ByFormerName,
    })
}

/// Whether commits of the publisher may wait for the subscription. Refuses a name of pgapace's subscription for
/// which they do not, if they do for the native one.
fn is_synchronous(source: &mut Session, facts: &AdoptionFacts, name: &str) -> Result<bool> {
    let native = &facts.application_name;
    // The connection string may name the sessions otherwise.
    let name = watch::standby_name(source, name);
    match awaited(source, native, &name)? {
        Awaited::No => return Ok(false),
        Awaited::Yes => return Ok(true),
        Awaited::ByFormerName => {}
    }
    Err(Failure::new(
        Class::Config,
        format!(
            "synchronous_standby_names of the publisher names \"{native}\", and not \"{name}\": once the \
             native subscription is disabled, commits would wait for it"
        ),
    )
    .hint(format!(
        "Adopt it with --name {native}; or add \"{name}\" to synchronous_standby_names of the publisher in \
         place of \"{native}\"."
    )))
}

pub(super) fn make_plan(
    source: &mut Session,
    (facts, unproven): (&AdoptionFacts, Option<String>),
    (name, slot, state): (&str, String, &Slot),
    contents: &PublicationContents,
    origin: Option<Lsn>,
) -> Result<Plan> {
    let synchronous = is_synchronous(source, facts, name)?;
    let confirmed = state.confirmed_flush.ok_or_else(|| slot::without_position(&slot))?;
    let start = start(origin, confirmed);
    let end = WalEnd::read(source)?.inserted;
    let farthest = facts.tables.iter().filter_map(|table| table.lsn).fold(start, Lsn::max);
    if farthest > end {
        return Err(Failure::new(
            Class::History,
            format!(
                "the native subscription has applied or copied up to {farthest}, but the publisher's WAL ends at \
                 {end}"
            ),
        )
        .hint("Check --publisher: it is another server, or was restored to an earlier state."));
    }
    let native = |table: &&publication::PublishedTable| {
        facts.tables.iter().any(|one| one.name == table.name)
    };
    let published = |table: &&NativeTable| contents.tables.iter().any(|one| one.name == table.name);
    Ok(Plan {
        native: facts.subscription.clone(),
        role: facts.role.clone(),
        slot,
        confirmed,
        origin,
        start,
        recorded: recorded(origin, &facts.tables, confirmed),
        behind: end.as_u64() - start.as_u64(),
        tables: contents.tables.iter().filter(native).count(),
        unknown: contents
            .tables
            .iter()
            .filter(|table| !native(table))
            .map(|table| table.name.to_string())
            .collect(),
        unpublished: facts
            .tables
            .iter()
            .filter(|table| !published(table))
            .map(|table| table.name.to_string())
            .collect(),
        publisher_major: source.server_version().major(),
        synchronous,
        unproven,
    })
}

pub(super) fn slot_name(native: &NativeSubscription, request: &AdoptRequest<'_>) -> Result<String> {
    match (&native.slot, request.slot) {
        (Some(slot), None) => Ok(slot.clone()),
        (Some(slot), Some(given)) if slot == given => Ok(slot.clone()),
        (Some(slot), Some(given)) => Err(Failure::new(
            Class::Config,
            format!("the native subscription uses slot \"{slot}\", not \"{given}\""),
        )
        .hint("Leave --slot out.")),
        (None, Some(given)) => Ok(given.to_owned()),
        (None, None) => Err(Failure::new(
            Class::Config,
            "the native subscription has no slot (slot_name = NONE)",
        )
        .hint(
            "Name the slot that it used with --slot; see pg_replication_slots on the publisher.",
        )),
    }
}

/// The slot, if pgapace can stream from it.
pub(super) fn usable_slot(source: &mut Session, native: &str, name: &str) -> Result<Slot> {
    let found = slot::find(source, name)?;
    // A position behind everything: only a slot that cannot be used is refused.
    let checked = slot::check_resume(name, found.as_ref(), is_standby(source)?, Lsn(u64::MAX));
    checked.map_err(|failure| match slot::is_lost(found.as_ref()) && !failure.is_transient() {
        true => failure.hint(to_replace(native, name, found.is_some())),
        false => failure,
    })?;
    found.ok_or_else(|| Failure::internal("the slot is gone"))
}

/// How pgapace takes the place of a native subscription whose slot is lost.
fn to_replace(native: &str, slot: &str, slot_exists: bool) -> String {
    let alter = alter(native);
    let drop = match slot_exists {
        true => format!(
            " On the publisher: SELECT pg_drop_replication_slot({});",
            wire::quote_literal(slot)
        ),
        false => String::new(),
    };
    format!(
        "Changes that the slot had not sent are lost, for the native subscription too. On the subscriber: {alter} \
         DISABLE; {alter} SET (slot_name = NONE); DROP SUBSCRIPTION {};{drop} then pgapace run --if-not-empty rebase \
         compares all tables with the publisher's, makes them equal, and goes on.",
        quote_ident(native)
    )
}
