//! One process per subscription, and the fence against sessions of an earlier one.
//!
//! Two advisory locks of the subscriber database: the owner's, held exclusively by the control session
//! of the process that runs the subscription; and the sessions', held shared by every session that
//! may commit for it. Who starts raises the epoch, ends the sessions of older epochs, and takes the
//! sessions' lock exclusively once: after that no packet of theirs, however late, can commit, and
//! the progress that is read stays true.

use std::time::{Duration, Instant};

use serde::Serialize;
use wire::Session;

use crate::error::{Class, Failure, LOCK_NOT_AVAILABLE, Result};
use crate::pooler;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::{COLUMNS, Subscription, SubscriptionId, subscription};

/// First key of the owner's lock ("pgao").
const OWNER_LOCK: i32 = 0x7067_616f;
/// First key of the sessions' lock ("pgas").
pub(crate) const SESSION_LOCK: i32 = 0x7067_6173;
/// How long old sessions may take to end.
const FENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// A session that owned, or owns, a subscription. The start tells it from a later session with the
/// same process id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionId {
    pid: i32,
    backend_start: String,
}

/// What has become the owner.
#[derive(Debug)]
pub(crate) struct Owning {
    pub(crate) session: SessionId,
    /// The oid of the subscriber database.
    pub(crate) database: u32,
}

/// Whose ownership may be ended.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// Anybody's: the user said so.
    pub(crate) any: bool,
    /// That of an earlier session of this process: the server does not notice for hours that a
    /// connection is gone when the network drops its packets.
    pub(crate) own: Option<SessionId>,
}

impl Former {
    fn includes(&self, owner: &SessionId) -> bool {
        self.any || self.own.as_ref() == Some(owner)
    }
}

/// Becomes the owner, waiting up to `patience` for another one to go; owners that `former` has
/// are terminated first.
pub(crate) fn become_owner(
    session: &mut Session,
    id: SubscriptionId,
    patience: Duration,
    former: &Former,
) -> Result<Owning> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "taking ownership of the subscription");
    if former.any || former.own.is_some() {
        terminate_holders(session, OWNER_LOCK, id, &|owner| former.includes(owner))?;
    }
    let deadline = Instant::now() + patience;
    loop {
        let sql = format!(
            "SELECT pg_catalog.pg_try_advisory_lock({OWNER_LOCK}, {}), pid, backend_start, datid, \
               pg_catalog.current_setting('session_replication_role') \
             FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())",
            id.0
        );
        let rows = session.query(&sql, &[]).map_err(|e| failed(&e))?;
        let row = rows.first().ok_or_else(|| Failure::internal("our own session is gone"))?;
        let (pid, role): (i32, String) = (field(&row, 1)?, field(&row, 4)?);
        if pid != session.backend_pid() || role != "replica" {
            let reason = "another process serves the session than when it began, or it has lost its \
                          settings";
            return Err(pooler::refused(pooler::Side::Subscriber, reason));
        }
        if boolean(&row, 0)? {
            let session = SessionId { pid: field(&row, 1)?, backend_start: field(&row, 2)? };
            return Ok(Owning { session, database: field(&row, 3)? });
        }
        if Instant::now() >= deadline {
            let owner = describe_holders(session, OWNER_LOCK, id)?;
            return Err(Failure::new(
                Class::Busy,
                format!("the subscription is run by another process: {owner}"),
            )
            .hint("Stop that process, or pass --take-over to end its sessions."));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Raises the epoch and waits until no session of an older one can commit. Returns the subscription
/// as it is from then on, `None` if it was dropped.
pub(crate) fn fence(session: &mut Session, id: SubscriptionId) -> Result<Option<Subscription>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "fencing off earlier sessions");
    // The epoch is committed before the lock is had: who takes the lock later sees the new one.
    let results = session
        .simple(&format!(
            "BEGIN; \
             UPDATE pgapace.subscription SET epoch = epoch + 1 WHERE id = {id} RETURNING {COLUMNS}; \
             COMMIT; \
             SELECT CASE WHEN pg_catalog.pg_try_advisory_lock({SESSION_LOCK}, {id}) \
                    THEN pg_catalog.pg_advisory_unlock({SESSION_LOCK}, {id}) END",
            id = id.0
        ))
        .map_err(|e| failed(&e))?;
    let Some(row) = results.get(1).and_then(wire::Rows::first) else { return Ok(None) };
    let row = subscription(&row)?;
    let nobody = results.get(3).and_then(wire::Rows::first);
    if nobody.is_some_and(|row| row.get(0) == Some("t")) {
        return Ok(Some(row));
    }
    let deadline = Instant::now() + FENCE_TIMEOUT;
    loop {
        terminate_holders(session, SESSION_LOCK, id, &|_| true)?;
        // One transaction: should the lock not be had, the setting is taken back with it.
        let locked = session.simple(&format!(
            "SET lock_timeout = '300ms'; \
             SELECT pg_catalog.pg_advisory_lock({SESSION_LOCK}, {id}); \
             SELECT pg_catalog.pg_advisory_unlock({SESSION_LOCK}, {id}); \
             SET lock_timeout = 0",
            id = id.0
        ));
        match locked {
            Ok(_) => return Ok(Some(row)),
            Err(error)
                if error.sqlstate() == Some(LOCK_NOT_AVAILABLE) && Instant::now() < deadline => {}
            Err(error) if error.sqlstate() == Some(LOCK_NOT_AVAILABLE) => {
                let holders = describe_holders(session, SESSION_LOCK, id)?;
                return Err(Failure::new(
                    Class::Busy,
                    format!("sessions of an earlier run do not end: {holders}"),
                )
                .hint("Look at what they wait for in pg_stat_activity on the subscriber."));
            }
            Err(error) => return Err(failed(&error)),
        }
    }
}

