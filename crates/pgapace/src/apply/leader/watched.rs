//! Observations of a run that the leader keeps and shows: see [`crate::observe`].

use std::time::{Duration, Instant};

use pgoutput::{Lsn, Timestamp};

use crate::config::Subscription;
use crate::observe::board::{Board, Every, POINT_EVERY};
use crate::observe::events::LogEvent;
use crate::observe::figures::{BlockerNow, Collector, Counted, Figures, SlowGroup};
use crate::observe::ledger::{Counts, Ledger};
use crate::subscriber::state::statistics::{Counters, Delta};

/// Seconds between 1970 and 2000, where the times of the protocol begin.
const EPOCH: f64 = 946_684_800.0;

/// A write of statistics that takes no longer than this, as from far away, is made once per second.
const QUICK: Duration = Duration::from_millis(200);
/// Longer writes take at most this part of the time.
const SHARE: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Figures and counters of a run that are shown, and when they were written.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(super) collector: Collector,
    pub(crate) board: Board,
    /// Counts of the stream workers and the catch-up workers.
    pub(super) ledger: Ledger,
    pub(super) received_bytes: u64,
    /// `received_bytes` when the board was told last.
    pub(super) posted_bytes: u64,
    last_commit: Option<Timestamp>,
    /// Of the first transaction that was sent since [`Self::decoded`]: where the one before it ends, and its time.
    first_sent: Option<(Lsn, Timestamp)>,
    /// Transactions that the running flush makes durable, and those that are durable.
    flushing: Counted,
    pub(super) durable: Counted,
    /// `None` before the first observation, with which the next is compared.
    pub(super) observed: Option<Instant>,
    pub(super) written: Instant,
    /// The durability session has statistics to write. It may wait long for a synchronous standby.
    pub(super) is_writing: bool,
    /// When the next ones are due at the latest, as those that were written last say.
    pub(super) next_due_in: Duration,
    /// The time from one write to the next, if the last one took long.
    pub(super) pause: Option<Duration>,
    /// Changes since they were written last.
    pub(super) counters: Counters,
    pub(super) counts: Counts,
    pub(super) reported: Option<Delta>,
    /// At some time, all that the publisher had was applied.
    pub(super) has_caught_up: bool,
    /// Those of the figures that were written last.
    pub(super) blockers: Vec<BlockerNow>,
    pub(super) points: Every,
    pub(super) slow_groups: Vec<SlowGroup>,
    pub(super) summaries: Summaries,
    pub(super) subscription: String,
    pub(super) event_retention: Option<Duration>,
    /// Warnings and errors that are not written yet.
    pub(super) events: Vec<LogEvent>,
}

impl Watched {
    /// `resumed`: the end of the last applied transaction, and when it committed.
    pub(crate) fn new(
        config: &Subscription,
        board: Board,
        ledger: Ledger,
        resumed: Option<(Lsn, Timestamp)>,
    ) -> Self {
        let now = Instant::now();
        Self {
            collector: Collector::new(resumed.map(|(lsn, time)| (lsn, seconds(time)))),
            board,
            ledger,
            received_bytes: 0,
            posted_bytes: 0,
            last_commit: None,
            first_sent: None,
            flushing: Counted::default(),
            durable: Counted::default(),
            observed: None,
            written: now,
            is_writing: false,
            next_due_in: Duration::ZERO,
            pause: None,
            counters: Counters::default(),
            counts: Counts::default(),
            reported: None,
            has_caught_up: false,
            blockers: Vec::new(),
            points: Every::new(POINT_EVERY),
            slow_groups: Vec::new(),
            summaries: Summaries::new(),
            subscription: config.name.clone(),
            event_retention: config.event_retention(),
            events: Vec::new(),
        }
    }

    /// A transaction is sent that committed at this time. The one before it ends at `after`.
    pub(super) fn sent(&mut self, after: Lsn, committed: Timestamp) {
        self.first_sent.get_or_insert((after, committed));
        self.last_commit = Some(committed);
    }

