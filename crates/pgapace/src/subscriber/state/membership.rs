//! `pgapace.member`: the processes that wait for subscriptions, and who holds these.

use serde::Serialize;
use wire::{Rows, Session};

use crate::error::{Failure, Result};
use crate::process::Process;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::name_array;
use crate::subscriber::state::ownership::{OWNER_LOCK, SessionId};

/// A subscription of the subscriber, and who holds it.
#[derive(Debug, Clone)]
pub(crate) struct HeldSubscription {
    pub(crate) name: String,
    /// The session with the owner's lock.
    pub(crate) holder: Option<SessionId>,
    /// The process that has this session; `None` for a verb, and for a process that has not recorded
    /// itself yet.
    pub(crate) owner: Option<BeatingOwner>,
}

/// A recorded owner that holds its subscription.
#[derive(Debug, Clone)]
pub(crate) struct BeatingOwner {
    pub(crate) host: String,
    pub(crate) process: i32,
    pub(crate) stage: OwnerStage,
    pub(crate) stalls: u32,
    pub(crate) beat: OwnerBeat,
}

/// What changes while an owner works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnerBeat {
    epoch: i64,
    stage: &'static str,
    beat: i64,
}

/// Registers this process, or raises its beat. Then reads who holds the subscriptions. The first part
/// is committed when this returns.
pub(crate) fn round(
    session: &mut Session,
    process: &Process,
    waits_for: &[String],
) -> Result<Vec<HeldSubscription>> {
    let beat = format!(
        "INSERT INTO pgapace.member AS m (id, host, process, waits_for) VALUES ({}, {}, {}, {}) \
         ON CONFLICT (id) DO UPDATE SET beat = m.beat + 1, waits_for = excluded.waits_for, \
           beat_at = excluded.beat_at",
        wire::quote_literal(&process.id),
        wire::quote_literal(&process.host),
        process.pid,
        wire::quote_literal(&name_array(waits_for)),
    );
    let [_, held] =
        session.simple_each([&beat, &held_sql()]).map_err(|e| Failure::subscriber(&e, WAITING))?;
    held_in(&held)
}

const WAITING: &str = "waiting as a standby";

/// Reads who holds the subscriptions.
pub(crate) fn look(session: &mut Session) -> Result<Vec<HeldSubscription>> {
    let held = session.simple(&held_sql()).map_err(|e| Failure::subscriber(&e, WAITING))?;
    held_in(&held)
}

/// Removes this process, and those whose last beat is so old that they cannot have left in an orderly way.
pub(crate) fn leave(session: &mut Session, process: &Process) -> Result<()> {
    let sql = format!(
        "DELETE FROM pgapace.member WHERE id = {} \
           OR beat_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(hours => 1)",
        wire::quote_literal(&process.id)
    );
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, WAITING))?;
    Ok(())
}

fn held_sql() -> String {
    format!(
        "SELECT s.name, l.pid, a.backend_start, o.host, o.process, o.stage, o.stalls, o.epoch, o.beat \
         FROM pgapace.subscription s \
         LEFT JOIN pg_catalog.pg_locks l ON l.locktype = 'advisory' AND l.granted \
           AND l.objsubid = 2 AND l.classid::pg_catalog.int8 = {OWNER_LOCK} \
           AND l.objid::pg_catalog.int8 = s.id AND l.database = (SELECT d.oid \
             FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()) \
         LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
         LEFT JOIN pgapace.owner o ON o.subscription = s.id AND o.epoch = s.epoch \
           AND o.backend = l.pid"
    )
}

fn held_in(results: &[Rows]) -> Result<Vec<HeldSubscription>> {
    let Some(rows) = results.first() else { return Ok(Vec::new()) };
    let read = |row: wire::Row<'_>| {
        let owner = match row.get(5).and_then(OwnerStage::from_name) {
            Some(stage) => Some(BeatingOwner {
                host: field(&row, 3)?,
                process: field(&row, 4)?,
                stage,
                stalls: field(&row, 6)?,
                beat: OwnerBeat {
                    epoch: field(&row, 7)?,
                    stage: stage.name(),
                    beat: field(&row, 8)?,
                },
            }),
            None => None,
        };
        let holder = match row.get(1) {
            Some(_) => Some(SessionId {
                pid: field(&row, 1)?,
                // NULL for sessions of other roles, unless this role may read all statistics.
                backend_start: row.get(2).unwrap_or_default().to_owned(),
            }),
            None => None,
        };
        Ok(HeldSubscription { name: field(&row, 0)?, holder, owner })
    };
    rows.iter().map(read).collect()
}

/// A process that waits for a subscription, for `status`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WaitingProcess {
    pub(crate) host: String,
    pub(crate) process: i32,
    pub(crate) since: String,
    /// Seconds since its last beat, by the subscriber's clock.
    pub(crate) beat_age: f64,
}

/// The processes that wait for a subscription, those first that wait longest.
pub(crate) fn waiting(session: &mut Session, name: &str) -> Result<Vec<WaitingProcess>> {
    let rows = session
        .query(
            "SELECT m.host, m.process, m.since, pg_catalog.date_part('epoch', \
               pg_catalog.clock_timestamp() - m.beat_at) \
             FROM pgapace.member m WHERE $1 = ANY (m.waits_for) ORDER BY m.since, m.id",
            &[Some(name)],
        )
        .map_err(|e| Failure::subscriber(&e, "reading which processes wait"))?;
    let read = |row: wire::Row<'_>| {
        Ok(WaitingProcess {
            host: field(&row, 0)?,
            process: field(&row, 1)?,
            since: field(&row, 2)?,
            beat_age: field(&row, 3)?,
        })
    };
    rows.iter().map(read).collect()
}
