//! Whether the publisher's commits wait for us: `synchronous_standby_names` may name us with any
//! reload of its settings, and nothing in the stream says so. A session of its own looks every few
//! seconds, on a thread; whoever leads the run sets up everything anew when that has changed.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::session::Publisher;
use crate::subscriber::catalogue::{field, first_row};

/// Between two looks.
const EVERY: Duration = Duration::from_secs(3);

/// The setting, in SQL.
pub(crate) const SYNCHRONOUS: &str = "pg_catalog.current_setting('synchronous_standby_names')";

/// Whether this setting names a subscription.
pub(crate) fn names(setting: &str, subscription: &str) -> bool {
    // The words of the setting, its numbers and FIRST or ANY among them; names match without case.
    let mut words = setting.split(|c: char| c.is_whitespace() || "(),\"".contains(c));
    words.any(|word| word == "*" || word.eq_ignore_ascii_case(subscription))
}

/// A running watch; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Gets what is so now, when that is not what was said before.
    pub(crate) changed: Receiver<bool>,
    _ends: Sender<()>,
}

impl Watch {
    /// Commits of the publisher wait for the subscription now, or not.
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
        match look(publisher, &mut session) {
            Ok(setting) => {
                let now = names(&setting, subscription);
                if now != waits {
                    // The leader may be gone.
                    let _ = sender.send(now);
                    return;
                }
            }
            // If it is more than this session, the stream ends too.
            Err(failure) => {
                tracing::debug!("{failure}");
                session = None;
            }
        }
    }
}

fn look(publisher: &Publisher, kept: &mut Option<Session>) -> Result<String> {
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
