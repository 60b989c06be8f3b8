//! `pgapace.member`: the processes that wait for subscriptions or share them, and the owners of these.

use serde::Serialize;
use wire::{Rows, Session};

use crate::error::{Failure, Result};
use crate::login_role::as_login_role;
use crate::process::Process;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::ownership::{OWNER_LOCK, SessionId};
use crate::subscriber::state::{advisory_lock, name_array};

/// A subscription of the subscriber, and the session that holds it.
#[derive(Debug, Clone)]
pub(crate) struct HeldSubscription {
    pub(crate) name: String,
    /// Because of an error.
    pub(crate) disabled: bool,
    /// The session with the owner's lock.
    pub(crate) holder: Option<SessionId>,
    /// The process that has this session; `None` for a verb, and for a process that has not recorded
    /// itself yet.
    pub(crate) owner: Option<BeatingOwner>,
}

/// A recorded owner that holds its subscription.
#[derive(Debug, Clone)]
pub(crate) struct BeatingOwner {
    /// The id of the owner's process, see [`process_of`]; `None` without --standby.
    pub(crate) member: Option<String>,
    pub(crate) host: String,
    pub(crate) process: i32,
    pub(crate) stage: OwnerStage,
    pub(crate) stalls: u32,
    pub(crate) beat: OwnerBeat,
}

/// The columns of `pgapace.owner` of which at least one changes while the owner works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnerBeat {
    epoch: i64,
    stage: &'static str,
    beat: i64,
}

/// This process, as others see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MemberRow {
    pub(crate) waits_for: Vec<String>,
    /// Subscriptions that it can run, with weights; empty if it does not share its subscriptions.
    pub(crate) runs: Vec<(String, u32)>,
    pub(crate) failed: Vec<String>,
    pub(crate) claims: Vec<String>,
}

/// A process that shares subscriptions, as its row tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenMember {
    /// See [`process_of`].
    pub(crate) id: String,
    pub(crate) beat: i64,
    /// Whether its session exists. Of a machine that is gone, it may for a while.
    pub(crate) connected: bool,
    pub(crate) runs: Vec<MemberSubscription>,
}

/// A subscription that a process can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberSubscription {
    pub(crate) name: String,
    pub(crate) weight: u32,
    /// The process failed to run the subscription lately.
    pub(crate) failed: bool,
    /// The process claims the subscription: it is to have it, as it has computed.
    pub(crate) claimed: bool,
}

/// The owners and members that one look at a subscriber database finds.
#[derive(Debug)]
pub(crate) struct OwnersAndMembers {
    pub(crate) held: Vec<HeldSubscription>,
    pub(crate) members: Vec<SeenMember>,
}

/// The row of one watcher of a process: each watcher has a row of its own, even if several watch the same
/// database.
pub(crate) fn row_id(process: &Process, watcher: u32) -> String {
    match watcher {
        0 => process.id.clone(),
        more => format!("{}.{more}", process.id),
    }
}

/// The id of the process whose watcher has the row `id`.
pub(crate) fn process_of(id: &str) -> &str {
    id.split_once('.').map_or(id, |(process, _)| process)
}

/// SQL for the same, of `pgapace.member m`.
pub(crate) const PROCESS_OF_SQL: &str = "pg_catalog.split_part(m.id, '.', 1)";

/// Registers the row `id` of this process, or raises its beat. Then looks. The first part is committed when this
/// returns.
pub(crate) fn round(
    session: &mut Session,
    process: &Process,
    id: &str,
    row: &MemberRow,
) -> Result<OwnersAndMembers> {
    let (names, weights): (Vec<_>, Vec<_>) =
        row.runs.iter().map(|(name, weight)| (name.clone(), weight.to_string())).unzip();
    let array = |names: &[String]| wire::quote_literal(&name_array(names));
    let beat = format!(
        "INSERT INTO pgapace.member AS m \
           (id, host, process, backend, waits_for, runs, weights, failed, claims) \
         VALUES ({}, {}, {}, pg_catalog.pg_backend_pid(), {}, {}, {}, {}, {}) \
         ON CONFLICT (id) DO UPDATE SET beat = m.beat + 1, backend = excluded.backend, \
           waits_for = excluded.waits_for, runs = excluded.runs, weights = excluded.weights, \
           failed = excluded.failed, claims = excluded.claims, beat_at = excluded.beat_at",
        wire::quote_literal(id),
        wire::quote_literal(&process.host),
        process.pid,
        array(&row.waits_for),
        array(&names),
        array(&weights),
        array(&row.failed),
        array(&row.claims),
    );
    let [_, held, members] = session
        .simple_each([&beat, &held_sql(), MEMBERS_SQL])
        .map_err(|e| Failure::subscriber(&e, WAITING))?;
    Ok(OwnersAndMembers { held: held_in(&held)?, members: members_in(&members)? })
}

