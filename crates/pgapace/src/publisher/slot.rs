//! The replication slot of a subscription: creating, checking and dropping it.
//!
//! Nothing in a slot tells who created it, and a subscription of another subscriber may use the
//! same name. After an interruption, pgapace must know whether it created the slot itself. So it
//! creates the slot in two steps. First a temporary slot provides the snapshot, and its position is
//! recorded on the subscriber. Then [`copy`] creates the slot at exactly that position. The server
//! writes WAL whenever it creates a new slot, so no other slot begins at that position
//! ([`is_ours`]).
//!
//! START_REPLICATION asks for the oldest position that is still needed ([`engine::stream_start`]), or
//! the slot's own if that is later. Transactions that are sent again are skipped by commit LSN. A slot
//! that is ahead of the progress is a gap, and is refused. Nothing is acknowledged before the stream
//! has passed the progress again. A walsender acts on an acknowledgement by what it noted while it
//! sent to an earlier run, and could remove the WAL that it still has to read.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::{Rows, Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::login_role::terminate;
use crate::publisher::catalogue_changes;
use crate::publisher::session::{
    IDENTIFY, SERVER_START, SystemIdentity, backend_pid, identity, is_standby,
};
use crate::publisher::wal_end::WalEnd;
use crate::publisher::watch::StandbyPublisher;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::SubscriptionId;

/// How often a slot is created at most, while the publisher's catalogue changes.
const CREATIONS: u32 = 5;

/// A slot that was just created, and the name of its exported snapshot.
#[derive(Debug)]
pub(crate) struct CreatedSlot {
    pub(crate) consistent_point: Lsn,
    pub(crate) snapshot: String,
}

/// The purpose of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only for the snapshot; the server drops it at the end of the session.
    Temporary,
    /// For the stream.
    Permanent {
        /// Synchronize the slot to standbys, if the server supports it (17 or later, not on a
        /// standby).
        failover: bool,
    },
}

/// Creates a logical slot for its snapshot alone. The session is then in a transaction that reads under the
/// snapshot. Other sessions can import the snapshot until that transaction ends.
pub(crate) fn create(session: &mut Session, name: &str, kind: Kind) -> Result<CreatedSlot> {
    create_then(session, name, kind, &mut |_| {})
}

/// The same. `at` learns the position of the slot before the snapshot is exported.
pub(crate) fn create_then(
    session: &mut Session,
    name: &str,
    kind: Kind,
    at: &mut dyn FnMut(Lsn),
) -> Result<CreatedSlot> {
    let (consistent_point, _) = begin(session, name, kind)?;
    at(consistent_point);
    export(session, consistent_point)
}

/// As [`create`], for a slot that is streamed. A slot that the publisher could not decode correctly is dropped, and
/// created again ([`catalogue_changes`]).
pub(crate) fn create_to_stream(
    session: &mut Session,
    name: &str,
    kind: Kind,
) -> Result<CreatedSlot> {
    let again = |session: &mut Session| {
        session.simple("ROLLBACK").map_err(|e| Failure::publisher(&e, "ending a transaction"))?;
        drop(session, name).map(|_| ())
    };
    let point = until_decodable(session, name, |session| begin(session, name, kind), again)?;
    export(session, point)
}

/// The same for a slot that `create` makes without a snapshot, in a session without a walsender.
pub(crate) fn create_without_snapshot(
    session: &mut Session,
    name: &str,
    mut create: impl FnMut(&mut Session) -> Result<()>,
) -> Result<()> {
    let create = |session: &mut Session| {
        let before = catalogue_changes::before(session)?;
        create(session).map(|()| ((), before))
    };
    let again = |session: &mut Session| {
        let dropped = session.simple(&drop_existing_sql(name));
        let doing = format!("dropping slot \"{name}\"");
        dropped.map(|_| ()).map_err(|e| Failure::publisher(&e, &doing))
    };
    until_decodable(session, name, create, again)
}

