//! How pgapace creates the slot of a subscription so that it knows it again.
//!
//! Nothing in a slot tells who created it, and a subscription of another subscriber may use the
//! same name. After an interruption, pgapace must know whether it created the slot itself. So it
//! creates the slot in two steps. First a temporary slot provides the snapshot, and its position is
//! recorded on the subscriber. Then [`copy`] creates the slot at exactly that position. The server
//! writes WAL whenever it creates a new slot, so no other slot begins at that position
//! ([`is_ours`]).

use pgoutput::Lsn;
use wire::{Session, quote_literal};

use super::Slot;
use super::alteration::set_failover;
use super::end::drop;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::backend_pid;
use crate::sqlstate;
use crate::subscriber::state::SubscriptionId;

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

/// Creates the permanent slot from the temporary one that this session has just [created](super::create),
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
