//! `pgapace release`: hands a subscription to a native one, which continues where pgapace stopped.
//!
//! The origin of the native subscription is advanced to pgapace's progress, which counts as native does:
//! the end LSN of the last applied transaction. The native worker asks for this position, so nothing
//! before it is sent.
//!
//! One transaction gives the slot back, forgets pgapace's state and enables the native subscription.
//! Advancing the origin is not transactional, but no session uses the origin before that transaction has
//! committed. So an interruption at any point leaves pgapace as the owner, and the next attempt advances
//! the origin to the position that counts then.

use std::time::Duration;

use pgoutput::Lsn;
use wire::{Session, quote_ident, quote_literal};

use super::adopt::{alter, run, same_sql};
use super::plan::{Awaited, awaited, lock};
use super::requirements::{Releasing, failure, release_problems};
use super::subscription::{
    NativeSubscription, Wanted, application_name, conninfo, find, named_by, origin_name, tables,
    workers,
};
use crate::error::{Class, Failure, Result};
use crate::publisher::history;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::is_standby;
use crate::publisher::slot::{self, Slot};
use crate::publisher::watch;
use crate::subscriber::origin;
use crate::subscriber::state::adoption::{self, Adoption, Step};
use crate::subscriber::state::{
    self, Phase, RelationState, Subscription, ownership, prepared, progress, published,
};
use crate::switchover;

/// The subscription to release, and the native subscription that continues it.
pub(crate) struct ReleaseRequest<'a> {
    pub(crate) name: &'a str,
    /// The name of a native subscription that is to be created.
    pub(crate) native: Option<&'a str>,
    /// How the subscriber reaches the publisher, if a native subscription is to be created.
    pub(crate) connection: Option<&'a str>,
    pub(crate) patience: Duration,
    pub(crate) dry_run: bool,
}

impl ReleaseRequest<'_> {
    /// The name of a native subscription that is created.
    fn created_name(&self) -> &str {
        self.native.unwrap_or(self.name)
    }
}

/// The result of a release, or of its dry run.
#[derive(Debug, Clone)]
pub(crate) struct Released {
    pub(crate) native: String,
    pub(crate) created: bool,
    pub(crate) enabled: bool,
    /// The native subscription gets `origin = none`, with which pgapace ran.
    pub(crate) sets_origin: bool,
    pub(crate) slot: String,
    pub(crate) applied: Lsn,
    pub(crate) tables: usize,
    /// Arguments for a native subscription that is created, which those of the existing one replace.
    pub(crate) unused: Vec<&'static str>,
}

/// The subscription to hand back, owned by this session. It fails as stopped when `stopping`.
pub(crate) fn own(
    control: &mut Session,
    name: &str,
    stopping: &dyn Fn() -> bool,
) -> Result<(Subscription, Option<Adoption>)> {
    let row = state::find_existing(control, name)?;
    let owning = ownership::become_owner(
        control,
        row.id,
        Duration::ZERO,
        &ownership::Former::default(),
        None,
        stopping,
    )?;
    let row = ownership::fence(control, row.id, &owning, stopping)?
        .ok_or_else(|| Failure::new(Class::Config, "the subscription was dropped meanwhile"))?;
    switchover::refuse_ended(control, &row)?;
    switchover::check_finished(control, &row)?;
    let adopted = adoption::all(control)?.into_iter().find(|one| one.name == row.name);
    Ok((row, adopted))
}

