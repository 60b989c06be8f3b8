//! Replication origins: only to tag commits, never as the source of truth (design 6).
//!
//! Tagged commits can be filtered by `origin = none` elsewhere, and carry the source's commit time.

use std::fmt::Display;
use std::time::{Duration, Instant};

use wire::{ServerError, Session};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::SubscriptionId;

/// How long an origin may still be held by a session that is ending.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// What the names of a subscription's origins begin with. Origins belong to the whole server,
/// subscription ids to one database, so the database is part of the name.
pub(crate) fn prefix(session: &mut Session, id: SubscriptionId) -> Result<String> {
    let rows = session
        .query(
            "SELECT d.oid FROM pg_catalog.pg_database d \
             WHERE d.datname = pg_catalog.current_database()",
            &[],
        )
        .map_err(|e| Failure::subscriber(&e, "naming the replication origin"))?;
    let row = rows.first().ok_or_else(|| Failure::internal("the database has no row"))?;
    let database: u32 = field(&row, 0)?;
    Ok(prefix_in(database, id))
}

/// The same, for the oid of the database.
pub(crate) fn prefix_in(database: impl Display, id: SubscriptionId) -> String {
    format!("pgapace_{database}_{}_", id.0)
}

/// Sets the session's origin, creating it when needed: one for each worker, because a session holds
/// its origin alone. `database`: the oid of the session's.
///
/// Without the privilege the reason is returned and the session goes on untagged.
pub(crate) fn attach(
    session: &mut Session,
    database: u32,
    id: SubscriptionId,
    worker: usize,
) -> Result<std::result::Result<(), String>> {
    let name = wire::quote_literal(&format!("{}{worker}", prefix_in(database, id)));
    // Asked first: what fails leaves an error in the server's log.
    let rows = session
        .query(&ASK_SQL.replace("{NAME}", &name), &[])
        .map_err(|e| Failure::subscriber(&e, "looking for the replication origin"))?;
    let row = rows.first().ok_or_else(|| Failure::internal("a query returned no row"))?;
    let refused = row.get(1).unwrap_or_default();
    if !refused.is_empty() {
        return Ok(Err(format!("permission denied for {refused} (SQLSTATE 42501)")));
    }
    let set_up = format!("SELECT pg_catalog.pg_replication_origin_session_setup({name})");
    let create = format!("SELECT pg_catalog.pg_replication_origin_create({name}); {set_up}");
    let mut attached = run(session, if boolean(&row, 0)? { &set_up } else { &create })?;
    if attached.is_ok() {
        // What resets is tried first: a statement that is refused must not leave anything behind.
        attached = run(
            session,
            "SELECT pg_catalog.pg_replication_origin_xact_reset(); \
             SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.now()), \
             pg_catalog.pg_replication_origin_xact_reset()",
        )?;
    }
    Ok(attached.map_err(|error| format!("{} (SQLSTATE {})", error.message, error.code)))
}

/// Whether there is an origin, and which functions for origins the role may not call.
const ASK_SQL: &str = "\
SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_replication_origin o WHERE o.roname = {NAME}),
       (SELECT pg_catalog.string_agg('function ' || p.proname, ', ' ORDER BY p.proname)
        FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n
                                WHERE n.nspname = 'pg_catalog')
          AND p.proname IN ('pg_replication_origin_create', 'pg_replication_origin_session_setup',
            'pg_replication_origin_xact_reset', 'pg_replication_origin_xact_setup')
          AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE'))";

/// What the server says to a statement about an origin.
fn run(
    session: &mut Session,
    statement: &str,
) -> Result<std::result::Result<(), Box<ServerError>>> {
    let deadline = Instant::now() + RELEASE_PATIENCE;
    loop {
        match session.simple(statement) {
            Ok(_) => return Ok(Ok(())),
            // An ending session gives its locks back, which the fence waits for, a moment before its
            // origin.
            Err(wire::Error::Server(error))
                if error.code == "55006" && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(wire::Error::Server(error)) => return Ok(Err(error)),
            Err(error) => {
                return Err(Failure::subscriber(&error, "setting the replication origin"));
            }
        }
    }
}

/// Removes the subscription's origins. Those that never existed do not matter.
pub(crate) fn drop_all(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "dropping the replication origin");
    let prefix = prefix(session, id)?;
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
