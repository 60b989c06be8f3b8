//! The lag of a subscriber in time, and its growth.

use std::time::Duration;

use pgoutput::Lsn;

use crate::scenario::live::Positions;

/// A series of samples of positions.
#[derive(Debug)]
pub(crate) struct Lag {
    /// Seconds since the start, with the publisher's WAL position at that time.
    written: Vec<(f64, f64)>,
    /// Seconds since the start, with the lag in milliseconds: the time since the publisher's WAL
    /// was at the applied position.
    behind: Vec<(f64, f64)>,
    /// Sums over all samples: the lag in bytes, and the part of it that was not sent.
    bytes: f64,
    unsent: f64,
}

impl Lag {
    /// Starts with the publisher's WAL position at the start of the load.
    pub(crate) fn from(start: Lsn) -> Self {
        Self { written: vec![(0.0, start.0 as f64)], behind: Vec::new(), bytes: 0.0, unsent: 0.0 }
    }

    /// Adds a sample at a time since the start of the load.
    pub(crate) fn note(&mut self, at: Duration, positions: Positions) {
        let at = at.as_secs_f64();
        self.written.push((at, positions.written.0 as f64));
        let then = match positions.behind() {
            0.0 => at,
            _ => self.written_at(positions.applied.0 as f64),
        };
        self.behind.push((at, (at - then) * 1000.0));
        self.bytes += positions.behind();
        self.unsent += positions.unsent();
    }

    /// The share of the lag that the publisher had not sent yet.
    pub(crate) fn unsent(&self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.unsent / self.bytes)
    }

    /// The growth of the lag in milliseconds per second: the slope of the least-squares line
    /// through all samples.
    pub(crate) fn slope(&self) -> Option<f64> {
        let number = self.behind.len() as f64;
        let mean =
            |of: &dyn Fn(&(f64, f64)) -> f64| self.behind.iter().map(of).sum::<f64>() / number;
        let (x, y) = (mean(&|sample| sample.0), mean(&|sample| sample.1));
        let together = mean(&|sample| (sample.0 - x) * (sample.1 - y));
        let slope = together / mean(&|sample| (sample.0 - x).powi(2));
        slope.is_finite().then_some(slope)
    }

    /// The time at which the WAL reached a position, interpolated between samples. WAL from before
    /// the load counts as written at its start.
    fn written_at(&self, position: f64) -> f64 {
        let after = self.written.partition_point(|(_, written)| *written < position);
        let earlier = after.checked_sub(1).map(|before| self.written[before]);
        match (earlier, self.written.get(after)) {
            (Some((earlier, from)), Some((later, to))) => {
                earlier + (later - earlier) * (position - from) / (to - from)
            }
            (Some((last, _)), None) => last,
            (None, _) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lag(applied: impl Fn(u64) -> u64) -> Lag {
        let mut lag = Lag::from(Lsn(1000));
        for second in 1..10 {
            let positions = Positions {
                written: Lsn(1000 + second * 100),
                sent: Lsn(applied(second)),
                applied: Lsn(applied(second)),
            };
            lag.note(Duration::from_secs(second), positions);
        }
        lag
    }

    #[test]
    fn at_half_the_speed_the_lag_grows_half_a_second_per_second() {
        let slope = lag(|second| 1000 + second * 50).slope().unwrap();
        assert!((slope - 500.0).abs() < 1e-6, "{slope}");
    }

    #[test]
    fn a_subscriber_that_keeps_up_has_no_slope() {
        for behind in [0, 30, 100] {
            let slope = lag(|second| 1000 + second * 100 - behind).slope().unwrap();
            assert!(slope.abs() < 1e-6, "{behind}: {slope}");
        }
    }

    #[test]
    fn a_subscriber_that_applies_nothing_loses_every_second() {
        let slope = lag(|_| 900).slope().unwrap();
        assert!((slope - 1000.0).abs() < 1e-6, "{slope}");
    }

    #[test]
    fn there_is_no_slope_without_samples() {
        assert_eq!(Lag::from(Lsn(1000)).slope(), None);
    }
}
