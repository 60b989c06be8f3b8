//! How far a position of the stream is behind the publisher, in bytes and in seconds.

use std::collections::VecDeque;

use pgoutput::Lsn;

/// Most samples that are kept. When there are more, every second one is dropped.
const MOST: usize = 1024;

/// Remembers which time belongs to which position of the stream.
///
/// Two kinds of times are known. The last transaction up to a position, or the first one behind it, committed at a
/// time of the publisher's clock. And at some time the publisher's WAL ended at a position. Changes behind a position
/// are as young as either, or younger, so the younger of both is the lag.
#[derive(Debug, Default)]
pub(crate) struct LagClock {
    commits: Times,
    ends: Times,
}

impl LagClock {
    /// The last transaction up to here committed at this time, or the first one behind, in seconds of the publisher's
    /// clock.
    pub(crate) fn committed(&mut self, lsn: Lsn, seconds: f64) {
        self.commits.push(lsn, seconds);
    }

    /// The publisher's WAL ended here at this time, in seconds of the publisher's clock.
    pub(crate) fn ended(&mut self, lsn: Lsn, seconds: f64) {
        self.ends.push(lsn, seconds);
    }

    /// For how long the changes behind `position` have been waiting, `now` being a time of the
    /// publisher's clock and `end` the end of its WAL. `None` if nothing is known of that.
    pub(crate) fn seconds(&self, position: Lsn, end: Lsn, now: f64) -> Option<f64> {
        if position >= end {
            return Some(0.0);
        }
        let known = [self.commits.before(position), self.ends.before(position)];
        let youngest = known.into_iter().flatten().max_by(f64::total_cmp);
        // Before anything was applied, the first transaction behind the position waits longest.
        let since = youngest.or_else(|| self.commits.after(position))?;
        Some((now - since).max(0.0))
    }
}

/// Times by position, both ascending.
#[derive(Debug, Default)]
struct Times(VecDeque<(Lsn, f64)>);

impl Times {
    fn push(&mut self, lsn: Lsn, seconds: f64) {
        match self.0.back_mut() {
            Some((last, known)) if *last >= lsn => {
                if *last == lsn {
                    *known = known.max(seconds);
                }
                return;
            }
            _ => {}
        }
        if self.0.len() >= MOST {
            // The distances double, so that the whole backlog stays covered.
            let mut index = 0;
            self.0.retain(|_| {
                index += 1;
                index % 2 == 0
            });
        }
        self.0.push_back((lsn, seconds));
    }

    /// The time of the first sample after this position.
    fn after(&self, lsn: Lsn) -> Option<f64> {
        let next = self.0.partition_point(|(at, _)| *at <= lsn);
        self.0.get(next).map(|(_, seconds)| *seconds)
    }

    /// The time of the last sample at or before this position.
    fn before(&self, lsn: Lsn) -> Option<f64> {
        let next = self.0.partition_point(|(at, _)| *at <= lsn);
        next.checked_sub(1).map(|at| self.0[at].1)
    }
}

/// Seconds until a lag is zero, if the subscription applies `applied` bytes of WAL per second, and the
/// publisher writes `written`. `None` if the lag does not shrink.
pub(crate) fn seconds_to_zero(lag: u64, applied: f64, written: f64) -> Option<f64> {
    if lag == 0 {
        return Some(0.0);
    }
    let gain = applied - written;
    // A lag of a few bytes at equal rates is no backlog, but neither is it known to end.
    (gain > 0.0).then(|| lag as f64 / gain)
}

#[cfg(test)]
mod tests {
    use pgoutput::Lsn;

    use super::{LagClock, MOST, seconds_to_zero};

    #[test]
    fn the_lag_is_the_age_of_what_is_not_applied() {
        let mut clock = LagClock::default();
        assert_eq!(clock.seconds(Lsn(5), Lsn(5), 100.0), Some(0.0), "nothing is behind");
        assert_eq!(clock.seconds(Lsn(5), Lsn(9), 100.0), None, "nothing is known");
        clock.committed(Lsn(10), 50.0);
        clock.committed(Lsn(20), 60.0);
        assert_eq!(clock.seconds(Lsn(5), Lsn(30), 100.0), Some(50.0), "the first one waits");
        assert_eq!(clock.seconds(Lsn(19), Lsn(30), 100.0), Some(50.0));
        assert_eq!(clock.seconds(Lsn(20), Lsn(30), 100.0), Some(40.0));
        // The last transaction is old, but at 98 s nothing came after it.
        clock.ended(Lsn(20), 98.0);
        clock.ended(Lsn(30), 99.0);
        assert_eq!(clock.seconds(Lsn(20), Lsn(30), 100.0), Some(2.0));
        assert_eq!(clock.seconds(Lsn(19), Lsn(30), 100.0), Some(50.0));
        // The publisher's clock may be behind.
        assert_eq!(clock.seconds(Lsn(20), Lsn(30), 10.0), Some(0.0));
        // WAL without changes followed, and then a transaction.
        clock.committed(Lsn(20), 99.5);
        clock.committed(Lsn(40), 99.5);
        assert_eq!(clock.seconds(Lsn(25), Lsn(40), 100.0), Some(0.5));
    }

    #[test]
    fn a_long_backlog_stays_covered() {
        let mut clock = LagClock::default();
        for n in 1..=10 * MOST as u64 {
            clock.committed(Lsn(n), n as f64);
        }
        let now = (10 * MOST) as f64;
        let position = Lsn(5 * MOST as u64);
        let lag = clock.seconds(position, Lsn(u64::MAX), now).unwrap_or_default();
        assert!((lag - now / 2.0).abs() < 100.0, "{lag}");
    }

    #[test]
    fn the_estimate_needs_a_gain() {
        assert_eq!(seconds_to_zero(0, 0.0, 100.0), Some(0.0));
        assert_eq!(seconds_to_zero(1000, 300.0, 100.0), Some(5.0));
        assert_eq!(seconds_to_zero(1000, 100.0, 100.0), None);
        assert_eq!(seconds_to_zero(1000, 0.0, 0.0), None);
    }
}