/// Hands the subscription back. `handed` is set before the COMMIT whose answer may be lost.
pub(super) fn attempt(
    control: &mut Session,
    source: &mut Session,
    (row, adopted): (&Subscription, Option<Adoption>),
    request: &ReleaseRequest<'_>,
    (stopping, handed): (&dyn Fn() -> bool, &mut Option<Released>),
) -> Result<Released> {
    if row.phase != Phase::Streaming {
        return Err(Failure::new(
            Class::Config,
            "the tables of the subscription are not copied yet",
        )
        .hint("Run pgapace run --until current first."));
    }
    let facts = gather_facts((control, source), row, adopted.as_ref(), request, stopping)?;
    let ReleaseFacts { releasing, existing, slot, sets_origin, tables } = facts;
    let what = format!("subscription {} cannot be handed back", row.name);
    if let Some(failure) = failure(&what, &release_problems(&releasing)) {
        return Err(failure);
    }
    let mut released = Released {
        native: existing
            .as_ref()
            .map_or_else(|| request.created_name().to_owned(), |(one, _)| one.native_name.clone()),
        created: existing.is_none(),
        enabled: existing.as_ref().is_none_or(|(one, _)| one.enabled),
        sets_origin,
        slot: row.slot_name.clone(),
        applied: releasing.applied,
        tables,
        unused: unused(control, request, existing.as_ref().map(|(_, native)| native))?,
    };
    check_connection(request, existing.is_none())?;
    if existing.is_none() {
        check_name(control, &released.native)?;
    }
    if request.dry_run {
        return Ok(released);
    }
    let native = match existing {
        Some((existing, _)) => existing,
        None => {
            let options = (&slot, releasing.origin_none);
            create(control, row, adopted.as_ref(), options, &released.native, request)?
        }
    };
    released.native.clone_from(&native.native_name);
    origin::drop_all(control, row.id)?;
    *handed = Some(released.clone());
    release_slot(control, row, (&native, sets_origin), releasing.applied)?;
    Ok(released)
}

/// The facts by which a release is refused or made.
struct ReleaseFacts {
    releasing: Releasing,
    /// The native subscription that was adopted.
    existing: Option<(Adoption, NativeSubscription)>,
    slot: Slot,
    /// See [`Released::sets_origin`].
    sets_origin: bool,
    /// How many published tables pgapace has.
    tables: usize,
}

/// Reads everything that decides whether the subscription can be released. Waits until its slot is free.
fn gather_facts(
    (control, source): (&mut Session, &mut Session),
    row: &Subscription,
    adopted: Option<&Adoption>,
    request: &ReleaseRequest<'_>,
    stopping: &dyn Fn() -> bool,
) -> Result<ReleaseFacts> {
    let state = slot::wait_until_free(source, &row.slot_name, request.patience, stopping)?;
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    let (name, recovers) = (&row.slot_name, is_standby(source)?);
    let confirmed = slot::check_resume(name, state.as_ref(), recovers, applied.through)?;
    history::check(source, row, &progress::followed(control, row.id, &applied)?)?;
    let state = state.ok_or_else(|| Failure::internal("the slot is gone"))?;
    let existing = match adopted {
        Some(adopted) => existing(control, adopted)?,
        None => None,
    };
    // Before the look: what is recorded must not be newer.
    let recorded = published::read(control, row.id)?;
    let contents = publication::read_contents(source, &row.publications)?;
    let relations = state::relations(control, row.id)?;
    let native_tables = match &existing {
        Some((existing, _)) => tables(control, existing.native)?,
        None => Vec::new(),
    };
    let is_known = |table: &&PublishedTable| relations.iter().any(|one| one.name == table.name);
    let is_native = |table: &&PublishedTable| {
        native_tables.iter().any(|one| one.name == table.name && one.state == 'r')
    };
    let names = |tables: Vec<&PublishedTable>| -> Vec<String> {
        tables.into_iter().map(|table| table.name.to_string()).collect()
    };
    let known: Vec<_> = contents.tables.iter().filter(is_known).collect();
    let unknown = contents.tables.iter().filter(|table| !is_known(table));
    let filtered = row.filters_origins();
    let origin_none =
        filtered || existing.is_none() && adopted.is_some_and(|adopted| adopted.origin_none);
    let sets_origin =
        filtered && existing.as_ref().is_some_and(|(_, native)| native.origin != "none");
    let native = existing.as_ref().map(|(_, native)| native);
    let releasing = Releasing {
        origin_none,
        awaited_as: awaited_as(control, source, row, native, request)?,
        publisher_major: source.server_version().major(),
        subscriber_major: control.server_version().major(),
        unready: unready(&relations, &contents.tables),
        unknown: match &existing {
            // Those that it does not have, it copies once it is told to (REFRESH PUBLICATION). The others it
            // would apply from pgapace's position on, without the changes before.
            Some(_) => names(unknown.filter(is_native).collect()),
            None => names(unknown.collect()),
        },
        foreign: names(known.iter().copied().filter(|table| !is_native(table)).collect()),
        native: existing.as_ref().map(|(one, _)| one.native_name.clone()),
        publications: row.publications.clone(),
        native_publications: existing.as_ref().map(|(_, native)| native.publications.clone()),
        published_otherwise: !published::unjudged(&recorded, &contents).is_empty(),
        slot: row.slot_name.clone(),
        skip: row.pending_skip(Some(applied.through)),
        prepared: prepared::read(control, row.id)?.len(),
        two_phase: state.two_phase,
        native_two_phase: native.map(|native| native.two_phase),
        applied: applied.through,
        highest: applied.highest(),
        synced: relations
            .iter()
            .filter_map(|table| table.sync_lsn)
            .map(|lsn| lsn.0)
            .max()
            .unwrap_or(Lsn::INVALID),
        confirmed,
    };
    let tables = known.len();
    Ok(ReleaseFacts { releasing, existing, slot: state, sets_origin, tables })
}

