//! The row of a request in `pgapace.hand_over`.

use std::time::Duration;

use pgoutput::Lsn;
use wire::{Rows, Session};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::{SubscriptionId, advisory_lock};

/// How often a process that stands aside looks whether it may run again.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// A request to the process that runs a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// To give it up, and to end unless other subscriptions run in the process.
    HandOver,
    /// To give it up until the session that asks is gone.
    StandAside,
}

impl Request {
    pub(crate) fn of(stands_aside: bool) -> Self {
        if stands_aside { Self::StandAside } else { Self::HandOver }
    }
}

/// Key of the lock that a session holds while it asks for anything. Its process id alone would not do:
/// after a restart of the server another session may have the same.
const ASKS: &str = "pg_catalog.hashtext('pgapace.hand_over')";

/// SQL: whether the session that made the request `h` exists.
fn asks(id: SubscriptionId) -> String {
    format!(
        "EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE {} \
           AND l.objid::pg_catalog.int8 = {} AND l.pid = h.requester)",
        advisory_lock::is_held(ASKS),
        id.0
    )
}

/// Records a request to the present owner, in place of one whose session is gone. Returns whether it is
/// recorded.
///
/// The lock keeps the epoch from changing. So a process that starts at the same time finds the request
/// after it has incremented the epoch, or the request has the new epoch.
pub(super) fn insert(session: &mut Session, id: SubscriptionId, request: Request) -> Result<bool> {
    let lock = format!("SELECT pg_catalog.pg_advisory_lock_shared({ASKS}, {})", id.0);
    session.simple(&lock).map_err(|e| writing(&e))?;
    let sql = format!(
        "WITH s AS (SELECT id, epoch FROM pgapace.subscription WHERE id = {} FOR SHARE) \
         INSERT INTO pgapace.hand_over AS h (subscription, epoch, stands_aside) \
           SELECT id, epoch, {} FROM s \
         ON CONFLICT (subscription) DO UPDATE SET epoch = excluded.epoch, \
             stands_aside = excluded.stands_aside, requester = excluded.requester, \
             requested_at = excluded.requested_at, lsn = NULL, done_at = NULL \
           WHERE h.requester = excluded.requester OR NOT {} \
         RETURNING h.subscription",
        id.0,
        request == Request::StandAside,
        asks(id),
    );
    let rows = session.query(&sql, &[]).map_err(|e| writing(&e))?;
    Ok(!rows.is_empty())
}

/// SQL for the unanswered request to the process with this epoch, or to any process: stands_aside for
/// [`Request::of`], or no row. A request whose session is gone is none.
pub(crate) fn request_sql(owner: OwnedEpoch) -> String {
    format!(
        "SELECT stands_aside FROM pgapace.hand_over h \
         WHERE subscription = {} AND (epoch = {} OR stands_aside) AND done_at IS NULL AND {}",
        owner.id.0,
        owner.epoch,
        asks(owner.id)
    )
}

/// Records that the owner has given the subscription up, and up to which LSN transactions are durable; no
/// LSN if a transaction was rolled back.
pub(crate) fn done(session: &mut Session, id: SubscriptionId, lsn: Option<Lsn>) -> Result<()> {
    let lsn = lsn.map(|lsn| lsn.to_string());
    let sql = format!(
        "UPDATE pgapace.hand_over SET done_at = pg_catalog.clock_timestamp(), lsn = $1::pg_catalog.pg_lsn \
         WHERE subscription = {} AND done_at IS NULL",
        id.0
    );
    session.query(&sql, &[lsn.as_deref()]).map(drop).map_err(|e| writing(&e))
}

/// Reads the answer: the LSN up to which transactions are durable, unless one was rolled back.
pub(super) fn answer(session: &mut Session, id: SubscriptionId) -> Result<Option<Option<Lsn>>> {
    let sql = format!(
        "SELECT lsn FROM pgapace.hand_over WHERE subscription = {} AND done_at IS NOT NULL",
        id.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    rows.first().map(|row| row.get(0).map(|_| field(&row, 0)).transpose()).transpose()
}

pub(super) fn delete(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!(
        "DELETE FROM pgapace.hand_over WHERE subscription = {id} \
           AND requester = pg_catalog.pg_backend_pid(); \
         SELECT pg_catalog.pg_advisory_unlock_shared({ASKS}, {id})",
        id = id.0
    );
    session.simple(&sql).map(drop).map_err(|e| writing(&e))
}

/// The query for [`asked`]: requests of sessions that exist.
pub(crate) fn started_sql(id: SubscriptionId) -> String {
    format!(
        "SELECT epoch, stands_aside FROM pgapace.hand_over h WHERE subscription = {} AND {}",
        id.0,
        asks(id)
    )
}

/// The meaning of a request for a process that has just become the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtStart {
    /// The process must give the subscription up again.
    Obey(Request),
    /// The process that was asked is gone, and this one is the next.
    Fulfilled,
}

/// Whether a process that has just become the owner finds a request. `now` is its epoch, if it has one, and
/// `last` the one that it had before.
pub(crate) fn asked(
    results: &[Rows],
    now: Option<i64>,
    last: Option<i64>,
) -> Result<Option<AtStart>> {
    let Some(row) = results.first().and_then(Rows::first) else { return Ok(None) };
    let (epoch, request): (i64, _) = (field(&row, 0)?, Request::of(boolean(&row, 1)?));
    Ok(match request {
        Request::StandAside => Some(AtStart::Obey(request)),
        _ if last == Some(epoch) => Some(AtStart::Obey(request)),
        // It came after the epoch was incremented: the leader finds and obeys it.
        _ if now == Some(epoch) => None,
        Request::HandOver => Some(AtStart::Fulfilled),
    })
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading pgapace.hand_over")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing pgapace.hand_over")
}

/// Waits until no session asks processes to stand aside, or until `stopping`.
pub(crate) fn wait_aside(
    session: &mut Session,
    id: SubscriptionId,
    stopping: &dyn Fn() -> bool,
) -> Result<()> {
    loop {
        let results = session.simple(&started_sql(id)).map_err(|e| reading(&e))?;
        let asked = asked(&results, None, None)?;
        if asked != Some(AtStart::Obey(Request::StandAside)) || stopping() {
            return Ok(());
        }
        std::thread::sleep(BETWEEN_LOOKS);
    }
}
