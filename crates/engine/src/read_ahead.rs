//! Whether keys of groups that cannot run yet are worth reading: only where reads are slow.
//!
//! What decides is how long the subscriber takes to read rows by key, seen in samples. A sample may be
//! slow because processors are busy, which reading ahead would only make worse; so it is the fastest
//! of several that counts. Where every one of them is slow, it is not the processor.

use std::collections::VecDeque;
use std::time::Duration;

/// Samples that decide.
const SAMPLES: usize = 8;
/// A key in memory takes about 5 µs; from here on it was read from somewhere else.
const SLOW: Duration = Duration::from_micros(40);
/// While keys are read ahead, others have read part of what is asked for already.
const FAST: Duration = Duration::from_micros(12);

/// Decides from the latest samples.
#[derive(Debug, Default)]
pub struct ReadAhead {
    on: bool,
    /// Time of one key.
    samples: VecDeque<Duration>,
}

impl ReadAhead {
    /// Whether keys are to be read ahead.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// So many keys were read in this time. Whether that changes the decision.
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
            // What was seen before does not count: it was seen under the other rule.
            self.samples.clear();
            self.on = on;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::{ReadAhead, SAMPLES};
    use std::time::Duration;

    fn sample(ahead: &mut ReadAhead, microseconds: &[u64]) -> bool {
        for each in microseconds {
            ahead.sampled(100, Duration::from_micros(*each * 100));
        }
        ahead.is_on()
    }

    #[test]
    fn slow_reads_turn_it_on_and_fast_ones_off() {
        let mut ahead = ReadAhead::default();
        assert!(!sample(&mut ahead, &[200; SAMPLES - 1]));
        assert!(sample(&mut ahead, &[200]));
        assert!(sample(&mut ahead, &[20; 100]));
        assert!(!sample(&mut ahead, &[4; SAMPLES]));
    }

    #[test]
    fn a_busy_processor_is_no_slow_disk() {
        let mut ahead = ReadAhead::default();
        for _ in 0..100 {
            // Most samples wait for their turn, some do not.
            assert!(!sample(&mut ahead, &[900, 300, 5000, 6, 70, 800]));
        }
    }

    #[test]
    fn a_few_fast_ones_do_not_turn_it_off() {
        let mut ahead = ReadAhead::default();
        sample(&mut ahead, &[100; SAMPLES]);
        assert!(sample(&mut ahead, &[3, 100, 3, 100, 100, 3, 100, 100, 3, 100]));
        assert!(!ahead.sampled(0, Duration::from_secs(1)));
    }
}
