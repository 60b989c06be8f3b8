//! Ownership of a subscription by one process, and the fence against sessions of an earlier
//! process.
//!
//! Two advisory locks of the subscriber database protect a subscription. The control session of the
//! process that runs the subscription holds the owner lock exclusively. Every session that may
//! commit for the subscription holds the session lock in share mode.
//!
//! At startup pgapace takes the owner lock and increments the epoch, in one round trip, and terminates
//! sessions of earlier epochs. Then it takes the session lock exclusively, once. After that, no late
//! packet of an earlier session can commit, so the progress that pgapace reads stays valid.
//!
//! Nothing in this fence depends on clocks, or on a process that still lives: a server that has ended a
//! session commits nothing more for it. A process that was suspended, or cut off, finds its sessions
//! closed and its epoch in the past when it continues.

use std::time::{Duration, Instant};

use serde::Serialize;
use wire::{Row, Rows, Session, TransactionStatus};

use crate::error::{Class, Failure, Result};
use crate::login_role::{as_login_role, terminate};
use crate::pooler;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::session::{LOCAL_COMMITS, names_of_owner};
use crate::subscriber::state::heartbeat::OwnerRecord;
use crate::subscriber::state::subscription::{self, COLUMNS};
use crate::subscriber::state::{Subscription, SubscriptionId, advisory_lock, name_array};

/// First key of the owner lock ("pgao"); the second key is the subscription id.
pub(crate) const OWNER_LOCK: i32 = 0x7067_616f;
/// First key of the session lock ("pgas"); the second key is the subscription id.
pub(crate) const SESSION_LOCK: i32 = 0x7067_6173;
/// How long sessions of an earlier run may take to end.
const FENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// The next step when a session does not end.
const STUCK_HINT: &str = "On the subscriber, see what it waits for: SELECT pid, state, \
    wait_event_type, wait_event FROM pg_stat_activity WHERE application_name LIKE 'pgapace %'.";

/// A subscription under the epoch of one run. Its SQL matches no row once a later run has incremented the
/// epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnedEpoch {
    pub(crate) id: SubscriptionId,
    pub(crate) epoch: i64,
}

impl OwnedEpoch {
    /// NULL, which the tables do not take, if a later run has incremented the epoch.
    pub(crate) fn sql(self) -> String {
        format!(
            "(SELECT s.id FROM pgapace.subscription s WHERE s.id = {} AND s.epoch = {})",
            self.id.0, self.epoch
        )
    }
}

/// A session that owns or owned a subscription. `backend_start` distinguishes it from a later
/// session with the same process id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionId {
    pub(super) pid: i32,
    pub(super) backend_start: String,
}

#[cfg(test)]
impl SessionId {
    pub(crate) fn with_pid(pid: i32) -> Self {
        Self { pid, backend_start: String::new() }
    }
}

/// The session that has become the owner.
#[derive(Debug)]
pub(crate) struct Owning {
    pub(crate) session: SessionId,
    /// The oid of the subscriber database.
    pub(crate) database: u32,
    /// The results of [`fence_sql`].
    fenced: Vec<Rows>,
}

impl Owning {
    /// The walsender of the stream before, if it is proved that it sent to this database. It may not have noticed
    /// yet that the process which read the stream is gone.
    pub(crate) fn former_walsender(&self) -> Result<Option<i32>> {
        let Some(row) = self.fenced.get(2).and_then(Rows::first) else { return Ok(None) };
        row.get(0).map(|_| field(&row, 0)).transpose()
    }
}

/// Owners that may be terminated.
#[derive(Debug, Default)]
pub(crate) struct Former {
    /// Any owner: the user passed `--take-over`.
    pub(crate) any: bool,
    /// An earlier session of this process. If the network drops its packets, the server may not
    /// notice for hours that the connection is lost.
    pub(crate) own: Option<SessionId>,
    /// The session of a process whose heartbeat has stopped.
    pub(crate) stopped: Option<SessionId>,
}

impl Former {
    fn includes(&self, owner: &SessionId) -> bool {
        self.any || [&self.own, &self.stopped].into_iter().flatten().any(|former| former == owner)
    }
}

/// The backend of a process that has ended keeps its locks until it has noticed that. So a verb waits so long at least:
/// the process may have been the verb before it.
const ENDING: Duration = Duration::from_secs(1);

/// How much longer a lock is asked for that nobody holds any more.
const GONE: Duration = Duration::from_secs(5);

/// In place of the holders of a lock that nobody holds any more.
const JUST_ENDED: &str = "it has just ended";

