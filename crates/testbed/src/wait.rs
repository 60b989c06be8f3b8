//! Waiting for conditions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};

use crate::error::{Error, Result};

const POLL_MIN: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(100);

/// Polls `condition` until it returns true, for at most `timeout`.
///
/// An error of the condition counts as "not yet", because a typical condition queries a server that
/// may be restarting. The timeout error contains the last such error.
///
/// Queries of the condition share their sessions while it is waited for: the start of a session costs a server more
/// than most queries.
pub fn wait_until(
    timeout: Duration,
    what: impl Into<String>,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    let mut poll = POLL_MIN;
    let _sessions = SharedSessions::begin();
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

thread_local! {
    /// The sessions of the condition that this thread waits for, by connection string.
    static SESSIONS: RefCell<Option<HashMap<String, Client>>> = const { RefCell::new(None) };
}

/// While it exists, [`with_session`] keeps its sessions. None outlives the wait: an open session would prevent its
/// database from being dropped or copied.
struct SharedSessions {
    /// Whether this is the outer one of two waits, one inside the other.
    outer: bool,
}

impl SharedSessions {
    fn begin() -> Self {
        SESSIONS.with_borrow_mut(|sessions| {
            let outer = sessions.is_none();
            sessions.get_or_insert_default();
            Self { outer }
        })
    }
}

impl Drop for SharedSessions {
    fn drop(&mut self) {
        if self.outer {
            drop(SESSIONS.take());
        }
    }
}

/// Runs queries in a session of the wait that this thread is in, or else in a new one. After an error the next
/// call has a new session.
pub(crate) fn with_session<T>(
    conninfo: &str,
    run: impl FnOnce(&mut Client) -> Result<T, postgres::Error>,
) -> Result<T, postgres::Error> {
    let kept = SESSIONS.with_borrow_mut(|sessions| sessions.as_mut()?.remove(conninfo));
    let mut client = match kept {
        Some(client) => client,
        None => Client::connect(conninfo, NoTls)?,
    };
    let result = run(&mut client)?;
    SESSIONS.with_borrow_mut(|sessions| {
        if let Some(sessions) = sessions {
            sessions.insert(conninfo.to_owned(), client);
        }
    });
    Ok(result)
}
