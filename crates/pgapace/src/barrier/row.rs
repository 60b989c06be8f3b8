//! The row of a barrier in `pgapace.barrier`.

use std::time::Duration;

use pgoutput::Lsn;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::login_role::terminate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::session::{self, Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::repertoire::Repertoire;

/// A row of `pgapace.barrier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BarrierId(i64);

/// The request of a verb for a barrier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BarrierRequest {
    pub(super) id: BarrierId,
    /// Whether the stream waits until the row is deleted.
    pub(super) holds: bool,
    /// Maximum number of attempts. Each of them doubles the delay.
    pub(super) attempts: u32,
}

/// The state of a request.
#[derive(Debug, Clone)]
pub(super) enum BarrierState {
    /// No process has seen it.
    Requested,
    /// This backend of the publisher creates a slot. With an `lsn` the slot exists, and the subscriber is
    /// behind it.
    Creating { walsender: Option<i32>, lsn: Option<Lsn> },
    /// The snapshots can be imported.
    Ready { lsn: Lsn, publisher: String, subscriber: String },
    /// The barrier cannot be made.
    Failed { class: Class, message: String, hint: Option<String> },
}

/// Opens a session that writes such rows. Its commits wait for no synchronous standby: the stream may be held
/// meanwhile, and would be held until the standby is back. A start deletes the rows, so none is needed after a
/// failover.
pub(super) fn connect(subscriber: &Subscriber) -> Result<Session> {
    let mut session = subscriber.connect(Purpose::Control)?;
    session::commit_locally(&mut session)?;
    Ok(session)
}

/// Records a request.
pub(super) fn insert(
    session: &mut Session,
    subscription: SubscriptionId,
    holds: bool,
    attempts: u32,
) -> Result<BarrierId> {
    let sql = format!(
        "INSERT INTO pgapace.barrier (subscription, holds, attempts) \
         VALUES ({}, {holds}, {attempts}) RETURNING id",
        subscription.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| writing(&e))?;
    let row = rows.first().ok_or_else(|| Failure::internal("INSERT returned no row"))?;
    Ok(BarrierId(field(&row, 0)?))
}

/// The oldest request that is not served yet. Only the keeper serves requests, so an earlier keeper has
/// begun those that it finds at its start, and failed.
pub(super) fn find_request(
    session: &mut Session,
    subscription: SubscriptionId,
) -> Result<Option<BarrierRequest>> {
    let sql = format!(
        "SELECT id, holds, attempts FROM pgapace.barrier \
         WHERE subscription = {} AND state IN ('requested', 'creating') ORDER BY id LIMIT 1",
        subscription.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let request = |row: wire::Row<'_>| {
        Ok(BarrierRequest {
            id: BarrierId(field(&row, 0)?),
            holds: boolean(&row, 1)?,
            attempts: field(&row, 2)?,
        })
    };
    rows.first().map(request).transpose()
}

/// Reads the state of a request; `None` if its row was deleted.
pub(super) fn state(session: &mut Session, id: BarrierId) -> Result<Option<BarrierState>> {
    let sql = format!(
        "SELECT state, walsender, lsn, publisher_snapshot, subscriber_snapshot, message, hint, exit_code \
         FROM pgapace.barrier WHERE id = {}",
        id.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(match row.get(0) {
        Some("requested") => BarrierState::Requested,
        Some("creating") => BarrierState::Creating {
            walsender: row.get(1).map(|_| field(&row, 1)).transpose()?,
            lsn: row.get(2).map(|_| field(&row, 2)).transpose()?,
        },
        Some("ready") => BarrierState::Ready {
            lsn: field(&row, 2)?,
            publisher: field(&row, 3)?,
            subscriber: field(&row, 4)?,
        },
        _ => {
            let code = row.get(7).map(|_| field::<u8>(&row, 7)).transpose()?;
            BarrierState::Failed {
                class: code.and_then(Class::of_exit_code).unwrap_or(Class::Busy),
                message: field(&row, 5)?,
                hint: row.get(6).map(str::to_owned),
            }
        }
    }))
}

/// Whether a request exists, and the verb that made it.
pub(super) fn is_wanted(session: &mut Session, id: BarrierId) -> Result<bool> {
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pgapace.barrier b \
           JOIN pg_catalog.pg_stat_activity a ON a.pid = b.requester WHERE b.id = {})",
        id.0
    );
    let results = session.simple(&sql).map_err(|e| reading(&e))?;
    boolean(&first_row(&results, "EXISTS")?, 0)
}

