//! Random numbers from a seed.

use std::time::Duration;

/// The SplitMix64 generator.
#[derive(Debug, Clone)]
pub(crate) struct Rng(pub(crate) u64);

/// Spreads a number over 64 bits.
pub(crate) fn mix(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// An independent generator, seeded from this one.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// A number below `bound`, which must not be 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("below a usize")
    }

    /// A time below `bound`, in whole microseconds.
    pub(crate) fn time(&mut self, bound: Duration) -> Duration {
        let bound = u64::try_from(bound.as_micros()).expect("a short time");
        Duration::from_micros(self.next() % bound.max(1))
    }

    /// One of the elements.
    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// True with probability `times / of`.
    pub(crate) fn chance(&mut self, times: usize, of: usize) -> bool {
        self.below(of) < times
    }

    /// A value from 0 to `most`.
    pub(crate) fn value(&mut self, most: u16) -> u16 {
        u16::try_from(self.next() % (u64::from(most) + 1)).expect("a u16")
    }
}
