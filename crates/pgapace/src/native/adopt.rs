//! `pgapace adopt`: takes a native subscription over, and undoes that if anything fails.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::{Session, quote_ident, quote_literal};

use super::abort::undone;
use super::interrupted::took_effect;
use super::options;
use super::plan::{
    GRACE, LOOK_EVERY, Plan, cannot, lock, make_plan, plan, slot_name, sound, usable_slot,
};
use super::requirements::{failure, problems, sync_lsn};
use super::subscription::{
    AdoptionFacts, NativeSubscription, NativeTable, Wanted, durable_position, read_facts, workers,
};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublicationContents};
use crate::publisher::session::identify;
use crate::publisher::slot;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::adoption::{self, Adoption, Step};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::{
    self, SubscriptionId, name_array, progress, schema, table_name_arrays,
};

/// This completes "stopped during …".
pub(crate) const DOING: &str = "the adoption";

/// The native subscription to adopt, and the name that pgapace gives it.
pub(crate) struct AdoptRequest<'a> {
    pub(crate) native: &'a str,
    /// The name of pgapace's subscription.
    pub(crate) name: &'a str,
    /// The slot, for a subscription that has none.
    pub(crate) slot: Option<&'a str>,
    /// How long to wait until the slot is free.
    pub(crate) patience: Duration,
}

/// Checks everything, and changes nothing. The names of an older version of schema pgapace are not looked at: only an
/// adoption upgrades it.
pub(crate) fn dry_run(
    control: &mut Session,
    source: &mut Session,
    facts: &AdoptionFacts,
    request: &AdoptRequest<'_>,
    shutdown: &Shutdown,
) -> Result<Plan> {
    if schema::version(control)? == schema::newest() {
        let begun = adoption::all(control)?;
        let major = source.server_version().major();
        check_names(control, request, (&facts.subscription, major), &begun)?;
    }
    plan(control, source, facts, request, shutdown)
}

/// Adopts the native subscription, or goes on where an earlier attempt was interrupted. After an error or a request to
/// stop, the native subscription runs again as before, or the error says that it does not, or the session on the
/// subscriber is broken.
///
/// `handed` is the plan of an attempt whose last COMMIT may have taken effect although its answer was lost.
pub(super) fn attempt(
    control: &mut Session,
    source: &mut Session,
    request: &AdoptRequest<'_>,
    shutdown: &Shutdown,
    handed: &mut Option<Plan>,
) -> Result<Plan> {
    let done = took_effect(handed, || {
        let native = handed.as_ref().map(|plan| plan.native.oid);
        Ok(adoption::all(control)?.iter().any(|one| {
            Some(one.native) == native && one.name == request.name && one.step == Step::Adopted
        }))
    })?;
    if let Some(plan) = done {
        return Ok(plan);
    }
    let sessions = [&*control, &*source].map(Session::cancel_handle);
    let (adoption, unproven) = interruptible(shutdown, &sessions, DOING, || {
        let begun = begin(control, source, request, shutdown)?;
        shutdown.check(DOING)?;
        disable(control, &begun.0)?;
        Ok(begun)
    })?;
    let done = interruptible(shutdown, &sessions, DOING, || {
        let adopted = (&adoption, unproven);
        end_and_take_slot((control, source), adopted, request.patience, shutdown, handed)
    });
    // The undoing is not interrupted.
    done.map_err(
        |failure| {
            if control.is_broken() { failure } else { undone(control, failure, &adoption) }
        },
    )
}

