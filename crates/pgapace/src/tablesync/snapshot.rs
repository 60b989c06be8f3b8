//! The snapshot under which all sessions of a copy read.

use pgoutput::Lsn;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot::{self, CreatedSlot};
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::tablesync::SyncContext;
use crate::tablesync::published_before::PublishedBefore;
use crate::tablesync::slot_wait::SlotWait;

/// An exported snapshot with its LSN: it contains transactions that committed before the LSN, and
/// none that commit later. It can be imported until the session that created its slot ends its
/// transaction.
#[derive(Debug)]
pub(crate) struct Snapshot {
    name: String,
    pub(crate) lsn: Lsn,
    /// The name of the temporary slot that was created for it.
    temporary: Option<String>,
}

/// A temporary slot, and the LSN of the snapshot with which it was created.
#[derive(Debug)]
pub(super) struct TemporarySlot {
    pub(super) name: String,
    pub(super) snapshot_lsn: Lsn,
}

impl Snapshot {
    /// The snapshot of the subscription's slot, held by the session that created the slot.
    pub(crate) fn of_slot(created: &CreatedSlot) -> Self {
        Self { name: created.snapshot.clone(), lsn: created.consistent_point, temporary: None }
    }

    /// The name under which other sessions import it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Creates a temporary slot with a snapshot. The returned session holds both, and reads under
    /// the snapshot. Also returns how tables were published before.
    pub(super) fn temporary(context: SyncContext<'_>) -> Result<(Self, Session, PublishedBefore)> {
        let SyncContext { publisher, publications, subscription, id, shutdown, .. } = context;
        let mut holder = publisher.connect()?;
        let _told = SlotWait::watch(publisher, subscription, &holder, context.reports);
        let sessions = [holder.cancel_handle()];
        // Waits for running transactions on the publisher.
        let (name, before, created) = interruptible(shutdown, &sessions, "table sync", || {
            let name = slot::temporary_name(&mut holder, id)?;
            let before = PublishedBefore::read(&mut holder, publications)?;
            let created = slot::create(&mut holder, &name, slot::Kind::Temporary)?;
            Ok((name, before, created))
        })?;
        Ok((Self { temporary: Some(name), ..Self::of_slot(&created) }, holder, before))
    }

    /// Opens a session that reads under the snapshot. An ordinary session is enough; it uses no
    /// walsender.
    pub(crate) fn open(&self, publisher: &Publisher) -> Result<Session> {
        let mut session = publisher.connect_to_look()?;
        self.import(&mut session)?;
        Ok(session)
    }

    /// The temporary slot that was created for it, which stays until its session ends.
    pub(super) fn temporary_slot(&self) -> Option<TemporarySlot> {
        let name = self.temporary.clone()?;
        Some(TemporarySlot { name, snapshot_lsn: self.lsn })
    }

    /// Releases the snapshot: no session can import it any more.
    pub(crate) fn release(self, holder: &mut Session) -> Result<()> {
        holder.simple("COMMIT").map_err(|e| Failure::publisher(&e, "releasing the snapshot"))?;
        Ok(())
    }

    /// Begins a transaction under the snapshot.
    pub(crate) fn import(&self, session: &mut Session) -> Result<()> {
        session
            .simple(&format!(
                "{}; SET TRANSACTION SNAPSHOT {}",
                slot::BEGIN_READING,
                wire::quote_literal(&self.name)
            ))
            .map_err(|e| match e.sqlstate() {
                // Servers of different versions report one or the other.
                Some(sqlstate::INVALID_PARAMETER_VALUE | sqlstate::UNDEFINED_OBJECT) => lost(),
                _ => Failure::publisher(&e, "importing the snapshot"),
            })?;
        Ok(())
    }
}

/// The failure of a copy whose snapshot no session can import any more.
pub(super) fn lost() -> Failure {
    Failure::new(Class::Publisher, "publisher: the session that holds the snapshot was lost")
        .detail("Copied tables stay; the others are copied under another snapshot.")
        .not_serving()
}
