//! The snapshot that all sessions of a copy read under.

use pgoutput::Lsn;
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot::{self, CreatedSlot};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::SubscriptionId;

/// An exported snapshot and the LSN at which it was made: what committed before is in it, what
/// commits from there on is not. It lasts while the session that made its slot is in the transaction
/// that it began for that.
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

    /// Of a temporary slot, and the session that holds both, and reads under it.
    pub(crate) fn temporary(
        publisher: &Publisher,
        id: SubscriptionId,
        shutdown: &Shutdown,
    ) -> Result<(Self, Session)> {
        let mut holder = publisher.connect()?;
        let sessions = [holder.cancel_handle()];
        // It waits for the transactions that run on the publisher.
        let created = interruptible(shutdown, &sessions, "table sync", || {
            let name = slot::temporary_name(&mut holder, id)?;
            slot::create(&mut holder, &name, slot::Kind::Temporary)
        })?;
        Ok((Self::of_slot(&created), holder))
    }

    /// Opens a session that reads under the snapshot. An ordinary one: a walsender is not needed.
    pub(crate) fn open(&self, publisher: &Publisher) -> Result<Session> {
        let mut session = publisher.connect_to_look()?;
        self.import(&mut session, "")?;
        Ok(session)
    }

    /// Lets the session go that made the slot: nobody can import the snapshot any more.
    pub(crate) fn release(self, holder: &mut Session) -> Result<()> {
        holder.simple("COMMIT").map_err(|e| Failure::publisher(&e, "releasing the snapshot"))?;
        Ok(())
    }

    /// Starts a transaction under the snapshot; `before` is run first.
    pub(crate) fn import(&self, session: &mut Session, before: &str) -> Result<()> {
        let begin = slot::begin_reading(session.server_version().major());
        session
            .simple(&format!(
                "{before}{begin}; SET TRANSACTION SNAPSHOT {}",
                wire::quote_literal(&self.name)
            ))
            .map_err(|e| Failure::publisher(&e, "importing the snapshot"))?;
        Ok(())
    }
}
