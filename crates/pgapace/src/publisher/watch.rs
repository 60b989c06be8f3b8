//! A thread that watches whether the publisher's commits wait for this subscription.
//!
//! Any reload of the publisher's settings may add the subscription to `synchronous_standby_names`,
//! and the stream does not tell. So a session of its own reads the setting every few seconds. When
//! the answer changes, the leader starts a new run.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::Publisher;
use crate::subscriber::catalogue::{field, first_row};

/// Time between two checks.
const EVERY: Duration = Duration::from_secs(3);

/// SQL expression for the setting.
pub(crate) const SYNCHRONOUS: &str = "pg_catalog.current_setting('synchronous_standby_names')";

/// Whether this setting names a subscription.
pub(crate) fn names(setting: &str, subscription: &str) -> bool {
    // The words include numbers, FIRST and ANY. Names match without regard to case
    // (`SyncRepGetStandbyPriority` in `syncrep.c`).
    let mut words = setting.split(|c: char| c.is_whitespace() || "(),\"".contains(c));
    words.any(|word| word == "*" || word.eq_ignore_ascii_case(subscription))
}

/// A running watch; it ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Receives the new answer, once, when it changes.
    pub(crate) changed: Receiver<bool>,
    _ends: Sender<()>,
}

impl Watch {
    /// Starts the thread. `waits` is the current answer: whether commits wait for the subscription.
    pub(crate) fn spawn(publisher: &Publisher, subscription: &str, waits: bool) -> Result<Self> {
        let (sender, changed) = bounded(1);
        let (ends, ended) = bounded(0);
        let (publisher, subscription) = (publisher.clone(), subscription.to_owned());
        std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || watch(&publisher, &subscription, waits, &sender, &ended))
            .map_err(|e| Failure::internal(format!("cannot start the watch thread: {e}")))?;
        Ok(Self { changed, _ends: ends })
    }
}

fn watch(
    publisher: &Publisher,
    subscription: &str,
    waits: bool,
    sender: &Sender<bool>,
    ended: &Receiver<()>,
) {
    let mut session = None;
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        match read_setting(publisher, &mut session) {
            Ok(setting) => {
                let now = names(&setting, subscription);
                if now != waits {
                    // The leader may have ended.
                    let _ = sender.send(now);
                    return;
                }
            }
            // If the publisher has failed, the stream ends too.
            Err(failure) => {
                tracing::debug!("{failure}");
                session = None;
            }
        }
    }
}

fn read_setting(publisher: &Publisher, kept: &mut Option<Session>) -> Result<String> {
    let session = match kept {
        Some(session) => session,
        None => kept.insert(publisher.connect_to_look()?),
    };
    let results = session
        .simple(&format!("SELECT {SYNCHRONOUS}"))
        .map_err(|e| Failure::publisher(&e, "reading synchronous_standby_names"))?;
    field(&first_row(&results, "a query for a setting")?, 0)
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn a_subscription_is_named_alone_in_a_list_or_by_a_star() {
        for setting in ["sub", "ANY 1 (a, \"sub\")", "FIRST 2 (SUB, b)", "*", "2 (x,sub)"] {
            assert!(names(setting, "sub"), "{setting}");
        }
        for setting in ["", "subs", "ANY 1 (a, b)"] {
            assert!(!names(setting, "sub"), "{setting}");
        }
    }
}
