//! Exclusion of other verifications and repairs of a subscription: only one session at a time, because
//! results of two would mix.
//!
//! The session holds an advisory lock on the subscriber, which ends with it. Verbs come before verification
//! in the background (--verify-interval): a verb announces itself with a second lock, which it shares with
//! other verbs. The background ends when it sees that, and begins again when no verb is left.

use std::time::{Duration, Instant};

use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::state::{SubscriptionId, advisory_lock};

/// How long a process that was killed may still hold its lock, and the background goes on.
const PATIENCE: Duration = Duration::from_secs(10);

/// The keys of both locks.
const VERIFIES: &str = "pg_catalog.hashtext('pgapace.verification')";
const WANTED: &str = "pg_catalog.hashtext('pgapace.verification.wanted')";

/// Lets a verb verify or repair, as long as the session lasts. It fails as stopped when `stopping`.
pub(crate) fn begin_verb(
    control: &mut Session,
    id: SubscriptionId,
    stopping: &dyn Fn() -> bool,
) -> Result<()> {
    let announce = format!("SELECT pg_catalog.pg_advisory_lock_shared({WANTED}, {})", id.0);
    control.simple(&announce).map_err(|e| locking(&e))?;
    let begun = Instant::now();
    while !try_lock(control, id)? {
        if stopping() {
            let message = "stopped while waiting for another verification or repair";
            return Err(Failure::new(Class::Stopped, message));
        }
        if begun.elapsed() >= PATIENCE {
            return Err(Failure::new(
                Class::Busy,
                "another verification or repair of this subscription is running",
            )
            .hint("Wait until it ends. Its process holds an advisory lock on the subscriber: see pg_locks."));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Lets the background verify, as long as the session lasts, unless a verb does or wants to.
pub(crate) fn begin_background(control: &mut Session, id: SubscriptionId) -> Result<bool> {
    Ok(!is_wanted_by_verb(control, id)? && try_lock(control, id)?)
}

/// Whether a verb verifies or repairs, or waits for that.
pub(crate) fn is_wanted_by_verb(session: &mut Session, id: SubscriptionId) -> Result<bool> {
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l \
           WHERE {} AND l.objid::pg_catalog.int8 = {})",
        advisory_lock::is_held(WANTED),
        id.0
    );
    let results = session.simple(&sql).map_err(|e| locking(&e))?;
    boolean(&first_row(&results, "EXISTS")?, 0)
}

fn try_lock(session: &mut Session, id: SubscriptionId) -> Result<bool> {
    let sql = format!("SELECT pg_catalog.pg_try_advisory_lock({VERIFIES}, {})", id.0);
    let results = session.simple(&sql).map_err(|e| locking(&e))?;
    boolean(&first_row(&results, "pg_try_advisory_lock")?, 0)
}

fn locking(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "taking an advisory lock")
}
