//! Lock waits of a run that does not stream yet: of its first copy, or of a table that it empties. There is no monitor then.
//! The heartbeat of the start logs them, and `status` looks by itself.

use wire::Session;

use super::detection::{self, Blocker};
use super::{WaitLog, ends_later};
use crate::error::{Failure, Result};
use crate::observe::figures::{BlockerNow, COPY_SESSION};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::{OWNER_LOCK, SESSION_LOCK};
use crate::subscriber::state::{SubscriptionId, advisory_lock};

/// The name of the session that owns the subscription.
pub(super) const CONTROL_SESSION: &str = "control session";

/// A session of the run that waits for sessions of others.
struct LockWait {
    pid: i32,
    name: &'static str,
    blockers: Vec<Blocker>,
}

/// The sessions that block the run now.
pub(crate) fn now(session: &mut Session, id: SubscriptionId) -> Result<Vec<BlockerNow>> {
    let mut shown = Vec::new();
    for LockWait { pid, name, blockers } in waits(session, id)? {
        let held_up = blockers.iter().filter(|blocker| !ends_later(blocker, pid));
        shown.extend(held_up.map(|blocker| blocker.shown(name)));
    }
    Ok(shown)
}

/// Logs the lock waits of a run until it streams.
#[derive(Debug)]
pub(crate) struct StartWaits {
    subscription: String,
    /// Sessions that waited at the last look.
    waiting: Vec<(i32, WaitLog)>,
}

impl StartWaits {
    pub(crate) fn new(subscription: &str) -> Self {
        Self { subscription: subscription.to_owned(), waiting: Vec::new() }
    }

    /// Logs who blocks, once for each wait that two looks in a row have seen.
    pub(crate) fn look(&mut self, session: &mut Session, id: SubscriptionId) -> Result<()> {
        let found = waits(session, id)?;
        self.waiting.retain(|(pid, _)| found.iter().any(|wait| wait.pid == *pid));
        for LockWait { pid, name, blockers } in &found {
            match self.waiting.iter_mut().find(|(known, _)| known == pid) {
                Some((_, log)) => log.name((*name, *pid), &blockers.iter().collect::<Vec<_>>()),
                None => self.waiting.push((*pid, WaitLog::new(&self.subscription))),
            }
        }
        Ok(())
    }
}

fn waits(session: &mut Session, id: SubscriptionId) -> Result<Vec<LockWait>> {
    let sql = format!(
        "SELECT l.pid, \
           pg_catalog.bool_or(l.classid::pg_catalog.int8 = {OWNER_LOCK}::pg_catalog.int8 & 4294967295), \
           EXISTS (SELECT FROM pg_catalog.pg_locks w WHERE w.pid = l.pid AND NOT w.granted) \
         FROM pg_catalog.pg_locks l \
         WHERE (({session}) OR ({owner})) AND l.objid::pg_catalog.int8 = {id} GROUP BY l.pid",
        session = advisory_lock::is_held(SESSION_LOCK),
        owner = advisory_lock::is_held(OWNER_LOCK),
        id = id.0
    );
    let rows = session
        .query_for_display(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading which sessions wait"))?;
    let (mut members, mut waiting) = (Vec::new(), Vec::new());
    for row in rows.iter() {
        let pid: i32 = field(&row, 0)?;
        members.push(pid);
        if boolean(&row, 2)? {
            waiting.push((pid, boolean(&row, 1)?));
        }
    }
    let mut waits = Vec::new();
    for (pid, is_owner) in waiting {
        let mut blockers = detection::look(session, id, pid, false)?;
        // They may wait for each other.
        blockers.retain(|blocker| !members.contains(&blocker.pid));
        if !blockers.is_empty() {
            let name = if is_owner { CONTROL_SESSION } else { COPY_SESSION };
            waits.push(LockWait { pid, name, blockers });
        }
    }
    Ok(waits)
}
