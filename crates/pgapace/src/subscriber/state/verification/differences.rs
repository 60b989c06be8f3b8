//! The rows of `pgapace.difference`.

use pgoutput::Lsn;
use wire::Session;

use super::TableOf;
use crate::error::Result;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::state::{name_array, reading, writing};
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
