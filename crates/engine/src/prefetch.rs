//! Whether to read the rows of waiting groups in advance: only where reads are slow.
//!
//! The decision depends on how long the subscriber takes to read a row by key, measured in samples.
//! A sample may also be slow because processors are busy, and prefetching would make that worse.
//! So the fastest of several samples decides: if even that one is slow, the cause is not the
//! processor.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of samples that decide.
const SAMPLES: usize = 8;
/// A key in memory takes about 5 µs. From this time on it was read from storage.
const SLOW: Duration = Duration::from_micros(40);
/// The limit for stopping is lower: while pgapace prefetches, part of each sample is already in
/// memory.
const FAST: Duration = Duration::from_micros(12);

/// Decides from the latest samples.
#[derive(Debug, Default)]
pub struct PrefetchDecision {
    on: bool,
    /// Time to read one key, for each sample.
    samples: VecDeque<Duration>,
}

impl PrefetchDecision {
    /// Whether to prefetch rows.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Adds a sample: reading `keys` keys took `took`. Returns whether the decision changed.
    pub fn sampled(&mut self, keys: u32, took: Duration) -> bool {
        if keys == 0 {
            return false;
        }
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(took / keys);
        if self.samples.len() < SAMPLES {
            return false;
        }
        let mut sorted: Vec<_> = self.samples.iter().copied().collect();
        sorted.sort_unstable();
        let on = if self.on { sorted[SAMPLES / 2] >= FAST } else { sorted[0] >= SLOW };
        let changed = on != self.on;
        if changed {
            // Earlier samples were measured under the other decision.
            self.samples.clear();
            self.on = on;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::{PrefetchDecision, SAMPLES};
    use std::time::Duration;

    fn sample(decision: &mut PrefetchDecision, microseconds: &[u64]) -> bool {
        for each in microseconds {
            decision.sampled(100, Duration::from_micros(*each * 100));
        }
        decision.is_on()
    }

    #[test]
    fn slow_reads_turn_it_on_and_fast_ones_off() {
        let mut decision = PrefetchDecision::default();
        assert!(!sample(&mut decision, &[200; SAMPLES - 1]));
        assert!(sample(&mut decision, &[200]));
        assert!(sample(&mut decision, &[20; 100]));
        assert!(!sample(&mut decision, &[4; SAMPLES]));
    }

    #[test]
    fn a_busy_processor_is_not_a_slow_disk() {
        let mut decision = PrefetchDecision::default();
        for _ in 0..100 {
            // Most samples wait for a processor, some do not.
            assert!(!sample(&mut decision, &[900, 300, 5000, 6, 70, 800]));
        }
    }

    #[test]
    fn a_few_fast_samples_do_not_turn_it_off() {
        let mut decision = PrefetchDecision::default();
        sample(&mut decision, &[100; SAMPLES]);
        assert!(sample(&mut decision, &[3, 100, 3, 100, 100, 3, 100, 100, 3, 100]));
        assert!(!decision.sampled(0, Duration::from_secs(1)));
    }
}
