//! Replication origins of the sessions that write replicated tables. They only tag commits.
//!
//! Another subscription can filter tagged commits with `origin = none`, and a tagged commit carries
//! the publisher's commit time. Progress is never read from an origin: since PostgreSQL 16 an
//! aborted transaction advances it too.

use std::fmt::Display;
use std::time::{Duration, Instant};

use wire::{Rows, ServerError, Session};

use crate::error::{Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::tagging;

/// How long a session that is ending may still hold an origin.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// Prefix of the names of all replication origins of pgapace.
pub(crate) const PREFIX: &str = "pgapace_";

/// The prefix of the names of a subscription's origins. Origins belong to the whole cluster and
/// subscription ids to one database, so the name contains the oid of the database.
pub(crate) fn prefix(session: &mut Session, id: SubscriptionId) -> Result<String> {
    Ok(prefix_in(database(session)?, id))
}

/// The oid of the session's database.
pub(crate) fn database(session: &mut Session) -> Result<u32> {
    let rows = session
        .query(
            "SELECT d.oid FROM pg_catalog.pg_database d \
             WHERE d.datname = pg_catalog.current_database()",
            &[],
        )
        .map_err(|e| Failure::subscriber(&e, "naming the replication origin"))?;
    let row = rows
        .first()
        .ok_or_else(|| Failure::internal("the current database has no row in pg_database"))?;
    field(&row, 0)
}

/// The same, for a known oid of the database.
pub(crate) fn prefix_in(database: impl Display, id: SubscriptionId) -> String {
    format!("{PREFIX}{database}_{}_", id.0)
}

/// The query for [`attach`]: about the origin of worker `worker`.
pub(crate) fn ask_sql(
    session: &Session,
    database: u32,
    id: SubscriptionId,
    worker: impl Display,
) -> String {
    let setting = tagging::setting(session.server_version().major());
    ASK_SQL.replace("{NAME}", &name(database, id, worker)).replace("{SETTING}", setting)
}

/// Sets the session's origin, and creates it if it does not exist. Each worker has its own origin,
/// because only one session can use an origin. `database` is the oid of the session's database.
/// `reserve`: an origin is created only if so many stay free. `asked` has the results of [`ask_sql`]:
/// privileges are checked first, because a failed call would log an error on the server.
///
/// Without the privilege, or without a free origin, the inner result holds the reason, and the session's
/// commits stay untagged.
pub(crate) fn attach(
    session: &mut Session,
    database: u32,
    id: SubscriptionId,
    worker: impl Display,
    reserve: Option<i64>,
    asked: &[Rows],
) -> Result<std::result::Result<(), String>> {
    let name = name(database, id, worker);
    let row = first_row(asked, "the query for the replication origin")?;
    let refused = row.get(1).unwrap_or_default();
    if !refused.is_empty() {
        return Ok(Err(format!("permission denied for {refused} (SQLSTATE 42501)")));
    }
    let (exists, free): (_, i64) = (boolean(&row, 0)?, field(&row, 2)?);
    if !exists && reserve.is_some_and(|reserve| free <= reserve) {
        let setting = tagging::setting(session.server_version().major());
        return Ok(Err(format!("{free} replication origins are free ({setting}), for others")));
    }
    let set_up = format!("SELECT pg_catalog.pg_replication_origin_session_setup({name})");
    let create = format!("SELECT pg_catalog.pg_replication_origin_create({name}); {set_up}");
    // The call that resets runs first, so that a statement that fails later leaves nothing behind.
    let try_out = "SELECT pg_catalog.pg_replication_origin_xact_reset(); \
                   SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.now()), \
                   pg_catalog.pg_replication_origin_xact_reset()";
    let attached = if exists {
        run(session, &format!("{set_up}; {try_out}"))?
    } else {
        match run(session, &create)? {
            Ok(()) => run(session, try_out)?,
            refused => refused,
        }
    };
    Ok(attached.map_err(|error| format!("{} (SQLSTATE {})", error.message, error.code)))
}

/// The name of the origin of worker `worker`, as a literal.
fn name(database: u32, id: SubscriptionId, worker: impl Display) -> String {
    wire::quote_literal(&format!("{}{worker}", prefix_in(database, id)))
}

/// Whether the origin exists, which origin functions the role may not call, and how many more origins
/// there may be.
const ASK_SQL: &str = "\
SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_replication_origin o WHERE o.roname = {NAME}),
       (SELECT pg_catalog.string_agg('function ' || p.proname, ', ' ORDER BY p.proname)
        FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n
                                WHERE n.nspname = 'pg_catalog')
          AND p.proname IN ('pg_replication_origin_create', 'pg_replication_origin_session_reset',
            'pg_replication_origin_session_setup',
            'pg_replication_origin_xact_reset', 'pg_replication_origin_xact_setup')
          AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')),
       pg_catalog.current_setting('{SETTING}')::pg_catalog.int8
         OPERATOR(pg_catalog.-) (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_origin)";

/// Runs a statement about an origin. The inner error is the server's.
fn run(
    session: &mut Session,
    statement: &str,
) -> Result<std::result::Result<(), Box<ServerError>>> {
    let deadline = Instant::now() + RELEASE_PATIENCE;
    loop {
        match session.simple(statement) {
            Ok(_) => return Ok(Ok(())),
            // A session that ends releases its locks, for which the fence waits, shortly before its
            // origin (55006: object_in_use).
            Err(wire::Error::Server(error))
                if error.code == sqlstate::OBJECT_IN_USE && Instant::now() < deadline =>
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

/// Whether the role may detach a session from its origin, and drop that.
pub(crate) const MAY_DROP_SQL: &str = "\
SELECT pg_catalog.count(*) OPERATOR(pg_catalog.=) 2 FROM pg_catalog.pg_proc p
WHERE p.pronamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pg_catalog')
  AND p.proname IN ('pg_replication_origin_session_reset', 'pg_replication_origin_drop')
  AND pg_catalog.has_function_privilege(p.oid, 'EXECUTE')";

/// Drops the origin of a session that ends: others may have the place. If it cannot be dropped, it stays.
pub(crate) fn release(
    session: &mut Session,
    database: u32,
    id: SubscriptionId,
    worker: impl Display,
) {
    let name = name(database, id, worker);
    // Asked first, because a failed call would log an error on the server.
    let may = session.query(MAY_DROP_SQL, &[]).ok().and_then(|rows| {
        let row = rows.first()?;
        boolean(&row, 0).ok()
    });
    if may != Some(true) {
        return;
    }
    let released = session.simple(&format!(
        "SELECT pg_catalog.pg_replication_origin_session_reset(); \
         SELECT pg_catalog.pg_replication_origin_drop({name})"
    ));
    if let Err(error) = released {
        tracing::debug!(name, %error, "a replication origin was left");
    }
}

/// Detaches a session from its origin, which stays.
pub(crate) fn detach(session: &mut Session) {
    let sql = "SELECT pg_catalog.pg_replication_origin_session_reset()";
    if let Err(error) = session.simple(sql) {
        tracing::debug!(%error, "a session keeps its replication origin");
    }
}

/// Drops origins that no session uses any more. If one of them is still in use, all stay.
pub(crate) fn drop_unused(session: &mut Session, names: &[&str]) -> Result<()> {
    let rows = session
        .query(MAY_DROP_SQL, &[])
        .map_err(|e| Failure::subscriber(&e, "checking privileges on replication origins"))?;
    if names.is_empty() || !rows.first().map_or(Ok(false), |row| boolean(&row, 0))? {
        return Ok(());
    }
    // The names were read a moment ago: another session may have dropped one meanwhile.
    let names: Vec<_> = names.iter().map(|name| wire::quote_literal(name)).collect();
    let sql = format!(
        "SELECT pg_catalog.pg_replication_origin_drop(o.roname) \
         FROM pg_catalog.pg_replication_origin o WHERE o.roname IN ({})",
        names.join(", ")
    );
    match session.simple(&sql) {
        Ok(_) => Ok(()),
        Err(wire::Error::Server(error)) => {
            tracing::debug!(%error, "replication origins were left");
            Ok(())
        }
        Err(error) => Err(Failure::subscriber(&error, "dropping replication origins")),
    }
}

/// Drops the origins of the subscription that exist.
pub(crate) fn drop_all(session: &mut Session, id: SubscriptionId) -> Result<()> {
    // Every role may read the catalogue, but calling the function needs a privilege. So it is
    // called only for origins that exist.
    for name in existing(session, id)? {
        session
            .query("SELECT pg_catalog.pg_replication_origin_drop($1)", &[Some(&name)])
            .map_err(|e| Failure::subscriber(&e, "dropping the replication origin"))?;
    }
    Ok(())
}

/// The same as far as the role may, and unless a session uses one of them: they are left to
/// [`Tagging::orphans`](tagging::Tagging::orphans) then.
pub(crate) fn drop_if_unused(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let names = existing(session, id)?;
    drop_unused(session, &names.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The names of the subscription's origins that exist.
fn existing(session: &mut Session, id: SubscriptionId) -> Result<Vec<String>> {
    let prefix = prefix(session, id)?;
    let rows = session
        .query(
            "SELECT roname FROM pg_catalog.pg_replication_origin \
             WHERE pg_catalog.starts_with(roname, $1)",
            &[Some(&prefix)],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the replication origins"))?;
    rows.iter().map(|row| field(&row, 0)).collect()
}
