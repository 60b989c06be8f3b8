//! What the leader records now and then: statistics, and what is out of date.

use std::time::{Duration, Instant};

use crate::apply::durability::DurabilityJob;
use crate::apply::leader::Leader;
use crate::subscriber::state::statistics::{Counters, Delta};

/// How often counters are written.
const STATISTICS_INTERVAL: Duration = Duration::from_secs(1);
/// The same while the leader only waits for the publisher: an idle subscription writes nothing (P9).
const IDLE_STATISTICS_INTERVAL: Duration = Duration::from_secs(60);

impl Leader<'_> {
    /// `goes_on`: whether the run has not failed.
    pub(super) fn write_statistics(&mut self, now: bool, goes_on: bool) {
        if !now && self.last_statistics.elapsed() < STATISTICS_INTERVAL {
            return;
        }
        self.around.counters.waits.add(&self.waits.take());
        self.around.counters.waits.add(&self.receiver.waits.take());
        self.around.counters.waits.add(&self.around.pool.take_waits());
        let positions = self.intake.progress.positions();
        let delta = Delta {
            counters: self.around.counters,
            received: positions.write,
            applied: positions.apply,
            flushed: positions.flush,
            spool: self.intake.incoming.spool().spool.used(),
            workers: self.around.pool.workers_in_use(),
            goes_on,
        };
        let mut news = delta;
        news.counters.waits.publisher = Duration::ZERO;
        let idle = self.reported == Some(news);
        if idle && !now && self.last_statistics.elapsed() < IDLE_STATISTICS_INTERVAL {
            return;
        }
        self.last_statistics = Instant::now();
        let modes = self.around.tables.take_modes();
        if !modes.is_empty() {
            self.around.durability.submit(DurabilityJob::Modes(modes));
        }
        let conflicts = std::mem::take(&mut self.conflicts);
        if !conflicts.is_empty() {
            self.around.durability.submit(DurabilityJob::Conflicts(conflicts));
        }
        if self.reported == Some(delta) {
            return;
        }
        self.around.counters = Counters::default();
        self.reported = Some(Delta { counters: Counters::default(), ..delta });
        self.around.durability.submit(DurabilityJob::Statistics(Box::new(delta)));
    }

    /// Removes progress rows that are not needed. Where commits are not durable, flushes do that.
    pub(super) fn remove_progress_rows(&mut self) {
        let committed = self.intake.progress.committed();
        if self.durable_commits && self.removed_before != committed {
            self.removed_before = committed;
            self.around.durability.submit(DurabilityJob::Remove(committed));
        }
    }

    /// A few at a time, so that commits do not wait behind it for long.
    pub(super) fn remove_old_conflicts(&mut self) {
        if let Some(age) = self.conflict_retention
            && self.remove_conflicts.is_some_and(|due| due <= Instant::now())
        {
            self.remove_conflicts = None;
            self.around.durability.submit(DurabilityJob::RemoveConflicts(age));
        }
    }

    /// A change of a subscriber's table that raises no error shows only in the catalogue.
    pub(super) fn look_at_the_schema(&mut self) {
        let applied = self.intake.progress.positions().apply;
        if self.schema_watch.is_due(applied) {
            let watched = self.around.tables.watched();
            self.around.durability.submit(DurabilityJob::Fingerprints(watched));
        }
    }
}
