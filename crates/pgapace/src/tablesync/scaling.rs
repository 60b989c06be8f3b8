//! Copy scaling: the number of workers that copy at a time.
//!
//! More sessions than processors are slower than fewer (measured; probably because a session that
//! holds a WAL lock or an index page waits for a processor). pgapace cannot query the number of
//! processors. So it starts with few workers, and an additional one stays only if more is copied
//! with it.
//!
//! Measured on 2 processors, medians of 5: 10 tables of 30 MB take 3.5 s with two workers and 4.1 s
//! with four. A table of 300 MB takes 5.5, 4.0 and 4.6 s with one, two and four workers.

use std::time::Duration;

/// Workers at the start. With two, publisher and subscriber both have work on any machine.
const FIRST: usize = 2;
/// Time after a change until the new sessions are open and copying.
const SETTLE: Duration = Duration::from_millis(200);
/// Time over which the copy rate is measured.
const WINDOW: Duration = Duration::from_millis(500);
/// Factor by which the rate must increase with an additional worker.
const WORTH: f64 = 1.15;
/// Pause after an additional worker did not help, at first and at most. Then it is tried again,
/// because the load of the servers and the tables change.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct CopyScaling {
    most: usize,
    now: usize,
    changed: Duration,
    /// Start of the window, and the bytes copied by then.
    window: Option<(Duration, u64)>,
    /// Bytes per second before the last worker was added, while that worker is on trial.
    before: Option<f64>,
    next_trial: Duration,
    pause: Duration,
    /// Number of workers that are building indexes and copy nothing.
    building: usize,
}

impl CopyScaling {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            now: FIRST.min(most),
            changed: Duration::ZERO,
            window: None,
            before: None,
            next_trial: Duration::ZERO,
            pause: FIRST_PAUSE,
            building: 0,
        }
    }

    /// The number of workers that may copy.
    pub(super) fn now(&self) -> usize {
        self.now
    }

    /// Adapts the number of workers. `at` is the time since the start, `bytes` the amount copied so
    /// far, and `building` the number of workers that are building indexes.
    pub(super) fn observe(&mut self, at: Duration, bytes: u64, building: usize) {
        if building != std::mem::replace(&mut self.building, building) {
            // With another number of workers copying, rates cannot be compared.
            self.window = None;
            if self.before.take().is_some() {
                self.change(self.now - 1, at);
            }
        }
        let Some((from, had)) = self.window else {
            if at >= self.changed + SETTLE {
                self.window = Some((at, bytes));
            }
            return;
        };
        let time = at.saturating_sub(from);
        if time < WINDOW {
            return;
        }
        self.window = Some((at, bytes));
        let rate = bytes.saturating_sub(had) as f64 / time.as_secs_f64();
        match self.before.take() {
            Some(before) if rate < before * WORTH => {
                self.next_trial = at + self.pause;
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                return self.change(self.now - 1, at);
            }
            Some(_) => self.pause = FIRST_PAUSE,
            None => {}
        }
        if self.now < self.most && at >= self.next_trial {
            self.before = Some(rate);
            self.change(self.now + 1, at);
        }
    }

    fn change(&mut self, workers: usize, at: Duration) {
        tracing::debug!(workers, "workers that copy tables");
        self.now = workers;
        self.changed = at;
        self.window = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies for `seconds` at the rate that `rate` returns for a number of workers. Returns the
    /// number of workers in each tenth of a second.
    fn copy(scaling: &mut CopyScaling, seconds: u64, rate: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut bytes = 0;
        let tenths = 0..seconds * 10;
        let step = |tenth| {
            scaling.observe(Duration::from_millis(tenth * 100), bytes, 0);
            bytes += rate(scaling.now()) / 10;
            scaling.now()
        };
        tenths.map(step).collect()
    }

    #[test]
    fn workers_are_added_while_the_rate_increases() {
        for processors in 1..=6 {
            // Each worker too many reduces the rate by a tenth.
            let rate = |workers: usize| {
                let too_many = workers.saturating_sub(processors) as u64;
                10_000_000 * workers.min(processors) as u64 * (10 - too_many) / 10
            };
            let mut scaling = CopyScaling::new(4);
            let numbers = copy(&mut scaling, 60, rate);
            let right = processors.clamp(2, 4);
            assert_eq!(numbers[0], 2);
            assert_eq!(numbers[49], right, "{processors}: {numbers:?}");
            // Repeated trials do not last.
            let others = numbers[50..].iter().filter(|number| **number != right);
            assert!(others.count() < 50, "{processors}: {numbers:?}");
            assert!(numbers.iter().all(|number| *number <= 4));
        }
    }

    #[test]
    fn workers_are_added_while_nothing_is_copied() {
        let numbers = copy(&mut CopyScaling::new(4), 5, |_| 0);
        assert_eq!(numbers.last(), Some(&4), "{numbers:?}");
    }

    #[test]
    fn rates_while_indexes_are_built_are_ignored() {
        let mut scaling = CopyScaling::new(4);
        let mut bytes = 0;
        for tenth in 0..100 {
            // One of two workers that share a processor builds for some tenths of a second now and
            // then.
            let building = usize::from(tenth / 4 % 2 == 0);
            scaling.observe(Duration::from_millis(tenth * 100), bytes, building);
            bytes += if building == 1 { 500_000 } else { 1_000_000 };
        }
        assert_eq!(scaling.now(), 2);
        // A worker that builds for long does not stop the scaling.
        for tenth in 100..150 {
            scaling.observe(Duration::from_millis(tenth * 100), bytes, 1);
            bytes += 1_000_000 * (scaling.now() as u64 - 1);
        }
        assert_eq!(scaling.now(), 4);
    }

    #[test]
    fn an_additional_worker_is_tried_again() {
        let mut scaling = CopyScaling::new(3);
        let numbers = copy(&mut scaling, 10, |_| 1_000_000);
        assert_eq!(numbers[30], 2, "{numbers:?}");
        let numbers =
            copy(&mut CopyScaling { changed: Duration::ZERO, ..scaling }, 60, |workers| {
                1_000_000 * workers as u64
            });
        assert_eq!(numbers.last(), Some(&3), "{numbers:?}");
    }
}
