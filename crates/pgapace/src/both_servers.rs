//! Both servers asked at the same time: at a distance, or while servers are busy, one after the other
//! takes twice as long.

use crate::error::{Failure, Result};
use crate::scoped_thread;

/// Asks the publisher on a thread of its own, and the subscriber on this one. `doing` names the
/// request to the publisher, if that thread panics.
pub(crate) fn ask_both<P: Send, S>(
    doing: &str,
    publisher: impl FnOnce() -> Result<P> + Send,
    subscriber: impl FnOnce() -> Result<S>,
) -> (Result<P>, Result<S>) {
    let (publisher, subscriber) = scoped_thread::both(publisher, subscriber);
    let panicked = || Err(Failure::internal(format!("{doing} panicked")));
    (publisher.unwrap_or_else(panicked), subscriber)
}
