//! The replication slot: create, look at, refuse, drop.
//!
//! A slot has nothing by which its maker could be told, and another subscription, of another subscriber,
//! may have the same name. So that one whose making was interrupted can be told from somebody else's,
//! it is made in two steps: a temporary slot has the snapshot, and its position is recorded on the
//! subscriber; then [`copy`] makes the slot with that very position. Every slot that the server makes
//! anew writes WAL, so no other begins there ([`is_ours`]).

use std::time::{Duration, Instant};

use pgoutput::{Lsn, Streaming};
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::session::backend_pid;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::SubscriptionId;

/// A slot that was just created, and the name of the snapshot that goes with it.
#[derive(Debug)]
pub(crate) struct CreatedSlot {
    pub(crate) consistent_point: Lsn,
    pub(crate) snapshot: String,
}

/// What a slot is created for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// For the snapshot only; gone with its session.
    Temporary,
    /// For the stream.
    Permanent {
        /// Have standbys hold a copy, where the server can (17, not on a standby itself).
        failover: bool,
    },
}

/// SQLSTATE of a slot that is there already.
pub(crate) const DUPLICATE: &str = "42710";
/// SQLSTATE of a server whose slots are all used.
const NO_SLOT_LEFT: &str = "53400";

/// Creates a logical slot. From then on the session is in a transaction that reads under the slot's
/// snapshot, and others can import it until that transaction ends.
pub(crate) fn create(session: &mut Session, name: &str, kind: Kind) -> Result<CreatedSlot> {
    let major = session.server_version().major();
    let mut options = vec!["SNAPSHOT 'use'"];
    if let Kind::Permanent { failover: true } = kind
        && supports_failover(session)?
    {
        options.push("FAILOVER");
    }
    let options =
        if major >= 15 { format!("({})", options.join(", ")) } else { "USE_SNAPSHOT".to_owned() };
    let sql = format!(
        "CREATE_REPLICATION_SLOT {} {}LOGICAL pgoutput {options}",
        quote_ident(name),
        if kind == Kind::Temporary { "TEMPORARY " } else { "" },
    );
    // Nothing more: while it waits for WAL, a walsender takes what it is sent for messages of a stream.
    let created = session.simple_each([begin_reading(major), &sql]);
    if created.is_err() && !session.is_broken() {
        session.simple("ROLLBACK").map_err(|e| Failure::publisher(&e, "ending a transaction"))?;
    }
    let [_, created] = match created {
        Ok(created) => created,
        Err(error) => {
            let failure = Failure::publisher(&error, &format!("creating slot \"{name}\""));
            return Err(explain_refusal(session, failure));
        }
    };
    let created = first_row(&created, "CREATE_REPLICATION_SLOT")?;
    let exported = session
        .simple("SELECT pg_catalog.pg_export_snapshot()")
        .map_err(|e| Failure::publisher(&e, "exporting the snapshot"))?;
    let exported = first_row(&exported, "pg_export_snapshot")?;
    Ok(CreatedSlot { consistent_point: field(&created, 1)?, snapshot: field(&exported, 0)? })
}

/// Why a slot cannot be created. One SQLSTATE has several reasons, which the settings tell from each
/// other.
fn explain_refusal(session: &mut Session, failure: Failure) -> Failure {
    const RAISE: &str = "Raise max_replication_slots on the publisher, and restart it.";
    match failure.sqlstate.as_deref() {
        Some("55000") => {
            let settings = session.simple(
                "SELECT pg_catalog.current_setting('wal_level') <> 'logical', \
                 pg_catalog.current_setting('max_replication_slots') = '0'",
            );
            let row = settings.as_ref().ok().and_then(|rows| rows.first()?.first());
            let is = |column| row.as_ref().is_some_and(|row| row.get(column) == Some("t"));
            if is(1) {
                failure.hint(RAISE)
            } else if is(0) {
                failure.hint("ALTER SYSTEM SET wal_level = logical; and restart the publisher.")
            } else {
                failure
            }
        }
        Some(NO_SLOT_LEFT) => failure.hint(RAISE),
        Some(DUPLICATE) => failure.hint("Choose another name with --slot, or drop that slot."),
        _ => failure,
    }
}

