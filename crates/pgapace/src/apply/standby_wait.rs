//! Sessions that wait for a synchronous standby of the subscriber (`synchronous_standby_names`), which may be gone.

use std::time::Duration;

use wire::{Session, quote_literal};

use crate::error::{Failure, Result};
use crate::login_role::as_login_role;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::{name_of_apply, name_of_durability};
use crate::subscriber::state::ownership::SESSION_LOCK;
use crate::subscriber::state::{SubscriptionId, advisory_lock};

/// The time after which such a wait is logged.
pub(crate) const TELL_AFTER: Duration = Duration::from_secs(4);

/// Whether this backend waits for a synchronous standby.
pub(crate) fn is_waiting(session: &mut Session, pid: i32) -> Result<bool> {
    let sql = format!(
        "SELECT FROM pg_catalog.pg_stat_get_activity({}) WHERE wait_event = 'SyncRep'",
        as_login_role(&pid.to_string())
    );
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "looking what a session waits for"))?;
    Ok(results.first().is_some_and(|rows| !rows.is_empty()))
}

/// For how many seconds a flush of the subscription has waited for a synchronous standby; `None` if none does, or if this
/// role may not see that.
pub(crate) fn of_flush(session: &mut Session, subscription: &str) -> Result<Option<f64>> {
    let sql = format!(
        "SELECT pg_catalog.max(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - query_start)) \
         FROM pg_catalog.pg_stat_activity WHERE datname = pg_catalog.current_database() \
           AND application_name = {} AND wait_event = 'SyncRep'",
        quote_literal(&name_of_durability(subscription))
    );
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "looking what a session waits for"))?;
    let row = first_row(&results, "an aggregate")?;
    row.get(0).map(|_| field(&row, 0)).transpose()
}

/// Ends the waits of the apply sessions of a run, and returns whether any waited. Their transactions are committed. The server
/// warns each session, so they are not taken for durable: a flush waits for the standbys.
pub(crate) fn end_of_apply(
    session: &mut Session,
    (id, subscription): (SubscriptionId, &str),
) -> Result<bool> {
    let sql = format!(
        "SELECT pg_catalog.pg_cancel_backend(a.pid) FROM pg_catalog.pg_locks l \
           CROSS JOIN LATERAL pg_catalog.pg_stat_get_activity({}) a \
         WHERE {} AND l.objid::pg_catalog.int8 = {} AND a.wait_event = 'SyncRep' \
           AND a.application_name = {}",
        as_login_role("l.pid"),
        advisory_lock::is_held(SESSION_LOCK),
        id.0,
        quote_literal(&name_of_apply(subscription))
    );
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "ending waits for a synchronous standby"))?;
    Ok(results.first().is_some_and(|rows| !rows.is_empty()))
}

/// Logs the wait of a session, by the name that it has in the log.
pub(crate) fn tell(subscription: &str, waiting: &str, pid: i32) {
    tracing::warn!(
        event = "synchronous_standby_wait",
        subscription,
        waiting,
        pid,
        "session waits for a synchronous standby of the subscriber"
    );
}