/// Creates a slot until no change of the catalogue lies in the time of its creation. `create` returns the xmax of a
/// snapshot from before, too; `again` drops the slot.
fn until_decodable<T>(
    session: &mut Session,
    name: &str,
    mut create: impl FnMut(&mut Session) -> Result<(T, u64)>,
    again: impl Fn(&mut Session) -> Result<()>,
) -> Result<T> {
    let mut attempt = 1;
    loop {
        let (created, before) = create(session)?;
        match catalogue_changes::since(session, before)? {
            Some(changed) if attempt < CREATIONS || changed.is_published => {
                again(session)?;
                if attempt == CREATIONS {
                    return Err(changed.refused());
                }
                tracing::info!(
                    event = "slot_created_again",
                    slot = name,
                    changed = changed.name,
                    "transactions changed the publisher's catalogue while the slot was created"
                );
            }
            changed => {
                if let Some(changed) = changed {
                    tracing::warn!(
                        event = "slot_catalogue_changed",
                        slot = name,
                        changed = changed.name,
                        "an unpublished table was changed each time that the slot was created"
                    );
                }
                return Ok(created);
            }
        }
        attempt += 1;
    }
}

/// Warns if the publisher may not decode a slot correctly that others have created, and that nothing has read yet.
pub(crate) fn warn_of_catalogue_changes(session: &mut Session, name: &str) -> Result<()> {
    let changed = catalogue_changes::since_slot(session, name)?;
    if let Some(changed) = changed.filter(|changed| changed.is_published) {
        tracing::warn!(
            event = "slot_may_lack_changes",
            slot = name,
            changed = changed.name,
            "the publisher's catalogue may have been changed while the slot was created: then the publisher decodes the \
             table as it was before"
        );
    }
    Ok(())
}

/// Creates a slot, and begins to read under its snapshot. Returns its position, and the xmax of a snapshot
/// from before.
///
/// The server refuses the snapshot if its settings were reloaded while the slot waited for transactions: some settings are
/// looked up in the catalogue then. So the slot is created again.
fn begin(session: &mut Session, name: &str, kind: Kind) -> Result<(Lsn, u64)> {
    let sql = creation_sql(session, name, kind)?;
    let mut attempt = 1;
    loop {
        // No further message may follow: while a walsender waits for WAL, it takes incoming messages
        // for messages of a stream.
        let created = session.simple_each([catalogue_changes::BEFORE, BEGIN_READING, &sql]);
        if created.is_err() && !session.is_broken() {
            let ended = session.simple("ROLLBACK");
            ended.map_err(|e| Failure::publisher(&e, "ending a transaction"))?;
        }
        let [before, _, created] = match created {
            Ok(created) => created,
            Err(error) if attempt < CREATIONS && has_looked_up_settings(&error) => {
                tracing::debug!(%error, "settings were reloaded while a slot was created");
                attempt += 1;
                continue;
            }
            Err(error) => {
                let failure = Failure::publisher(&error, &format!("creating slot \"{name}\""));
                return Err(explain_refusal(session, failure));
            }
        };
        let before = field(&first_row(&before, "the present snapshot")?, 0)?;
        let created = first_row(&created, "CREATE_REPLICATION_SLOT")?;
        return Ok((field(&created, 1)?, before));
    }
}

/// The command that creates a slot, in a transaction that takes over its snapshot.
fn creation_sql(session: &mut Session, name: &str, kind: Kind) -> Result<String> {
    let major = session.server_version().major();
    let mut options = vec!["SNAPSHOT 'use'"];
    if let Kind::Permanent { failover: true } = kind
        && supports_failover(session)?
    {
        options.push("FAILOVER");
    }
    let options =
        if major >= 15 { format!("({})", options.join(", ")) } else { "USE_SNAPSHOT".to_owned() };
    Ok(format!(
        "CREATE_REPLICATION_SLOT {} {}LOGICAL pgoutput {options}",
        quote_ident(name),
        if kind == Kind::Temporary { "TEMPORARY " } else { "" },
    ))
}

/// Whether the session had a snapshot of the catalogue when it was to take over that of the slot
/// (`SnapBuildInitialSnapshot` in `snapbuild.c`). The server translates no internal error.
fn has_looked_up_settings(error: &wire::Error) -> bool {
    error.sqlstate() == Some(sqlstate::INTERNAL_ERROR)
        && error.to_string().contains("cannot build an initial slot snapshot when MyProc->xmin")
}

