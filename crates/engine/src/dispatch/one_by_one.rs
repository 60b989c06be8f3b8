//! Transactions that are committed one by one (`--group-transactions 1`): one after the other in the
//! pipeline of one session, or side by side on several sessions.
//!
//! In a pipeline, the changes and COMMITs of many transactions are sent without waiting for an answer:
//! each costs only what the subscriber does for it. Side by side, the changes of several transactions
//! are executed at once. But COMMITs keep their order, so each waits for the answer to the one before on
//! another session, and for the worker which that wakes: [`Pacing::turn`], and a round trip more where
//! the subscriber is far away. Measured with `simple-update`: 25 000 transactions a second in a
//! pipeline, 4800 side by side on two sessions or on four.
//!
//! So they go side by side only where one takes longer than a turn, because it reads from a disk or has
//! many changes, and only while that is faster than the pipeline was:
//!
//! ```text
//!              one takes longer than a turn
//!   Pipeline ────────────────────────────────► SideBySide
//!      ▲                                          │
//!      └──────────────────────────────────────────┘
//!         as soon as that is not faster, or after a
//!         while, to measure the pipeline again
//! ```
//!
//! A turn is a constant, and no machine's own: on a slow one, each transaction may take longer. And a single
//! measurement may fall into a moment in which others have the processors. So neither decides alone. The
//! pipeline is left after two slow measurements in a row, and a stay side by side is a trial that is
//! looked at again and again: on a busy machine of two processors, stays of seconds that were looked at
//! only at their end took 60 000 transactions from 5 s to between 16 and 22.

use std::time::Duration;

use super::Pacing;
use super::waited::Waited;

/// Transactions in a measurement, at least.
const MEASURED: usize = 8;
/// Slow measurements of the pipeline in a row after which it is left.
const SLOW: u32 = 2;
/// Side by side, a transaction must take less than this part of the time that it took in the pipeline.
/// Several sessions cost the processors more.
const GAIN: f64 = 0.9;
/// Transactions of the first runs, before it is known how long one takes.
const FIRST_RUN: usize = 16;
const SHORTEST_RUN: usize = 4;
/// The longest time side by side, and the times for which the pipeline stays where it was faster.
const LONGEST: Duration = Duration::from_secs(30);
const FIRST_STAY: Duration = Duration::from_secs(5);
const LONGEST_STAY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Pipeline,
    SideBySide {
        /// When the measurement under way began.
        since: Duration,
        /// When the pipeline is measured again.
        until: Duration,
    },
}

/// Decides which way transactions go that are committed one by one.
#[derive(Debug)]
pub(super) struct OneByOne {
    way: Way,
    /// How many workers there may be.
    workers: usize,
    pacing: Pacing,
    /// The time that a COMMIT takes to follow the one before on another session.
    turn: Duration,
    /// Seconds of a transaction in the pipeline, and side by side, when that was measured last.
    pipeline: Option<f64>,
    side_by_side: Option<f64>,
    /// Slow measurements of the pipeline in a row.
    slow: u32,
    /// The measurement under way.
    time: Duration,
    transactions: usize,
    /// When the last group ended.
    ended_at: Duration,
    waited: Waited,
    /// How long transactions go side by side, the next time.
    length: Duration,
    /// The pipeline stays until then, and the next time for so long.
    stays_until: Duration,
    stay: Duration,
}

impl OneByOne {
    pub(super) fn new(workers: usize, round_trip: Duration, pacing: Pacing) -> Self {
        Self {
            way: Way::Pipeline,
            workers,
            pacing,
            turn: pacing.turn + round_trip,
            pipeline: None,
            side_by_side: None,
            slow: 0,
            time: Duration::ZERO,
            transactions: 0,
            ended_at: Duration::ZERO,
            waited: Waited::default(),
            length: pacing.side_by_side,
            stays_until: Duration::ZERO,
            stay: FIRST_STAY,
        }
    }