/// Takes the owner lock, and waits up to `patience` for another owner to release it. Owners
/// included in `former` are terminated. [`fence`] must follow: what it needs first comes in the same
/// round trip. So does the `record` of the owner, which a verb does not have: whoever holds the lock is
/// recorded with it. It fails as stopped when `stopping`.
pub(crate) fn become_owner(
    session: &mut Session,
    id: SubscriptionId,
    patience: Duration,
    former: &Former,
    record: Option<OwnerRecord<'_>>,
    stopping: &dyn Fn() -> bool,
) -> Result<Owning> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "taking ownership of the subscription");
    let ends_others = former.any || former.own.is_some() || former.stopped.is_some();
    let deadline = Instant::now() + if record.is_none() { patience.max(ENDING) } else { patience };
    let lock = lock_sql(id, record.is_some());
    let fence = fence_sql(id, session.backend_pid(), record);
    loop {
        let [asked, fenced] = match session.simple_each([&lock, &fence]) {
            Ok(results) => results,
            Err(error) => {
                // The caller may go on with the session.
                if !session.is_broken() && session.transaction_status() != TransactionStatus::Idle {
                    session.simple("ROLLBACK").map_err(|e| failed(&e))?;
                }
                return Err(failed(&error));
            }
        };
        let row = asked
            .first()
            .and_then(Rows::first)
            .ok_or_else(|| Failure::internal("pg_stat_get_activity does not show this session"))?;
        let (pid, role): (i32, String) = (field(&row, 1)?, field(&row, 4)?);
        if pid != session.backend_pid() || role != "replica" {
            let reason = "the session changed to another backend process after it began, or lost its \
                          settings";
            return Err(pooler::refused(pooler::Side::Subscriber, reason));
        }
        if boolean(&row, 0)? {
            let session = SessionId { pid: field(&row, 1)?, backend_start: field(&row, 2)? };
            return Ok(Owning { session, database: field(&row, 3)?, fenced });
        }
        let mut terminated = 0;
        if ends_others {
            // In each round: a process with --standby may have taken the lock meanwhile.
            let included = |owner: &SessionId| former.includes(owner);
            terminated = terminate_holders(session, OWNER_LOCK, id, &included)?;
        }
        if stopping() {
            let message = "stopped while waiting for the owner of the subscription";
            return Err(Failure::new(Class::Stopped, message));
        }
        if Instant::now() >= deadline {
            let holders = holders(session, OWNER_LOCK, id)?;
            let owner = describe_holders(&holders);
            if owner.is_some() || Instant::now() >= deadline + GONE {
                let owner = owner.as_deref().unwrap_or(JUST_ENDED);
                let holder = holders.first().map(|row| session_id(&row)).transpose()?;
                if former.own.is_some() && holder == former.own {
                    return Err(stuck(format!(
                        "the control session of an earlier run of this process did not end: {owner}"
                    )));
                }
                return Err(Failure::new(
                    Class::Busy,
                    format!("the subscription is run by another process: {owner}"),
                )
                .hint(
                    "Stop that process, or let it end the subscription: pgapace hand-over. pgapace run \
                     --take-over ends its sessions.",
                ));
            }
        }
        // A session that was terminated ends within milliseconds.
        std::thread::sleep(Duration::from_millis(if terminated > 0 { 10 } else { 100 }));
    }
}

/// Tries to take the owner lock, and tells which session and with which settings. For a run, no commit waits for a
/// standby from here on.
fn lock_sql(id: SubscriptionId, runs: bool) -> String {
    let commits = if runs { LOCAL_COMMITS } else { "NULL" };
    format!(
        "SELECT pg_catalog.pg_try_advisory_lock({OWNER_LOCK}, {}), pid, backend_start, datid, \
           pg_catalog.current_setting('session_replication_role'), {commits} \
         FROM pg_catalog.pg_stat_get_activity({})",
        id.0,
        as_login_role("pg_catalog.pg_backend_pid()")
    )
}

