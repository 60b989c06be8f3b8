//! Proof that a publisher is the server from which a native subscription reads: another one may have a slot of the
//! same name. With its position, the native subscription would skip transactions once it is handed back.
//!
//! The worker proves it by using the slot. Without a worker, the connection string of the subscription does, if
//! this role may read it and it leads to a server from here.

use std::time::Instant;

use wire::{Session, quote_ident};

use super::plan::{GRACE, LOOK_EVERY};
use super::subscription::{AdoptionFacts, conninfo, workers};
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::same_database::{self, DatabaseIdentity};
use crate::stopping::interrupt::abandonable;
use crate::stopping::shutdown::Shutdown;

/// Refuses a publisher that is proven to be another one. Returns why nothing could be proven. `name` is that of
/// pgapace's subscription.
pub(super) fn unproven(
    control: &mut Session,
    source: &mut Session,
    facts: &AdoptionFacts,
    (name, slot): (&str, &str),
    shutdown: &Shutdown,
) -> Result<Option<String>> {
    if worker_uses(control, source, facts, slot)? {
        return Ok(None);
    }
    let Some(text) = conninfo(control, facts.subscription.oid)? else {
        let reason = format!("role {} may not read its connection string", facts.role);
        return Ok(Some(reason));
    };
    // The error would repeat the text, which may have a password.
    let Ok(info) = crate::config::conninfo(&text) else {
        return Ok(Some("its connection string cannot be used here".to_owned()));
    };
    let publisher = Publisher::new(info, name, "UTF8");
    let reached = abandonable(shutdown, "connecting", move || publisher.connect())?;
    let identified = reached.and_then(|mut session| {
        let theirs = identity(&mut session)?;
        Ok((session, theirs))
    });
    let (mut reached, theirs) = match identified {
        Ok(identified) => identified,
        Err(failure) => {
            let reason =
                format!("its connection string leads nowhere from here: {}", failure.message);
            return Ok(Some(reason));
        }
    };
    let ours = identity(source)?;
    if same_database::is_same((&mut reached, &theirs), (source, &ours)) {
        return Ok(None);
    }
    let native = quote_ident(&facts.subscription.name);
    Err(Failure::new(
        Class::Config,
        format!(
            "--publisher is another database or server than that in the connection string of native subscription \
             {native}"
        ),
    )
    .hint(format!(
        "Check --publisher. If the connection string is outdated: ALTER SUBSCRIPTION {native} CONNECTION '…'; If it \
         leads to another server from here than from the subscriber: ALTER SUBSCRIPTION {native} ENABLE; and adopt \
         it while its worker runs."
    )))
}

/// Whether a worker runs, and uses the slot on this publisher. Refuses a publisher on which nobody uses it although a
/// worker runs.
fn worker_uses(
    control: &mut Session,
    source: &mut Session,
    facts: &AdoptionFacts,
    slot: &str,
) -> Result<bool> {
    let deadline = Instant::now() + GRACE;
    while !workers(control, facts.subscription.oid)?.is_empty() {
        if slot::find(source, slot)?.is_some_and(|slot| slot.active_pid.is_some()) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(
                Class::Config,
                format!(
                    "a worker of the native subscription runs, but nobody uses slot \"{slot}\" on this \
                     publisher"
                ),
            )
            .hint("Check --publisher: it is not the server that the native subscription reads from."));
        }
        // A worker that has just started does not use its slot yet.
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(false)
}

fn identity(session: &mut Session) -> Result<DatabaseIdentity> {
    DatabaseIdentity::of(session, Failure::publisher)
}