/// Checks everything, and creates schema pgapace. Returns what is to be recorded, and why the publisher is not proven.
fn begin(
    control: &mut Session,
    source: &mut Session,
    request: &AdoptRequest<'_>,
    shutdown: &Shutdown,
) -> Result<(Adoption, Option<String>)> {
    let facts = sound(control, request)?;
    let native = facts.subscription.clone();
    lock(control, &native)?;
    let mut begun = Vec::new();
    let version = schema::version(control)?;
    if version > 0 {
        schema::upgrade(control, version)?;
        begun = adoption::all(control)?;
        let major = source.server_version().major();
        check_names(control, request, (&native, major), &begun)?;
    }
    let unproven = plan(control, source, &facts, request, shutdown)?.unproven;
    // An adoption that is refused creates no schema.
    if version == 0 {
        schema::upgrade(control, version)?;
    }
    let adoption = Adoption {
        name: request.name.to_owned(),
        native: native.oid,
        native_name: native.name.clone(),
        slot: slot_name(&native, request)?,
        origin_none: options::origin_none(&native, source.server_version().major()),
        // An earlier attempt may have disabled it.
        enabled: native.enabled || begun.iter().any(|one| one.native == native.oid && one.enabled),
        step: Step::Disabled,
    };
    Ok((adoption, unproven))
}

/// Waits for the end of the native subscription, and takes its slot.
fn end_and_take_slot(
    (control, source): (&mut Session, &mut Session),
    (adoption, unproven): (&Adoption, Option<String>),
    patience: Duration,
    shutdown: &Shutdown,
    handed: &mut Option<Plan>,
) -> Result<Plan> {
    let begun = Instant::now();
    loop {
        wait_for_end(control, source, adoption, patience, shutdown)?;
        let taken =
            take_slot(control, source, (adoption, unproven.clone()), (shutdown, &mut *handed))?;
        match taken {
            Some(plan) => return Ok(plan),
            None if begun.elapsed() < patience => {}
            None => return Err(worker_started()),
        }
    }
}

/// Refuses names that others use. An adoption that was begun goes on under its name.
fn check_names(
    control: &mut Session,
    request: &AdoptRequest<'_>,
    (native, publisher_major): (&NativeSubscription, u32),
    begun: &[Adoption],
) -> Result<()> {
    let config = |message: String| Failure::new(Class::Config, message);
    if let Some(own) = begun.iter().find(|one| one.native == native.oid) {
        if own.step == Step::Adopted {
            let arguments = options::run_arguments(native, publisher_major, (&own.name, &own.slot));
            return Err(config(format!(
                "native subscription {} is adopted already, as subscription {}",
                quote_ident(&native.name),
                own.name
            ))
            .hint(format!(
                "pgapace run --publisher … --subscriber … {arguments} continues; pgapace release hands it back."
            )));
        }
        if own.name != request.name {
            return Err(config(format!(
                "the adoption of native subscription {} was begun as subscription {}",
                quote_ident(&native.name),
                own.name
            ))
            .hint(format!("Continue it with --name {}, or pass --abort.", own.name)));
        }
    }
    let other = begun.iter().any(|one| one.native != native.oid && one.name == request.name);
    if other || state::find(control, request.name)?.is_some() {
        return Err(config(format!("the subscriber has a subscription {} already", request.name))
            .hint("Choose another name with --name."));
    }
    Ok(())
}

/// Disables the native subscription, and records that.
fn disable(control: &mut Session, adoption: &Adoption) -> Result<()> {
    let sql = format!(
        "BEGIN; {}; {} DISABLE; {}; COMMIT",
        adoption::begin_sql(adoption),
        alter(&adoption.native_name),
        same_sql(adoption),
    );
    run(control, &sql, "disabling the native subscription")?;
    tracing::info!(
        event = "native_disabled",
        native = adoption.native_name,
        "native subscription was disabled"
    );
    Ok(())
}

pub(super) fn alter(name: &str) -> String {
    format!("ALTER SUBSCRIPTION {}", quote_ident(name))
}

/// SQL that fails if the name no longer is that of the subscription: it was renamed meanwhile.
pub(super) fn same_sql(adoption: &Adoption) -> String {
    format!(
        "SELECT 1 / (SELECT pg_catalog.count(*)::int4 FROM pg_catalog.pg_subscription \
           WHERE oid = {} AND subname = {})",
        adoption.native,
        quote_literal(&adoption.native_name)
    )
}

