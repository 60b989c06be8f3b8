//! Replication origins: only to tag commits, never as the source of truth (design 6).
//!
//! Tagged commits can be filtered by `origin = none` elsewhere, and carry the source's commit time.

use wire::Session;

use crate::error::{Failure, Result};
use crate::target::state::SubscriptionId;

/// Name of the origin of a subscription's apply session.
pub(crate) fn name(id: SubscriptionId) -> String {
    format!("pgapace_{}_0", id.0)
}

/// Sets the session's origin, creating it when needed.
///
/// Without the privilege the reason is returned and the session goes on untagged.
pub(crate) fn attach(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<std::result::Result<(), String>> {
    let name = wire::quote_literal(&name(id));
    // A failed statement must not leave anything behind, so each is its own.
    let statements = [
        format!(
            "SELECT pg_catalog.pg_replication_origin_create({name}) \
             WHERE pg_catalog.pg_replication_origin_oid({name}) IS NULL"
        ),
        format!("SELECT pg_catalog.pg_replication_origin_session_setup({name})"),
        "SELECT pg_catalog.pg_replication_origin_xact_reset()".to_owned(),
        "SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.now()), \
         pg_catalog.pg_replication_origin_xact_reset()"
            .to_owned(),
    ];
    for statement in statements {
        match session.simple(&statement) {
            Ok(_) => {}
            Err(wire::Error::Server(error)) => {
                return Ok(Err(format!("{} (SQLSTATE {})", error.message, error.code)));
            }
            Err(error) => return Err(Failure::target(&error, "setting the replication origin")),
        }
    }
    Ok(Ok(()))
}

/// Removes the subscription's origins. Those that never existed do not matter.
pub(crate) fn drop_all(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let failed = |e: &wire::Error| Failure::target(e, "dropping the replication origin");
    let prefix = format!("pgapace_{}_", id.0);
    // The catalogue is readable by all, the function only with privilege, and then only if needed.
    let rows = session
        .query(
            "SELECT roname FROM pg_catalog.pg_replication_origin \
             WHERE pg_catalog.starts_with(roname, $1)",
            &[Some(&prefix)],
        )
        .map_err(|e| failed(&e))?;
    for row in rows.iter() {
        session
            .query("SELECT pg_catalog.pg_replication_origin_drop($1)", &[row.get(0)])
            .map_err(|e| failed(&e))?;
    }
    Ok(())
}
