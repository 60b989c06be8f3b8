//! The end of a wait for a barrier while the runs of the subscription fail and are retried.

use std::time::{Duration, Instant};

use pgoutput::Lsn;

use crate::error::{Class, Failure, Result};
use crate::subscriber::state::statistics::LastFailure;

/// How often a subscription may be started again without a failure that was recorded.
const STARTS: u32 = 10;

/// The runs that a verb has seen ending since something was applied.
#[derive(Debug, Default)]
pub(super) struct FailingRun {
    since: Option<(Instant, Option<Lsn>)>,
    starts: u32,
}

impl FailingRun {
    /// Counts a start that has made a request void.
    pub(super) fn started_again(&mut self) {
        self.starts += 1;
    }

    /// Returns the failure of the last run as an error if runs have failed for `patience`, and nothing was applied
    /// meanwhile.
    pub(super) fn check(
        &mut self,
        last: LastFailure,
        patience: Duration,
        now: Instant,
    ) -> Result<()> {
        match self.since {
            Some((since, applied)) if last.applied <= applied => {
                if now.duration_since(since) < patience {
                    return Ok(());
                }
            }
            _ => {
                *self = Self { since: Some((now, last.applied)), starts: 0 };
                if !patience.is_zero() {
                    return Ok(());
                }
            }
        }
        match last.failure {
            Some(failure) => Err(failure),
            None if self.starts < STARTS => Ok(()),
            None => Err(Failure::new(
                Class::Busy,
                format!("the subscription was started {STARTS} times before the barrier was ready"),
            )
            .hint("The log of pgapace run says why.")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(failure: Option<&str>, applied: u64) -> LastFailure {
        LastFailure {
            failure: failure.map(|text| Failure::new(Class::Subscriber, text)),
            applied: Some(Lsn(applied)),
            is_retried: true,
        }
    }

    #[test]
    fn the_failure_ends_the_wait_unless_something_is_applied() {
        let (now, patience) = (Instant::now(), Duration::from_secs(60));
        let mut failing = FailingRun::default();
        assert!(failing.check(last(Some("full"), 16), patience, now).is_ok());
        assert!(failing.check(last(Some("full"), 16), patience, now + patience / 2).is_ok());
        assert!(failing.check(last(Some("full"), 32), patience, now + patience).is_ok());
        assert!(failing.check(last(Some("full"), 32), patience, now + patience).is_ok());
        let ended = failing.check(last(Some("full"), 32), patience, now + patience * 2);
        assert_eq!(ended.unwrap_err().message, "full");
    }

    #[test]
    fn starts_without_a_failure_are_counted() {
        let (now, patience) = (Instant::now(), Duration::from_secs(60));
        let mut failing = FailingRun::default();
        assert!(failing.check(last(None, 16), patience, now).is_ok());
        for _ in 0..STARTS {
            assert!(failing.check(last(None, 16), patience, now + patience).is_ok());
            failing.started_again();
        }
        assert!(failing.check(last(None, 16), patience, now + patience).is_err());
    }
}
