//! Reads which sessions of the subscriber block one session, directly or through others: one statement.

use std::time::{Duration, Instant};

use wire::Session;

use crate::error::{Failure, Result};
use crate::observe::figures::BlockerNow;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::SESSION_LOCK;
use crate::subscriber::state::{SubscriptionId, advisory_lock};

/// One wait, and the session that blocks. The server hides state and times of other roles' sessions from
/// roles without pg_read_all_stats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocker {
    /// The backend that waits.
    pub(super) waiting: i32,
    /// The backend that blocks; [`engine::blockers::PREPARED`] for a prepared transaction.
    pub(super) pid: i32,
    pub(super) user: Option<String>,
    pub(super) application_name: Option<String>,
    pub(super) state: Option<String>,
    pub(super) query_start: Option<String>,
    pub(super) query: Option<String>,
    /// The prepared transaction, if it was found.
    pub(super) prepared: Option<PreparedBlocker>,
}

/// A prepared transaction that blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PreparedBlocker {
    pub(super) gid: String,
    /// Whether this subscription has prepared it.
    pub(super) is_ours: bool,
}

impl Blocker {
    /// The gid of a prepared transaction of this subscription.
    pub(super) fn our_gid(&self) -> Option<&str> {
        self.prepared.as_ref().filter(|prepared| prepared.is_ours).map(|prepared| &*prepared.gid)
    }

    /// As a message names it.
    pub(super) fn described(&self) -> String {
        if let Some(prepared) = &self.prepared {
            return format!("prepared transaction {}", prepared.gid);
        }
        let of = |what: &str, value: &Option<String>| {
            value.as_deref().filter(|value| !value.is_empty()).map(|value| format!("{what}{value}"))
        };
        let known = [
            of("user ", &self.user),
            of("application_name ", &self.application_name),
            of("", &self.state),
        ];
        format!(
            "process {} ({})",
            self.pid,
            known.into_iter().flatten().collect::<Vec<_>>().join(", ")
        )
    }

    /// As it is shown while `waiting` waits for it.
    pub(super) fn shown(&self, waiting: &str) -> BlockerNow {
        BlockerNow {
            waiting: waiting.to_owned(),
            pid: (self.pid != engine::blockers::PREPARED).then_some(self.pid),
            user: self.user.clone(),
            application_name: self.application_name.clone(),
            state: self.state.clone(),
            query: self.query.clone(),
            gid: self.prepared.as_ref().map(|prepared| prepared.gid.clone()),
        }
    }
}

/// Kinds of locks that a session holds inside one step of a statement, and never while it waits for anything
/// else (`LockTagType` in the server's `lock.h`): no cycle goes through them. Many sessions that
/// insert into one table wait for each other's extension of its file.
const BRIEF: &str = "('extend', 'page', 'frozenid')";

/// For a second look at a server that was too busy for the first one.
const PATIENT: &str = "15s";

/// Waits between backends of the coordinator on any server. A global process id holds the node in its upper
/// digits (`backend_data.c` of Citus).
const CITUS_WAITS: &str = "distributed (waiting, blocking) AS MATERIALIZED ( \
  SELECT (waiting_gpid % 10000000000)::pg_catalog.int4, \
    (blocking_gpid % 10000000000)::pg_catalog.int4 \
  FROM pg_catalog.citus_lock_waits \
  WHERE waiting_gpid / 10000000000 = pg_catalog.citus_backend_gpid() / 10000000000 \
    AND blocking_gpid / 10000000000 = pg_catalog.citus_backend_gpid() / 10000000000 \
), ";
const CITUS_FIRST: &str =
    " UNION ALL SELECT $pid, c.blocking FROM distributed c WHERE c.waiting = $pid";
const CITUS_NEXT: &str = " UNION ALL SELECT c.blocking FROM distributed c WHERE c.waiting = w.pid";

/// Looks may fail for so long.
const FAILING: Duration = Duration::from_secs(30);

/// The session that reads who blocks.
pub(super) struct Detector {
    session: Session,
    id: SubscriptionId,
    subscription: String,
    /// Whether the database has Citus.
    citus: bool,
    /// All looks have failed since then.
    failing: Option<Instant>,
}

impl Detector {
    pub(super) fn new(
        session: Session,
        id: SubscriptionId,
        subscription: &str,
        citus: bool,
    ) -> Self {
        Self { session, id, subscription: subscription.to_owned(), citus, failing: None }
    }

