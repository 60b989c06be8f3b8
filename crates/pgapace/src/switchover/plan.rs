//! Checks that are made before writes are stopped.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use engine::table_name::TableName;
use wire::{Session, quote_ident, quote_literal};

use super::applying_roles::ApplyingRoles;
use super::carried::left_out;
use super::lost::ReadOnly;
use super::procedure::{Request, Sides};
use super::publisher::{
    database_setting, missing_on_publisher, missing_ownership, roles_that_write,
    sessions_of_superusers, staying_prepared,
};
use super::record::{self, ended_generation};
use super::roles;
use super::servers;
use super::verify_at_end;
use super::way_back::WayBack;
use crate::check;
use crate::check::opposite;
use crate::check::partitions::detached;
use crate::check::report::{Fix, Severity};
use crate::error::{Failure, Result};
use crate::lag::{self, Absence};
use crate::publisher::publication::{self, PublicationContents, PublishedTable};
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::sequences::{self, Chosen, SetOptions};
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::refuse_unlike_bytes;
use crate::subscriber::state::published::{self, PreviousReading};
use crate::subscriber::state::verification::ALL_ROWS;
use crate::subscriber::state::{self, Phase, exposed, ownership, statistics};
use crate::two_phase;
use crate::verify::prepare::Problem;
use crate::verify::requirements::not_ready;

/// How long the process that applies may own nothing between two of its runs.
const ABSENCE: Duration = Duration::from_secs(5);
/// How long a two-phase client takes at most between PREPARE TRANSACTION and COMMIT PREPARED.
const RESOLVED_WITHIN: Duration = Duration::from_secs(2);
/// The steps that change nothing. Completes "stopped during …".
pub(crate) const CHECKS: &str = "the checks of both sides";
/// How many prepared transactions are named.
const SAID: usize = 5;

/// The results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// The reasons why the subscription cannot be switched over, each with its next step.
    pub(crate) problems: Vec<String>,
    /// Sequences that are not set, each with the reason, and what to know before.
    pub(crate) notes: Vec<String>,
}

/// Everything that can be checked before writes are stopped. It fails if the publisher is not the one that the
/// subscription follows, and as stopped after a signal.
pub(crate) fn plan(sides: &mut Sides<'_>, request: &Request<'_>) -> Result<Findings> {
    let (stop, sessions) = (sides.stop, sides.cancel_handles());
    interruptible(stop, &sessions, CHECKS, || find(sides, request))
}

