//! The replication slot of a subscription: reading, creating, checking, altering and dropping it.

mod alteration;
mod checks;
mod copy;
mod creation;
mod end;

use pgoutput::Lsn;
use wire::{Rows, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::session::{IDENTIFY, SERVER_START, SystemIdentity, identity};
use crate::publisher::wal_end::WalEnd;
use crate::publisher::watch::StandbyPublisher;
use crate::subscriber::catalogue::{boolean, field, first_row};
pub(crate) use alteration::{end_two_phase, set_failover};
pub(crate) use checks::{
    LOST_HINT, check_kind, check_promoted, check_resume, has_skipped, is_lost, without_position,
};
pub(crate) use copy::{Copied, copy, is_ours, not_ours, temporary_name};
pub(crate) use creation::{
    CreatedSlot, Kind, create, create_then, create_to_stream, create_without_snapshot,
    warn_of_catalogue_changes,
};
pub(crate) use end::{drop, drop_existing_sql, end_walsender, wait_until_free};

/// Begins a transaction with one snapshot. No session of pgapace has a time limit for transactions.
pub(crate) const BEGIN_READING: &str =
    "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// The columns of `pg_replication_slots` that pgapace checks.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) plugin: Option<String>,
    pub(crate) in_this_database: bool,
    pub(crate) active_pid: Option<i32>,
    pub(crate) confirmed_flush: Option<Lsn>,
    pub(crate) two_phase: bool,
    /// The server has synchronised it from a primary. A promoted server keeps this mark, so it counts only during
    /// recovery.
    pub(crate) synced: bool,
    pub(crate) invalid: Option<String>,
    pub(crate) wal_status: Option<String>,
    pub(crate) retained_bytes: Option<i64>,
    /// Bytes of WAL that may still be written before the slot is invalidated; `None` without a
    /// limit.
    pub(crate) safe_wal_size: Option<i64>,
}

/// Reads a slot.
pub(crate) fn find(session: &mut Session, name: &str) -> Result<Option<Slot>> {
    let results = session
        .simple(&find_sql(session, name))
        .map_err(|e| Failure::publisher(&e, &format!("reading slot \"{name}\"")))?;
    found(&results)
}

/// Facts about the publisher that are read before the stream starts.
pub(crate) struct PublisherNow {
    pub(crate) system: SystemIdentity,
    pub(crate) slot: Option<Slot>,
    /// Where its WAL ends.
    pub(crate) wal_end: WalEnd,
    /// If it is in recovery.
    pub(crate) standby: Option<StandbyPublisher>,
}

/// Reads the publisher's identity, a slot and the end of WAL in one round trip.
pub(crate) fn read_publisher(session: &mut Session, name: &str) -> Result<PublisherNow> {
    // The timeline of a server that was not in recovery before it is read does not change.
    let now = format!("SELECT {}, pg_catalog.pg_is_in_recovery(), {SERVER_START}", WalEnd::sql());
    let [now, identified, slot] =
        session
            .simple_each([&now, IDENTIFY, &find_sql(session, name)])
            .map_err(|e| Failure::publisher(&e, &format!("reading slot \"{name}\"")))?;
    let (now, system) = (first_row(&now, "the query for an LSN")?, identity(&identified)?);
    let standby = match boolean(&now, WalEnd::COLUMNS)? {
        true => Some(StandbyPublisher {
            started: field(&now, WalEnd::COLUMNS + 1)?,
            walsender: session.backend_pid(),
            timeline: system.timeline,
        }),
        false => None,
    };
    Ok(PublisherNow { slot: found(&slot)?, wal_end: WalEnd::of(&now)?, standby, system })
}

fn find_sql(session: &Session, name: &str) -> String {
    let major = session.server_version().major();
    let reason = match major {
        17.. => "s.invalidation_reason",
        16 => "CASE WHEN s.conflicting THEN 'conflict with recovery' END",
        _ => "NULL::pg_catalog.text",
    };
    let synced = if major >= 17 { "s.synced" } else { "false" };
    format!(
        "SELECT s.plugin, s.database = pg_catalog.current_database(), s.active_pid, \
             s.confirmed_flush_lsn, s.two_phase, s.wal_status, {reason}, \
             pg_catalog.pg_wal_lsn_diff(CASE WHEN pg_catalog.pg_is_in_recovery() \
               THEN pg_catalog.pg_last_wal_replay_lsn() \
               ELSE pg_catalog.pg_current_wal_lsn() END, s.restart_lsn)::pg_catalog.int8, \
             s.safe_wal_size, {synced} \
             FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = {}",
        quote_literal(name)
    )
}

/// The slot in the results of [`find_sql`].
fn found(results: &[Rows]) -> Result<Option<Slot>> {
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    let lost = row.get(5) == Some("lost");
    Ok(Some(Slot {
        plugin: row.get(0).map(str::to_owned),
        in_this_database: row.get(1) == Some("t"),
        active_pid: row.get(2).map(|_| field(&row, 2)).transpose()?,
        confirmed_flush: row.get(3).map(|_| field(&row, 3)).transpose()?,
        two_phase: boolean(&row, 4)?,
        synced: boolean(&row, 9)?,
        invalid: row
            .get(6)
            .map(str::to_owned)
            .or_else(|| lost.then(|| "required WAL was removed".to_owned())),
        wal_status: row.get(5).map(str::to_owned),
        retained_bytes: row.get(7).map(|_| field(&row, 7)).transpose()?,
        safe_wal_size: row.get(8).map(|_| field(&row, 8)).transpose()?,
    }))
}