    /// The last decoded transaction ends here.
    pub(super) fn decoded(&mut self, lsn: Lsn) {
        // No change between `after` and this transaction waits. So what waits behind `after` is as young as it, however
        // long ago WAL of other databases was written there.
        if let Some((after, time)) = self.first_sent.take() {
            self.collector.decoded(after, seconds(time));
        }
        if let Some(time) = self.last_commit {
            self.collector.decoded(lsn, seconds(time));
        }
    }

    /// A flush begins. `counters`: of transactions committed since the last observation.
    pub(super) fn flush_begins(&mut self, counters: &Counters) {
        self.flushing = self.collector.committed(counters);
    }

    /// The flush has returned.
    pub(super) fn flushed(&mut self) {
        self.durable = self.flushing;
    }

    /// The statistics are written; `took` is the time of the write.
    ///
    /// They are updates of the same rows. While a session of the subscriber keeps an old snapshot, all versions of
    /// such a row remain, and each update reads them. So the writes may take a [`SHARE`] of the time only.
    pub(super) fn statistics_written(&mut self, took: Duration) {
        self.is_writing = false;
        self.pause = pause_after(took);
    }

    /// Whether the pause after a write that took long is over.
    pub(super) fn may_write(&self) -> bool {
        self.pause.is_none_or(|pause| self.written.elapsed() >= pause)
    }

    /// When the figures after those of a write that begins now are due, if nothing happens: after `interval`, or the
    /// pause after a write that took long.
    pub(super) fn due_after(&self, interval: Duration) -> Duration {
        self.pause.map_or(interval, |pause| pause.max(interval))
    }

    /// Whether it is time for the next observation.
    pub(super) fn is_due(&self, interval: Duration) -> bool {
        self.observed.is_none_or(|observed| observed.elapsed() >= interval)
    }
}

fn pause_after(took: Duration) -> Option<Duration> {
    (took > QUICK).then(|| took.saturating_mul(SHARE).min(LONGEST_PAUSE))
}

/// Interval of the summaries in the log.
const SUMMARY: Duration = Duration::from_secs(60);

/// One line of the log per minute.
#[derive(Debug)]
pub(super) struct Summaries {
    last: Instant,
    counters: Counters,
}

impl Summaries {
    fn new() -> Self {
        Self { last: Instant::now(), counters: Counters::default() }
    }

    /// Adds these counts, and logs their sum when a minute has passed.
    pub(super) fn add(&mut self, subscription: &str, counters: &Counters, figures: &Figures) {
        self.counters.add(counters);
        if self.last.elapsed() < SUMMARY {
            return;
        }
        self.last = Instant::now();
        let counters = std::mem::take(&mut self.counters);
        let committed = figures.stage("committed");
        tracing::info!(
            event = "progress",
            subscription,
            transactions = counters.transactions,
            rows = counters.inserts + counters.updates + counters.deletes,
            conflicts = counters.conflicts().iter().map(|(_, count)| count).sum::<u64>(),
            lag_bytes = committed.and_then(|stage| stage.lag_bytes),
            lag_seconds = committed.and_then(|stage| stage.lag_seconds).map(tenths),
            limited_by = figures.limited_by,
            "changes of the last minute"
        );
    }
}

fn tenths(seconds: f64) -> f64 {
    (seconds * 10.0).round() / 10.0
}

/// A time of the protocol, in seconds since 1970.
pub(super) fn seconds(time: Timestamp) -> f64 {
    time.0 as f64 / 1e6 + EPOCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_writes_are_rare() {
        assert_eq!(pause_after(Duration::from_millis(150)), None);
        assert_eq!(pause_after(Duration::from_millis(300)), Some(Duration::from_secs(6)));
        assert_eq!(pause_after(Duration::from_secs(9)), Some(LONGEST_PAUSE));
    }
}