fn find(sides: &mut Sides<'_>, request: &Request<'_>) -> Result<Findings> {
    servers::check_publisher(sides)?;
    let (mut problems, mut notes) = (Vec::new(), Vec::new());
    if sides.row.phase != Phase::Streaming {
        problems.push("the tables are not copied yet: run pgapace run".to_owned());
    }
    privileges(sides, request, &mut problems)?;
    let attributes = sides.config.publisher.get("target_session_attrs");
    if request.stop_writes.is_none() && attributes == Some("read-write") {
        problems.push(
            "the publisher's connection string has target_session_attrs=read-write, which refuses every \
             session once writes are stopped: use primary, or pass --stop-writes"
                .to_owned(),
        );
    }
    if request.stop_writes.is_some() != request.resume_writes.is_some() {
        problems.push("--stop-writes and --resume-writes belong together".to_owned());
    }
    if !is_applied(sides)? {
        problems.push(not_applied(sides)?);
    }
    prepared_transactions(sides, &mut problems)?;
    native_subscriptions(sides.source, &mut problems)?;
    if request.stop_writes.is_none() {
        problems.extend(roles_that_write(sides.source)?);
        problems.extend(sessions_of_superusers(sides.source)?);
    }
    if !request.with_others {
        servers::other_subscriptions(sides, &mut problems)?;
    }
    servers::unfinished_switchovers(sides, &mut problems)?;
    let found = problems.len();
    let tables = tables_ready(sides, &mut problems)?;
    // A table that is not ready is named already.
    if let Some(compared) = &request.verify
        && problems.len() == found
    {
        problems.extend(verify_at_end::problems(sides, compared)?);
    }
    let applying = ApplyingRoles::read(sides)?;
    if !request.ignore_roles {
        let reader = applying.on_publisher.as_ref().map(|role| role.name.as_str());
        problems.extend(roles::missing(sides.source, sides.control, &tables, reader)?);
    }
    if let Some(age) = request.verified_within {
        verified(sides, &tables, age, &mut problems)?;
    }
    let mut carried: HashSet<_> = tables.iter().map(|table| table.name.clone()).collect();
    if let Some(back) = &request.back {
        let way_back = (back, request.returns);
        carried.extend(check_way_back(sides, way_back, &applying, &tables, &mut problems)?);
        notes.extend(applying.notes());
        notes.extend(less_on_the_way_back(sides, request)?);
    }
    if !request.returns {
        opposite_direction(sides, &carried, &mut problems)?;
        let found = ReadOnly::find(sides.control, sides.source, sides.row)?;
        notes.extend(found.map(|found| format!("warning: {}", found.line())));
    }
    let found = sequences::read(sides.source, &sides.row.publications, &tables, Chosen::All)?;
    let options = SetOptions { dry_run: true, ..SetOptions::default() };
    let (unset, unimportant) = sequences::set(sides.control, &found, &options)?.reasons();
    problems.extend(unset);
    notes.extend(unimportant.into_iter().map(|reason| format!("sequence {reason}")));
    let detached = detached((&mut *sides.source, &mut *sides.control), &tables)?;
    notes.extend(detached.iter().map(|found| format!("warning: {}", found.message())));
    // The way back has its state on the publisher.
    if request.back.is_some()
        && let Some(found) = exposed::find(sides.source, sides.control)?
    {
        notes.push(format!("on the publisher, {}: {}", found.message(), found.hint()));
    }
    let end = lag::end_of_wal(sides.source)?;
    let stopping = || sides.stop.requested();
    let lag = lag::wait(sides.control, sides.source, sides.row, end, request.deadline, &stopping)?;
    if let Some(lag) = lag {
        problems.push(lag.because("the subscriber does not catch up within --deadline"));
    }
    Ok(Findings { problems, notes })
}

/// Whether the way back can begin, and would carry everything. Returns the tables that it carries.
fn check_way_back(
    sides: &mut Sides<'_>,
    (back, returns): (&WayBack, bool),
    roles: &ApplyingRoles,
    tables: &[PublishedTable],
    problems: &mut Vec<String>,
) -> Result<Vec<TableName>> {
    servers::synchronous(sides, problems)?;
    // The servers change places.
    if let Err(failure) = refuse_unlike_bytes(sides.control, sides.source) {
        problems.push(format!("the way back cannot run: swapped, {}", failure.message));
    }
    let left = record::is_left_slot(sides.source, &back.name)?;
    slot_possible(sides.control, back, left, problems)?;
    match &roles.on_subscriber {
        None => may_replicate(sides, back, problems)?,
        // Its walsender is one that the verb cannot try.
        Some(role) if role.may_replicate => {}
        Some(role) => problems.push(may_not_replicate(sides.control, &quote_ident(&role.name))?),
    }
    if !publications_exist(sides.control, back, problems)? {
        return Ok(Vec::new());
    }
    let carried = left_out(sides, tables, (back, returns), problems)?;
    // One that has ended worked before, and its remains say that its slot is gone.
    if ended_generation(sides.source, &back.name)? == 0 {
        if record::has_subscription(sides.source, &back.name)? {
            // `check` advises to rebase such a subscription, which would delete rows that only the publisher has.
            problems.push(format!(
                "the publisher has a subscription {0} already, of an earlier switchover or from another server: \
                 pgapace drop --keep-slot --name {0} with the servers swapped, if nobody needs it, or choose another \
                 --back-name",
                back.name
            ));
        } else {
            way_back(sides, (back, roles), problems)?;
        }
    }
    Ok(carried)
}

