//! Measures how much the workers apply per second.
//!
//! Groups end rarely, and in bursts: commits keep their order. So each worker is measured over whole
//! cycles, from the end of one of its groups to the end of another, and the rates of the workers are
//! added. Groups that were assigned before the measurement began do not count.
//!
//! Nor does a group whose session mostly prepared statements for it: its rate is not that of later ones.

use std::time::Duration;

use crate::dispatch::waited::Waited;

/// The size of a group's work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupWork {
    /// Payload bytes.
    pub bytes: usize,
    /// Changes.
    pub changes: usize,
}

impl GroupWork {
    /// A change costs as much as this number of payload bytes, besides its own.
    const CHANGE: f64 = 100.0;

    fn amount(self) -> f64 {
        self.changes as f64 * Self::CHANGE + self.bytes as f64
    }
}

/// A rate, and the conditions under which it was measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measurement {
    /// Work per second.
    pub(super) rate: f64,
    /// Bytes per change: the kind of the load.
    pub(super) width: f64,
    /// Part of the time in which work waited for a worker.
    pub(super) saturated: f64,
    pub(super) took: Duration,
}

/// The cycles of one worker.
#[derive(Debug, Clone, Copy, Default)]
struct Cycles {
    /// End of the group before the first cycle.
    from: Option<Duration>,
    /// End of the last cycle.
    until: Duration,
    count: usize,
    work: f64,
    /// The worker had nothing more to do then.
    idle: bool,
    /// How long the session has prepared statements since the last group ended.
    preparing: Duration,
}

#[derive(Debug)]
pub(super) struct Meter {
    /// Groups that were assigned before do not count.
    restarted: Duration,
    since: Duration,
    /// When a group ended last whose session mostly prepared statements.
    prepared: Duration,
    workers: Vec<Cycles>,
    bytes: usize,
    changes: usize,
    waited: Waited,
}

/// A measurement takes this long at least.
const SHORTEST: Duration = Duration::from_millis(250);
/// Cycles of all workers together, and of each worker, at least.
const CYCLES: usize = 4;
const CYCLES_OF_EACH: usize = 2;
/// A group does not count if its session has prepared statements for more than this part (1 in n) of its
/// time, but only within the first of a measurement: some loads need new statements all the time.
const PREPARING: u32 = 4;
const PREPARING_WITHIN: Duration = Duration::from_secs(5);

