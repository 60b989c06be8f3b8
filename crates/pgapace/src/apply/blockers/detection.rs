//! Who waits for whom on the subscriber, as far as it concerns one session: one statement.

use wire::Session;

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership::SESSION_LOCK;

/// One wait, and what can be seen of the session that is waited for (of those of other roles, state
/// and times are hidden without pg_read_all_stats).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocker {
    /// Backend that waits.
    pub(super) waiting: i32,
    /// Backend that is waited for; [`engine::blockers::PREPARED`] for a prepared transaction.
    pub(super) pid: i32,
    pub(super) user: Option<String>,
    pub(super) application_name: Option<String>,
    pub(super) state: Option<String>,
    pub(super) query_start: Option<String>,
}

/// All waits that can be reached from `pid`, each asked for once. Also those that the server does
/// not know: a session of another subscription that does nothing may wait for its turn behind any
/// other session of that subscription (they all hold its lock, see `ownership`).
///
/// What is seen may be of different instants; then a group gives way without need.
pub(super) fn look(session: &mut Session, id: SubscriptionId, pid: i32) -> Result<Vec<Blocker>> {
    let sql = format!(
        "WITH RECURSIVE member AS MATERIALIZED ( \
           SELECT l.pid, l.objid FROM pg_catalog.pg_locks l \
           WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 \
             AND l.classid::pg_catalog.int8 = {SESSION_LOCK} \
             AND l.objid::pg_catalog.int8 <> {id} \
             AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d \
                               WHERE d.datname = pg_catalog.current_database()) \
         ), wait (waiting, pid) AS ( \
           SELECT {pid}, b.pid FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids({pid})) b (pid) \
           UNION \
           SELECT w.pid, n.pid FROM wait w CROSS JOIN LATERAL ( \
             SELECT b.pid \
             FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid) \
             UNION ALL \
             SELECT o.pid FROM member m \
             JOIN member o ON o.objid = m.objid AND o.pid <> m.pid \
             LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = m.pid \
             WHERE m.pid = w.pid AND a.state IS DISTINCT FROM 'active' \
           ) n WHERE w.pid <> 0 \
         ) \
         SELECT w.waiting, w.pid, a.usename, a.application_name, a.state, a.query_start \
         FROM wait w LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = w.pid",
        id = id.0
    );
    match session.query(&sql, &[]) {
        Ok(rows) => rows
            .iter()
            .map(|row| {
                let text = |column| row.get(column).map(str::to_owned);
                Ok(Blocker {
                    waiting: field(&row, 0)?,
                    pid: field(&row, 1)?,
                    user: text(2),
                    application_name: text(3),
                    state: text(4),
                    query_start: text(5),
                })
            })
            .collect(),
        // The server is too busy to say (see `Purpose::Monitor`); the next look may be luckier.
        Err(error) if error.sqlstate() == Some("57014") => {
            tracing::debug!(%error, "cannot look who waits for whom");
            Ok(Vec::new())
        }
        Err(error) => Err(Failure::subscriber(&error, "looking who waits for whom")),
    }
}