    /// The waits that can be reached from `pid`. After a failure nothing is seen: the group goes on waiting, as without
    /// a look, and the next look may succeed. A lost session is a failure at once. So are failures that last: a wait
    /// that only a look can end would last for ever.
    pub(super) fn look(&mut self, pid: i32) -> Result<Vec<Blocker>> {
        let failure = match look(&mut self.session, self.id, pid, self.citus) {
            Ok(seen) => {
                self.failing = None;
                return Ok(seen);
            }
            Err(failure) if self.session.is_broken() => return Err(failure),
            Err(failure) => failure,
        };
        let now = Instant::now();
        match self.failing {
            None => {
                self.failing = Some(now);
                tracing::warn!(
                    event = "blockers_unknown",
                    subscription = self.subscription,
                    error = %failure,
                    "cannot read which sessions block"
                );
            }
            Some(since) if now.duration_since(since) > FAILING => {
                return Err(failure.transient(true));
            }
            Some(_) => {}
        }
        Ok(Vec::new())
    }
}

/// All waits that can be reached from `pid`, with the names of prepared transactions.
pub(super) fn look(
    session: &mut Session,
    id: SubscriptionId,
    pid: i32,
    with_citus: bool,
) -> Result<Vec<Blocker>> {
    let seen = waits(session, id, pid, with_citus)?;
    name_prepared(session, id, seen)
}

/// All waits that can be reached from `pid`, each once. An idle session of another subscription may wait
/// for its turn to commit behind any other session of that subscription, which the server does not know.
/// So these waits are added; the sessions of a subscription share a lock (see `ownership`).
///
/// The statement may see different instants. Then a group is rolled back without need. Waits for [`BRIEF`]
/// locks are left out.
///
/// With Citus, statements wait on other servers too, for which Citus has a view.
///
/// Most looks find no wait, and to plan this takes the server milliseconds. So a short query comes first.
fn waits(
    session: &mut Session,
    id: SubscriptionId,
    pid: i32,
    with_citus: bool,
) -> Result<Vec<Blocker>> {
    if !with_citus && !may_wait(session, pid)? {
        return Ok(Vec::new());
    }
    let (waits, first, next) =
        if with_citus { (CITUS_WAITS, CITUS_FIRST, CITUS_NEXT) } else { ("", "", "") };
    let first = first.replace("$pid", &pid.to_string());
    let sql = format!(
        "WITH RECURSIVE {waits} member AS MATERIALIZED ( \
           SELECT l.pid, l.objid FROM pg_catalog.pg_locks l \
           WHERE {sessions} AND l.objid::pg_catalog.int8 <> {id} \
         ), wait (waiting, pid) AS ( \
           (SELECT {pid}, b.pid \
            FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids({pid})) b (pid){first}) \
           UNION \
           SELECT w.pid, n.pid FROM wait w CROSS JOIN LATERAL ( \
             SELECT b.pid \
             FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid) \
             UNION ALL \
             SELECT o.pid FROM member m \
             JOIN member o ON o.objid = m.objid AND o.pid <> m.pid \
             LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = m.pid \
             WHERE m.pid = w.pid AND a.state IS DISTINCT FROM 'active'{next} \
           ) n WHERE w.pid <> 0 \
         ) \
         SELECT w.waiting, w.pid, a.usename, a.application_name, a.state, a.query_start, \
           pg_catalog.left(a.query, 1000), \
           coalesce(v.wait_event_type = 'Lock' AND v.wait_event IN {BRIEF}, false) \
         FROM wait w LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = w.pid \
         LEFT JOIN pg_catalog.pg_stat_activity v ON v.pid = w.waiting",
        sessions = advisory_lock::is_held(SESSION_LOCK),
        id = id.0
    );
    let rows = match session.query_for_display(&sql, &[]) {
        // The server is too busy to answer in time (see `Purpose::Monitor`). No other session detects these
        // waits: a group may wait for ever.
        Err(error) if is_cancelled(&error) => {
            tracing::debug!(%error, "could not read which sessions block; reading again");
            let patient = session.simple(&format!("SET statement_timeout = '{PATIENT}'"));
            let rows = patient.and_then(|_| session.query_for_display(&sql, &[]));
            session.simple("RESET statement_timeout").map_err(|e| doing(&e))?;
            rows
        }
        all => all,
    };
    match rows {
        Ok(rows) => rows
            .iter()
            .filter(|row| row.get(7) != Some("t"))
            .map(|row| {
                let text = |column| row.get(column).map(str::to_owned);
                Ok(Blocker {
                    waiting: field(&row, 0)?,
                    pid: field(&row, 1)?,
                    user: text(2),
                    application_name: text(3),
                    state: text(4),
                    query_start: text(5),
                    query: text(6),
                    prepared: None,
                })
            })
            .collect(),
        // The next request may succeed.
        Err(error) if is_cancelled(&error) => {
            tracing::debug!(%error, "could not read which sessions block");
            Ok(Vec::new())
        }
        Err(error) => Err(doing(&error)),
    }
}

