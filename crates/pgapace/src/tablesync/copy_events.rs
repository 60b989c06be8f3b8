//! What the thread of a copy beside the stream tells the leader, and what the leader wants of it.
//!
//! The slot of a copy waits for transactions of the publisher. Meanwhile the deferred changes may fill the spool, and the
//! stream stops. If the publisher is synchronous, the commit of such a transaction waits for the stream: neither would
//! ever end. So the leader asks for a position at which the slot still waits. The snapshot will have everything that
//! commits before it, and such changes need not be kept ([`engine::deferred`]).
//!
//! Why the snapshot has it: a session of the publisher reads the position, and sees after that that the walsender waits for
//! the lock of a transaction (`SnapBuildWaitSnapshot` in `snapbuild.c`). This transaction is running in every
//! `xl_running_xacts` record up to there, so none of these records makes the slot consistent. The record that does is
//! written later, and the slot's consistent point is its end. A standby takes no such lock: there the stream waits.

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use pgoutput::Lsn;

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;

/// An event of a copy. The published tables are those among its tables.
pub(crate) enum CopyEvent {
    /// The slot of the next snapshot still waited for a transaction when the publisher was here.
    WaitedForAt(Lsn),
    /// Some tables are complete; the others are copied under another snapshot.
    Repeated(Vec<PublishedTable>),
    /// The copy has ended.
    Ended(Result<Vec<PublishedTable>>),
}

/// The side of the copy.
#[derive(Debug, Clone)]
pub(crate) struct CopyReports {
    events: Sender<CopyEvent>,
    /// The leader wants a position at which the slot waits.
    pub(super) wishes: Receiver<()>,
}

/// The side of the leader: a copy that runs while other tables stream.
pub(crate) struct Copying {
    events: Receiver<CopyEvent>,
    wishes: Sender<()>,
}

/// Both sides.
pub(super) fn channel() -> (CopyReports, Copying) {
    let (sender, events) = unbounded();
    let (wishes, wished) = bounded(1);
    (CopyReports { events: sender, wishes: wished }, Copying { events, wishes })
}

impl CopyReports {
    /// The leader may have ended.
    pub(super) fn tell(&self, event: CopyEvent) {
        drop(self.events.send(event));
    }
}

impl Copying {
    /// Asks for a position at which the slot waits, if it does, unless one was asked for that nobody has looked for.
    pub(super) fn ask_for_position(&self) {
        let _ = self.wishes.try_send(());
    }

    /// The next event, if there is one.
    pub(super) fn next(&self) -> Result<Option<CopyEvent>> {
        match self.events.try_recv() {
            Ok(event) => Ok(Some(event)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                Err(Failure::internal("the copy of a table panicked"))
            }
        }
    }
}
