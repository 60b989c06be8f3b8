//! When the slot is lost, if it goes on as in the last minutes.

use std::time::Duration;

use crate::observe::figures::window::Window;
use crate::observe::figures::{PublisherSeen, SlotFigures};

/// Over how long growth is measured: the slot's restart position moves in steps.
const GROWTH: Duration = Duration::from_secs(300);
/// Growth over less than this says nothing.
const LEAST: f64 = 10.0;

/// Retained WAL by time.
#[derive(Debug)]
pub(super) struct SlotForecast {
    retained: Window<i64>,
    last: Option<PublisherSeen>,
}

impl SlotForecast {
    pub(super) fn new() -> Self {
        Self { retained: Window::new(GROWTH), last: None }
    }

    /// Takes the publisher's answer of `at`. The same answer may come several times.
    pub(super) fn seen(&mut self, at: Duration, seen: &PublisherSeen) {
        if let Some(retained) = seen.retained_bytes {
            self.retained.push(at, retained);
        }
        self.last = Some(seen.clone());
    }

    pub(super) fn figures(&self) -> Option<SlotFigures> {
        let seen = self.last.as_ref()?;
        let growth = self.retained.pair(GROWTH).filter(|(_, _, seconds)| *seconds >= LEAST);
        let growth = growth.map(|(then, now, seconds)| (now - then) as f64 / seconds);
        let lost_in = match (seen.safe_wal_size, growth) {
            (Some(safe), Some(growth)) if growth > 0.0 => Some((safe as f64 / growth).max(0.0)),
            _ => None,
        };
        Some(SlotFigures {
            wal_status: seen.wal_status.clone(),
            retained_bytes: seen.retained_bytes,
            retained_bytes_per_second: growth,
            safe_wal_size: seen.safe_wal_size,
            lost_in_seconds: lost_in,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::SlotForecast;
    use crate::observe::figures::PublisherSeen;

    fn seen(retained: i64, safe: Option<i64>) -> PublisherSeen {
        PublisherSeen {
            retained_bytes: Some(retained),
            safe_wal_size: safe,
            ..PublisherSeen::default()
        }
    }

    #[test]
    fn a_slot_is_lost_when_what_is_safe_is_used_up() {
        let mut forecast = SlotForecast::new();
        assert!(forecast.figures().is_none());
        forecast.seen(Duration::from_secs(0), &seen(1000, Some(9000)));
        let first = forecast.figures().unwrap_or_default();
        assert_eq!((first.retained_bytes, first.lost_in_seconds), (Some(1000), None));
        forecast.seen(Duration::from_secs(20), &seen(3000, Some(7000)));
        let later = forecast.figures().unwrap_or_default();
        assert_eq!(later.retained_bytes_per_second, Some(100.0));
        assert_eq!(later.lost_in_seconds, Some(70.0));
        // Without a limit it is not lost, and the growth says when a disk is full.
        forecast.seen(Duration::from_secs(40), &seen(5000, None));
        let unlimited = forecast.figures().unwrap_or_default();
        assert_eq!(unlimited.lost_in_seconds, None);
        assert_eq!(unlimited.retained_bytes_per_second, Some(100.0));
        // The acknowledged WAL is removed.
        forecast.seen(Duration::from_secs(60), &seen(100, Some(9900)));
        assert_eq!(forecast.figures().unwrap_or_default().lost_in_seconds, None);
    }
}