/// Marks a session as one that may commit for the subscription. Its statements still carry the
/// epoch, so a session that takes the lock too late is refused by its first progress row.
pub(crate) fn join(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!("SELECT pg_catalog.pg_advisory_lock_shared({SESSION_LOCK}, {})", id.0);
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, "joining the subscription"))?;
    Ok(())
}

/// Ends a session of this run that was lost on our side, and waits until it is gone: after that
/// nothing of it can commit.
pub(crate) fn end_session(session: &mut Session, id: SubscriptionId, pid: i32) -> Result<()> {
    let deadline = Instant::now() + FENCE_TIMEOUT;
    let lost = |holder: &SessionId| holder.pid == pid;
    while terminate_holders(session, SESSION_LOCK, id, &lost)? > 0 {
        if Instant::now() >= deadline {
            return Err(Failure::new(Class::Busy, format!("backend {pid} does not end"))
                .hint("Look at what it waits for in pg_stat_activity on the subscriber."));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The process that runs a subscription, as the subscriber sees it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Owner {
    /// Its control session's backend.
    pub(crate) pid: i32,
    /// Address of its machine; `None` for a Unix socket, or without the privilege to see it.
    pub(crate) client: Option<String>,
    pub(crate) since: Option<String>,
}

/// Who runs the subscription now, if anybody.
pub(crate) fn owner(session: &mut Session, id: SubscriptionId) -> Result<Option<Owner>> {
    let rows = holders(session, OWNER_LOCK, id)?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Owner {
        pid: field(&row, 0)?,
        client: row.get(2).map(str::to_owned),
        since: row.get(3).map(str::to_owned),
    }))
}

fn holders(session: &mut Session, class: i32, id: SubscriptionId) -> Result<wire::Rows> {
    let sql = format!(
        "SELECT a.pid, a.application_name, a.client_addr, a.backend_start \
         FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 \
           AND l.classid::pg_catalog.int8 = {class} AND l.objid::pg_catalog.int8 = {} \
           AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d \
                             WHERE d.datname = pg_catalog.current_database()) \
           AND l.pid <> pg_catalog.pg_backend_pid()",
        id.0
    );
    session.query(&sql, &[]).map_err(|e| Failure::subscriber(&e, "looking for earlier sessions"))
}

fn describe_holders(session: &mut Session, class: i32, id: SubscriptionId) -> Result<String> {
    let rows = holders(session, class, id)?;
    let described: Vec<_> = rows
        .iter()
        .map(|row| {
            format!(
                "backend {} from {} since {}",
                row.get(0).unwrap_or("?"),
                row.get(2).unwrap_or("this host"),
                row.get(3).unwrap_or("?"),
            )
        })
        .collect();
    Ok(if described.is_empty() {
        "one that has just ended".to_owned()
    } else {
        described.join(", ")
    })
}

/// Ends the holders of a lock; returns how many there were.
fn terminate_holders(
    session: &mut Session,
    class: i32,
    id: SubscriptionId,
    which: &dyn Fn(&SessionId) -> bool,
) -> Result<usize> {
    let mut found = 0;
    for row in holders(session, class, id)?.iter() {
        let pid: i32 = field(&row, 0)?;
        // Not shown of other roles' sessions.
        let backend_start = row.get(3).unwrap_or_default().to_owned();
        if !which(&SessionId { pid, backend_start }) {
            continue;
        }
        found += 1;
        session
            .query(
                "SELECT pg_catalog.pg_terminate_backend($1::pg_catalog.int4)",
                &[Some(&pid.to_string())],
            )
            .map_err(|e| {
                Failure::subscriber(&e, "ending a session of an earlier run").hint(
                    "Run pgapace with the role that ran it before, or grant pg_signal_backend.",
                )
            })?;
    }
    Ok(found)
}
