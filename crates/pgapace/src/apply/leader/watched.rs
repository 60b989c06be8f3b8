//! What the leader keeps to show of a run: see [`crate::observe`].

use std::time::{Duration, Instant};

use pgoutput::{Lsn, Timestamp};

use crate::observe::board::{Board, Every, POINT_EVERY};
use crate::observe::figures::Collector;
use crate::observe::ledger::{Counts, Ledger};
use crate::subscriber::state::statistics::{Counters, Delta};

/// Seconds between 1970 and 2000, where the times of the protocol begin.
const EPOCH: f64 = 946_684_800.0;

/// What is shown of a run, and when it was written.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(super) collector: Collector,
    pub(crate) board: Board,
    /// Of the stream workers and the catch-up workers.
    pub(super) ledger: Ledger,
    pub(super) received_bytes: u64,
    /// `received_bytes` when the board was told last.
    pub(super) posted_bytes: u64,
    pub(super) last_commit: Option<Timestamp>,
    /// `None` before the first observation, with which the next is compared.
    pub(super) observed: Option<Instant>,
    pub(super) written: Instant,
    /// Counted since it was written.
    pub(super) counters: Counters,
    pub(super) counts: Counts,
    pub(super) reported: Option<Delta>,
    pub(super) points: Every,
}

impl Watched {
    /// `resumed`: the end of the last applied transaction, and when it committed.
    pub(crate) fn new(board: Board, ledger: Ledger, resumed: Option<(Lsn, Timestamp)>) -> Self {
        let now = Instant::now();
        Self {
            collector: Collector::new(resumed.map(|(lsn, time)| (lsn, seconds(time)))),
            board,
            ledger,
            received_bytes: 0,
            posted_bytes: 0,
            last_commit: None,
            observed: None,
            written: now,
            counters: Counters::default(),
            counts: Counts::default(),
            reported: None,
            points: Every::new(POINT_EVERY),
        }
    }

    /// The last decoded transaction ends here.
    pub(super) fn decoded(&mut self, lsn: Lsn) {
        if let Some(time) = self.last_commit {
            self.collector.decoded(lsn, seconds(time));
        }
    }

    /// Whether it is time for the next observation.
    pub(super) fn is_due(&self, interval: Duration) -> bool {
        self.observed.is_none_or(|observed| observed.elapsed() >= interval)
    }
}

/// A time of the protocol, in seconds since 1970.
pub(super) fn seconds(time: Timestamp) -> f64 {
    time.0 as f64 / 1e6 + EPOCH
}