/// The name of pgapace's sessions, for which commits of the publisher wait, and that of the native worker, for which
/// they do not.
fn awaited_as(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    native: Option<&NativeSubscription>,
    request: &ReleaseRequest<'_>,
) -> Result<Option<(String, String)>> {
    let ours = watch::standby_name(source, &row.name);
    let theirs = match native {
        Some(native) => application_name(control, native)?,
        None => named_by(request.connection, request.created_name()),
    };
    let lost = awaited(source, &ours, &theirs)? == Awaited::ByFormerName;
    Ok(lost.then_some((ours, theirs)))
}

/// The published tables whose copy is not complete, was requested again, or may lack changes.
fn unready(relations: &[RelationState], published: &[PublishedTable]) -> Vec<String> {
    let is_published = |table: &&RelationState| published.iter().any(|one| one.name == table.name);
    relations
        .iter()
        .filter(is_published)
        .filter(|table| !table.is_complete())
        .map(|table| table.name.to_string())
        .collect()
}

/// A native subscription that is created needs a connection string, which must be valid.
fn check_connection(request: &ReleaseRequest<'_>, creates: bool) -> Result<()> {
    if creates && request.connection.is_none() {
        return Err(Failure::new(Class::Config, "--connection is not given").hint(
            "There is no native subscription, so one is created: pass the connection string with which \
             the subscriber's server reaches the publisher.",
        ));
    }
    // A server's error would repeat the text, which may have a password.
    if request.connection.is_some_and(|text| crate::config::conninfo(text).is_err()) {
        return Err(Failure::new(Class::Config, "--connection is no valid connection string"));
    }
    Ok(())
}

/// Refuses the name of a native subscription that is to be created, if there is one.
fn check_name(control: &mut Session, name: &str) -> Result<()> {
    if find(control, Wanted::Name(name))?.is_none() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Config,
        format!("the subscriber has a native subscription {} already", quote_ident(name)),
    )
    .hint("Choose another name with --subscription."))
}

/// The arguments for a native subscription that is created, if one exists that was adopted, or created by a release that
/// was interrupted, and that differs from them or cannot be compared.
fn unused(
    control: &mut Session,
    request: &ReleaseRequest<'_>,
    existing: Option<&NativeSubscription>,
) -> Result<Vec<&'static str>> {
    let mut unused = Vec::new();
    let Some(native) = existing else { return Ok(unused) };
    if request.native.is_some_and(|name| name != native.name) {
        unused.push("--subscription");
    }
    if request.connection.is_some()
        && conninfo(control, native.oid)?.as_deref() != request.connection
    {
        unused.push("--connection");
    }
    Ok(unused)
}

