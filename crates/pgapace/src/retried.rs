//! Attempts that are repeated while they fail for a reason that may pass.

use std::time::Duration;

use crate::error::Result;

/// Repeats an attempt every `pause` until it succeeds, fails for good, or has failed when `ended` is true.
pub(crate) fn until<T>(
    ended: impl Fn() -> bool,
    pause: Duration,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    loop {
        match attempt() {
            Err(failure) if failure.is_transient() && !ended() => std::thread::sleep(pause),
            result => return result,
        }
    }
}
