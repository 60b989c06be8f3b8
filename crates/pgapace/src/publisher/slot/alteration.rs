//! ALTER_REPLICATION_SLOT: properties of a slot that exists.

use wire::{Session, quote_ident};

use crate::error::{Failure, Result};
use crate::publisher::session::is_standby;

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

/// Whether the server can synchronize slots to standbys: 17 or later, and not a standby.
pub(super) fn supports_failover(session: &mut Session) -> Result<bool> {
    if session.server_version().major() < 17 {
        return Ok(false);
    }
    Ok(!is_standby(session)?)
}

/// Makes an inactive slot send prepared transactions only when they are committed (18 or later).
pub(crate) fn end_two_phase(session: &mut Session, name: &str) -> Result<()> {
    let sql = format!("ALTER_REPLICATION_SLOT {} (TWO_PHASE false)", quote_ident(name));
    session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, &format!("altering slot \"{name}\"")))?;
    Ok(())
}
