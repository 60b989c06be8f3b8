//! Rolls the first group in flight back, with the groups that were sent behind it, to be executed
//! again.

use engine::group::GroupSeq;
use engine::worker::Retry;

use crate::apply::apply_session::{roll_back, roll_back_part};
use crate::apply::replies::RowCount;
use crate::apply::worker::session::WorkerSession;
use crate::error::{Failure, Result};
use crate::stopping::interrupt::cancel;

impl WorkerSession {
    /// An earlier group waits for locks of this one, which waits for its turn.
    pub(super) fn give_way(&mut self, group: GroupSeq) -> Result<()> {
        if !self.groups.can_give_way(group) {
            return Ok(());
        }
        tracing::debug!(group = group.0, "a group is rolled back for an earlier one");
        let busy = self.groups.expects_replies();
        self.start_recovery(Retry::GivenWay)?;
        if busy {
            cancel(&self.session.cancel_handle());
        }
        Ok(())
    }

    /// The first group in flight has failed.
    pub(super) fn start_recovery(&mut self, retry: Retry) -> Result<()> {
        let Some(needs_sync) = self.groups.start_recovery(retry) else { return Ok(()) };
        if self.groups.rolls_back_to_savepoint() {
            self.tally.roll_back_part();
            self.rows = RowCount::default();
        } else {
            self.forget_replies();
        }
        self.tally.count(|counters| match retry {
            Retry::Later => counters.retries += 1,
            Retry::GivenWay => counters.victims += 1,
            Retry::ByRows => counters.fallbacks += 1,
            Retry::Never => {}
        });
        if needs_sync {
            self.session.queue_sync();
        }
        self.send()
    }

    /// The transaction that was being answered is rolled back.
    pub(super) fn forget_replies(&mut self) {
        self.tally.roll_back();
        self.rows = RowCount::default();
    }

    /// All replies are there after a failure: rolls back, and queues the groups again.
    pub(super) fn recover(&mut self) -> Result<()> {
        let rolled_back = if self.groups.rolls_back_to_savepoint() {
            roll_back_part(&mut self.session)
        } else {
            roll_back(&mut self.session)
        };
        rolled_back.map_err(|e| Failure::subscriber(&e, "rolling back a group"))?;
        if let Some(first) = self.groups.first() {
            self.encoder.forget_after(&mut self.session, first.position.clone());
        }
        if let Some((at, error)) = self.offense.take() {
            return Err(self.name_conflict(at, &error)?);
        }
        self.groups.rolled_back();
        Ok(())
    }
}
