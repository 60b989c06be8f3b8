//! When the slot is lost at the present rate.
//!
//! A slot retains more and more WAL for two reasons. Either pgapace does not acknowledge as fast as the
//! publisher writes, or a long transaction of the publisher holds the slot's restart position. That position
//! moves in steps: the publisher looks for a new one every 15 s. So a subscription that keeps up retains more
//! and more for some seconds, then less. Growth is therefore that of the least values of two halves of a window.

use std::collections::VecDeque;
use std::time::Duration;

use crate::observe::figures::{PublisherSeen, SlotFigures};
use crate::publisher::slot::Slot;

/// Over how long the growth of WAL is measured that is not acknowledged, and over how long at least.
const BEHIND: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(15));
/// The same for WAL that is retained.
const RETAINED: (Duration, Duration) = (Duration::from_secs(120), Duration::from_secs(60));
/// A slot that is lost later than this is not in danger.
const FAR: f64 = 30.0 * 86_400.0;

/// Bytes by time, over a window.
#[derive(Debug)]
struct Growth {
    samples: VecDeque<(Duration, i64)>,
    longest: Duration,
    least: Duration,
}

impl Growth {
    fn new((longest, least): (Duration, Duration)) -> Self {
        Self { samples: VecDeque::new(), longest, least }
    }

    fn push(&mut self, at: Duration, bytes: i64) {
        let first = at.saturating_sub(self.longest);
        while self.samples.front().is_some_and(|(then, _)| *then < first) {
            self.samples.pop_front();
        }
        self.samples.push_back((at, bytes));
    }

    /// Bytes per second; `None` if too little was seen.
    fn rate(&self) -> Option<f64> {
        let ((first, _), (last, _)) = (self.samples.front()?, self.samples.back()?);
        let half = last.saturating_sub(*first) / 2;
        if half < self.least / 2 {
            return None;
        }
        let (mut before, mut after) = (i64::MAX, i64::MAX);
        for (at, bytes) in &self.samples {
            let least = if *at < *first + half { &mut before } else { &mut after };
            *least = (*least).min(*bytes);
        }
        Some((after - before) as f64 / half.as_secs_f64())
    }
}

/// The answers of the publisher about the slot.
#[derive(Debug)]
pub(crate) struct SlotForecast {
    behind: Growth,
    retained: Growth,
    last: Option<PublisherSeen>,
}

impl SlotForecast {
    pub(crate) fn new() -> Self {
        Self { behind: Growth::new(BEHIND), retained: Growth::new(RETAINED), last: None }
    }

    /// Takes the publisher's answer of `at`. `behind`: bytes of its WAL that are not acknowledged.
    pub(crate) fn seen(&mut self, at: Duration, seen: &PublisherSeen, behind: u64) {
        self.behind.push(at, i64::try_from(behind).unwrap_or(i64::MAX));
        if let Some(retained) = seen.retained_bytes {
            self.retained.push(at, retained);
        }
        self.last = Some(seen.clone());
    }

    /// The same before a stream has begun: nothing of what the slot retains is acknowledged.
    pub(crate) fn seen_slot(&mut self, at: Duration, slot: &Slot) {
        let seen = PublisherSeen {
            wal_status: slot.wal_status.clone(),
            retained_bytes: slot.retained_bytes,
            safe_wal_size: slot.safe_wal_size,
            ..PublisherSeen::default()
        };
        let behind = slot.retained_bytes.and_then(|bytes| u64::try_from(bytes).ok());
        self.seen(at, &seen, behind.unwrap_or_default());
    }

