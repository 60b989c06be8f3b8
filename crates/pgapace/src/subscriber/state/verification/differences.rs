//! The rows of `pgapace.difference`.

use pgoutput::Lsn;
use wire::{Session, quote_literal};

use super::TableOf;
use crate::error::Result;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::state::{name_array, reading, writing};

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

/// Records differences of one chunk.
pub(crate) fn record(
    session: &mut Session,
    table: TableOf<'_>,
    chunk: u64,
    lsn: Lsn,
    differences: &[NewDifference],
) -> Result<()> {
    if differences.is_empty() {
        return Ok(());
    }
    let nullable = |text: &Option<String>| {
        text.as_ref().map_or_else(|| "NULL".to_owned(), |text| quote_literal(text))
    };
    let values: Vec<_> = differences
        .iter()
        .map(|one| {
            let columns = one.columns.as_ref().map(|names| name_array(names));
            format!(
                "('{}', {}::pg_catalog.jsonb, {}::pg_catalog.jsonb, {}::pg_catalog.text[], {})",
                one.kind,
                nullable(&one.key),
                nullable(&one.row),
                nullable(&columns),
                one.copies
            )
        })
        .collect();
    let sql = format!(
        "INSERT INTO pgapace.difference (subscription, schema_name, table_name, verification, chunk, lsn, \
           kind, key, row_values, columns, copies) \
         SELECT {}, {}, {}, {}, {chunk}, '{lsn}', v.* FROM (VALUES {}) v",
        table.id.0,
        quote_literal(&table.name.schema),
        quote_literal(&table.name.name),
        table.number.0,
        values.join(", ")
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}
