//! Which tables are verified in the background, and when.

use std::time::Duration;

use engine::table_name::TableName;
use wire::Session;

use super::ALL_ROWS;
use crate::error::Result;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::relations::UNPUBLISHED;
use crate::subscriber::state::{SubscriptionId, reading};

/// A table that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScheduledTable {
    pub(crate) name: TableName,
    /// Whether its verification was interrupted.
    pub(crate) begun: bool,
    /// Time until its next verification.
    pub(crate) due_in: Duration,
}

/// All ready tables, those first whose turn it is: begun ones, those that were never verified, and those
/// whose last complete verification began longest ago. A complete verification of a verb counts.
pub(crate) fn read(
    session: &mut Session,
    id: SubscriptionId,
    interval: Duration,
) -> Result<Vec<ScheduledTable>> {
    let sql = format!(
        "SELECT t.schema_name, t.table_name, t.begun, \
           CASE WHEN t.begun OR t.last IS NULL THEN 0 ELSE greatest(0, pg_catalog.ceil(1000 * extract(epoch FROM \
             t.last - pg_catalog.clock_timestamp() + interval '{} milliseconds')))::pg_catalog.int8 END \
         FROM (SELECT r.schema_name, r.table_name, \
             pg_catalog.count(*) FILTER (WHERE v.kind = 'begun') > 0 AS begun, \
             pg_catalog.max(v.started_at) FILTER (WHERE v.kind <> 'begun' AND v.result IS NOT NULL \
               AND v.scope = '{ALL_ROWS}') AS last \
           FROM pgapace.relation r LEFT JOIN pgapace.verification v ON v.subscription = r.subscription \
             AND v.schema_name = r.schema_name AND v.table_name = r.table_name \
           WHERE r.subscription = {} AND r.state = 'ready' AND r.requested IS NULL \
             AND NOT {UNPUBLISHED} GROUP BY 1, 2) t \
         ORDER BY t.begun DESC, t.last NULLS FIRST, 1, 2",
        interval.as_millis(),
        id.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let table = |row: wire::Row<'_>| {
        Ok(ScheduledTable {
            name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
            begun: boolean(&row, 2)?,
            due_in: Duration::from_millis(field(&row, 3)?),
        })
    };
    rows.iter().map(table).collect()
}

/// Tables that are no longer ready, or no longer part of the subscription, are not gone on with.
pub(crate) fn forget_others(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!(
        "WITH gone AS (DELETE FROM pgapace.verification v WHERE v.subscription = {id} AND v.kind = 'begun' \
           AND NOT EXISTS (SELECT FROM pgapace.relation r WHERE r.subscription = v.subscription \
             AND r.schema_name = v.schema_name AND r.table_name = v.table_name AND r.state = 'ready' \
             AND r.requested IS NULL AND NOT {UNPUBLISHED}) RETURNING v.*) \
         DELETE FROM pgapace.difference d USING gone g WHERE d.subscription = g.subscription \
           AND d.schema_name = g.schema_name AND d.table_name = g.table_name \
           AND d.verification = g.verification",
        id = id.0
    );
    session.simple(&sql).map(drop).map_err(|e| super::writing(&e))
}