    pub(crate) fn figures(&self) -> Option<SlotFigures> {
        let seen = self.last.as_ref()?;
        let rates = [self.behind.rate(), self.retained.rate()].into_iter().flatten();
        let growth = rates.max_by(f64::total_cmp);
        let lost_in = match (seen.safe_wal_size, growth) {
            // The next checkpoint of the publisher may remove WAL that the slot needs, or has removed it.
            (Some(..=0), _) => Some(0.0),
            _ if seen.wal_status.as_deref() == Some("lost") => Some(0.0),
            (Some(safe), Some(growth)) if growth > 0.0 => Some(safe as f64 / growth),
            _ => None,
        };
        Some(SlotFigures {
            wal_status: seen.wal_status.clone(),
            retained_bytes: seen.retained_bytes,
            retained_bytes_per_second: growth,
            safe_wal_size: seen.safe_wal_size,
            lost_in_seconds: lost_in.filter(|seconds| *seconds < FAR),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::SlotForecast;
    use crate::observe::figures::{PublisherSeen, SlotFigures};

    /// The figures after answers of every third second: bytes that are retained, that are safe, and that
    /// are not acknowledged.
    fn after(seconds: u64, answer: impl Fn(u64) -> (i64, Option<i64>, u64)) -> SlotFigures {
        let mut forecast = SlotForecast::new();
        assert!(forecast.figures().is_none());
        for second in (0..=seconds).step_by(3) {
            let (retained, safe_wal_size, behind) = answer(second);
            let retained_bytes = Some(retained);
            let seen = PublisherSeen { retained_bytes, safe_wal_size, ..PublisherSeen::default() };
            forecast.seen(Duration::from_secs(second), &seen, behind);
        }
        forecast.figures().unwrap_or_default()
    }

    fn signed(seconds: u64) -> i64 {
        i64::try_from(seconds).unwrap_or(i64::MAX)
    }

    #[test]
    fn a_slot_is_lost_when_what_is_safe_is_used_up() {
        let blocked = |second| (1000 + 100 * signed(second), Some(9000), 100 * second);
        assert_eq!(after(12, blocked).lost_in_seconds, None, "too little was seen");
        let found = after(24, blocked);
        assert_eq!(found.retained_bytes_per_second, Some(100.0));
        assert_eq!((found.retained_bytes, found.lost_in_seconds), (Some(3400), Some(90.0)));
        // Without a limit it is not lost, and the growth says when a disk is full.
        let unlimited = after(24, |second| (0, None, 100 * second));
        assert_eq!(unlimited.lost_in_seconds, None);
        assert_eq!(unlimited.retained_bytes_per_second, Some(100.0));
        // Nor is one that takes years.
        assert_eq!(after(300, |second| (0, Some(1 << 40), second)).lost_in_seconds, None);
    }

    #[test]
    fn a_slot_beyond_its_limit_is_lost_now_whether_it_grows_or_not() {
        for safe in [0, -4096] {
            assert_eq!(after(0, |_| (9000, Some(safe), 0)).lost_in_seconds, Some(0.0), "{safe}");
            assert_eq!(after(120, |_| (9000, Some(safe), 0)).lost_in_seconds, Some(0.0), "{safe}");
        }
        assert_eq!(after(120, |_| (9000, Some(1), 0)).lost_in_seconds, None);
        let mut forecast = SlotForecast::new();
        let wal_status = Some("lost".to_owned());
        forecast.seen(Duration::ZERO, &PublisherSeen { wal_status, ..PublisherSeen::default() }, 0);
        assert_eq!(forecast.figures().and_then(|slot| slot.lost_in_seconds), Some(0.0));
    }

    #[test]
    fn a_slot_whose_restart_position_moves_in_steps_is_not_lost() {
        for seconds in (15..300).step_by(3) {
            let steps = |second| (100_000 * signed(second % 15), Some(1 << 30), 0);
            assert_eq!(after(seconds, steps).lost_in_seconds, None, "{seconds}");
        }
    }

    #[test]
    fn a_transaction_of_the_publisher_that_holds_the_restart_position_is_seen() {
        let held = |second| (100 * signed(second), Some(9000), 0);
        assert_eq!(after(120, held).lost_in_seconds, Some(90.0));
    }

    #[test]
    fn growth_that_begins_late_is_seen_within_a_minute() {
        let late = |second: u64| (0, Some(9000), 100 * second.saturating_sub(300));
        assert_eq!(after(300, late).lost_in_seconds, None);
        assert!(after(360, late).lost_in_seconds.is_some());
    }
}
