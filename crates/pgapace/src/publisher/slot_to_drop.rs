//! The slot that a verb is about to drop, or to replace by another one.
//!
//! Behind that, the verb forgets the subscription or its progress, and nothing drops a slot that it has not found: the
//! slot would hold WAL for ever. So the verb must be connected to the server that has the slot, if it exists.

use std::time::Duration;

use pgoutput::Lsn;
use wire::Session;

use super::history::check_followed;
use super::session::{SystemIdentity, identify, is_standby};
use super::slot::{self, Slot};
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::{Subscription, progress};

const COPY: &str = "No process runs the subscription in this database. If the database is a copy of the subscriber, the \
     process of the original uses the slot: then pass --keep-slot to pgapace drop.";

/// Refuses another publisher than the one that the subscription follows, a server that a failover left behind, and a
/// standby without a slot of its own. `hint` is for another system or timeline. Returns the publisher's identity, and
/// the slot as soon as no session uses it, with whether one did.
pub(crate) fn find(
    source: &mut Session,
    row: &Subscription,
    hint: &str,
    patience: Duration,
    stopping: &dyn Fn() -> bool,
) -> Result<(SystemIdentity, Option<(Slot, bool)>)> {
    let system = identify(source)?;
    check_followed(source, &system, row, hint)?;
    let recovers = is_standby(source)?;
    let user = slot::find(source, &row.slot_name)?.and_then(|slot| slot.active_pid);
    if let Some(pid) = user {
        tracing::warn!(
            event = "slot_in_use",
            subscription = row.name,
            slot = row.slot_name,
            pid,
            "replication slot is in use, although no process runs the subscription in this database"
        );
    }
    let found =
        slot::wait_until_free(source, &row.slot_name, patience, stopping).map_err(|failure| {
            let busy = failure.class == Class::Busy;
            if busy { failure.detail(COPY) } else { failure }
        })?;
    slot::check_promoted(&row.slot_name, found.as_ref(), recovers)?;
    Ok((system, found.map(|found| (found, user.is_some()))))
}

/// How far the slot is ahead of what this database has applied: both positions. Nothing is acknowledged that is not
/// recorded here before, so such a slot is fed from another database, or this one was restored from a backup.
pub(crate) fn ahead(
    control: &mut Session,
    row: &Subscription,
    found: &Slot,
) -> Result<Option<(Lsn, Lsn)>> {
    let applied = progress::read(control, row.id)?.map(|applied| applied.through);
    Ok(found.confirmed_flush.zip(applied).filter(|(confirmed, applied)| confirmed > applied))
}

/// Refuses a slot that a session has used meanwhile, and that is ahead of this database.
pub(crate) fn check_of_original(
    control: &mut Session,
    row: &Subscription,
    found: &Slot,
) -> Result<()> {
    let Some((confirmed, applied)) = ahead(control, row, found)? else { return Ok(()) };
    let name = &row.slot_name;
    let message = format!(
        "slot \"{name}\" was in use, and has moved to {confirmed}, but this database has applied changes only up to \
         {applied}"
    );
    Err(Failure::new(Class::Slot, message)
        .detail("If the database is a copy of the subscriber, the process of the original uses the slot.")
        .hint("If the subscriber was restored from a backup, and nothing uses the slot any more: pgapace rebase again."))
}
