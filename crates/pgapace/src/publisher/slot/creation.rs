//! Creates slots: a temporary one for its snapshot, or one to stream from, which the publisher must be able to decode.

use pgoutput::Lsn;
use wire::{Session, quote_ident};

use super::BEGIN_READING;
use super::alteration::supports_failover;
use super::end::{drop, drop_existing_sql};
use crate::error::{Failure, Result};
use crate::publisher::catalogue_changes;
use crate::sqlstate;
use crate::subscriber::catalogue::{field, first_row};

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
