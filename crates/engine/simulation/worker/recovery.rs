//! Rolls groups back to repeat them, on the same session or on another one.

use engine::group::GroupSeq;
use engine::worker::Retry;

use crate::simulation::Sabotage;
use crate::simulation::subscriber::Command;
use crate::simulation::worker::encoded::Pending;
use crate::simulation::worker::{Around, Failure, Result, Worker};

impl Worker {
    pub(super) fn give_way(&mut self, group: GroupSeq, around: &mut Around<'_>) -> Result<()> {
        if !self.groups.can_give_way(group) {
            return Ok(());
        }
        around.note(|| format!("group {} gives way", group.0));
        self.start_recovery(Retry::GivenWay, around)
    }

    pub(super) fn start_recovery(&mut self, retry: Retry, around: &mut Around<'_>) -> Result<()> {
        let Some(needs_sync) = self.groups.start_recovery(retry) else { return Ok(()) };
        let (number, first) = (self.number, self.groups.first().map(|first| first.group.seq.0));
        around.note(|| format!("worker {number}: retries group {first:?}: {retry:?}"));
        if needs_sync {
            self.unsent.push(Command::Sync);
        }
        self.send(around)
    }

    pub(super) fn recover(&mut self, around: &mut Around<'_>) -> Result<()> {
        // The session does nothing else, so the reply comes at once.
        let session = &mut around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        session.commands.push_back(
            if self.groups.rolls_back_to_savepoint() && around.sabotage != Sabotage::PartsRolledBack
            {
                Command::RollbackTo(0)
            } else {
                Command::Rollback
            },
        );
        around.subscriber.step(self.number, around.history).map_err(Failure::Wrong)?;
        around.subscriber.sessions[self.number].replies.clear();
        self.groups.rolled_back();
        Ok(())
    }

    /// Goes on with a new session (`worker/lost_session.rs`).
    pub(super) fn reconnect(&mut self, around: &mut Around<'_>) -> Result<()> {
        if !self.groups.is_repeatable() {
            return Err(Failure::Run);
        }
        let session = around.subscriber.open_session();
        around.subscriber.sessions[self.number] = session;
        let is_recorded = |end| match around.sabotage {
            Sabotage::ForgottenCommit => Ok::<_, Failure>(false),
            Sabotage::AssumedCommit => Ok(true),
            _ => Ok(around.subscriber.is_recorded(end)),
        };
        let through = self.groups.committed_through(is_recorded)?;
        let mut took_effect = Vec::new();
        self.groups.lost(through, |_, replies, _| took_effect.extend(replies));
        for pending in took_effect {
            if let Pending::Sync(Some(commits)) | Pending::Commit(commits) = pending {
                self.transaction_committed(commits);
            }
        }
        self.unsent.clear();
        self.committed = None;
        Ok(())
    }
}
