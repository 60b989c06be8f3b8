//! How the looks at the publications went, and which of their failures are logged.

use std::time::{Duration, Instant};

use crate::error::Failure;

/// Time between two log lines about the same failure of looks at the publications.
const LOGGED_AGAIN: Duration = Duration::from_secs(3600);

/// How the looks at the publications went.
#[derive(Debug)]
pub(super) struct Refreshes {
    /// When the last one succeeded, in seconds since 1970.
    read_at: f64,
    /// Why those since have failed.
    error: Option<String>,
    /// The error that was logged last, and when.
    logged: Option<(String, Instant)>,
}

impl Refreshes {
    /// The start of a run has read the publications.
    pub(super) fn new(read_at: f64) -> Self {
        Self { read_at, error: None, logged: None }
    }

    pub(super) fn succeeded(&mut self, at: f64) {
        *self = Self::new(at);
    }

    /// Returns whether to log the failure: each reason once, and again after a long time. A connection that is
    /// lost once tells nothing: the next look succeeds, or the stream ends too.
    pub(super) fn failed(&mut self, failure: &Failure, now: Instant) -> bool {
        let first = self.error.is_none();
        let error = self.error.insert(failure.to_string());
        let known = self
            .logged
            .as_ref()
            .is_some_and(|(logged, at)| logged == error && now.duration_since(*at) < LOGGED_AGAIN);
        if known || first && failure.is_connection_lost() {
            return false;
        }
        self.logged = Some((error.clone(), now));
        true
    }

    /// When the publications were read last, in seconds since 1970, and why they could not be read since.
    pub(super) fn last(&self) -> (f64, Option<&str>) {
        (self.read_at, self.error.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::{Failure, Instant, LOGGED_AGAIN, Refreshes};
    use crate::error::{Class, Recovery};

    #[test]
    fn each_reason_is_logged_once() {
        let failure = |message: &str, recovery| Failure {
            recovery,
            ..Failure::new(Class::Publisher, message)
        };
        let (mut refreshes, now) = (Refreshes::new(1.0), Instant::now());
        let lost = failure("lost", Recovery::Reconnect);
        assert!(!refreshes.failed(&lost, now), "the next look may succeed");
        assert!(refreshes.failed(&lost, now) && !refreshes.failed(&lost, now));
        let refused = failure("refused", Recovery::None);
        assert!(refreshes.failed(&refused, now) && !refreshes.failed(&refused, now));
        assert!(refreshes.failed(&refused, now + LOGGED_AGAIN));
        assert!(refreshes.error.is_some() && refreshes.read_at < 2.0);
        refreshes.succeeded(2.0);
        assert!(refreshes.error.is_none() && refreshes.failed(&refused, now));
    }
}
