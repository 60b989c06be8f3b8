//! Moments in which no transaction is prepared on the subscriber, although commits of the publisher wait for that.
//!
//! A requested copy begins when no transaction is prepared, and a copied table is ready when those have ended that left its
//! changes out. With many clients, some transaction is prepared at any time. So new ones are held for a moment, in which
//! the others end. If they do not, those that are held are prepared, and it is tried again later.

use std::time::{Duration, Instant};

/// The longest time for which the publisher's sessions wait.
const LONGEST: Duration = Duration::from_secs(1);
/// Time from one such moment to the next, which grows while they do not suffice, and the longest.
const EVERY: Duration = Duration::from_secs(10);
const RARELY: Duration = Duration::from_secs(320);

#[derive(Debug)]
pub(super) struct PreparePause {
    since: Option<Instant>,
    every: Duration,
}

impl Default for PreparePause {
    fn default() -> Self {
        Self { since: None, every: EVERY }
    }
}

impl PreparePause {
    /// Whether transactions are held now, if something `waits` for the end of those that are prepared.
    pub(super) fn is_on(&mut self, waits: bool, now: Instant) -> bool {
        if !waits {
            *self = Self::default();
            return false;
        }
        let mut took = now.duration_since(*self.since.get_or_insert(now));
        if took >= self.every {
            *self = Self { since: Some(now), every: (self.every * 2).min(RARELY) };
            took = Duration::ZERO;
        }
        took < LONGEST
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Instant, PreparePause};

    #[test]
    fn sessions_of_the_publisher_wait_for_a_moment_now_and_then() {
        let (mut pause, begin) = (PreparePause::default(), Instant::now());
        let mut held =
            |waits, tenths: u64| pause.is_on(waits, begin + Duration::from_millis(tenths * 100));
        assert!(!held(false, 0));
        assert!(held(true, 1) && held(true, 10) && !held(true, 11) && !held(true, 100));
        assert!(held(true, 101) && held(true, 110) && !held(true, 111) && !held(true, 300));
        assert!(held(true, 301) && !held(true, 311));
        assert!(!held(false, 312) && held(true, 313) && !held(true, 323) && held(true, 413));
    }
}