/// Exports the snapshot under which the session reads.
fn export(session: &mut Session, consistent_point: Lsn) -> Result<CreatedSlot> {
    let exported = session
        .simple("SELECT pg_catalog.pg_export_snapshot()")
        .map_err(|e| Failure::publisher(&e, "exporting the snapshot"))?;
    let exported = first_row(&exported, "pg_export_snapshot")?;
    Ok(CreatedSlot { consistent_point, snapshot: field(&exported, 0)? })
}

/// The failure for a slot whose creation has not ended.
pub(crate) fn without_position(name: &str) -> Failure {
    Failure::new(Class::Slot, format!("slot \"{name}\" has no position")).hint(format!(
        "It is being created, or its creation was interrupted. On the publisher: SELECT * FROM \
         pg_replication_slots WHERE slot_name = {}. If active_pid is NULL, drop it: SELECT \
         pg_drop_replication_slot({0}).",
        wire::quote_literal(name)
    ))
}

/// Adds the next step to the error of a slot that cannot be created. One SQLSTATE has several
/// causes, which the server's settings tell apart.
fn explain_refusal(session: &mut Session, failure: Failure) -> Failure {
    const RAISE: &str =
        "On the publisher: ALTER SYSTEM SET max_replication_slots = …; then restart it.";
    match failure.sqlstate.as_deref() {
        Some(sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE) => {
            let settings = session.simple(
                "SELECT pg_catalog.current_setting('wal_level') <> 'logical', \
                 pg_catalog.current_setting('max_replication_slots') = '0'",
            );
            let row = settings.as_ref().ok().and_then(|rows| rows.first()?.first());
            let is = |column| row.as_ref().is_some_and(|row| row.get(column) == Some("t"));
            if is(1) {
                failure.hint(RAISE)
            } else if is(0) {
                failure.hint(
                    "On the publisher: ALTER SYSTEM SET wal_level = logical; then restart it.",
                )
            } else {
                failure
            }
        }
        Some(sqlstate::CONFIGURATION_LIMIT_EXCEEDED) => failure.hint(RAISE),
        Some(sqlstate::DUPLICATE_OBJECT) => {
            failure.hint("Choose another name with --slot, or drop that slot.")
        }
        _ => failure,
    }
}

/// A name for a temporary slot of this session.
pub(crate) fn temporary_name(session: &mut Session, id: SubscriptionId) -> Result<String> {
    // The process id is needed because two subscribers may each have a subscription with this id.
    Ok(format!("pgapace_sync_{}_{}", id.0, backend_pid(session)?))
}

/// The result of creating a slot from another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copied {
    Done,
    /// The server refused; the snapshot is lost.
    Refused,
}

/// Creates the permanent slot from the temporary one that this session has just [created](create),
/// at the same position, and drops the temporary one. The session still reads under the snapshot.
///
/// The server may refuse, for example because no slot is left. Then the temporary slot is dropped
/// too.
pub(crate) fn copy(
    session: &mut Session,
    temporary: &str,
    name: &str,
    failover: bool,
) -> Result<Copied> {
    let doing = format!("creating slot \"{name}\"");
    let sql = format!(
        "SELECT pg_catalog.pg_copy_logical_replication_slot({}, {}, false)",
        quote_literal(temporary),
        quote_literal(name)
    );
    match session.simple(&sql) {
        Ok(_) => {}
        Err(error) if error.sqlstate() == Some(sqlstate::DUPLICATE_OBJECT) => {
            return Err(not_ours(name));
        }
        Err(error) if session.is_broken() => return Err(Failure::publisher(&error, &doing)),
        Err(error) => {
            tracing::debug!(%error, "cannot copy a slot");
            session.simple("ROLLBACK").map_err(|e| Failure::publisher(&e, &doing))?;
            drop(session, temporary)?;
            return Ok(Copied::Refused);
        }
    }
    if failover {
        set_failover(session, name)?;
    }
    drop(session, temporary)?;
    Ok(Copied::Done)
}

/// Has standbys synchronize a slot, if the server supports it (17 or later, not on a standby).
pub(crate) fn set_failover(session: &mut Session, name: &str) -> Result<()> {
    if !supports_failover(session)? {
        return Ok(());
    }
    let sql = format!("ALTER_REPLICATION_SLOT {} (FAILOVER true)", quote_ident(name));
    session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, &format!("altering slot \"{name}\"")))?;
    Ok(())
}

