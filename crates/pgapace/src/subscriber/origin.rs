//! Replication origins of the sessions that write replicated tables. They only tag commits.
//!
//! Another subscription can filter tagged commits with `origin = none`, and a tagged commit carries
//! the publisher's commit time. Progress is never read from an origin: since PostgreSQL 16 an
//! aborted transaction advances it too.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wire::{Rows, ServerError, Session, TransactionStatus};

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
    ASK_SQL
        .replace("{NAME}", &name(database, id, worker))
        .replace("{SETTING}", setting)
        .replace("{WITHOUT}", &tagging::without_origin_sql(database))
        .replace("{ID}", &id.0.to_string())
        .replace("{GRANT}", GRANT_SQL)
}

/// The replication origins that a session leaves free when it creates its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeftFree {
    /// For native subscriptions.
    pub(crate) reserve: i64,
    /// Whether one more is left to each other subscription of the database that has none: a further worker
    /// must not take the only origin of another subscription.
    pub(crate) one_each: bool,
}

/// Why the commits of a session stay untagged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Untagged {
    /// The role may not use origins, or the server refused one. `grant`: the SQL that allows it.
    Refused { reason: String, grant: Option<String> },
    /// No origin is free, or those that are free are left to others.
    Short(String),
}

impl Display for Untagged {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { reason, .. } | Self::Short(reason) => f.write_str(reason),
        }
    }
}

impl Untagged {
    /// The hint for a user: how commits get a tag, or how to do without. `leaves_some`: some origins are left to
    /// native subscriptions. `why` is a sentence: what untagged commits would cause.
    pub(crate) fn remedy(&self, leaves_some: bool, why: &str) -> String {
        const WITHOUT: &str = "or pass --tag-commits=false if there is no other direction.";
        let first = match self {
            // The comment lets the whole hint be pasted.
            Self::Refused { grant: Some(grant), .. } => {
                return format!("{grant} -- {WITHOUT} {why}");
            }
            Self::Refused { grant: None, .. } => {
                "Grant the role the origin functions (pgapace check prints the GRANT; docs/privileges.sql has it)"
            }
            Self::Short(_) => {
                "Raise max_replication_slots (max_active_replication_origins from 18 on)"
            }
        };
        let second = match self {
            Self::Short(_) if leaves_some => {
                ", pass --tag-commits=true to use those that are left to native subscriptions,"
            }
            _ => "",
        };
        format!("{why} {first}{second} {WITHOUT}")
    }

    fn by(error: &ServerError) -> Self {
        let reason = format!("{} (SQLSTATE {})", error.message, error.code);
        match error.code == sqlstate::CONFIGURATION_LIMIT_EXCEEDED {
            true => Self::Short(reason),
            false => Self::Refused { reason, grant: None },
        }
    }

    fn short(free: i64, session: &Session) -> Self {
        let setting = tagging::setting(session.server_version().major());
        let free = free.max(0);
        Self::Short(format!(
            "{free} replication origins are free ({setting}), and they are left to others"
        ))
    }

    /// Logs it, once until a commit of the subscription is tagged: each run finds the same. Who counts on tags must see
    /// that origins are short; that the role may not use them was a decision.
    pub(crate) fn log(&self, subscription: &str) {
        let is_short = matches!(self, Self::Short(_));
        if !logged().insert((subscription.to_owned(), is_short)) {
            return;
        }
        match self {
            Self::Refused { reason, .. } => tracing::info!(
                event = "commits_not_tagged",
                subscription,
                reason,
                "commits are not tagged with a replication origin"
            ),
            Self::Short(reason) => tracing::warn!(
                event = "origins_short",
                subscription,
                reason,
                "commits are not tagged, because replication origins are short"
            ),
        }
    }
}

/// Subscriptions of the process whose untagged commits were logged, and whether because origins are short.
fn logged() -> MutexGuard<'static, BTreeSet<(String, bool)>> {
    static LOGGED: Mutex<BTreeSet<(String, bool)>> = Mutex::new(BTreeSet::new());
    LOGGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The commits of this subscription are tagged. If they are not later, that is logged again.
pub(crate) fn commits_are_tagged(subscription: &str) {
    logged().retain(|(name, _)| name != subscription);
}

