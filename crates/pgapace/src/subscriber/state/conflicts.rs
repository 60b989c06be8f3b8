//! Rows of `pgapace.conflict`.

use std::sync::Arc;
use std::time::Duration;

use engine::relation::RemoteRelation;
use pgoutput::Timestamp;
use wire::{Param, ServerError, Session};

use crate::error::{Failure, Offender, Result};
use crate::subscriber::conflict::{Action, ConflictType};
use crate::subscriber::state::SubscriptionId;

/// A conflict and its resolution.
#[derive(Debug, Clone)]
pub(crate) struct Conflict {
    pub(crate) kind: ConflictType,
    pub(crate) action: Action,
    /// Whether the change was applied, in some form.
    pub(crate) applied: bool,
    pub(crate) table: Arc<RemoteRelation>,
    pub(crate) offender: Offender,
    /// Commit time on the publisher.
    pub(crate) commit_time: Timestamp,
    /// The subscriber's error, if it refused the change.
    pub(crate) said: Option<ServerError>,
}

const SQL: &str = "\
INSERT INTO pgapace.conflict (subscription, schema_name, table_name, conflict, action, applied,
  operation, key, remote_xid, commit_lsn, commit_time, sqlstate, message, detail)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, '2000-01-01 00:00:00+00'::pg_catalog.timestamptz
  + $11::pg_catalog.int8 * '1 microsecond'::pg_catalog.interval, $12, $13, $14)";

/// Queues the statement that records a conflict, in the transaction in which it occurred.
pub(crate) fn queue(
    session: &mut Session,
    id: SubscriptionId,
    conflict: &Conflict,
) -> wire::Result<()> {
    let Conflict { kind, action, applied, table, offender, commit_time, said } = conflict;
    let said = said.as_ref();
    let id = id.0.to_string();
    let xid = offender.xid.0.to_string();
    let lsn = offender.commit_lsn.to_string();
    let time = commit_time.0.to_string();
    let params = [
        Some(id.as_str()),
        Some(&table.name.schema),
        Some(&table.name.name),
        Some(kind.name()),
        Some(action.name()),
        Some(if *applied { "t" } else { "f" }),
        Some(offender.operation),
        offender.key.as_deref(),
        Some(&xid),
        Some(&lsn),
        Some(&time),
        said.map(|said| said.code.as_str()),
        said.map(|said| said.message.as_str()),
        said.and_then(|said| said.detail.as_deref()),
    ];
    let params = params.map(|text| text.map_or(Param::Null, |text| Param::Text(text.as_bytes())));
    session.queue_statement(SQL, &[], params.into_iter())
}

/// Whether this conflict is already recorded. A conflict that stops the subscription occurs at each
/// start, and is counted once.
pub(crate) fn is_recorded(
    session: &mut Session,
    id: SubscriptionId,
    conflict: &Conflict,
) -> Result<bool> {
    let Conflict { kind, action, table, offender, .. } = conflict;
    let rows = session
        .query(
            "SELECT 1 FROM pgapace.conflict WHERE subscription = $1::pg_catalog.int4 \
               AND commit_lsn = $2::pg_catalog.pg_lsn AND remote_xid = $3::pg_catalog.int8 \
               AND schema_name = $4 AND table_name = $5 AND conflict = $6 AND action = $7 \
               AND operation = $8 AND key IS NOT DISTINCT FROM $9 LIMIT 1",
            &[
                Some(&id.0.to_string()),
                Some(&offender.commit_lsn.to_string()),
                Some(&offender.xid.0.to_string()),
                Some(&table.name.schema),
                Some(&table.name.name),
                Some(kind.name()),
                Some(action.name()),
                Some(offender.operation),
                offender.key.as_deref(),
            ],
        )
        .map_err(|e| Failure::subscriber(&e, "reading recorded conflicts"))?;
    Ok(!rows.is_empty())
}

/// Maximum number of rows removed at once.
const BATCH: u64 = 1000;

/// Removes up to `BATCH` rows older than `age`. Returns whether there may be more.
pub(crate) fn remove_old(session: &mut Session, id: SubscriptionId, age: Duration) -> Result<bool> {
    let removed = session
        .execute(
            &format!(
                "DELETE FROM pgapace.conflict WHERE id IN (SELECT c.id FROM pgapace.conflict c \
                   WHERE c.subscription = $1::pg_catalog.int4 AND c.recorded_at \
                     < pg_catalog.now() - $2::pg_catalog.float8 * '1 second'::pg_catalog.interval \
                   ORDER BY c.recorded_at LIMIT {BATCH} FOR UPDATE SKIP LOCKED)"
            ),
            &[Some(&id.0.to_string()), Some(&age.as_secs().to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "removing old conflicts"))?;
    Ok(removed >= BATCH)
}

/// Records conflicts of transactions that have already ended, all in one transaction.
pub(crate) fn write<'c>(
    session: &mut Session,
    id: SubscriptionId,
    conflicts: impl IntoIterator<Item = &'c Conflict>,
) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "recording conflicts");
    for conflict in conflicts {
        queue(session, id, conflict).map_err(|e| failed(&e))?;
    }
    session.finish_queued().map_err(|e| failed(&e))
}