/// Whether pgapace created this slot at `made_at` for this subscription, and nothing has used it
/// since.
pub(crate) fn is_ours(slot: &Slot, made_at: Option<Lsn>) -> bool {
    slot.plugin.as_deref() == Some("pgoutput")
        && slot.in_this_database
        && slot.active_pid.is_none()
        && slot.invalid.is_none()
        && slot.confirmed_flush.is_some()
        && slot.confirmed_flush == made_at
}

/// The error for a slot that another subscription may have created.
pub(crate) fn not_ours(name: &str) -> Failure {
    Failure::new(
        Class::Slot,
        format!("slot \"{name}\" exists on the publisher, but may belong to another subscription"),
    )
    .hint(format!(
        "On the publisher: SELECT * FROM pg_replication_slots. If nothing uses the slot, drop it: \
         SELECT pg_drop_replication_slot({}). Otherwise drop this subscription (pgapace drop \
         --keep-slot), and start it with another --slot.",
        quote_literal(name)
    ))
}

/// Begins a transaction with one snapshot. No session of pgapace has a time limit for transactions.
pub(crate) const BEGIN_READING: &str =
    "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY";

fn supports_failover(session: &mut Session) -> Result<bool> {
    if session.server_version().major() < 17 {
        return Ok(false);
    }
    Ok(!is_standby(session)?)
}

/// The columns of `pg_replication_slots` that pgapace checks.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) plugin: Option<String>,
    pub(crate) in_this_database: bool,
    pub(crate) active_pid: Option<i32>,
    pub(crate) confirmed_flush: Option<Lsn>,
    pub(crate) two_phase: bool,
    /// The server has synchronised it from a primary. A promoted server keeps this mark, so it counts only during
    /// recovery.
    pub(crate) synced: bool,
    pub(crate) invalid: Option<String>,
    pub(crate) wal_status: Option<String>,
    pub(crate) retained_bytes: Option<i64>,
    /// Bytes of WAL that may still be written before the slot is invalidated; `None` without a
    /// limit.
    pub(crate) safe_wal_size: Option<i64>,
}

/// Reads a slot.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Slot>> {
    let results = session
        .simple(&find_sql(session, name))
        .map_err(|e| Failure::publisher(&e, &format!("reading slot \"{name}\"")))?;
    found(&results)
}

/// Facts about the publisher that are read before the stream starts.
pub(crate) struct PublisherNow {
    pub(crate) system: SystemIdentity,
    pub(crate) slot: Option<Slot>,
    /// Where its WAL ends.
    pub(crate) wal_end: WalEnd,
    /// If it is in recovery.
    pub(crate) standby: Option<StandbyPublisher>,
}

/// Reads the publisher's identity, a slot and the end of WAL in one round trip.
pub(crate) fn read_publisher(session: &mut Session, name: &str) -> Result<PublisherNow> {
    // The timeline of a server that was not in recovery before it is read does not change.
    let now = format!("SELECT {}, pg_catalog.pg_is_in_recovery(), {SERVER_START}", WalEnd::sql());
    let [now, identified, slot] =
        session
            .simple_each([&now, IDENTIFY, &find_sql(session, name)])
            .map_err(|e| Failure::publisher(&e, &format!("reading slot \"{name}\"")))?;
    let (now, system) = (first_row(&now, "the query for an LSN")?, identity(&identified)?);
    let standby = match boolean(&now, WalEnd::COLUMNS)? {
        true => Some(StandbyPublisher {
            started: field(&now, WalEnd::COLUMNS + 1)?,
            walsender: session.backend_pid(),
            timeline: system.timeline,
        }),
        false => None,
    };
    Ok(PublisherNow { slot: found(&slot)?, wal_end: WalEnd::of(&now)?, standby, system })
}

