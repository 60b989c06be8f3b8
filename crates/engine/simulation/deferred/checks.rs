//! Checks that the table has its rows, and that no position is acknowledged too early.

use engine::table_sync::TableSyncState;

use crate::simulation::deferred::{Subscriber, World};

impl World<'_> {
    pub(super) fn acknowledge(&mut self) -> Result<(), String> {
        let flush = self.run.positions().flush;
        let lacks = self.history.transactions.iter().any(|one| {
            one.end_lsn <= flush
                && one.changes.iter().any(|change| change.touches(self.table))
                && !self.durable.has(one.commit_lsn, one.end_lsn)
                && !(self.synchronous && self.durable.is_copied_again(flush))
        });
        if lacks {
            let Subscriber { state, sync_lsn, through, progress, .. } = &self.durable;
            return Err(format!(
                "P4: {flush} is acknowledged, and a table lacks changes before it: it is in state {}, \
                 has sync_lsn {sync_lsn} and progress {through}, others {progress}",
                state.name()
            ));
        }
        self.acknowledged = self.acknowledged.max(flush);
        Ok(())
    }

    /// The table has exactly what it should.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.now.state.is_copied() {
            return Ok(());
        }
        let mut expected =
            self.history.rows_of(self.table, |one| self.now.has(one.commit_lsn, one.end_lsn));
        let mut rows = self.now.rows.clone();
        expected.sort_unstable();
        rows.sort_unstable();
        if rows != expected {
            let state = self.now.state.name();
            return Err(format!("P5: a table in state {state} has {rows:?}, not {expected:?}"));
        }
        Ok(())
    }

    pub(super) fn is_through(&self) -> bool {
        self.run.is_through()
            && self.run.intake.deferred.tables().is_empty()
            && !self.now.requested
            && self.requests == 0
            && self.now.progress == self.durable.progress
            && self.now.state == self.durable.state
    }

    pub(super) fn check_the_end(&self) -> Result<(), String> {
        if self.now.state != TableSyncState::Ready {
            return Err(format!("in the end a table is in state {}", self.now.state.name()));
        }
        let held = self.history.preparations.iter().filter(|one| one.ended.is_none()).count();
        let open = self.history.spans.iter().filter(|one| one.end.is_none()).count();
        if self.run.intake.incoming.spool().len() > held + open {
            return Err("P6: in the end files are left".to_owned());
        }
        Ok(())
    }
}