/// Subscriptions in the opposite direction: with the way back, changes of the subscriber would be applied twice on the
/// publisher. Native ones are named by [`native_subscriptions`].
fn opposite_direction(
    sides: &mut Sides<'_>,
    tables: &HashSet<TableName>,
    problems: &mut Vec<String>,
) -> Result<()> {
    for (name, common) in opposite::applied(sides.source, sides.control, tables)? {
        problems.push(format!(
            "subscription {name} of the publisher applies changes of {common} of these tables in the opposite \
             direction: stop its pgapace run, and pgapace drop --name {name} with the servers swapped"
        ));
    }
    Ok(())
}

/// The privileges that the procedure needs on both sides.
fn privileges(
    sides: &mut Sides<'_>,
    request: &Request<'_>,
    problems: &mut Vec<String>,
) -> Result<()> {
    let stops = request.stop_writes.is_none();
    if let Some(grant) = missing_on_publisher(sides.source, stops)? {
        problems.push(match stops {
            true => format!(
                "the role may not stop writes on the publisher: {grant} or pass --stop-writes"
            ),
            false => format!("the role does not see who writes on the publisher: {grant}"),
        });
    }
    // A database that is read-only is opened at the end, when nothing can be undone any more.
    if let (database, Some(_)) = database_setting(sides.control)?
        && let Some(grant) = missing_ownership(sides.control)?
    {
        problems.push(format!(
            "the subscriber's database has a setting default_transaction_read_only, and the role may not reset it \
             at the end: {grant} or ALTER DATABASE {database} RESET default_transaction_read_only;"
        ));
    }
    Ok(())
}

/// Native subscriptions that write on the publisher: their workers ignore that a database is read-only.
fn native_subscriptions(source: &mut Session, problems: &mut Vec<String>) -> Result<()> {
    let results = source
        .simple(
            "SELECT pg_catalog.quote_ident(s.subname) FROM pg_catalog.pg_subscription s \
             JOIN pg_catalog.pg_database d ON d.oid = s.subdbid \
             WHERE d.datname = pg_catalog.current_database() AND s.subenabled ORDER BY 1",
        )
        .map_err(|e| Failure::publisher(&e, "looking for subscriptions"))?;
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let name: String = field(&row, 0)?;
        problems.push(format!(
            "a subscription writes on the publisher: ALTER SUBSCRIPTION {name} DISABLE;"
        ));
    }
    Ok(())
}

/// Why no process applies the subscription, as far as the last one has recorded it, and the next step.
fn not_applied(sides: &mut Sides<'_>) -> Result<String> {
    let absence = Absence::find(sides.control, sides.source, sides.row)?;
    if absence != Absence::NoProcess {
        return Ok(format!("{}. {}", absence.said(), absence.hint()));
    }
    let last = statistics::last_failure(sides.control, sides.row.id)?.failure;
    let why = last.map_or(String::new(), |failure| {
        let hint = failure.hint.map_or(String::new(), |hint| format!(" {hint}"));
        format!("; the last one ended with an error: {}.{hint}", failure.message)
    });
    Ok(format!("{}: start pgapace run{why}", absence.said()))
}

/// A warning if the way back applies prepared transactions later than the subscription does, because its publisher is too
/// old.
pub(super) fn less_on_the_way_back(
    sides: &mut Sides<'_>,
    request: &Request<'_>,
) -> Result<Option<String>> {
    let version = sides.control.server_version();
    if request.back.is_none() || two_phase::decodes(version.major()) {
        return Ok(None);
    }
    let slot = slot::find(sides.source, &sides.row.slot_name)?;
    let used = sides.config.two_phase == Some(true) || slot.is_some_and(|slot| slot.two_phase);
    Ok(used.then(|| {
        format!(
            "warning: the way back applies prepared transactions when they are committed: the subscriber, PostgreSQL \
             {version}, does not decode them at their PREPARE, whatever --two-phase says"
        )
    }))
}

