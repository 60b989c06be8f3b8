//! How many workers copy at a time.
//!
//! More sessions than the servers have processors for take longer than fewer do (measured; probably
//! because those that hold a lock of the WAL, or a page of an index, wait for a processor). How many
//! processors there are cannot be asked; so it begins with few workers, and one more stays only where
//! more is copied with it.

use std::time::Duration;

/// Workers at the start: with two, sources and subscribers work while others wait, on any machine.
const FIRST: usize = 2;
/// After a change, until sessions are open and at work.
const SETTLE: Duration = Duration::from_millis(200);
/// What is copied in so much time makes a rate.
const WINDOW: Duration = Duration::from_millis(500);
/// How much more has to be copied with another worker.
const WORTH: f64 = 1.15;
/// After another worker was of no use, until it is tried again, at first and at most: what else the
/// servers do, and what is copied, changes.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct CopyScaling {
    most: usize,
    now: usize,
    changed: Duration,
    /// When the window began, and what was copied by then.
    window: Option<(Duration, u64)>,
    /// Bytes per second before the last worker joined, which is on trial.
    before: Option<f64>,
    next_trial: Duration,
    pause: Duration,
    /// Workers that build indexes, and move nothing meanwhile.
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

    /// Workers that may copy.
    pub(super) fn now(&self) -> usize {
        self.now
    }

    /// Looks at what was copied so far, `at` this time since the start, when so many of the workers are
    /// `building` indexes.
    pub(super) fn look(&mut self, at: Duration, bytes: u64, building: usize) {
        if building != std::mem::replace(&mut self.building, building) {
            // What was copied with fewer or more of them at it says nothing of what is copied now.
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

    /// Copies for `seconds` at the rates that `rate` gives for numbers of workers; says how many
    /// there were in each tenth of a second.
    fn copy(scaling: &mut CopyScaling, seconds: u64, rate: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut bytes = 0;
        let tenths = 0..seconds * 10;
        let step = |tenth| {
            scaling.look(Duration::from_millis(tenth * 100), bytes, 0);
            bytes += rate(scaling.now()) / 10;
            scaling.now()
        };
        tenths.map(step).collect()
    }

    #[test]
    fn as_many_as_it_pays_for() {
        for processors in 1..=6 {
            // Each one too many takes a tenth from all.
            let rate = |workers: usize| {
                let too_many = workers.saturating_sub(processors) as u64;
                10_000_000 * workers.min(processors) as u64 * (10 - too_many) / 10
            };
            let mut scaling = CopyScaling::new(4);
            let numbers = copy(&mut scaling, 60, rate);
            let right = processors.clamp(2, 4);
            assert_eq!(numbers[0], 2);
            assert_eq!(numbers[49], right, "{processors}: {numbers:?}");
            // What is tried again does not last.
            let others = numbers[50..].iter().filter(|number| **number != right);
            assert!(others.count() < 50, "{processors}: {numbers:?}");
            assert!(numbers.iter().all(|number| *number <= 4));
        }
    }

    #[test]
    fn others_may_where_nothing_moves() {
        let numbers = copy(&mut CopyScaling::new(4), 5, |_| 0);
        assert_eq!(numbers.last(), Some(&4), "{numbers:?}");
    }

    #[test]
    fn nothing_is_concluded_from_indexes_that_are_built() {
        let mut scaling = CopyScaling::new(4);
        let mut bytes = 0;
        for tenth in 0..100 {
            // One of two that share a processor builds now and then, for some tenths of a second.
            let building = usize::from(tenth / 4 % 2 == 0);
            scaling.look(Duration::from_millis(tenth * 100), bytes, building);
            bytes += if building == 1 { 500_000 } else { 1_000_000 };
        }
        assert_eq!(scaling.now(), 2);
        // One that builds for long keeps nobody else from it.
        for tenth in 100..150 {
            scaling.look(Duration::from_millis(tenth * 100), bytes, 1);
            bytes += 1_000_000 * (scaling.now() as u64 - 1);
        }
        assert_eq!(scaling.now(), 4);
    }

    #[test]
    fn it_is_tried_again() {
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