/// Increments the epoch, and looks whether a session of an earlier epoch can still commit. It does
/// neither without the owner lock, or if another backend than `pid` executes it. The owner is recorded with
/// the epoch.
///
/// The epoch is committed before the session lock is asked for, so a session that joins later sees the
/// new epoch.
fn fence_sql(id: SubscriptionId, pid: i32, record: Option<OwnerRecord<'_>>) -> String {
    let owns = format!(
        "EXISTS (SELECT 1 FROM pg_catalog.pg_locks l \
           WHERE {owner} AND l.objid::pg_catalog.int8 = {id} \
             AND l.pid = {pid} AND l.pid = pg_catalog.pg_backend_pid())",
        owner = advisory_lock::is_held(OWNER_LOCK),
        id = id.0
    );
    format!(
        "BEGIN; \
         UPDATE pgapace.subscription SET epoch = epoch + 1 WHERE id = {id} AND {owns} \
           AND pg_catalog.current_setting('session_replication_role') = 'replica' \
         RETURNING {COLUMNS}; \
         {record}; \
         COMMIT; \
         SELECT CASE WHEN NOT {owns} THEN NULL \
           WHEN pg_catalog.pg_try_advisory_lock({SESSION_LOCK}, {id}) \
           THEN pg_catalog.pg_advisory_unlock({SESSION_LOCK}, {id}) END",
        id = id.0,
        record = record.map_or_else(|| "SELECT".to_owned(), |record| record.sql(id, &owns)),
    )
}

/// After the owner lock is taken and the epoch incremented: waits until no session of an earlier epoch
/// can commit. Returns the subscription with the new epoch, or `None` if it was dropped. It fails as stopped
/// when `stopping`.
pub(crate) fn fence(
    session: &mut Session,
    id: SubscriptionId,
    owning: &Owning,
    stopping: &dyn Fn() -> bool,
) -> Result<Option<Subscription>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "fencing off earlier sessions");
    let results = &owning.fenced;
    let Some(row) = results.get(1).and_then(Rows::first) else { return Ok(None) };
    let row = subscription::from_row(&row)?;
    let no_holder = results.get(4).and_then(Rows::first);
    if no_holder.is_some_and(|row| row.get(0) == Some("t")) {
        return Ok(Some(row));
    }
    let deadline = Instant::now() + FENCE_TIMEOUT;
    loop {
        terminate_holders(session, SESSION_LOCK, id, &|_| true)?;
        // One transaction, whose end resets lock_timeout.
        let locked = session.simple(&format!(
            "SET LOCAL lock_timeout = '300ms'; \
             SELECT pg_catalog.pg_advisory_lock({SESSION_LOCK}, {id}); \
             SELECT pg_catalog.pg_advisory_unlock({SESSION_LOCK}, {id})",
            id = id.0
        ));
        match locked {
            Ok(_) => return Ok(Some(row)),
            Err(error) if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) && stopping() => {
                let message = "stopped while waiting for sessions of an earlier run";
                return Err(Failure::new(Class::Stopped, message));
            }
            Err(error)
                if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE)
                    && Instant::now() < deadline => {}
            Err(error) if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) => {
                let holders = describe_holders(&holders(session, SESSION_LOCK, id)?);
                let holders = holders.as_deref().unwrap_or(JUST_ENDED);
                return Err(stuck(format!(
                    "sessions of an earlier run did not end within {FENCE_TIMEOUT:?}: {holders}"
                )));
            }
            Err(error) => return Err(failed(&error)),
        }
    }
}

/// Terminates all other sessions that only an owner opens, by their names: those that commit nothing
/// and so do not hold the session lock, of a machine that closed no connection. Only the owner calls it,
/// before it opens such sessions itself. Sessions that the connection string gives another name stay until the
/// server finds that the machine is gone: the name does not tell whose they are.
pub(crate) fn end_leftovers(session: &mut Session, subscription: &str) -> Result<()> {
    let sql = format!(
        "SELECT {} FROM pg_catalog.pg_stat_activity a \
         WHERE a.datname = pg_catalog.current_database() AND a.usename = session_user \
           AND a.pid <> pg_catalog.pg_backend_pid() \
           AND a.application_name = ANY ($1::pg_catalog.text[])",
        terminate("a.pid")
    );
    session
        .query(&sql, &[Some(&name_array(&names_of_owner(subscription)))])
        .map_err(|e| Failure::subscriber(&e, "terminating sessions of an earlier run"))?;
    Ok(())
}

/// Lets a session commit for the subscription. Progress rows still carry the epoch. So a session of
/// an earlier epoch that takes the lock too late fails at its first progress row.
pub(crate) fn join(session: &mut Session, id: SubscriptionId) -> Result<()> {
    session
        .simple(&join_sql(id))
        .map_err(|e| Failure::subscriber(&e, "joining the subscription"))?;
    Ok(())
}

/// The same, and the results of `query` in the same round trip.
pub(crate) fn join_and(
    session: &mut Session,
    id: SubscriptionId,
    query: &str,
) -> Result<Vec<Rows>> {
    let [_, results] = session
        .simple_each([&join_sql(id), query])
        .map_err(|e| Failure::subscriber(&e, "joining the subscription"))?;
    Ok(results)
}

