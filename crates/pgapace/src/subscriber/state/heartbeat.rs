//! `pgapace.owner`: the process that runs a subscription, and its heartbeat.
//!
//! The heartbeat is written by the work itself: by the leader in its event loop, through the durability
//! session, and by the coordinator of a copy. Before and after a copy, a thread of its own writes it as
//! long as the run works ([`crate::subscription`]). A process that is stuck, suspended or cut off from the
//! subscriber does not write it. Without another process that waits for the subscription, or shares it,
//! nothing is written.

use wire::{PreparedStatement, Session};

use crate::error::{Failure, Result};
use crate::process::Process;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::membership::{MEMBER_BEATS, PROCESS_OF_SQL};
use crate::subscriber::state::ownership::OwnedEpoch;

/// The stage that the owner of a subscription records with its heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OwnerStage {
    /// Creates slot and schema, or compares tables. That may take days.
    Setup,
    /// Resumes the stream, which takes moments.
    Starting,
    Copying,
    Streaming,
}

impl OwnerStage {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Starting => "starting",
            Self::Copying => "copying",
            Self::Streaming => "streaming",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Setup, Self::Starting, Self::Copying, Self::Streaming];
        all.into_iter().find(|stage| stage.name() == name)
    }
}

/// How a process is recorded as the owner.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnerRecord<'a> {
    pub(crate) process: &'a Process,
    /// Whether other processes may see it by its id.
    pub(crate) member: bool,
    /// Whether it took the subscription from a process whose heartbeat had stopped.
    pub(crate) judged: bool,
}

impl OwnerRecord<'_> {
    /// SQL for the transaction that increments the epoch. It does nothing unless `condition` holds. Returns the
    /// walsender of the stream before, if it sent to this database.
    pub(super) fn sql(&self, id: SubscriptionId, condition: &str) -> String {
        let Self { process, member, judged } = self;
        format!(
            "INSERT INTO pgapace.owner AS o \
               (subscription, epoch, member, host, process, backend, server, stage) \
             SELECT s.id, s.epoch, {}, {}, {}, pg_catalog.pg_backend_pid(), {SERVER}, \
               CASE WHEN s.phase = 'streaming' AND NOT s.rebasing THEN '{}' ELSE '{}' END \
             FROM pgapace.subscription s WHERE s.id = {} AND {condition} \
             ON CONFLICT (subscription) DO UPDATE SET \
               stalls = CASE WHEN {judged} AND NOT EXISTS (SELECT FROM pgapace.progress p \
                   WHERE p.subscription = o.subscription AND p.epoch = o.epoch) \
                   AND NOT (o.stage = '{}' AND o.beat >= {LONG_LIFE}) \
                 THEN o.stalls + 1 ELSE 0 END, \
               epoch = excluded.epoch, member = excluded.member, host = excluded.host, \
               process = excluded.process, backend = excluded.backend, \
               walsender = CASE WHEN o.server = excluded.server THEN o.walsender END, \
               server = excluded.server, \
               stage = excluded.stage, beat = 0, since = excluded.since, \
               beat_at = excluded.beat_at \
             RETURNING o.walsender",
            if *member { wire::quote_literal(&process.id) } else { "NULL".to_owned() },
            wire::quote_literal(&process.host),
            process.pid,
            OwnerStage::Starting.name(),
            OwnerStage::Setup.name(),
            id.0,
            OwnerStage::Streaming.name(),
        )
    }
}

/// SQL: text that no copy of this database has, nor any other database: a copy of its files is run by another server
/// process, and a dump is restored into another database.
const SERVER: &str = "(SELECT d.oid::pg_catalog.text FROM pg_catalog.pg_database d \
       WHERE d.datname = pg_catalog.current_database()) \
     || ' ' || pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time())::pg_catalog.text";

/// SQL that records the walsender of a stream that begins.
pub(crate) fn walsender_sql(owner: OwnedEpoch, walsender: i32) -> String {
    format!(
        "UPDATE pgapace.owner SET walsender = {walsender} WHERE subscription = {} AND epoch = {}",
        owner.id.0, owner.epoch
    )
}