/// Records the backend that creates the slot of a request.
pub(super) fn creating(session: &mut Session, id: BarrierId, walsender: i32) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.barrier SET state = 'creating', walsender = {walsender}, lsn = NULL \
         WHERE id = {}",
        id.0
    );
    session.simple(&sql).map(drop).map_err(|e| writing(&e))
}

/// Records that the publisher's snapshot exists; the subscriber may be behind it.
pub(super) fn created(session: &mut Session, id: BarrierId, lsn: Lsn) -> Result<()> {
    let sql = format!("UPDATE pgapace.barrier SET lsn = '{lsn}' WHERE id = {}", id.0);
    session.simple(&sql).map(drop).map_err(|e| writing(&e))
}

/// Records that the snapshots can be imported.
pub(super) fn ready(
    session: &mut Session,
    id: BarrierId,
    lsn: Lsn,
    publisher: &str,
    subscriber: &str,
) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.barrier SET state = 'ready', lsn = $1::pg_catalog.pg_lsn, \
           publisher_snapshot = $2, subscriber_snapshot = $3 WHERE id = {}",
        id.0
    );
    let lsn = lsn.to_string();
    let values = [Some(lsn.as_str()), Some(publisher), Some(subscriber)];
    session.query(&sql, &values).map(drop).map_err(|e| writing(&e))
}

/// Records that the request cannot be fulfilled.
pub(super) fn failed(session: &mut Session, id: BarrierId, failure: &Failure) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.barrier SET state = 'failed', message = $1, hint = $2, exit_code = {} WHERE id = {}",
        failure.class.exit_code(),
        id.0
    );
    let repertoire = Repertoire::of(session);
    let message = repertoire.storable(&failure.message);
    let hint = failure.hint.as_deref().map(|hint| repertoire.storable(hint));
    let values = [Some(&*message), hint.as_deref()];
    session.query(&sql, &values).map(drop).map_err(|e| writing(&e))
}

/// Deletes a row. Waits until a transaction that has locked it has ended. A transaction that lasts longer
/// than `patience` is terminated.
pub(super) fn delete(session: &mut Session, id: BarrierId, patience: Duration) -> Result<()> {
    let sql = format!(
        "SET lock_timeout = '{}ms'; DELETE FROM pgapace.barrier WHERE id = {}; SET lock_timeout = 0",
        patience.as_millis().max(1),
        id.0
    );
    match session.simple(&sql) {
        Ok(_) => Ok(()),
        Err(error) if error.sqlstate() == Some(crate::sqlstate::LOCK_NOT_AVAILABLE) => {
            // Only a verb of pgapace locks such a row, under the same role.
            let end = format!(
                "SELECT {} \
                 FROM (SELECT writer AS b FROM pgapace.barrier WHERE id = {} AND writer IS NOT NULL) w",
                terminate("b"),
                id.0
            );
            session.simple(&end).map_err(|e| writing(&e))?;
            let sql = format!("DELETE FROM pgapace.barrier WHERE id = {}", id.0);
            session.simple(&sql).map(drop).map_err(|e| writing(&e))
        }
        Err(error) => Err(writing(&error)),
    }
}

/// SQL that deletes the row of a barrier that is ready, in the transaction that writes while the stream is
/// held. The stream goes on when that transaction has ended.
pub(super) fn take_sql(id: BarrierId) -> String {
    format!("DELETE FROM pgapace.barrier WHERE id = {} AND state = 'ready' RETURNING id", id.0)
}

/// Records which backend writes while the stream is held.
pub(super) fn written_by(session: &mut Session, id: BarrierId, backend: i32) -> Result<()> {
    let sql = format!("UPDATE pgapace.barrier SET writer = {backend} WHERE id = {}", id.0);
    session.simple(&sql).map(drop).map_err(|e| writing(&e))
}

/// SQL that deletes the rows of earlier runs, before this one applies anything.
pub(crate) fn clear_sql(owner: OwnedEpoch) -> String {
    format!("DELETE FROM pgapace.barrier WHERE subscription = {}", owner.sql())
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading pgapace.barrier")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing pgapace.barrier")
}