fn find_sql(session: &Session, name: &str) -> String {
    let major = session.server_version().major();
    let reason = match major {
        17.. => "s.invalidation_reason",
        16 => "CASE WHEN s.conflicting THEN 'conflict with recovery' END",
        _ => "NULL::pg_catalog.text",
    };
    let synced = if major >= 17 { "s.synced" } else { "false" };
    format!(
        "SELECT s.plugin, s.database = pg_catalog.current_database(), s.active_pid, \
             s.confirmed_flush_lsn, s.two_phase, s.wal_status, {reason}, \
             pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() \
               THEN pg_catalog.pg_last_wal_replay_lsn() \
               ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::pg_catalog.int8, \
             s.safe_wal_size, {synced} \
             FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = {}",
        quote_literal(name)
    )
}

/// The slot in the results of [`find_sql`].
fn found(results: &[Rows]) -> Result<Option<Slot>> {
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    let lost = row.get(5) == Some("lost");
    Ok(Some(Slot {
        plugin: row.get(0).map(str::to_owned),
        in_this_database: row.get(1) == Some("t"),
        active_pid: row.get(2).map(|_| field(&row, 2)).transpose()?,
        confirmed_flush: row.get(3).map(|_| field(&row, 3)).transpose()?,
        two_phase: boolean(&row, 4)?,
        synced: boolean(&row, 9)?,
        invalid: row
            .get(6)
            .map(str::to_owned)
            .or_else(|| lost.then(|| "required WAL was removed".to_owned())),
        wal_status: row.get(5).map(str::to_owned),
        retained_bytes: row.get(7).map(|_| field(&row, 7)).transpose()?,
        safe_wal_size: row.get(8).map(|_| field(&row, 8)).transpose()?,
    }))
}

/// Checks that a slot is of the kind that pgapace creates. If it is not, it was dropped, and something else has
/// its name.
pub(crate) fn check_kind(name: &str, slot: &Slot) -> Result<()> {
    let what = match slot.plugin.as_deref() {
        Some("pgoutput") if slot.in_this_database => return Ok(()),
        Some("pgoutput") => "it is of another database".to_owned(),
        Some(plugin) => format!("its plugin is {plugin}"),
        None => "it is a physical slot".to_owned(),
    };
    Err(Failure::new(
        Class::Slot,
        format!("slot \"{name}\" is not a pgoutput slot of the publisher's database: {what}"),
    )
    .hint(
        "Check --slot and the database in --publisher. If something else has this name now: pgapace drop \
         --keep-slot, then pgapace run with another --slot and --if-not-empty rebase, which compares all \
         tables with the publisher's, and makes them equal.",
    ))
}

/// Checks that the stream can continue from this slot without losing a change. Returns the position
/// that the slot has confirmed.
///
/// `in_recovery`: the server is a standby. It may be one that is not promoted yet: then the slot is missing, or is
/// synchronised from the primary, which alone can use it. The run waits for the primary.
pub(crate) fn check_resume(
    name: &str,
    slot: Option<&Slot>,
    in_recovery: bool,
    progress: Lsn,
) -> Result<Lsn> {
    let refuse = |what: String| Failure::new(Class::Slot, what);
    let rebuild = "Changes that the slot had not sent are lost. pgapace rebase creates a new slot, \
                   compares all tables with the publisher's, makes them equal, and goes on.";
    check_promoted(name, slot, in_recovery)?;
    let Some(slot) = slot else {
        return Err(refuse(format!("slot \"{name}\" does not exist on the publisher")).hint(
            "If the publisher is a promoted standby, its slots were not synchronized. Changes that \
             the slot had not sent are lost. pgapace rebase creates a new slot, compares all tables \
             with the publisher's, makes them equal, and goes on.",
        ));
    };
    check_kind(name, slot)?;
    if let Some(reason) = &slot.invalid {
        return Err(refuse(format!("slot \"{name}\" was invalidated: {reason}")).hint(rebuild));
    }
    let confirmed = slot
        .confirmed_flush
        .ok_or_else(|| refuse(format!("slot \"{name}\" has no confirmed position")))?;
    if confirmed > progress {
        return Err(refuse(format!(
            "slot \"{name}\" has moved to {confirmed}, but the subscriber has applied changes only \
             up to {progress}: changes in between were skipped"
        ))
        .hint(
            "Another program consumed or advanced the slot, or the subscriber was restored from a \
               backup. If this server is a copy of the subscriber, or was left behind by a failover, \
               correct --subscriber: the slot serves the other one. Otherwise, pgapace rebase creates a \
               new slot, compares all tables with the publisher's, makes them equal, and goes on.",
        ));
    }
    Ok(confirmed)
}

