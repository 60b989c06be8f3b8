//! Ends the use of a slot: waits for its walsender or terminates it, and drops the slot.

use std::time::{Duration, Instant};

use wire::{Session, quote_ident, quote_literal};

use super::{Slot, find};
use crate::error::{Class, Failure, Result};
use crate::login_role::terminate;
use crate::sqlstate;

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