/// Sets the session's origin, and creates it if it does not exist. Each worker has its own origin,
/// because only one session can use an origin. `database` is the oid of the session's database.
/// `left_free`: an origin is created only if so many stay free. `asked` has the results of [`ask_sql`]:
/// privileges are checked first, because a failed call would log an error on the server.
///
/// Without the privilege, or without a free origin, the inner result holds the reason, and the session's
/// commits stay untagged.
pub(crate) fn attach(
    session: &mut Session,
    database: u32,
    id: SubscriptionId,
    worker: impl Display,
    left_free: Option<LeftFree>,
    asked: &[Rows],
) -> Result<std::result::Result<(), Untagged>> {
    let name = name(database, id, worker);
    let row = first_row(asked, "the query for the replication origin")?;
    let refused = row.get(1).unwrap_or_default();
    if !refused.is_empty() {
        let reason = format!("permission denied for {refused} (SQLSTATE 42501)");
        let grant = row.get(4).map(str::to_owned);
        return Ok(Err(Untagged::Refused { reason, grant }));
    }
    let (exists, free, without): (_, i64, i64) =
        (boolean(&row, 0)?, field(&row, 2)?, field(&row, 3)?);
    let set_up = format!("SELECT pg_catalog.pg_replication_origin_session_setup({name})");
    // The call that resets runs first, so that a statement that fails later leaves nothing behind.
    let try_out = "SELECT pg_catalog.pg_replication_origin_xact_reset(); \
                   SELECT pg_catalog.pg_replication_origin_xact_setup('0/0', pg_catalog.now()), \
                   pg_catalog.pg_replication_origin_xact_reset()";
    if exists {
        let attached = run(session, &format!("{set_up}; {try_out}"))?;
        return Ok(attached.map(drop).map_err(|error| Untagged::by(&error)));
    }
    let left = left_free.map(|it| it.reserve + if it.one_each { without } else { 0 });
    if left.is_some_and(|left| free <= left) {
        return Ok(Err(Untagged::short(free, session)));
    }
    let creating = create_sql(session, &name);
    let free: i64 = match run(session, &creating)? {
        Ok(results) => {
            let created = results.last().and_then(Rows::first);
            let none = || Failure::internal("creating a replication origin returned nothing");
            field(&created.ok_or_else(none)?, 0)?
        }
        Err(error) => {
            roll_back(session)?;
            return Ok(Err(Untagged::by(&error)));
        }
    };
    if left.is_some_and(|left| free < left) {
        roll_back(session)?;
        return Ok(Err(Untagged::short(free + 1, session)));
    }
    match run(session, &format!("{set_up}; COMMIT; {try_out}"))? {
        Ok(_) => Ok(Ok(())),
        Err(error) => {
            roll_back(session)?;
            Ok(Err(Untagged::by(&error)))
        }
    }
}

/// Begins a transaction that creates an origin, and returns how many more there may be beside it.
///
/// Sessions that start at the same time do not see each other's origins yet, and no lock that a role may
/// take covers all databases of the server. But the server gives out the lowest id that is free, and skips
/// those of transactions in progress too: all ids below the new one are taken.
fn create_sql(session: &Session, name: &str) -> String {
    let setting = tagging::setting(session.server_version().major());
    format!(
        "BEGIN; SELECT pg_catalog.current_setting('{setting}')::pg_catalog.int8 \
           OPERATOR(pg_catalog.-) created.id OPERATOR(pg_catalog.-) \
           (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_origin o \
            WHERE o.roident::pg_catalog.int8 OPERATOR(pg_catalog.>) created.id) \
         FROM (SELECT pg_catalog.pg_replication_origin_create({name})::pg_catalog.int8 AS id) created"
    )
}

fn roll_back(session: &mut Session) -> Result<()> {
    if session.transaction_status() == TransactionStatus::Idle {
        return Ok(());
    }
    session
        .simple("ROLLBACK")
        .map(drop)
        .map_err(|e| Failure::subscriber(&e, "setting the replication origin"))
}

/// The name of the origin of worker `worker`, as a literal.
fn name(database: u32, id: SubscriptionId, worker: impl Display) -> String {
    wire::quote_literal(&format!("{}{worker}", prefix_in(database, id)))
}

/// Whether the origin exists, which origin functions the role may not call, how many more origins
/// there may be, how many other subscriptions of the database have none, and the SQL that grants the functions.
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
         OPERATOR(pg_catalog.-) (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_origin),
       ({WITHOUT} AND s.id OPERATOR(pg_catalog.<>) {ID}),
       ({GRANT})";

/// The SQL that lets the role call the origin functions; NULL if it may call all.
pub(crate) const GRANT_SQL: &str = "\
SELECT 'GRANT EXECUTE ON FUNCTION '
         || pg_catalog.string_agg(p.oid::pg_catalog.regprocedure::pg_catalog.text, ', ' ORDER BY p.proname)
         || ' TO ' || pg_catalog.quote_ident(current_user::pg_catalog.text) || ';'
FROM pg_catalog.pg_proc p
WHERE p.pronamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pg_catalog')
  AND p.proname IN ('pg_replication_origin_create', 'pg_replication_origin_drop',
    'pg_replication_origin_oid', 'pg_replication_origin_session_reset',
    'pg_replication_origin_session_setup',
    'pg_replication_origin_xact_reset', 'pg_replication_origin_xact_setup')
  AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')";

/// Runs a statement about an origin. The inner error is the server's.
fn run(
    session: &mut Session,
    statement: &str,
) -> Result<std::result::Result<Vec<Rows>, Box<ServerError>>> {
    let deadline = Instant::now() + RELEASE_PATIENCE;
    loop {
        match session.simple(statement) {
            Ok(rows) => return Ok(Ok(rows)),
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
