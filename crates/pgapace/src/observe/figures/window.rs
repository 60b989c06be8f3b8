//! Samples of the last minute, and the rates between them.

use std::collections::VecDeque;
use std::time::Duration;

/// The two windows over which rates are shown.
pub(crate) const SHORT: Duration = Duration::from_secs(10);
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Samples by time, the oldest first.
#[derive(Debug)]
pub(crate) struct Window<T> {
    samples: VecDeque<(Duration, T)>,
    kept: Duration,
}

impl<T> Window<T> {
    /// A window that keeps samples for this long.
    pub(crate) fn new(kept: Duration) -> Self {
        Self { samples: VecDeque::new(), kept }
    }

    /// Adds a sample. One sample that is older than the window stays, so that the window is covered.
    pub(crate) fn push(&mut self, at: Duration, sample: T) {
        let first = at.saturating_sub(self.kept);
        while self.samples.get(1).is_some_and(|(second, _)| *second <= first) {
            self.samples.pop_front();
        }
        self.samples.push_back((at, sample));
    }

    /// The newest sample and the one with which it is compared over `window`, with the seconds between
    /// them. Shortly after the start that is less than the window. `None` with one sample.
    pub(crate) fn pair(&self, window: Duration) -> Option<(&T, &T, f64)> {
        let (now, newest) = self.samples.back()?;
        let first = now.saturating_sub(window);
        let before = self.samples.partition_point(|(at, _)| *at <= first).saturating_sub(1);
        let (then, oldest) = self.samples.get(before)?;
        let seconds = (*now - *then).as_secs_f64();
        (seconds > 0.0).then_some((oldest, newest, seconds))
    }

    /// The rate of a counter over `window`, per second; zero if it is not known.
    pub(crate) fn rate(&self, window: Duration, counter: impl Fn(&T) -> u64) -> f64 {
        self.pair(window).map_or(0.0, |(then, now, seconds)| {
            counter(now).saturating_sub(counter(then)) as f64 / seconds
        })
    }

    /// The newest sample.
    pub(crate) fn last(&self) -> Option<&T> {
        self.samples.back().map(|(_, sample)| sample)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{LONG, SHORT, Window};

    #[test]
    fn rates_are_those_of_the_window_or_of_what_there_is() {
        let mut window = Window::new(LONG);
        assert!(window.pair(SHORT).is_none());
        window.push(Duration::from_secs(0), 0);
        assert_eq!(window.rate(SHORT, |n| *n), 0.0);
        for second in 1..=4 {
            window.push(Duration::from_secs(second), second * 100);
        }
        assert_eq!(window.rate(SHORT, |n| *n), 100.0);
        // Nothing happens for eight seconds.
        window.push(Duration::from_secs(12), 400);
        assert_eq!(window.rate(SHORT, |n| *n), 20.0);
        window.push(Duration::from_secs(22), 400);
        assert_eq!(window.rate(SHORT, |n| *n), 0.0);
        assert_eq!(window.rate(LONG, |n| *n), 400.0 / 22.0);
        window.push(Duration::from_secs(100), 400);
        assert_eq!(window.rate(LONG, |n| *n), 0.0);
    }
}