/// Runs a transaction that leaves the session out of a transaction whatever happens.
pub(super) fn run(control: &mut Session, sql: &str, doing: &str) -> Result<()> {
    let result = control.simple(sql);
    if let Err(error) = result {
        let renamed = error.sqlstate() == Some("22012");
        let failure = if renamed {
            let message =
                "another session has renamed or adopted the native subscription meanwhile";
            Failure::new(Class::Config, message)
                .hint("Run pgapace adopt again, with its present name.")
        } else {
            Failure::subscriber(&error, doing)
        };
        if !control.is_broken() {
            control.simple("ROLLBACK").map_err(|e| Failure::subscriber(&e, doing))?;
        }
        return Err(failure);
    }
    Ok(())
}

/// Waits until no worker of the native subscription is left, and its slot is free.
fn wait_for_end(
    control: &mut Session,
    source: &mut Session,
    adoption: &Adoption,
    patience: Duration,
    shutdown: &Shutdown,
) -> Result<()> {
    let begun = Instant::now();
    loop {
        let left = workers(control, adoption.native)?;
        if left.is_empty() {
            break;
        }
        if shutdown.requested() {
            return Err(Failure::new(
                Class::Stopped,
                "stopped while the native subscription ended",
            ));
        }
        if begun.elapsed() >= patience {
            let pids = left.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
            return Err(Failure::new(
                Class::Busy,
                format!("workers of the native subscription do not end: process {pids}"),
            )
            .hint(format!(
                "On the subscriber, see what they wait for: SELECT * FROM pg_stat_activity WHERE pid IN \
                 ({pids})."
            )));
        }
        if begun.elapsed() >= GRACE {
            let sql =
                left.iter().map(|pid| format!("SELECT pg_catalog.pg_terminate_backend({pid})"));
            // Without the privilege, pgapace waits for them.
            if let Err(error) = control.simple(&sql.collect::<Vec<_>>().join("; ")) {
                tracing::debug!(%error, "cannot terminate workers");
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    slot::wait_until_free(source, &adoption.slot, patience, &|| shutdown.requested())?;
    Ok(())
}

fn worker_started() -> Failure {
    Failure::new(Class::Busy, "workers of the native subscription start again and again")
        .hint("Run pgapace adopt again, while nobody else alters the native subscription.")
}

/// Takes the slot from the native subscription and records its position, in one transaction. `None` if a worker has
/// started meanwhile: the launcher may have read the subscription before it was disabled. Such a worker ends by itself.
fn take_slot(
    control: &mut Session,
    source: &mut Session,
    adopted: (&Adoption, Option<String>),
    ending: (&Shutdown, &mut Option<Plan>),
) -> Result<Option<Plan>> {
    let done = try_take_slot(control, source, adopted, ending);
    if !matches!(done, Ok(Some(_))) && !control.is_broken() {
        let doing = "rolling back the adoption";
        control.simple("ROLLBACK").map_err(|e| Failure::subscriber(&e, doing))?;
    }
    done
}

fn try_take_slot(
    control: &mut Session,
    source: &mut Session,
    (adoption, unproven): (&Adoption, Option<String>),
    (shutdown, handed): (&Shutdown, &mut Option<Plan>),
) -> Result<Option<Plan>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "taking the native subscription over");
    // It locks the subscription: from here on no other session can alter it.
    let begin = format!("BEGIN; {} SET (slot_name = NONE)", alter(&adoption.native_name));
    control.simple(&begin).map_err(|e| failed(&e))?;
    let facts = read_facts(control, Wanted::Oid(adoption.native))?.ok_or_else(|| {
        Failure::new(Class::Config, "the native subscription was dropped meanwhile")
            .hint("On the subscriber, see which there are: SELECT subname FROM pg_subscription.")
    })?;
    if facts.subscription.name != adoption.native_name || facts.subscription.enabled {
        return Err(Failure::new(
            Class::Config,
            "the native subscription was renamed or enabled meanwhile",
        )
        .hint(
            "On the subscriber: SELECT subname, subenabled FROM pg_subscription. Then run pgapace adopt \
             again, with its present name.",
        ));
    }
    if let Some(failure) = failure(&cannot(&adoption.native_name), &problems(&facts)) {
        return Err(failure);
    }
    if !facts.workers.is_empty() {
        return Ok(None);
    }
    let origin = durable_position(control, adoption.native)?;
    let state = usable_slot(source, &adoption.native_name, &adoption.slot)?;
    if let Some(pid) = state.active_pid {
        let message =
            format!("slot \"{}\" is in use by walsender {pid} of the publisher", adoption.slot);
        return Err(Failure::new(Class::Busy, message).hint(format!(
            "On the publisher, see whose it is: SELECT * FROM pg_stat_replication WHERE pid = {pid}. When \
             it has ended, run pgapace adopt again."
        )));
    }
    let contents = publication::read_contents(source, &facts.subscription.publications)?;
    let slot = (adoption.name.as_str(), adoption.slot.clone(), &state);
    let plan = make_plan(source, (&facts, unproven), slot, &contents, origin)?;
    let identity = identify(source)?;
    let created = state::create(
        control,
        &state::NewSubscription {
            name: &adoption.name,
            slot_name: &adoption.slot,
            publications: &facts.subscription.publications,
            owns_slot: true,
            copy_data: true,
            schema_copy: None,
            rebasing: false,
        },
    )?;
    let created = created.ok_or_else(|| {
        let message = format!("the subscriber has a subscription {} already", adoption.name);
        Failure::new(Class::Busy, message)
    })?;
    let streaming = format!(
        "{}; UPDATE pgapace.subscription SET phase = 'streaming', system_identifier = {}, \
           timeline = {}, published_lsn = '{}', publisher_database = {} WHERE id = {}; {}",
        progress::start_sql(created.id, plan.start, created.epoch),
        quote_literal(&identity.system_identifier),
        identity.timeline,
        contents.lsn,
        contents.database,
        created.id.0,
        adoption::end_sql(adoption.native, plan.start)
    );
    control.simple(&streaming).map_err(|e| failed(&e))?;
    record_tables(control, created.id, &facts.tables, &contents, plan.start)?;
    shutdown.check(DOING)?;
    *handed = Some(plan.clone());
    // A synchronous commit: it makes all commits of the native worker durable too, on synchronous
    // standbys as well.
    control.simple("COMMIT").map_err(|e| failed(&e))?;
    tracing::info!(
        event = "native_adopted",
        native = adoption.native_name,
        subscription = adoption.name,
        slot = adoption.slot,
        lsn = %plan.start,
        tables = plan.tables,
        "native subscription was adopted"
    );
    Ok(Some(plan))
}

/// Records the tables that both sides know, as ready, each with its sync LSN.
fn record_tables(
    control: &mut Session,
    id: SubscriptionId,
    tables: &[NativeTable],
    contents: &PublicationContents,
    start: Lsn,
) -> Result<()> {
    let native: FxHashMap<_, _> = tables.iter().map(|table| (&table.name, table.lsn)).collect();
    let (mut names, mut lsns, mut by) = (Vec::new(), Vec::new(), Vec::new());
    for table in &contents.tables {
        let Some(recorded) = native.get(&table.name) else { continue };
        names.push(&table.name);
        lsns.push(sync_lsn(start, *recorded).to_string());
        by.push(table.published_by.to_string());
    }
    let sql = format!(
        "INSERT INTO pgapace.relation \
           (subscription, schema_name, table_name, state, sync_lsn, copied_xid, published_by) \
         SELECT {}, c.schema_name, c.table_name, 'ready', c.sync_lsn, \
           pg_catalog.pg_current_xact_id(), c.published_by \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.pg_lsn[]), \
                         pg_catalog.unnest($4::pg_catalog.text[])) \
           AS c (schema_name, table_name, sync_lsn, published_by)",
        OwnedEpoch { id, epoch: 0 }.sql()
    );
    let [schemas, names] = table_name_arrays(names);
    let arguments = [schemas, names, name_array(&lsns), name_array(&by)];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    control
        .execute(&sql, &arguments)
        .map_err(|e| Failure::subscriber(&e, "recording the tables of the native subscription"))?;
    Ok(())
}