/// The next step when a slot [`is_lost`].
pub(crate) const LOST_HINT: &str = "The slot of the subscription is lost. pgapace rebase creates a new slot, compares \
    all tables with the publisher's, makes them equal, and goes on.";

/// Whether nothing can be streamed from the slot any more.
pub(crate) fn is_lost(slot: Option<&Slot>) -> bool {
    slot.is_none_or(|slot| slot.invalid.is_some())
}

/// The error for a slot that has passed the PREPARE at `prepared`, of which the subscriber has nothing.
pub(crate) fn has_skipped(name: &str, confirmed: Lsn, prepared: Lsn) -> Failure {
    let message = format!(
        "slot \"{name}\" has moved to {confirmed}, but the subscriber lacks the transaction that was prepared at \
         {prepared}: it would never be applied"
    );
    Failure::new(Class::Slot, message).hint(
        "The subscriber was restored from a backup, or a standby was promoted that lacked its last changes. pgapace \
         rebase creates a new slot, compares all tables with the publisher's, makes them equal, and goes on.",
    )
}

/// Refuses a standby without a slot of its own: the slot is the primary's.
pub(crate) fn check_promoted(name: &str, slot: Option<&Slot>, in_recovery: bool) -> Result<()> {
    match slot {
        Some(slot) if !slot.synced => Ok(()),
        _ if in_recovery => Err(not_promoted(name, slot.is_some())),
        _ => Ok(()),
    }
}

/// The error for a standby without a slot of its own.
fn not_promoted(name: &str, synced: bool) -> Failure {
    let reached = "the publisher is a standby";
    let (class, message) = if synced {
        (Class::Publisher, format!("{reached}, to which slot \"{name}\" is only synchronised"))
    } else {
        (Class::Slot, format!("{reached}, on which slot \"{name}\" does not exist"))
    };
    let other = if synced {
        ""
    } else {
        " If the slot was on this standby, it is lost: pgapace drop --keep-slot, then pgapace run \
         --if-not-empty rebase."
    };
    Failure::new(class, message)
        .hint(format!(
            "pgapace run tries again until it reaches the primary, or the standby is promoted. If the \
             connection string of the publisher names several hosts, add \
             target_session_attrs=primary.{other}"
        ))
        .not_serving()
}