impl Meter {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            restarted: Duration::ZERO,
            since: Duration::ZERO,
            prepared: Duration::ZERO,
            workers: vec![Cycles::default(); workers],
            bytes: 0,
            changes: 0,
            waited: Waited::default(),
        }
    }

    /// Begins anew. Groups in flight do not count.
    pub(super) fn restart(&mut self, now: Duration) {
        self.workers.fill(Cycles::default());
        self.restarted = now;
        self.go_on(now);
    }

    /// Measures again under the same conditions: the next cycle of each worker begins where its last
    /// one ended.
    pub(super) fn go_on(&mut self, now: Duration) {
        for cycles in &mut self.workers {
            if cycles.from.is_some() {
                let from = if cycles.idle { now } else { cycles.until };
                *cycles = Cycles {
                    from: Some(from),
                    until: from,
                    idle: cycles.idle,
                    ..Cycles::default()
                };
            }
        }
        (self.since, self.bytes, self.changes) = (now, 0, 0);
        self.waited.restart(now);
    }

    /// Whether work waits for a worker from now on.
    pub(super) fn waits(&mut self, waits: bool, now: Duration) {
        self.waited.note(waits, now);
    }

    /// A worker's session has prepared statements for so long, for groups that have not ended.
    pub(super) fn preparing(&mut self, worker: usize, time: Duration) {
        self.workers[worker].preparing += time;
    }

    /// A group has ended; `idle`: the worker has nothing more to do.
    pub(super) fn ended(
        &mut self,
        worker: usize,
        assigned: Duration,
        work: GroupWork,
        idle: bool,
        now: Duration,
    ) {
        let cycles = &mut self.workers[worker];
        cycles.idle = idle;
        let preparing = std::mem::take(&mut cycles.preparing);
        let took = now.saturating_sub(cycles.until.max(assigned));
        if preparing * PREPARING > took && now.saturating_sub(self.since) < PREPARING_WITHIN {
            *cycles = Cycles { from: Some(now), until: now, idle, ..Cycles::default() };
            self.prepared = now;
            return;
        }
        if cycles.from.is_none() || assigned < self.restarted {
            (cycles.from, cycles.until) = (Some(now), now);
            return;
        }
        cycles.until = now;
        cycles.count += 1;
        cycles.work += work.amount();
        self.bytes += work.bytes;
        self.changes += work.changes;
    }

    /// The result, once there is one. `longest`: how long to wait for workers whose groups take long.
    pub(super) fn result(
        &self,
        workers: usize,
        longest: Duration,
        now: Duration,
    ) -> Option<Measurement> {
        let took = now.saturating_sub(self.since);
        let of_each = CYCLES_OF_EACH.max(CYCLES.div_ceil(workers));
        let through = self.workers.iter().filter(|cycles| cycles.count >= of_each).count();
        let some = self.workers.iter().any(|cycles| cycles.count >= of_each);
        let waited = now.saturating_sub(self.since.max(self.prepared));
        if took < SHORTEST || through < workers && (waited < longest || !some) {
            return None;
        }
        let rate = self.workers.iter().filter(|cycles| cycles.count > 0).map(|cycles| {
            let until = if cycles.idle { now } else { cycles.until };
            let time = until.saturating_sub(cycles.from.unwrap_or(until));
            cycles.work / time.as_secs_f64().max(1e-6)
        });
        Some(Measurement {
            rate: rate.sum(),
            width: (self.bytes + 1) as f64 / self.changes.max(1) as f64,
            saturated: self.waited.until(now).as_secs_f64() / took.as_secs_f64(),
            took,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    const WORK: GroupWork = GroupWork { bytes: 900, changes: 1 };

    #[test]
    fn whole_cycles_count() {
        let mut meter = Meter::new(2);
        meter.restart(at(1000));
        meter.waits(true, at(1000));
        // Assigned before: its end begins the first cycle.
        meter.ended(0, at(900), WORK, false, at(1100));
        for cycle in 1..=4 {
            meter.ended(0, at(1050), WORK, false, at(1100 + 100 * cycle));
            assert_eq!(meter.result(1, at(9999), at(1100 + 100 * cycle)).is_some(), cycle == 4);
        }
        let measured = meter.result(1, at(9999), at(1540)).expect("it is complete");
        assert!((measured.rate - 10_000.0).abs() < 1.0, "{measured:?}");
        assert!((measured.width - 900.0).abs() < 1.0);
        assert!((measured.saturated - 1.0).abs() < 1e-9);
        // The next measurement continues with the cycle that is under way.
        meter.go_on(at(1540));
        for cycle in 1..=4 {
            meter.ended(0, at(1500), WORK, false, at(1500 + 200 * cycle));
        }
        let measured = meter.result(1, at(9999), at(2300)).expect("it is complete");
        assert!((measured.rate - 5000.0).abs() < 1.0, "{measured:?}");
    }

    #[test]
    fn time_without_work_counts() {
        let mut meter = Meter::new(1);
        meter.restart(at(0));
        for group in 0..=4 {
            meter.ended(0, at(0), WORK, group == 4, at(100 * group));
        }
        let measured = meter.result(1, at(9999), at(800)).expect("it is complete");
        assert!((measured.rate - 5000.0).abs() < 1.0, "{measured:?}");
        assert!(measured.saturated < 1e-9);
    }

    #[test]
    fn groups_for_which_statements_are_prepared_do_not_count() {
        let mut meter = Meter::new(2);
        meter.restart(at(0));
        for group in 0..8 {
            meter.ended(0, at(0), WORK, false, at(100 * group));
            // The other session prepares for its first five groups.
            meter.preparing(1, if group < 5 { at(50) } else { at(5) });
            meter.ended(1, at(0), WORK, false, at(100 * group));
        }
        let measured = meter.result(2, at(9999), at(700)).expect("it is complete");
        assert!((measured.rate - 20_000.0).abs() < 1.0, "{measured:?}");
        assert!(meter.result(3, at(350), at(749)).is_none(), "a third is waited for");
        assert!(meter.result(3, at(350), at(750)).is_some());
        // Where each group needs new statements, they count after a while.
        meter.restart(at(1000));
        for group in 0..80 {
            meter.preparing(0, at(50));
            meter.ended(0, at(1000), WORK, false, at(1000 + 100 * group));
        }
        assert!(meter.result(1, at(9999), at(8900)).is_some());
    }

    #[test]
    fn one_long_group_is_not_waited_for_long() {
        let mut meter = Meter::new(2);
        meter.restart(at(0));
        for group in 0..8 {
            meter.ended(0, at(0), WORK, false, at(100 * group));
        }
        assert!(meter.result(2, at(1000), at(999)).is_none());
        assert!(meter.result(2, at(1000), at(1000)).is_some());
    }
}
