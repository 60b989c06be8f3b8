//! Periodic work of the leader: it writes statistics, and removes rows that are out of date.

use std::time::{Duration, Instant};

use crate::apply::bookkeeping::{BookkeepingJob, Fingerprints, Statistics};
use crate::apply::leader::{Leader, Outcome};
use crate::observe::board::{Posted, wall};
use crate::observe::events;
use crate::observe::figures::{Figures, Observation, TableDelta, ThreadWaits};
use crate::observe::history::Point;
use crate::observe::ledger::keep_slowest;
use crate::subscriber::state::statistics::{Counters, Delta, ErrorsOver, WaitTimes};

/// How often figures are made and counters are written.
const STATISTICS_INTERVAL: Duration = Duration::from_secs(1);
/// How often they are written while nothing happens but rates of the last minute are not zero.
const SLOWING_INTERVAL: Duration = Duration::from_secs(10);
/// The same while the leader only waits for the publisher: an idle subscription writes nothing (P9).
const IDLE_STATISTICS_INTERVAL: Duration = Duration::from_secs(60);

/// The same while the publisher has WAL of which nothing arrives: the lag grows. As often as the publisher is asked.
const LAGGING_INTERVAL: Duration = Duration::from_secs(3);

/// How long after these figures the next ones are written, if nothing happens.
fn interval_after(figures: &Figures) -> Duration {
    if figures.is_kept_from_receiving() {
        LAGGING_INTERVAL
    } else if figures.is_moving() {
        SLOWING_INTERVAL
    } else {
        IDLE_STATISTICS_INTERVAL
    }
}