/// A name for a temporary slot of this session.
pub(crate) fn temporary_name(session: &mut Session, id: SubscriptionId) -> Result<String> {
    // Two subscriptions may have one id, on two subscribers, and one process: not one session.
    Ok(format!("pgapace_sync_{}_{}", id.0, backend_pid(session)?))
}

/// What came of making a slot from another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copied {
    Done,
    /// The server would not; its snapshot is gone.
    Refused,
}

/// Makes the slot of the stream from the temporary one that the session has just [created](create),
/// at the same position, and drops that. The session still reads under the snapshot.
///
/// The server may refuse, as when it has no more slots: then the temporary one is gone too.
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
        Err(error) if error.sqlstate() == Some(DUPLICATE) => return Err(not_ours(name)),
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

/// Has standbys hold a copy of a slot, where the server can (17, not on a standby itself).
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

/// Whether a slot is the one that was made for us and that nobody has used since, if it was to begin
/// at this position.
pub(crate) fn is_ours(slot: &Slot, made_at: Option<Lsn>) -> bool {
    slot.plugin.as_deref() == Some("pgoutput")
        && slot.in_this_database
        && slot.active_pid.is_none()
        && slot.invalid.is_none()
        && slot.confirmed_flush.is_some()
        && slot.confirmed_flush == made_at
}

/// The refusal to take, or drop, a slot that somebody else may have made.
pub(crate) fn not_ours(name: &str) -> Failure {
    Failure::new(
        Class::Slot,
        format!(
            "slot \"{name}\" exists on the publisher, and nothing proves that it was made for this \
             subscription"
        ),
    )
    .hint(format!(
        "It may serve another subscription of that name: see pg_replication_slots on the publisher. \
         If nobody needs it: SELECT pg_drop_replication_slot({}), and start again. Else drop this \
         subscription (pgapace drop --keep-slot) and start it anew with another --slot.",
        quote_literal(name)
    ))
}

/// Begins a transaction that reads under one snapshot, for as long as it takes.
pub(crate) fn begin_reading(major: u32) -> &'static str {
    if major >= 17 {
        "SET transaction_timeout = 0; BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
    } else {
        "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
    }
}

fn supports_failover(session: &mut Session) -> Result<bool> {
    if session.server_version().major() < 17 {
        return Ok(false);
    }
    let results = session
        .simple("SELECT pg_catalog.pg_is_in_recovery()")
        .map_err(|e| Failure::publisher(&e, "looking at the server"))?;
    let row = results.first().and_then(wire::Rows::first);
    Ok(row.is_some_and(|row| row.get(0) == Some("f")))
}

/// A row of `pg_replication_slots`, as far as we judge it.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) plugin: Option<String>,
    pub(crate) in_this_database: bool,
    pub(crate) active_pid: Option<i32>,
    pub(crate) confirmed_flush: Option<Lsn>,
    pub(crate) two_phase: bool,
    pub(crate) invalid: Option<String>,
    pub(crate) wal_status: Option<String>,
    pub(crate) retained_bytes: Option<i64>,
    /// WAL that may still be written before the slot is lost; `None` for no limit.
    pub(crate) safe_wal_size: Option<i64>,
}

/// Looks a slot up.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Slot>> {
    let major = session.server_version().major();
    let reason = match major {
        17.. => "s.invalidation_reason",
        16 => "CASE WHEN s.conflicting THEN 'conflict with recovery' END",
        _ => "NULL::pg_catalog.text",
    };
    let two_phase = if major >= 14 { "s.two_phase" } else { "false" };
    let results = session
        .simple(&format!(
            "SELECT s.plugin, s.database = pg_catalog.current_database(), s.active_pid, \
             s.confirmed_flush_lsn, {two_phase}, s.wal_status, {reason}, \
             pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() \
               THEN pg_catalog.pg_last_wal_replay_lsn() \
               ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::pg_catalog.int8, \
             s.safe_wal_size \
             FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = {}",
            quote_literal(name)
        ))
        .map_err(|e| Failure::publisher(&e, &format!("looking at slot \"{name}\"")))?;
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    let lost = row.get(5) == Some("lost");
    Ok(Some(Slot {
        plugin: row.get(0).map(str::to_owned),
        in_this_database: row.get(1) == Some("t"),
        active_pid: row.get(2).map(|_| field(&row, 2)).transpose()?,
        confirmed_flush: row.get(3).map(|_| field(&row, 3)).transpose()?,
        two_phase: boolean(&row, 4)?,
        invalid: row
            .get(6)
            .map(str::to_owned)
            .or_else(|| lost.then(|| "required WAL was removed".to_owned())),
        wal_status: row.get(5).map(str::to_owned),
        retained_bytes: row.get(7).map(|_| field(&row, 7)).transpose()?,
        safe_wal_size: row.get(8).map(|_| field(&row, 8)).transpose()?,
    }))
}