/// Reads the walsender of the last stream that was sent to this database.
pub(crate) fn last_walsender(session: &mut Session, id: SubscriptionId) -> Result<Option<i32>> {
    let sql = format!(
        "SELECT o.walsender FROM pgapace.owner o WHERE o.subscription = {} AND o.server = {SERVER}",
        id.0
    );
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading the owner of the subscription"))?;
    let Some(row) = rows.first() else { return Ok(None) };
    row.get(0).map(|_| field(&row, 0)).transpose()
}

/// An owner that has streamed for so many beats did not stop because its start needs more time, even if it
/// has applied nothing: there was nothing.
const LONG_LIFE: u32 = 30;

/// Beats once before the stream, if another process judges the owner. It changes no stage, so it may come
/// late.
pub(crate) fn beat_before_stream(session: &mut Session, owner: OwnedEpoch) -> Result<()> {
    let (setup, starting) = (OwnerStage::Setup.name(), OwnerStage::Starting.name());
    let another = another_judges();
    let condition = format!("o.stage IN ('{setup}', '{starting}') AND {another}");
    write(session, owner, ("beat_before_stream", "", &condition), &[])
}

/// Beats once, if another process judges the owner, or if the stage is another one.
/// `applied`: it has committed something, so that it needs no more patience than another.
pub(crate) fn beat(
    session: &mut Session,
    owner: OwnedEpoch,
    stage: OwnerStage,
    applied: bool,
) -> Result<()> {
    let condition = format!("(o.stage <> $1 OR {})", another_judges());
    let set = format!(
        "stage = $1, \
         stalls = CASE WHEN $2::pg_catalog.bool OR o.beat >= {LONG_LIFE} THEN 0 ELSE o.stalls END, "
    );
    let params = [Some(stage.name()), Some(if applied { "true" } else { "false" })];
    write(session, owner, ("beat", &set, &condition), &params)
}

/// SQL: whether another process judges the owner: it waits for the subscription, or shares it with the owner.
/// One that shares it judges all the time, also while it tries to run it, or pauses after a failure.
fn another_judges() -> String {
    format!(
        "EXISTS (SELECT FROM pgapace.member m \
           WHERE (s.name = ANY (m.waits_for) OR s.name = ANY (m.runs)) \
             AND {PROCESS_OF_SQL} IS DISTINCT FROM o.member \
             AND {MEMBER_BEATS})"
    )
}

/// A heartbeat means nothing after a crash. Its commit waits neither for the disk nor for a synchronous standby:
/// others would take the owner for dead. So it is, whatever session writes it.
///
/// `name` is that of the prepared statement.
fn write(
    session: &mut Session,
    owner: OwnedEpoch,
    (name, set, condition): (&'static str, &str, &str),
    params: &[Option<&str>],
) -> Result<()> {
    let asynchronous = PreparedStatement {
        name: "asynchronous",
        sql: "SELECT pg_catalog.set_config('synchronous_commit', 'off', true)",
    };
    let sql = format!(
        "UPDATE pgapace.owner o SET {set}beat = o.beat + 1, \
           beat_at = pg_catalog.clock_timestamp() \
         FROM pgapace.subscription s \
         WHERE s.id = o.subscription AND o.subscription = {} AND o.epoch = {} AND {condition}",
        owner.id.0, owner.epoch,
    );
    session
        .query_prepared_each([(asynchronous, &[]), (PreparedStatement { name, sql: &sql }, params)])
        .map(drop)
        .map_err(|e| Failure::subscriber(&e, "writing the heartbeat"))
}

/// The process that runs a subscription, or ran it last.
#[derive(Debug, Clone)]
pub(crate) struct RecordedOwner {
    pub(crate) host: String,
    pub(crate) process: i32,
    /// Of its control session on the subscriber.
    pub(crate) backend: i32,
}

/// Reads the owner that is recorded under the current epoch.
pub(crate) fn recorded(session: &mut Session, id: SubscriptionId) -> Result<Option<RecordedOwner>> {
    let sql = format!(
        "SELECT o.host, o.process, o.backend FROM pgapace.owner o JOIN pgapace.subscription s \
           ON s.id = o.subscription AND s.epoch = o.epoch WHERE s.id = {}",
        id.0
    );
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading the owner of the subscription"))?;
    let read = |row: wire::Row<'_>| {
        let (host, process) = (field(&row, 0)?, field(&row, 1)?);
        Ok(RecordedOwner { host, process, backend: field(&row, 2)? })
    };
    rows.first().map(read).transpose()
}
