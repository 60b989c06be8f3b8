//! The rows of `pgapace.difference`.

use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::Session;

use super::TableOf;
use crate::error::Result;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::state::{SubscriptionId, name_array, reading, writing};
use crate::subscriber::statement::copy::put_escaped;

/// A new difference of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewDifference {
    pub(crate) kind: &'static str,
    /// JSON objects of column and text. A table without a key has rows.
    pub(crate) key: Option<String>,
    pub(crate) row: Option<String>,
    pub(crate) columns: Option<Vec<String>>,
    pub(crate) copies: u64,
}

/// Forgets differences of chunks that are compared again: those behind the position, which is after
/// so many chunks.
pub(crate) fn forget_after(session: &mut Session, table: TableOf<'_>, chunks: u64) -> Result<()> {
    let sql = format!(
        "DELETE FROM pgapace.difference d WHERE {} AND d.chunk >= {chunks}",
        table.of_verification('d')
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}

/// Forgets the differences of one chunk, which is compared again.
pub(crate) fn forget_chunk(session: &mut Session, table: TableOf<'_>, chunk: u64) -> Result<()> {
    let sql = format!(
        "DELETE FROM pgapace.difference d WHERE {} AND d.chunk = {chunk}",
        table.of_verification('d')
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}

/// SQL that forgets differences that are none any more, and takes them out of the counts of the verifications that found
/// them. So one that was interrupted goes on with those that are left, and one whose differences are all gone has found
/// the table equal.
pub(crate) fn settle_sql(ids: &[String]) -> String {
    format!(
        "WITH settled AS (DELETE FROM pgapace.difference WHERE id = ANY ('{{{}}}'::pg_catalog.int8[]) \
           RETURNING subscription, schema_name, table_name, verification, kind, copies), \
         found AS (SELECT s.subscription, s.schema_name, s.table_name, s.verification, \
             coalesce(pg_catalog.sum(s.copies) FILTER (WHERE s.kind = 'missing'), 0)::pg_catalog.int8 AS missing, \
             coalesce(pg_catalog.sum(s.copies) FILTER (WHERE s.kind = 'extra'), 0)::pg_catalog.int8 AS extra, \
             coalesce(pg_catalog.sum(s.copies) FILTER (WHERE s.kind = 'different'), 0)::pg_catalog.int8 AS different \
           FROM settled s GROUP BY 1, 2, 3, 4) \
         UPDATE pgapace.verification v SET missing = greatest(v.missing - f.missing, 0), \
           extra = greatest(v.extra - f.extra, 0), different = greatest(v.different - f.different, 0), \
           result = CASE WHEN v.missing <= f.missing AND v.extra <= f.extra AND v.different <= f.different \
             AND v.result = 'different' THEN 'equal' ELSE v.result END \
         FROM found f WHERE v.subscription = f.subscription AND v.schema_name = f.schema_name \
           AND v.table_name = f.table_name AND v.verification = f.verification",
        ids.join(",")
    )
}

/// Differences of each table that its last complete verification, or an interrupted one, has counted and not recorded.
pub(crate) fn unrecorded(
    session: &mut Session,
    id: SubscriptionId,
) -> Result<Vec<(TableName, u64)>> {
    let sql = format!(
        "SELECT l.schema_name, l.table_name, pg_catalog.max(l.counted - l.recorded)::pg_catalog.int8 \
         FROM (SELECT v.schema_name, v.table_name, v.missing + v.extra + v.different AS counted, \
             (SELECT coalesce(pg_catalog.sum(d.copies), 0) FROM pgapace.difference d \
                WHERE d.subscription = v.subscription AND d.schema_name = v.schema_name \
                  AND d.table_name = v.table_name AND d.verification = v.verification) AS recorded \
           FROM pgapace.verification v WHERE v.subscription = {id} \
             AND (v.kind = 'verb_begun' OR v.result IS NOT NULL AND NOT EXISTS ( \
               SELECT FROM pgapace.verification n WHERE n.subscription = v.subscription \
                 AND n.schema_name = v.schema_name AND n.table_name = v.table_name AND n.result IS NOT NULL \
                 AND (n.lsn, n.verification) > (v.lsn, v.verification)))) l \
         WHERE l.counted > l.recorded GROUP BY 1, 2 ORDER BY 1, 2",
        id = id.0
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let table = |row: wire::Row<'_>| {
        Ok((TableName { schema: field(&row, 0)?, name: field(&row, 1)? }, field(&row, 2)?))
    };
    rows.iter().map(table).collect()
}

/// How many differences of a table are recorded.
pub(crate) fn recorded(session: &mut Session, table: TableOf<'_>) -> Result<u64> {
    let sql = format!(
        "SELECT pg_catalog.count(*) FROM pgapace.difference d WHERE {}",
        table.of_verification('d')
    );
    let results = session.simple(&sql).map_err(|e| reading(&e))?;
    field(&first_row(&results, "the count of differences")?, 0)
}

/// Records differences of one chunk. Many rows may differ: a COPY takes about two thirds of the time of an INSERT.
pub(crate) fn record(
    session: &mut Session,
    table: TableOf<'_>,
    chunk: u64,
    lsn: Lsn,
    differences: &[NewDifference],
) -> Result<()> {
    const COPY: &str = "COPY pgapace.difference (subscription, schema_name, table_name, verification, chunk, lsn, kind, \
         copies, key, row_values, columns) FROM STDIN";
    if differences.is_empty() {
        return Ok(());
    }
    let [id, number] = [i64::from(table.id.0), table.number.0].map(|number| number.to_string());
    let (chunk, lsn) = (chunk.to_string(), lsn.to_string());
    let (schema, name) = (table.name.schema.as_str(), table.name.name.as_str());
    let mut rows = Vec::new();
    for one in differences {
        let columns = one.columns.as_ref().map(|names| name_array(names));
        let copies = one.copies.to_string();
        let known = [&id, schema, name, &number, &chunk, &lsn, one.kind, &copies].map(Some);
        let found = [one.key.as_deref(), one.row.as_deref(), columns.as_deref()];
        for (place, value) in known.into_iter().chain(found).enumerate() {
            if place > 0 {
                rows.push(b'\t');
            }
            match value {
                Some(value) => {
                    put_escaped(value.as_bytes(), &mut |bytes| rows.extend_from_slice(bytes));
                }
                None => rows.extend_from_slice(b"\\N"),
            }
        }
        rows.push(b'\n');
    }
    let mut copy = session.copy_in(COPY).map_err(|e| writing(&e))?;
    copy.send(&rows).map_err(|e| writing(&e))?;
    copy.finish().map(drop).map_err(|e| writing(&e))
}
