//! Waiting for conditions.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const POLL_MIN: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(100);

/// Polls `condition` until it returns true, for at most `timeout`.
///
/// An error of the condition counts as "not yet", because a typical condition queries a server that
/// may be restarting. The timeout error contains the last such error.
pub fn wait_until(
    timeout: Duration,
    what: impl Into<String>,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    let mut poll = POLL_MIN;
    loop {
        let last = match condition() {
            Ok(true) => return Ok(()),
            Ok(false) => None,
            Err(error) => Some(Box::new(error)),
        };
        let waited = started.elapsed();
        if waited >= timeout {
            return Err(Error::Timeout { what: what.into(), waited, last });
        }
        sleep(poll.min(timeout.saturating_sub(waited)));
        poll = (poll * 2).min(POLL_MAX);
    }
}