/// Names the prepared transactions: one blocker for each. It is left as it is if the lock is held by none any more.
///
/// A lock of a prepared transaction has no process. Its `virtualtransaction` leads to the lock on its transaction id.
fn name_prepared(
    session: &mut Session,
    id: SubscriptionId,
    seen: Vec<Blocker>,
) -> Result<Vec<Blocker>> {
    let is_prepared = |blocker: &Blocker| blocker.pid == engine::blockers::PREPARED;
    let waiting = seen.iter().filter(|blocker| is_prepared(blocker));
    let waiting: Vec<_> = waiting.map(|blocker| blocker.waiting.to_string()).collect();
    if waiting.is_empty() {
        return Ok(seen);
    }
    let lock = |of: &str| {
        let columns = [
            "locktype",
            "database",
            "relation",
            "page",
            "tuple",
            "virtualxid",
            "transactionid",
            "classid",
            "objid",
            "objsubid",
        ];
        columns.map(|column| format!("{of}.{column}")).join(", ")
    };
    let sql = format!(
        "WITH lock AS MATERIALIZED ( \
           SELECT * FROM pg_catalog.pg_locks l WHERE l.pid IS NULL OR l.pid IN ({waiting}) \
         ) \
         SELECT DISTINCT w.pid, x.gid, EXISTS (SELECT FROM pgapace.prepared p \
             WHERE p.subscription = {id} AND p.name = x.gid) \
         FROM lock w \
         JOIN lock h ON h.pid IS NULL AND h.granted AND ({w}) IS NOT DISTINCT FROM ({h}) \
         JOIN lock t ON t.pid IS NULL AND t.locktype = 'transactionid' \
           AND t.virtualtransaction = h.virtualtransaction \
         JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = t.transactionid \
         WHERE w.pid IS NOT NULL AND NOT w.granted ORDER BY w.pid, x.gid",
        waiting = waiting.join(", "),
        id = id.0,
        w = lock("w"),
        h = lock("h"),
    );
    let rows = match session.query_for_display(&sql, &[]) {
        Ok(rows) => rows,
        // The waits count, also without names.
        Err(error) if !session.is_broken() => {
            tracing::debug!(%error, "could not read which prepared transactions block");
            return Ok(seen);
        }
        Err(error) => return Err(doing(&error)),
    };
    let mut found = Vec::with_capacity(rows.len());
    for row in rows.iter() {
        let prepared = PreparedBlocker { gid: field(&row, 1)?, is_ours: boolean(&row, 2)? };
        found.push((field::<i32>(&row, 0)?, prepared));
    }
    let mut all = Vec::with_capacity(seen.len() + found.len());
    for blocker in seen {
        let those =
            found.iter().filter(|(pid, _)| is_prepared(&blocker) && *pid == blocker.waiting);
        let named = those
            .map(|(_, prepared)| Blocker { prepared: Some(prepared.clone()), ..blocker.clone() });
        let before = all.len();
        all.extend(named);
        if all.len() == before {
            all.push(blocker);
        }
    }
    Ok(all)
}

/// Whether a backend waits for others, or the server is too busy to say so in time.
fn may_wait(session: &mut Session, pid: i32) -> Result<bool> {
    let sql = format!("SELECT pg_catalog.cardinality(pg_catalog.pg_blocking_pids({pid}))");
    match session.query(&sql, &[]) {
        Ok(rows) => Ok(rows.first().and_then(|row| row.get(0)) != Some("0")),
        Err(error) if is_cancelled(&error) => Ok(true),
        Err(error) => Err(doing(&error)),
    }
}

fn is_cancelled(error: &wire::Error) -> bool {
    error.sqlstate() == Some(sqlstate::QUERY_CANCELED)
}

fn doing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading which sessions block")
}
