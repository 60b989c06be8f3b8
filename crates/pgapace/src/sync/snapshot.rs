//! The snapshot that all sessions of a copy read under.

use pgoutput::Lsn;
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::{Publisher, backend_pid};
use crate::publisher::slot::{self, CreatedSlot};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::target::state::SubscriptionId;

/// An exported snapshot and the LSN at which it was made: what committed before is in it, what
/// commits from there on is not. It lasts while the session that made its slot stays idle.
#[derive(Debug)]
pub(crate) struct Snapshot {
    name: String,
    pub(crate) lsn: Lsn,
}

impl Snapshot {
    /// That of the subscription's slot, held by whoever created it.
    pub(crate) fn of_slot(created: &CreatedSlot) -> Self {
        Self { name: created.snapshot.clone(), lsn: created.consistent_point }
    }

    /// Of a temporary slot, and the session that both end with.
    pub(crate) fn temporary(
        publisher: &Publisher,
        id: SubscriptionId,
        shutdown: &Shutdown,
    ) -> Result<(Self, Session)> {
        let mut holder = publisher.connect()?;
        let sessions = [holder.cancel_handle()];
        // It waits for the transactions that run on the publisher.
        let created = interruptible(shutdown, &sessions, "table sync", || {
            // Two subscriptions may have one id, on two targets, and one process: not one session.
            let name = format!("pgapace_sync_{}_{}", id.0, backend_pid(&mut holder)?);
            slot::create(&mut holder, &name, slot::Kind::Temporary)
        })?;
        Ok((Self::of_slot(&created), holder))
    }

    /// Opens a session that reads under the snapshot. An ordinary one: a walsender is not needed.
    pub(crate) fn open(&self, publisher: &Publisher) -> Result<Session> {
        let mut session = publisher.connect_to_look()?;
        let before = if session.server_version().major() >= 17 {
            "SET transaction_timeout = 0; "
        } else {
            ""
        };
        self.import(&mut session, before)?;
        Ok(session)
    }

    /// Starts a transaction under the snapshot; `before` is run first.
    pub(crate) fn import(&self, session: &mut Session, before: &str) -> Result<()> {
        session
            .simple(&format!(
                "{before}BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; \
                 SET TRANSACTION SNAPSHOT {}",
                wire::quote_literal(&self.name)
            ))
            .map_err(|e| Failure::publisher(&e, "importing the snapshot"))?;
        Ok(())
    }
}
