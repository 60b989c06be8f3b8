//! A wait that is noticed again and again: a user is told once, if it is long.

use std::time::{Duration, Instant};

/// The time after which a user is told what something waits for.
pub(crate) const TELL_AFTER: Duration = Duration::from_secs(5);

/// The time without a notice after which the wait has ended.
const ENDED_AFTER: Duration = Duration::from_secs(3);

/// A wait, while it lasts.
#[derive(Debug, Default)]
pub(crate) struct LongWait {
    since: Option<Instant>,
    noticed_at: Option<Instant>,
    told: bool,
}

impl LongWait {
    /// Notices that something waits. Returns whether to tell the user.
    pub(crate) fn noticed(&mut self, now: Instant) -> bool {
        if self.noticed_at.is_none_or(|at| now.duration_since(at) > ENDED_AFTER) {
            *self = Self { since: Some(now), ..Self::default() };
        }
        self.noticed_at = Some(now);
        let is_long = self.since.is_some_and(|since| now.duration_since(since) >= TELL_AFTER);
        is_long && !std::mem::replace(&mut self.told, is_long)
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Instant, LongWait};

    #[test]
    fn each_long_wait_is_told_once() {
        let (mut wait, begin) = (LongWait::default(), Instant::now());
        let mut told = |seconds| wait.noticed(begin + Duration::from_secs(seconds));
        let first: Vec<_> = (0..9).map(&mut told).collect();
        assert_eq!(first.iter().position(|told| *told), Some(5));
        assert_eq!(first.iter().filter(|told| **told).count(), 1);
        // Another wait, which is short at first.
        assert!(![20, 22, 24].into_iter().any(&mut told));
        assert!(told(25));
    }
}