/// Checks that the stream can go on from this slot without losing a change, and returns the
/// position to start at: always the slot's own, what was applied beyond it is skipped by LSN.
pub(crate) fn check_resume(name: &str, slot: Option<&Slot>, progress: Lsn) -> Result<Lsn> {
    let refuse = |what: String| Failure::new(Class::Slot, what);
    let rebuild = "What it had not sent is lost for the subscriber: drop the subscription (pgapace \
                   drop) and start it anew with empty tables.";
    let Some(slot) = slot else {
        return Err(refuse(format!("slot \"{name}\" does not exist on the publisher")).hint(
            "If the publisher is a promoted standby, its slots were not synchronised. \
             What was not sent is lost for the subscriber: drop the subscription (pgapace drop) and \
             start it anew with empty tables.",
        ));
    };
    if slot.plugin.as_deref() != Some("pgoutput") || !slot.in_this_database {
        return Err(refuse(format!(
            "slot \"{name}\" is not a pgoutput slot of the publisher's database"
        ))
        .hint("Check --slot and the database in --publisher."));
    }
    if let Some(reason) = &slot.invalid {
        return Err(refuse(format!("slot \"{name}\" was invalidated: {reason}")).hint(rebuild));
    }
    let confirmed = slot
        .confirmed_flush
        .ok_or_else(|| refuse(format!("slot \"{name}\" has no confirmed position")))?;
    if confirmed > progress {
        return Err(refuse(format!(
            "slot \"{name}\" has moved to {confirmed}, but the subscriber is applied only up to \
             {progress}: changes in between were skipped"
        ))
        .hint(
            "Something else consumed or advanced the slot, or the subscriber was restored from a \
               backup. Drop the subscription (pgapace drop) and start it anew with empty tables.",
        ));
    }
    Ok(confirmed)
}

/// Waits while somebody else uses the slot, usually our own walsender that has not noticed that
/// its connection is gone: it does within wal_sender_timeout.
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
            .hint("See pg_stat_replication on the publisher for who uses it."));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Ends the walsender of another process that runs this subscription, and of nobody else. Without
/// the privilege it is waited for: a walsender ends by itself within wal_sender_timeout.
pub(crate) fn end_user(
    session: &mut Session,
    slot: &str,
    subscription: &str,
    patience: Duration,
) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.pg_terminate_backend(s.active_pid) \
         FROM pg_catalog.pg_replication_slots s \
         JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid \
         WHERE s.slot_name = {} AND a.application_name = {}",
        quote_literal(slot),
        quote_literal(subscription)
    );
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        match session.simple(&sql) {
            Ok(results) if results.first().is_none_or(wire::Rows::is_empty) => break,
            // Again and again: the first signal has it say good-bye to a process that may not read,
            // and only another one takes it out of that wait (`ProcessClientWriteInterrupt`).
            Ok(_) => std::thread::sleep(Duration::from_millis(100)),
            Err(error) if error.sqlstate() == Some("42501") => {
                tracing::info!(
                    event = "walsender_not_terminated",
                    %error,
                    "could not terminate the walsender of the other process; waiting for it"
                );
                break;
            }
            Err(error) => {
                return Err(Failure::publisher(&error, "ending the other process's walsender"));
            }
        }
    }
    Ok(())
}

