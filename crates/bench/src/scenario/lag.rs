//! How far a subscriber is behind in time, and whether that grows.

use std::time::Duration;

use pgoutput::Lsn;

use crate::scenario::live::Positions;

/// Positions that were looked at, one after the other.
#[derive(Debug)]
pub(crate) struct Lag {
    /// Seconds, and how far the publisher's WAL went then.
    written: Vec<(f64, f64)>,
    /// Seconds, and by how many milliseconds the subscriber was behind then: how long ago the
    /// publisher's WAL went as far as was applied.
    behind: Vec<(f64, f64)>,
    /// Bytes that the subscriber was behind, and those of them that were not sent, over all looks.
    bytes: f64,
    unsent: f64,
}

impl Lag {
    /// The publisher's WAL goes so far when the load begins.
    pub(crate) fn from(start: Lsn) -> Self {
        Self { written: vec![(0.0, start.0 as f64)], behind: Vec::new(), bytes: 0.0, unsent: 0.0 }
    }

    /// Notes positions, so long after the load began.
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

    /// By how many milliseconds the lag grew in each second: the slope of the straight line that
    /// is nearest to all samples by least squares.
    pub(crate) fn slope(&self) -> Option<f64> {
        let number = self.behind.len() as f64;
        let mean =
            |of: &dyn Fn(&(f64, f64)) -> f64| self.behind.iter().map(of).sum::<f64>() / number;
        let (x, y) = (mean(&|sample| sample.0), mean(&|sample| sample.1));
        let together = mean(&|sample| (sample.0 - x) * (sample.1 - y));
        let slope = together / mean(&|sample| (sample.0 - x).powi(2));
        slope.is_finite().then_some(slope)
    }

    /// When the WAL went so far; between two looks it grows evenly. What comes before the load was
    /// there when it began.
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
    fn half_the_speed_loses_half_a_second_in_each() {
        let slope = lag(|second| 1000 + second * 50).slope().unwrap();
        assert!((slope - 500.0).abs() < 1e-6, "{slope}");
    }

    #[test]
    fn who_keeps_pace_has_no_slope() {
        for behind in [0, 30, 100] {
            let slope = lag(|second| 1000 + second * 100 - behind).slope().unwrap();
            assert!(slope.abs() < 1e-6, "{behind}: {slope}");
        }
    }

    #[test]
    fn who_applies_nothing_loses_every_second() {
        let slope = lag(|_| 900).slope().unwrap();
        assert!((slope - 1000.0).abs() < 1e-6, "{slope}");
    }

    #[test]
    fn nothing_is_known_without_samples() {
        assert_eq!(Lag::from(Lsn(1000)).slope(), None);
    }
}