/// Whether a process applies the subscription. One that stood aside for a verb that was killed needs a moment.
fn is_applied(sides: &mut Sides<'_>) -> Result<bool> {
    let begun = Instant::now();
    loop {
        if ownership::owner(sides.control, sides.row.id)?.is_some() {
            return Ok(true);
        }
        if begun.elapsed() >= ABSENCE {
            return Ok(false);
        }
        sides.stop.check(CHECKS)?;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Transactions that would keep the publisher from being quiet.
fn prepared_transactions(sides: &mut Sides<'_>, problems: &mut Vec<String>) -> Result<()> {
    let found = staying_prepared(sides.source, RESOLVED_WITHIN, sides.stop)?;
    problems.extend(found.iter().take(SAID).map(|one| {
        let gid = quote_literal(&one.gid);
        format!(
            "a transaction is prepared on the publisher since {}: let its transaction manager resolve it; or COMMIT \
             PREPARED {gid}; or ROLLBACK PREPARED {gid};",
            one.since
        )
    }));
    Ok(())
}

/// Every published table takes part, and has all changes. A table that was added meanwhile would lack its rows, and
/// one that was published in another way for a while would lack the changes of that time. Returns the tables.
pub(super) fn tables_ready(
    sides: &mut Sides<'_>,
    problems: &mut Vec<String>,
) -> Result<Vec<PublishedTable>> {
    let Sides { control, source, row, .. } = sides;
    // Before the look: what is recorded must not be newer.
    let recorded = published::read(control, row.id)?;
    let look = publication::read_contents(source, &row.publications)?;
    let waiting = not_ready(control, row, look.tables.iter())?;
    problems.extend(waiting.iter().map(Problem::line));
    problems.extend(changed_publications(&recorded, &look));
    let states = state::relations_by_name(control, row.id)?;
    for table in look.tables.iter().map(|table| &table.name) {
        let Some(state) = states.get(table) else { continue };
        if let Some(from) = state.stale_from {
            problems.push(format!(
                "table {table} may lack changes since {from} ({}): pgapace resync copies it again, and \
                 pgapace verify ends the mark if it is equal",
                state.stale_reason.as_deref().unwrap_or("unknown")
            ));
        }
    }
    Ok(look.tables)
}

fn changed_publications(recorded: &PreviousReading, look: &PublicationContents) -> Option<String> {
    let tables = published::unjudged(recorded, look);
    (!tables.is_empty()).then(|| {
        format!(
            "tables were published in another way since pgapace run looked, and may lack changes ({}): it looks \
             again after --refresh-interval, and at its start",
            tables.join(", ")
        )
    })
}

/// The last verification of every table found all of its rows and columns equal, not longer ago than this.
fn verified(
    sides: &mut Sides<'_>,
    tables: &[PublishedTable],
    age: Duration,
    problems: &mut Vec<String>,
) -> Result<()> {
    let sql = format!(
        "SELECT l.schema_name, l.table_name FROM ( \
           SELECT DISTINCT ON (schema_name, table_name) * FROM pgapace.verification \
           WHERE subscription = {} AND result IS NOT NULL AND (scope = '{ALL_ROWS}' OR result <> 'equal') \
           ORDER BY schema_name, table_name, lsn DESC, verification DESC) l \
         WHERE l.result = 'equal' AND l.columns_left = '{{}}' \
           AND l.finished_at >= pg_catalog.now() - interval '{} s'",
        sides.row.id.0,
        age.as_secs_f64()
    );
    let results =
        sides.control.simple(&sql).map_err(|e| Failure::subscriber(&e, "reading verifications"))?;
    let mut known = HashSet::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        known.insert(TableName { schema: field(&row, 0)?, name: field(&row, 1)? });
    }
    let missing: Vec<_> = tables
        .iter()
        .map(|table| &table.name)
        .filter(|name| !known.contains(*name))
        .map(TableName::to_string)
        .collect();
    if !missing.is_empty() {
        problems.push(format!(
            "tables were not found equal within --verified-within: {}: pgapace verify",
            missing.join(", ")
        ));
    }
    Ok(())
}

/// Whether the role may replicate from the new side. A walsender tells: managed services have rules of their own.
fn may_replicate(sides: &mut Sides<'_>, back: &WayBack, problems: &mut Vec<String>) -> Result<()> {
    let info = sides.config.subscriber.clone();
    let user = quote_ident(info.user());
    let walsender = Publisher::new(info, &back.name, sides.publisher.encoding()).connect();
    let Err(failure) = walsender else { return Ok(()) };
    if failure.sqlstate.as_deref() == Some(sqlstate::INSUFFICIENT_PRIVILEGE) {
        problems.push(may_not_replicate(sides.control, &user)?);
    } else {
        let hint = failure.hint.map_or(String::new(), |hint| format!(": {hint}"));
        problems.push(format!("the way back cannot be read: {}{hint}", failure.message));
    }
    Ok(())
}

fn may_not_replicate(control: &mut Session, role: &str) -> Result<String> {
    let fix = check::replication_fix(control, role)?;
    Ok(format!(
        "role {role} may not replicate from the subscriber, which the way back needs{}; or pass --no-back",
        said(&fix).trim_end_matches(';')
    ))
}

/// A fix, behind the problem.
fn said(fix: &Fix) -> String {
    match fix {
        Fix::Sql(sql) => format!(": {sql}"),
        Fix::Command(command) => format!(": {command}"),
        Fix::Service { service, text } => format!(": in {service}: {text}"),
    }
}

/// Whether the subscriber can have the slot of the way back. With `left`, a slot of that name is dropped before.
pub(super) fn slot_possible(
    control: &mut Session,
    back: &WayBack,
    left: bool,
    problems: &mut Vec<String>,
) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.current_setting('wal_level'), \
           EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {}), \
           (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots) \
             < pg_catalog.current_setting('max_replication_slots')::int4",
        quote_literal(&back.name)
    );
    let results =
        control.simple(&sql).map_err(|e| Failure::subscriber(&e, "checking the way back"))?;
    let row = first_row(&results, "the way back")?;
    if row.get(0) != Some("logical") {
        problems.push(
            "the subscriber has no wal_level = logical, which the way back needs: ALTER SYSTEM SET \
             wal_level = logical; and restart it; or pass --no-back"
                .to_owned(),
        );
    }
    if row.get(1) == Some("t") && !left {
        problems.push(format!(
            "the subscriber has a slot {0} already: SELECT pg_drop_replication_slot('{0}') if nobody needs it, \
             or choose another --back-name",
            back.name
        ));
    }
    if row.get(2) != Some("t") {
        problems.push(
            "the subscriber has no free replication slot: raise max_replication_slots".to_owned(),
        );
    }
    Ok(())
}

