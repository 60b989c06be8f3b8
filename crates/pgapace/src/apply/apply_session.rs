//! The sessions that apply changes: the identity of their commits, how they are opened and rolled back.

use std::time::Duration;

use engine::dispatch::Pacing;
use wire::{Session, TransactionStatus};

use crate::error::Result;
use crate::sqlstate;
use crate::subscriber::state::{SubscriptionId, ownership};

/// The subscription and epoch that the commits of a session belong to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) id: SubscriptionId,
    /// Whose progress its commits record: that of the subscription, or of a table that catches up.
    pub(crate) progress_of: SubscriptionId,
    pub(crate) epoch: i64,
    /// Whether the session has a replication origin.
    pub(crate) tagged: bool,
    /// How many replication origins stay free for others.
    pub(crate) origin_reserve: Option<i64>,
    /// Whether the origin of a worker that goes is dropped.
    pub(crate) drops_origin: bool,
    /// Whether the subscriber refuses a commit before its predecessor's.
    pub(crate) ordered: bool,
    /// Whether the database has Citus, and transactions need what [`crate::subscriber::citus`] says.
    pub(crate) citus: bool,
    /// The `client_encoding` of the session.
    pub(crate) encoding: &'static str,
    /// The oid of the subscriber database.
    pub(crate) database: u32,
    /// The backend of the control session, which owns the subscription.
    pub(crate) owner: i32,
    /// The longest measured round trip to the subscriber.
    pub(crate) round_trip: Duration,
}

impl Identity {
    /// Whether a round trip takes longer than the work of a small group. Then workers save round trips.
    pub(crate) fn is_far(&self) -> bool {
        Pacing::MEASURED.is_far(self.round_trip)
    }

    /// Whether the control session of this run still owns the subscription.
    pub(crate) fn still_owns(&self, session: &mut Session) -> Result<bool> {
        let owner = ownership::owner(session, self.id)?;
        Ok(owner.is_some_and(|owner| owner.pid == self.owner))
    }
}

/// A session that was lost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    /// The process id of its backend.
    pub(crate) backend: i32,
    /// Whether it had a replication origin.
    pub(crate) tagged: bool,
}

/// Opens a session with the statements of every transaction prepared on it. If it replaces a lost one,
/// the backend of that has ended when this returns.
pub(crate) type Connect = Box<dyn Fn(Option<Lost>) -> Result<(Session, Identity)> + Send>;

/// Rolls back the open transaction, if there is one.
pub(crate) fn roll_back(session: &mut Session) -> wire::Result<()> {
    while session.transaction_status() != TransactionStatus::Idle && !undo(session, "ROLLBACK")? {}
    Ok(())
}

/// Rolls back the changes behind the savepoint before the present part of a transaction.
pub(crate) fn roll_back_part(session: &mut Session) -> wire::Result<()> {
    while !undo(session, "ROLLBACK TO SAVEPOINT pgapace_part")? {}
    Ok(())
}

/// Whether it is undone. If not, a cancel request for an earlier statement came late.
fn undo(session: &mut Session, sql: &str) -> wire::Result<bool> {
    match session.simple(sql) {
        Ok(_) => Ok(true),
        Err(error) if error.sqlstate() == Some(sqlstate::QUERY_CANCELED) => Ok(false),
        Err(error) => Err(error),
    }
}