fn join_sql(id: SubscriptionId) -> String {
    format!("SELECT pg_catalog.pg_advisory_lock_shared({SESSION_LOCK}, {})", id.0)
}

/// Terminates a session of this run whose connection was lost, and waits until it has ended. After
/// that, none of its transactions can commit.
pub(crate) fn end_session(session: &mut Session, id: SubscriptionId, pid: i32) -> Result<()> {
    let deadline = Instant::now() + FENCE_TIMEOUT;
    let lost = |holder: &SessionId| holder.pid == pid;
    while terminate_holders(session, SESSION_LOCK, id, &lost)? > 0 {
        if Instant::now() >= deadline {
            return Err(stuck(format!("backend {pid} did not end within {FENCE_TIMEOUT:?}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The process that runs a subscription, as the subscriber sees it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct OwnerProcess {
    /// Process id of the backend of its control session.
    pub(crate) pid: i32,
    /// Client address of that session; `None` for a Unix socket, or without the privilege to see it.
    pub(crate) client: Option<String>,
    pub(crate) since: Option<String>,
    /// Seconds since then.
    #[serde(skip)]
    pub(crate) age: Option<f64>,
    /// Host and process id as the process recorded them; `None` for a verb.
    pub(crate) host: Option<String>,
    pub(crate) process: Option<i32>,
}

/// Returns the process that runs the subscription, if there is one.
pub(crate) fn owner(session: &mut Session, id: SubscriptionId) -> Result<Option<OwnerProcess>> {
    let rows = holders(session, OWNER_LOCK, id)?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(OwnerProcess {
        pid: field(&row, 0)?,
        client: row.get(2).map(str::to_owned),
        since: row.get(3).map(str::to_owned),
        age: row.get(4).map(|_| field(&row, 4)).transpose()?,
        host: None,
        process: None,
    }))
}

/// Whether a session owns the subscription that is none of `known`.
pub(crate) fn is_of_another(
    session: &mut Session,
    id: SubscriptionId,
    known: &[SessionId],
) -> Result<bool> {
    let holders = holders(session, OWNER_LOCK, id)?;
    let holder = holders.first().map(|row| session_id(&row)).transpose()?;
    Ok(holder.is_some_and(|holder| !known.contains(&holder)))
}

fn holders(session: &mut Session, class: i32, id: SubscriptionId) -> Result<Rows> {
    let sql = format!(
        "SELECT a.pid, a.application_name, a.client_addr, a.backend_start, \
           pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - a.backend_start) \
         FROM pg_catalog.pg_locks l \
         JOIN LATERAL pg_catalog.pg_stat_get_activity({}) a ON a.pid = l.pid \
         WHERE {} AND l.objid::pg_catalog.int8 = {} AND l.pid <> pg_catalog.pg_backend_pid()",
        as_login_role("l.pid"),
        advisory_lock::is_held(class),
        id.0
    );
    session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "looking for sessions of an earlier run"))
}

/// The [`holders`] of a lock; `None` if there are none.
fn describe_holders(holders: &Rows) -> Option<String> {
    let described: Vec<_> = holders
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
    (!described.is_empty()).then(|| described.join(", "))
}

/// One of the [`holders`] of a lock.
fn session_id(holder: &Row<'_>) -> Result<SessionId> {
    // NULL for sessions of other roles, unless this role may read all statistics.
    let backend_start = holder.get(3).unwrap_or_default().to_owned();
    Ok(SessionId { pid: field(holder, 0)?, backend_start })
}

/// The failure of a run whose earlier sessions do not end. They end some time: a server may be slow.
fn stuck(message: String) -> Failure {
    Failure::new(Class::Busy, message).hint(STUCK_HINT).transient(true)
}

/// Terminates the holders of a lock that `which` selects, and returns their number.
fn terminate_holders(
    session: &mut Session,
    class: i32,
    id: SubscriptionId,
    which: &dyn Fn(&SessionId) -> bool,
) -> Result<usize> {
    let mut found = 0;
    for row in holders(session, class, id)?.iter() {
        let holder = session_id(&row)?;
        if !which(&holder) {
            continue;
        }
        found += 1;
        let pid = holder.pid.to_string();
        session.simple(&format!("SELECT {}", terminate(&pid))).map_err(|e| {
            Failure::subscriber(&e, "terminating a session of an earlier run")
                .hint("Run pgapace with the role that ran it before, or grant pg_signal_backend.")
        })?;
    }
    Ok(found)
}