fn publications_exist(
    control: &mut Session,
    back: &WayBack,
    problems: &mut Vec<String>,
) -> Result<bool> {
    let mut all = true;
    for name in &back.publications {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = {})",
            quote_literal(name)
        );
        let results =
            control.simple(&sql).map_err(|e| Failure::subscriber(&e, "checking the way back"))?;
        if first_row(&results, "EXISTS")?.get(0) != Some("t") {
            all = false;
            let name = quote_ident(name);
            problems.push(format!(
                "the subscriber has no publication {name} for the way back: CREATE PUBLICATION {name} FOR \
                 TABLE …; or pass --no-back"
            ));
        }
    }
    Ok(all)
}

/// Problems of the way back that `pgapace check` finds: identities, roles, tables of the old side.
fn way_back(
    sides: &Sides<'_>,
    (back, roles): (&WayBack, &ApplyingRoles),
    problems: &mut Vec<String>,
) -> Result<()> {
    let mut config = sides.config.reversed(back);
    roles.act(&mut config)?;
    // The slot is created by the switchover, and nothing is copied.
    (config.create_slot, config.copy_data) = (true, Some(false));
    let mut report = check::check(&config);
    if let Some(failure) = report.unreachable.take_if(|failure| failure.is_connection_lost()) {
        return Err(failure);
    }
    // The role was tried by itself.
    let blockers = report.findings.iter().filter(|finding| {
        finding.severity == Severity::Blocker && finding.topic != check::REPLICATION
    });
    problems.extend(blockers.map(|finding| {
        let fix = finding.fix.as_ref().map(said).unwrap_or_default();
        let side = match finding.side {
            check::report::Side::Publisher => "new side",
            check::report::Side::Subscriber => "old side",
            check::report::Side::Program => "program",
        };
        format!("the way back is blocked ({side}): {}{fix}", finding.message)
    }));
    Ok(())
}