/// Has a slot that nobody uses send prepared transactions only when they are committed (18).
pub(crate) fn end_two_phase(session: &mut Session, name: &str) -> Result<()> {
    let sql = format!("ALTER_REPLICATION_SLOT {} (TWO_PHASE false)", quote_ident(name));
    session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, &format!("altering slot \"{name}\"")))?;
    Ok(())
}

/// Drops a slot; one that is not there is no error.
pub(crate) fn drop(session: &mut Session, name: &str) -> Result<bool> {
    match session.simple(&format!("DROP_REPLICATION_SLOT {} WAIT", quote_ident(name))) {
        Ok(_) => Ok(true),
        Err(error) if error.sqlstate() == Some("42704") => Ok(false),
        Err(error) => Err(Failure::publisher(&error, &format!("dropping slot \"{name}\""))),
    }
}

/// Options of the stream beside the protocol version.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamOptions {
    /// Leave out changes that carry a replication origin (16).
    pub(crate) origin_none: bool,
    /// Prepared transactions are sent at their PREPARE, from here on for ever: it is the slot that
    /// remembers this (15).
    pub(crate) two_phase: bool,
    /// Values come in the binary form of their types.
    pub(crate) binary: bool,
    /// When large transactions are sent; every supported version can while they run.
    pub(crate) streaming: Streaming,
}

/// The START_REPLICATION command with the best options of the server's version.
pub(crate) fn start_command(
    major: u32,
    slot: &str,
    from: Lsn,
    publications: &[String],
    options: &StreamOptions,
) -> String {
    let protocol = match major {
        16.. => 4,
        15 => 3,
        _ => 2,
    };
    let names: Vec<_> = publications.iter().map(|name| quote_ident(name)).collect();
    let mut sql = format!(
        "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '{protocol}', \
         publication_names {}",
        quote_ident(slot),
        quote_literal(&names.join(","))
    );
    if major >= 16 {
        sql.push_str(if options.origin_none { ", origin 'none'" } else { ", origin 'any'" });
    }
    if options.two_phase {
        sql.push_str(", two_phase 'on'");
    }
    if options.binary {
        sql.push_str(", binary 'true'");
    }
    match options.streaming {
        Streaming::Off => {}
        Streaming::On => sql.push_str(", streaming 'on'"),
        Streaming::Parallel => sql.push_str(", streaming 'parallel'"),
    }
    sql.push(')');
    sql
}

#[cfg(test)]
mod tests {
    use super::{Lsn, Slot, StreamOptions, Streaming, check_resume, start_command};
    use crate::error::Class;

    fn slot(confirmed: u64) -> Slot {
        Slot {
            plugin: Some("pgoutput".to_owned()),
            in_this_database: true,
            active_pid: None,
            confirmed_flush: Some(Lsn(confirmed)),
            two_phase: false,
            invalid: None,
            wal_status: None,
            retained_bytes: None,
            safe_wal_size: None,
        }
    }

    fn class(slot: Option<&Slot>) -> Option<Class> {
        check_resume("s", slot, Lsn(100)).err().map(|failure| failure.class)
    }

    #[test]
    fn a_slot_at_or_behind_progress_resumes_at_its_own_position() {
        assert_eq!(check_resume("s", Some(&slot(40)), Lsn(100)).ok(), Some(Lsn(40)));
        assert_eq!(check_resume("s", Some(&slot(100)), Lsn(100)).ok(), Some(Lsn(100)));
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
    fn options_follow_the_version() {
        let publications = ["p".to_owned(), "it's \"q\"".to_owned()];
        assert_eq!(
            start_command(14, "s", Lsn(16), &publications[..1], &StreamOptions::default()),
            "START_REPLICATION SLOT \"s\" LOGICAL 0/10 (proto_version '2', \
             publication_names '\"p\"')"
        );
        let options = StreamOptions {
            origin_none: true,
            two_phase: true,
            binary: true,
            streaming: Streaming::On,
        };
        let newest = start_command(18, "s", Lsn(16), &publications, &options);
        assert!(newest.contains("proto_version '4'"), "{newest}");
        assert!(newest.contains(r#"publication_names '"p","it''s ""q"""'"#), "{newest}");
        let last = "origin 'none', two_phase 'on', binary 'true', streaming 'on')";
        assert!(newest.ends_with(last), "{newest}");
    }
}
