//! Summary of the last complete verifications of all tables.

use pgoutput::Lsn;
use serde::{Serialize, Serializer};
use wire::Session;

use super::ALL_ROWS;
use crate::error;
use crate::subscriber::catalogue::field;
use crate::subscriber::state::relations::UNPUBLISHED;
use crate::subscriber::state::{SubscriptionId, reading};

/// The last complete verification of each ready table. Verifications of a part of the rows do not count.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct VerificationSummary {
    /// The lowest LSN at which a table was compared; null if a table was not.
    #[serde(serialize_with = "lsn_text")]
    pub(crate) lsn: Option<Lsn>,
    /// When the oldest and the newest of them ended, in seconds since 1970.
    pub(crate) oldest_at: Option<f64>,
    pub(crate) newest_at: Option<f64>,
    /// In all published columns.
    pub(crate) tables_equal: u64,
    /// Equal as far as they were compared: columns were left out, or cannot be compared.
    pub(crate) tables_equal_in_part: u64,
    pub(crate) tables_different: u64,
    pub(crate) tables_unverified: u64,
    pub(crate) missing: u64,
    pub(crate) extra: u64,
    pub(crate) different: u64,
}

fn lsn_text<S: Serializer>(lsn: &Option<Lsn>, serializer: S) -> Result<S::Ok, S::Error> {
    lsn.map(|lsn| lsn.to_string()).serialize(serializer)
}

/// Reads the summary.
pub(crate) fn read(
    session: &mut Session,
    id: SubscriptionId,
) -> error::Result<VerificationSummary> {
    let sql = format!(
        "SELECT CASE WHEN pg_catalog.count(l.result) = pg_catalog.count(*) THEN pg_catalog.min(l.first_lsn) END, \
           extract(epoch FROM pg_catalog.min(l.finished_at)), extract(epoch FROM pg_catalog.max(l.finished_at)), \
           pg_catalog.count(*) FILTER (WHERE l.result = 'equal' AND l.columns_left = '{{}}'), \
           pg_catalog.count(*) FILTER (WHERE l.result = 'different'), \
           pg_catalog.count(*) FILTER (WHERE l.result IS NULL), \
           coalesce(pg_catalog.sum(l.missing), 0), coalesce(pg_catalog.sum(l.extra), 0), \
           coalesce(pg_catalog.sum(l.different), 0), \
           pg_catalog.count(*) FILTER (WHERE l.result = 'equal' AND l.columns_left <> '{{}}') \
         FROM pgapace.relation r LEFT JOIN LATERAL ( \
           SELECT * FROM pgapace.verification v WHERE v.subscription = r.subscription \
             AND v.schema_name = r.schema_name AND v.table_name = r.table_name \
             AND v.result IS NOT NULL AND v.scope = '{ALL_ROWS}' \
           ORDER BY v.lsn DESC, v.verification DESC LIMIT 1) l ON true \
         WHERE r.subscription = {} AND r.state = 'ready' AND NOT {UNPUBLISHED}",
        id.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let Some(row) = rows.first() else { return Ok(VerificationSummary::default()) };
    let number = |column: usize| row.get(column).map(|_| field(&row, column)).transpose();
    Ok(VerificationSummary {
        lsn: row.get(0).map(|_| field(&row, 0)).transpose()?,
        oldest_at: number(1)?,
        newest_at: number(2)?,
        tables_equal: field(&row, 3)?,
        tables_equal_in_part: field(&row, 9)?,
        tables_different: field(&row, 4)?,
        tables_unverified: field(&row, 5)?,
        missing: field(&row, 6)?,
        extra: field(&row, 7)?,
        different: field(&row, 8)?,
    })
}