/// The native subscription that was adopted, if it still exists, with its present name.
pub(super) fn existing(
    control: &mut Session,
    adopted: &Adoption,
) -> Result<Option<(Adoption, NativeSubscription)>> {
    let Some(native) = find(control, Wanted::Oid(adopted.native))? else { return Ok(None) };
    lock(control, &native)?;
    let name = quote_ident(&native.name);
    if native.enabled || native.slot.is_some() || !workers(control, native.oid)?.is_empty() {
        return Err(Failure::new(
            Class::Busy,
            format!("native subscription {name} was enabled, or got a slot, since it was adopted"),
        )
        .hint(format!(
            "If it has not run since: ALTER SUBSCRIPTION {name} DISABLE; ALTER SUBSCRIPTION {name} SET \
             (slot_name = NONE);"
        )));
    }
    if !native.may_alter || (!native.password_required && !native.superuser) {
        return Err(Failure::new(
            Class::Subscriber,
            format!("the role may not alter native subscription {name}"),
        )
        .hint(format!(
            "Run pgapace release as {} or as a superuser.",
            quote_ident(&native.owner)
        )));
    }
    Ok(Some((Adoption { native_name: native.name.clone(), ..adopted.clone() }, native)))
}

/// Creates a native subscription that is as one that was adopted: disabled, and without a slot.
fn create(
    control: &mut Session,
    row: &Subscription,
    adopted: Option<&Adoption>,
    (slot, origin_none): (&Slot, bool),
    name: &str,
    request: &ReleaseRequest<'_>,
) -> Result<Adoption> {
    let connection = request.connection.unwrap_or_default();
    let major = control.server_version().major();
    let mut options = vec![
        "enabled = false",
        "create_slot = false",
        "copy_data = false",
        "slot_name = NONE",
        "streaming = on",
    ];
    if slot.two_phase && major >= 15 {
        options.push("two_phase = true");
    }
    if origin_none {
        options.push("origin = none");
    }
    let publications: Vec<_> = row.publications.iter().map(|name| quote_ident(name)).collect();
    let new = Adoption {
        name: row.name.clone(),
        native: 0,
        native_name: name.to_owned(),
        slot: row.slot_name.clone(),
        origin_none,
        enabled: true,
        step: Step::Adopted,
    };
    let forget = adopted.map_or(String::new(), |old| adoption::forget_sql(old.native) + "; ");
    let sql = format!(
        "BEGIN; {forget}CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {} WITH ({}); {}; COMMIT",
        quote_ident(name),
        quote_literal(connection),
        publications.join(", "),
        options.join(", "),
        adoption::created_sql(&new)
    );
    run(control, &sql, "creating the native subscription")?;
    let created = find(control, Wanted::Name(name))?
        .ok_or_else(|| Failure::internal("the native subscription is gone"))?;
    lock(control, &created)?;
    tracing::info!(event = "native_created", native = name, "native subscription was created");
    Ok(Adoption { native: created.oid, ..new })
}

/// Gives the slot and the position to the native subscription, and forgets pgapace's.
fn release_slot(
    control: &mut Session,
    row: &Subscription,
    (native, sets_origin): (&Adoption, bool),
    applied: Lsn,
) -> Result<()> {
    let origin = if sets_origin { ", origin = none" } else { "" };
    // It fails while a worker has the origin.
    let advance = format!(
        "SELECT pg_catalog.pg_replication_origin_advance({}, '{applied}'); ",
        quote_literal(&origin_name(native.native))
    );
    let sql = hand_back_sql(row, native, origin, &advance);
    run(control, &sql, "handing the subscription back")?;
    tracing::info!(
        event = "native_released",
        native = native.native_name,
        subscription = row.name,
        slot = row.slot_name,
        lsn = %applied,
        "subscription was handed to a native one"
    );
    Ok(())
}

/// SQL of one transaction that gives the slot to the native subscription, and forgets pgapace's. The first statement
/// locks the native one.
pub(super) fn hand_back_sql(
    row: &Subscription,
    native: &Adoption,
    options: &str,
    advance: &str,
) -> String {
    let alter = alter(&native.native_name);
    let enable = if native.enabled { format!("{alter} ENABLE; ") } else { String::new() };
    format!(
        "BEGIN; {alter} SET (slot_name = {}{options}); {}; {advance}{}; {enable}COMMIT",
        quote_literal(&row.slot_name),
        same_sql(native),
        state::forget_sql(row.id),
    )
}