impl Leader<'_> {
    /// The lag is as exact as this is frequent.
    pub(super) fn note_decoded(&mut self) {
        self.watched.decoded(self.intake.progress.last_dispatched());
    }

    /// Makes figures, and writes them if they are news.
    pub(super) fn write_statistics(&mut self) {
        self.show(false, ErrorsOver::BeforeApplied);
    }

    /// The last statistics of a run that has failed.
    pub(super) fn write_of_failed_run(&mut self) {
        self.show(true, ErrorsOver::None);
    }

    /// The last statistics of any other run.
    pub(super) fn write_last_statistics(&mut self, outcome: Outcome) {
        self.show(
            true,
            match outcome {
                Outcome::Reached => ErrorsOver::ThroughApplied,
                _ => ErrorsOver::BeforeApplied,
            },
        );
    }

    /// `now`: even if they are no news. `over`: which errors of earlier runs are over, unless it has caught up.
    fn show(&mut self, now: bool, over: ErrorsOver) {
        if !now && !self.watched.is_due(STATISTICS_INTERVAL) {
            return;
        }
        let first = self.watched.observed.is_none();
        let (figures, delta) = self.observe(over);
        if (first || self.watched.is_writing) && !now {
            return;
        }
        let mut news = delta;
        (news.counters.waits.publisher, news.counters.waits.idle) =
            (Duration::ZERO, Duration::ZERO);
        let watched = &self.watched;
        // The wait of a copy changes no count.
        let blockers_are_news = watched.blockers != figures.blockers;
        let idle = watched.reported == Some(news)
            && watched.counts.is_empty()
            && watched.events.is_empty()
            && !blockers_are_news;
        let interval = interval_after(&figures);
        // Whoever reads the last figures relies on what they say about the next ones.
        let due_in = interval.min(watched.next_due_in);
        if idle && !now && watched.written.elapsed() < due_in {
            return;
        }
        let modes = self.around.tables.take_modes();
        BookkeepingJob::modes(&modes).for_each(|job| self.around.durability.bookkeep(job));
        let conflicts = std::mem::take(&mut self.conflicts);
        if !conflicts.is_empty() {
            self.around.durability.bookkeep(BookkeepingJob::Conflicts(conflicts));
        }
        if !now && !self.watched.may_write() {
            return;
        }
        self.watched.written = Instant::now();
        if self.watched.reported == Some(delta)
            && self.watched.events.is_empty()
            && !blockers_are_news
        {
            return;
        }
        self.watched.blockers.clone_from(&figures.blockers);
        self.watched.counters = Counters::default();
        self.watched.reported = Some(Delta { counters: Counters::default(), ..delta });
        self.watched.next_due_in = self.watched.due_after(interval);
        let point = self.watched.points.is_due().then(|| Point::of(&figures));
        let counts = std::mem::take(&mut self.watched.counts);
        if point.is_some() {
            let board = self.watched.board.clone();
            self.around.durability.bookkeep(BookkeepingJob::TableStates(board));
        }
        let events = std::mem::take(&mut self.watched.events);
        let event_retention = self.watched.event_retention;
        let statistics = Statistics { delta, figures, counts, point, events, event_retention };
        self.watched.is_writing = true;
        self.around.durability.bookkeep(BookkeepingJob::Statistics(Box::new(statistics)));
    }

    /// Takes the counts and waits since the last call, and shows them on the board.
    fn observe(&mut self, over: ErrorsOver) -> (Figures, Delta) {
        self.watched.observed = Some(Instant::now());
        let threads = self.take_waits();
        let counters = std::mem::take(&mut self.around.counters);
        let mut counts = self.around.pool.take_counts();
        counts.add(self.watched.ledger.take());
        let positions = self.intake.progress.positions();
        let (memory_bytes, memory_limit) = self.receiver.memory.used();
        let tables = counts
            .tables
            .iter()
            .map(|(name, changes)| TableDelta { name: name.clone(), changes: changes.total() });
        self.watched.slow_groups.extend(self.around.pool.take_slowest());
        keep_slowest(&mut self.watched.slow_groups);
        let decoded = self.around.decoded;
        // Between two transactions, all that is received is decoded.
        let in_transaction = self.intake.incoming.in_transaction() || !self.rest.is_empty();
        let dispatched = self.intake.progress.last_dispatched();
        let decoded_lsn = if in_transaction { dispatched } else { positions.write.max(dispatched) };
        let spool = self.intake.incoming.spool().spool.used();
        let seen = Observation {
            wall: wall(),
            received: positions.write,
            received_bytes: self.watched.received_bytes,
            decoded: decoded_lsn,
            decoded_transactions: decoded.transactions,
            decoded_changes: decoded.changes,
            committed: self.intake.progress.committed().max(positions.apply),
            durable: positions.flush,
            durable_counts: self.watched.durable,
            counters,
            publisher: self.watch.seen(),
            threads,
            workers: self.around.pool.workers_now(),
            blockers: self.around.pool.blockers_now(),
            memory_bytes,
            memory_limit,
            spool,
            tables: tables.collect(),
            slow_groups: self.watched.slow_groups.clone(),
        };
        // The publisher was asked after the start of the run.
        let end = seen.publisher.as_ref().map(|publisher| publisher.lsn);
        self.watched.has_caught_up |=
            end.is_some_and(|end| end <= positions.apply) && self.is_quiet();
        let over = match over {
            ErrorsOver::None => over,
            _ if self.watched.has_caught_up => ErrorsOver::All,
            _ => over,
        };
        let at = self.now();
        let mut figures = self.watched.collector.observe(at, &seen);
        let (read_at, error) = self.around.table_sync.refreshes();
        (figures.publications_read_at, figures.refresh_error) =
            (Some(read_at), error.map(str::to_owned));
        let watched = &mut self.watched;
        figures.next_due_in = Some(watched.due_after(interval_after(&figures)).as_secs_f64());
        let received = watched.received_bytes - watched.posted_bytes;
        watched.posted_bytes = watched.received_bytes;
        watched.board.post(Posted {
            figures: figures.clone(),
            counters,
            received_bytes: received,
            retries: counts.retries.clone(),
            applied: positions.apply,
            over,
        });
        watched.summaries.add(&watched.subscription, &counters, &figures);
        events::add(&mut watched.events, events::take_pending(&watched.subscription));
        watched.counters.add(&counters);
        watched.counts.add(counts);
        let delta = Delta {
            counters: watched.counters,
            received: positions.write,
            applied: positions.apply,
            flushed: positions.flush,
            spool,
            workers: self.around.pool.workers_in_use(),
            over,
        };
        (figures, delta)
    }

    /// The time that each thread waited, by reason. The sums over all threads go to the counters.
    fn take_waits(&mut self) -> Vec<ThreadWaits> {
        let (leader, receiver) = (self.waits.take(), self.receiver.waits.take());
        let workers = self.around.pool.take_waits();
        let sums = &mut self.around.counters.waits;
        // Its wait for the subscriber is that of the workers.
        sums.add(&WaitTimes { subscriber: Duration::ZERO, ..leader });
        sums.add(&receiver);
        workers.iter().for_each(|(_, waits)| sums.add(waits));
        sums.add(&self.around.pool.take_lock_waits());
        let thread = |name: &str, waits| ThreadWaits { thread: name.to_owned(), waits };
        let mut threads = vec![thread("leader", leader), thread("receiver", receiver)];
        threads.extend(workers.into_iter().map(|(n, waits)| thread(&format!("apply {n}"), waits)));
        threads
    }

    /// Removes progress rows that are not needed. Where commits are not durable, flushes do that.
    pub(super) fn remove_progress_rows(&mut self) {
        let committed = self.intake.progress.committed();
        if self.durable_commits && self.removed_before != committed {
            self.removed_before = committed;
            self.around.durability.remove_progress(committed);
        }
    }

    /// A few at a time, so that commits do not wait behind it for long.
    pub(super) fn remove_old_conflicts(&mut self) {
        if let Some(age) = self.conflict_retention
            && self.conflict_removal.begins()
        {
            self.around.durability.bookkeep(BookkeepingJob::RemoveConflicts(age));
        }
    }

    /// A change of a subscriber's table that raises no error shows only in the catalogue.
    pub(super) fn look_at_the_schema(&mut self) {
        let applied = self.intake.progress.positions().apply;
        if !self.schema_watch.is_due(applied, Instant::now()) {
            return;
        }
        match self.around.tables.watched() {
            none if none.is_empty() => self.schema_watch.answered(Instant::now()),
            watched => self
                .around
                .durability
                .bookkeep(BookkeepingJob::Fingerprints(Fingerprints::of(watched))),
        }
    }
}