const WAITING: &str = "waiting as a standby";

/// Reads the sessions that hold the subscriptions, and the processes that share them.
pub(crate) fn look(session: &mut Session) -> Result<OwnersAndMembers> {
    let [held, members] = session
        .simple_each([&held_sql(), MEMBERS_SQL])
        .map_err(|e| Failure::subscriber(&e, WAITING))?;
    Ok(OwnersAndMembers { held: held_in(&held)?, members: members_in(&members)? })
}

/// Removes the row `id` of this process, and those whose last beat is so old that they cannot have left in an orderly way.
pub(crate) fn leave(session: &mut Session, id: &str) -> Result<()> {
    let sql = format!(
        "DELETE FROM pgapace.member WHERE id = {} \
           OR beat_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(hours => 1)",
        wire::quote_literal(id)
    );
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, WAITING))?;
    Ok(())
}

fn held_sql() -> String {
    format!(
        "SELECT s.name, l.pid, a.backend_start, o.host, o.process, o.stage, o.stalls, o.epoch, o.beat, \
           o.member, s.disabled_reason IS NOT NULL \
         FROM pgapace.subscription s \
         LEFT JOIN pg_catalog.pg_locks l ON {owner} AND l.objid::pg_catalog.int8 = s.id \
         LEFT JOIN LATERAL pg_catalog.pg_stat_get_activity({started}) a ON a.pid = l.pid \
         LEFT JOIN pgapace.owner o ON o.subscription = s.id AND o.epoch = s.epoch \
           AND o.backend = l.pid",
        owner = advisory_lock::is_held(OWNER_LOCK),
        // Without a holder, that of this session, which is none.
        started = as_login_role("coalesce(l.pid, pg_catalog.pg_backend_pid())")
    )
}

fn held_in(results: &[Rows]) -> Result<Vec<HeldSubscription>> {
    let Some(rows) = results.first() else { return Ok(Vec::new()) };
    let read = |row: wire::Row<'_>| {
        let owner = match row.get(5).and_then(OwnerStage::from_name) {
            Some(stage) => Some(BeatingOwner {
                member: row.get(9).map(str::to_owned),
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
        let (name, disabled) = (field(&row, 0)?, boolean(&row, 10)?);
        Ok(HeldSubscription { name, disabled, holder, owner })
    };
    rows.iter().map(read).collect()
}

/// A row for each subscription that a process can run, in a fixed order.
const MEMBERS_SQL: &str = "\
    SELECT m.id, m.beat, EXISTS (SELECT FROM pg_catalog.pg_stat_activity a WHERE a.pid = m.backend), \
      r.name, r.weight, r.name = ANY (m.failed), r.name = ANY (m.claims) \
    FROM pgapace.member m, ROWS FROM (pg_catalog.unnest(m.runs), pg_catalog.unnest(m.weights)) \
      AS r (name, weight) \
    WHERE r.name IS NOT NULL AND r.weight > 0 ORDER BY m.id, r.name";

fn members_in(results: &[Rows]) -> Result<Vec<SeenMember>> {
    let mut members: Vec<SeenMember> = Vec::new();
    for row in results.iter().flat_map(Rows::iter) {
        let id: String = field(&row, 0)?;
        if members.last().is_none_or(|last| last.id != id) {
            let (beat, connected) = (field(&row, 1)?, boolean(&row, 2)?);
            members.push(SeenMember { id, beat, connected, runs: Vec::new() });
        }
        if let Some(member) = members.last_mut() {
            member.runs.push(MemberSubscription {
                name: field(&row, 3)?,
                weight: field(&row, 4)?,
                failed: boolean(&row, 5)?,
                claimed: boolean(&row, 6)?,
            });
        }
    }
    Ok(members)
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

/// SQL condition: the process of this row of `pgapace.member`, `m`, is alive. One that was killed leaves its row behind.
pub(super) const MEMBER_BEATS: &str =
    "m.beat_at > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => 60)";

/// The processes that wait for a subscription, those first that wait longest.
pub(crate) fn waiting(session: &mut Session, name: &str) -> Result<Vec<WaitingProcess>> {
    let sql = format!(
        "SELECT m.host, m.process, m.since, pg_catalog.date_part('epoch', \
           pg_catalog.clock_timestamp() - m.beat_at) \
         FROM pgapace.member m WHERE $1 = ANY (m.waits_for) AND {MEMBER_BEATS} ORDER BY m.since, m.id"
    );
    let rows = session
        .query(&sql, &[Some(name)])
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