    pub(super) fn is_pipeline(&self) -> bool {
        self.way == Way::Pipeline
    }

    /// How many transactions the next group may have.
    pub(super) fn run(&self) -> usize {
        if !self.is_pipeline() {
            return 1;
        }
        let Some(one) = self.pipeline else { return FIRST_RUN.min(self.pacing.run) };
        let run = self.pacing.run_time.as_secs_f64() / one.max(1e-9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is between these bounds"
        )]
        let run = run.clamp(1.0, 1e9) as usize;
        run.max(SHORTEST_RUN).min(self.pacing.run)
    }

    /// Whether work waits for a worker from now on.
    pub(super) fn waits(&mut self, waits: bool, now: Duration) {
        self.waited.note(waits, now);
    }

    /// A group of so many transactions has ended.
    pub(super) fn ended(&mut self, assigned: Duration, transactions: usize, now: Duration) {
        let before = std::mem::replace(&mut self.ended_at, now);
        match self.way {
            Way::Pipeline => {
                // One that was assigned later has waited for the publisher, and for the answer.
                if assigned <= before {
                    self.time += now.saturating_sub(before);
                    self.transactions += transactions;
                }
                if self.is_measured(self.time, self.pacing.pipeline_measurement) {
                    self.measured_pipeline(now);
                }
            }
            Way::SideBySide { since, until } => {
                // It was assigned to the pipeline.
                if assigned < since {
                    self.way =
                        Way::SideBySide { since: now, until: until + now.saturating_sub(since) };
                    return self.begin(now);
                }
                self.transactions += transactions;
                let took = now.saturating_sub(since);
                if self.is_measured(took, self.pacing.side_by_side_measurement) {
                    self.measured_side_by_side(took, until, now);
                }
            }
        }
    }

    fn is_measured(&self, took: Duration, least: Duration) -> bool {
        took >= least && self.transactions >= MEASURED.min(self.pacing.run)
    }

    fn measured_pipeline(&mut self, now: Duration) {
        let one = self.time.as_secs_f64() / self.transactions as f64;
        self.pipeline = Some(one);
        self.slow = if one > self.turn.as_secs_f64() { self.slow + 1 } else { 0 };
        if self.side_by_side.is_some_and(|side_by_side| one * GAIN <= side_by_side) {
            self.stay_in_pipeline(now);
        } else if self.workers > 1 && self.slow >= SLOW && now >= self.stays_until {
            self.way = Way::SideBySide { since: now, until: now + self.length };
        }
        self.begin(now);
    }

    fn measured_side_by_side(&mut self, took: Duration, until: Duration, now: Duration) {
        // It counts as fast as it was only if it had enough to do.
        let was_busy = self.waited.until(now) * 2 >= took;
        let one = took.as_secs_f64() / self.transactions as f64;
        let is_slower = self.pipeline.is_some_and(|pipeline| one >= pipeline * GAIN);
        if was_busy && is_slower {
            self.way = Way::Pipeline;
            self.stay_in_pipeline(now);
        } else if now >= until {
            self.way = Way::Pipeline;
            self.side_by_side = was_busy.then_some(one);
            if was_busy {
                (self.length, self.stay) = ((self.length * 2).min(LONGEST), FIRST_STAY);
            }
        } else {
            self.way = Way::SideBySide { since: now, until };
        }
        self.begin(now);
    }

    /// The pipeline is as fast: another trial comes later, and each time later.
    fn stay_in_pipeline(&mut self, now: Duration) {
        (self.side_by_side, self.length) = (None, self.pacing.side_by_side);
        self.stays_until = now + self.stay;
        self.stay = (self.stay * 2).min(LONGEST_STAY);
    }

    /// Another measurement begins.
    fn begin(&mut self, now: Duration) {
        if !self.is_pipeline() {
            self.slow = 0;
        }
        (self.time, self.transactions) = (Duration::ZERO, 0);
        self.waited.restart(now);
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, OneByOne, Pacing};

    /// Applies as fast as this subscriber does: microseconds of a transaction in the pipeline, and side by
    /// side. Returns the part of the time that was spent side by side.
    fn part_side_by_side(
        one: &mut OneByOne,
        [pipeline, side_by_side]: [u64; 2],
        seconds: u64,
    ) -> f64 {
        let (begun, mut spread) = (one.ended_at, Duration::ZERO);
        one.waits(true, begun);
        while one.ended_at < begun + Duration::from_secs(seconds) {
            let (at, beside) = (one.ended_at, !one.is_pipeline());
            let run = one.run() as u64;
            let took = Duration::from_micros(if beside { side_by_side } else { run * pipeline });
            one.ended(at, one.run(), at + took);
            if beside {
                spread += took;
            }
        }
        spread.as_secs_f64() / (one.ended_at - begun).as_secs_f64()
    }

    fn new(workers: usize, round_trip: u64) -> OneByOne {
        OneByOne::new(workers, Duration::from_millis(round_trip), Pacing::MEASURED)
    }

    #[test]
    fn short_transactions_stay_in_the_pipeline() {
        let mut one = new(4, 0);
        assert_eq!(part_side_by_side(&mut one, [40, 210], 60), 0.0);
        assert_eq!(one.run(), Pacing::MEASURED.run);
        // A turn takes a round trip, so longer ones stay where the subscriber is far away.
        assert_eq!(part_side_by_side(&mut new(4, 5), [3000, 5000], 60), 0.0);
        assert_eq!(
            part_side_by_side(&mut new(1, 0), [3000, 3000], 60),
            0.0,
            "there is no other worker"
        );
    }

    #[test]
    fn long_transactions_go_side_by_side_where_that_is_faster() {
        let part = part_side_by_side(&mut new(4, 0), [2000, 500], 60);
        assert!(part > 0.95, "{part}");
        let part = part_side_by_side(&mut new(4, 0), [2000, 2100], 120);
        assert!(part < 0.25, "{part}");
    }

    /// On a slow machine every transaction takes longer than a turn, and side by side even longer.
    #[test]
    fn a_trial_that_is_slower_ends_at_once() {
        let mut one = new(4, 0);
        part_side_by_side(&mut one, [300, 900], 1);
        let part = part_side_by_side(&mut one, [300, 900], 120);
        assert!(part > 0.0 && part < 0.03, "{part}");
        // Also where it was faster before.
        let mut one = new(4, 0);
        part_side_by_side(&mut one, [300, 100], 60);
        let part = part_side_by_side(&mut one, [300, 900], 60);
        assert!(part < 0.03, "{part}");
    }

    #[test]
    fn a_moment_in_which_others_have_the_processors_starts_nothing() {
        let mut one = new(4, 0);
        for _ in 0..100 {
            assert_eq!(part_side_by_side(&mut one, [80, 210], 1), 0.0);
            let (at, run) = (one.ended_at, one.run());
            one.ended(at, run, at + Duration::from_millis(400));
        }
    }

    #[test]
    fn another_load_is_noticed() {
        let mut one = new(4, 0);
        part_side_by_side(&mut one, [40, 210], 20);
        assert!(part_side_by_side(&mut one, [2000, 500], 30) > 0.9);
        part_side_by_side(&mut one, [40, 210], 31);
        assert_eq!(part_side_by_side(&mut one, [40, 210], 30), 0.0);
    }

    #[test]
    fn the_time_for_which_the_publisher_sends_nothing_does_not_count() {
        let mut one = new(4, 0);
        for second in 1..100 {
            let at = Duration::from_secs(second);
            one.ended(at - Duration::from_millis(5), 1, at);
        }
        assert!(one.is_pipeline());
        assert_eq!(one.pipeline, None);
    }
}