/// Waits while another process uses the slot. Usually that is a walsender of an earlier run that
/// has not noticed the end of its connection; it does within wal_sender_timeout.
pub(crate) fn wait_until_free(
    session: &mut Session,
    name: &str,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<Option<Slot>> {
    let deadline = Instant::now() + patience;
    loop {
        let slot = find(session, name)?;
        let Some(pid) = slot.as_ref().and_then(|slot| slot.active_pid) else { return Ok(slot) };
        if stopping() {
            return Err(Failure::new(Class::Stopped, "stopped while waiting for the slot"));
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(
                Class::Busy,
                format!("slot \"{name}\" is in use by walsender {pid} of the publisher"),
            )
            .hint(format!(
                "On the publisher: SELECT * FROM pg_stat_replication WHERE pid = {pid}."
            )));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Terminates a walsender that has sent the changes of this subscription to this subscriber, unless it has ended: then
/// another backend may have its process id, but not the subscription's application_name, or that of this session.
/// The role of that walsender may do it, and members of pg_signal_backend. Without the privilege, the caller must wait
/// until that walsender ends after wal_sender_timeout. It fails as stopped when `stopping`.
///
/// The caller must have a proof that the walsender is not that of another subscriber, of which this one is a copy.
pub(crate) fn end_walsender(
    session: &mut Session,
    walsender: i32,
    subscription: &str,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<()> {
    let sql = format!(
        "SELECT {} \
         FROM pg_catalog.pg_stat_activity a \
         WHERE a.pid = {walsender} AND a.pid <> pg_catalog.pg_backend_pid() \
           AND a.application_name IN ({}, pg_catalog.current_setting('application_name'))",
        terminate("a.pid"),
        quote_literal(subscription)
    );
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        match session.simple(&sql) {
            Ok(results) if results.first().is_none_or(wire::Rows::is_empty) => break,
            // Repeatedly: after the first signal, the walsender waits until its client has read the
            // last messages. Only another signal ends that wait (`ProcessClientWriteInterrupt` in
            // `postgres.c`).
            Ok(_) if stopping() => {
                let message = "stopped while terminating the walsender of another process";
                return Err(Failure::new(Class::Stopped, message));
            }
            Ok(_) => std::thread::sleep(Duration::from_millis(100)),
            Err(error) if error.sqlstate() == Some(sqlstate::INSUFFICIENT_PRIVILEGE) => {
                tracing::info!(
                    event = "walsender_not_terminated",
                    %error,
                    "could not terminate the walsender of the other process; waiting for it"
                );
                break;
            }
            Err(error) => {
                return Err(Failure::publisher(
                    &error,
                    "terminating the other process's walsender",
                ));
            }
        }
    }
    Ok(())
}

/// Makes an inactive slot send prepared transactions only when they are committed (18 or later).
pub(crate) fn end_two_phase(session: &mut Session, name: &str) -> Result<()> {
    let sql = format!("ALTER_REPLICATION_SLOT {} (TWO_PHASE false)", quote_ident(name));
    session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, &format!("altering slot \"{name}\"")))?;
    Ok(())
}

/// Drops a slot. Returns whether it existed.
pub(crate) fn drop(session: &mut Session, name: &str) -> Result<bool> {
    match session.simple(&format!("DROP_REPLICATION_SLOT {} WAIT", quote_ident(name))) {
        Ok(_) => Ok(true),
        Err(error) if error.sqlstate() == Some(sqlstate::UNDEFINED_OBJECT) => Ok(false),
        Err(error) => Err(Failure::publisher(&error, &format!("dropping slot \"{name}\""))),
    }
}

/// SQL that drops a slot, if it exists, in a session without a walsender.
pub(crate) fn drop_existing_sql(name: &str) -> String {
    format!(
        "SELECT pg_catalog.pg_drop_replication_slot(slot_name) \
         FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
        quote_literal(name)
    )
}

#[cfg(test)]
mod tests {
    use super::{Lsn, Slot, check_resume};
    use crate::error::Class;

    fn slot(confirmed: u64) -> Slot {
        Slot {
            plugin: Some("pgoutput".to_owned()),
            in_this_database: true,
            active_pid: None,
            confirmed_flush: Some(Lsn(confirmed)),
            two_phase: false,
            synced: false,
            invalid: None,
            wal_status: None,
            retained_bytes: None,
            safe_wal_size: None,
        }
    }

    fn class(slot: Option<&Slot>) -> Option<Class> {
        check_resume("s", slot, false, Lsn(100)).err().map(|failure| failure.class)
    }

    #[test]
    fn a_slot_at_or_behind_progress_resumes_at_its_own_position() {
        assert_eq!(check_resume("s", Some(&slot(40)), false, Lsn(100)).ok(), Some(Lsn(40)));
        assert_eq!(check_resume("s", Some(&slot(100)), false, Lsn(100)).ok(), Some(Lsn(100)));
    }

    #[test]
    fn gaps_and_unusable_slots_are_refused() {
        assert_eq!(class(Some(&slot(101))), Some(Class::Slot));
        assert_eq!(class(None), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { invalid: Some("x".into()), ..slot(1) })), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { in_this_database: false, ..slot(1) })), Some(Class::Slot));
        assert_eq!(class(Some(&Slot { plugin: None, ..slot(1) })), Some(Class::Slot));
    }

    #[test]
    fn a_standby_is_waited_for_unless_the_slot_is_its_own() {
        let of_primary = Slot { synced: true, ..slot(40) };
        for found in [None, Some(&of_primary)] {
            let failure = check_resume("s", found, true, Lsn(100)).err();
            assert!(failure.is_some_and(|failure| failure.is_connection_lost()), "{found:?}");
        }
        assert_eq!(check_resume("s", Some(&slot(40)), true, Lsn(100)).ok(), Some(Lsn(40)));
        // It was promoted.
        assert_eq!(check_resume("s", Some(&of_primary), false, Lsn(100)).ok(), Some(Lsn(40)));
    }
}
