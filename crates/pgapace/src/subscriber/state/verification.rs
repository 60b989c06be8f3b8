//! What is recorded of verifications: the last one of each table, and its differences.

use pgoutput::Lsn;
use serde::Serialize;
use wire::{Session, quote_literal};

use crate::error::Result;
use crate::subscriber::catalogue::{field, first_row, parse_name_array};
use crate::subscriber::state::{SubscriptionId, name_array, reading, writing};

/// Counts of what was compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// Rows and their text on the publisher.
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) missing: u64,
    pub(crate) extra: u64,
    pub(crate) different: u64,
}

impl Counts {
    pub(crate) fn differences(&self) -> u64 {
        self.missing + self.extra + self.different
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
        self.chunks += other.chunks;
        self.missing += other.missing;
        self.extra += other.extra;
        self.different += other.different;
    }
}

/// The last verification of one table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct TableVerification {
    pub(crate) schema: String,
    pub(crate) name: String,
    /// The same for all tables of one verification.
    pub(crate) number: i64,
    /// What was compared: all rows, or which.
    pub(crate) scope: String,
    pub(crate) started_at: Option<String>,
    /// Null if it was interrupted, or still runs.
    pub(crate) finished_at: Option<String>,
    /// The LSN of the last pair of snapshots.
    pub(crate) lsn: Option<String>,
    #[serde(flatten)]
    pub(crate) counts: Counts,
    /// `equal` or `different`; null until it is finished.
    pub(crate) result: Option<String>,
    /// Columns that were not compared.
    pub(crate) columns_left: Vec<String>,
    /// The key up to which all rows are compared, if it is compared by ranges.
    pub(crate) position: Option<Vec<String>>,
}

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

/// A table of a subscription.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableOf<'a> {
    pub(crate) id: SubscriptionId,
    pub(crate) schema: &'a str,
    pub(crate) name: &'a str,
}

impl TableOf<'_> {
    fn condition(&self) -> String {
        format!(
            "subscription = {} AND schema_name = {} AND table_name = {}",
            self.id.0,
            quote_literal(self.schema),
            quote_literal(self.name)
        )
    }
}

const COLUMNS: &str = "schema_name, table_name, verification, scope, started_at, finished_at, lsn, \
    rows, bytes, chunks, missing, extra, different, result, columns_left, position";

/// The last verifications of all tables of a subscription.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Vec<TableVerification>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM pgapace.verification WHERE subscription = $1::pg_catalog.int4 \
         ORDER BY schema_name, table_name"
    );
    let rows = session.query(&sql, &[Some(&id.0.to_string())]).map_err(|e| reading(&e))?;
    let names = |text: Option<&str>| text.map(parse_name_array).transpose();
    rows.iter()
        .map(|row| {
            Ok(TableVerification {
                schema: field(&row, 0)?,
                name: field(&row, 1)?,
                number: field(&row, 2)?,
                scope: field(&row, 3)?,
                started_at: row.get(4).map(str::to_owned),
                finished_at: row.get(5).map(str::to_owned),
                lsn: row.get(6).map(str::to_owned),
                counts: Counts {
                    rows: field(&row, 7)?,
                    bytes: field(&row, 8)?,
                    chunks: field(&row, 9)?,
                    missing: field(&row, 10)?,
                    extra: field(&row, 11)?,
                    different: field(&row, 12)?,
                },
                result: row.get(13).map(str::to_owned),
                columns_left: names(row.get(14))?.unwrap_or_default(),
                position: names(row.get(15))?,
            })
        })
        .collect()
}

/// Begins a verification of these tables, and forgets their earlier one. Returns its number.
pub(crate) fn begin(
    session: &mut Session,
    id: SubscriptionId,
    tables: &[(&str, &str, &[String])],
    scope: &str,
) -> Result<i64> {
    let values: Vec<_> = tables
        .iter()
        .map(|(schema, name, left)| {
            format!(
                "({}, {}, {}::pg_catalog.text[])",
                quote_literal(schema),
                quote_literal(name),
                quote_literal(&name_array(left))
            )
        })
        .collect();
    let values = values.join(", ");
    let results = session
        .simple(&format!(
            "BEGIN; \
             DELETE FROM pgapace.difference d USING (VALUES {values}) t (schema_name, table_name, l) \
               WHERE d.subscription = {id} AND d.schema_name = t.schema_name \
                 AND d.table_name = t.table_name; \
             DELETE FROM pgapace.verification v USING (VALUES {values}) t (schema_name, table_name, l) \
               WHERE v.subscription = {id} AND v.schema_name = t.schema_name \
                 AND v.table_name = t.table_name; \
             INSERT INTO pgapace.verification \
               (subscription, schema_name, table_name, verification, scope, columns_left) \
             SELECT {id}, t.schema_name, t.table_name, n.number, {scope}, t.columns_left \
             FROM (VALUES {values}) t (schema_name, table_name, columns_left) \
             CROSS JOIN (SELECT pg_catalog.nextval('pgapace.verification_number') AS number) n; \
             SELECT pg_catalog.currval('pgapace.verification_number'); \
             COMMIT",
            id = id.0,
            scope = quote_literal(scope),
        ))
        .map_err(|e| writing(&e))?;
    let row = results.get(results.len().saturating_sub(2)).and_then(wire::Rows::first);
    let row = row.ok_or_else(|| crate::error::Failure::internal("no number of a verification"))?;
    field(&row, 0)
}

/// Forgets differences of chunks that are compared again: those behind the position, which is after
/// so many chunks.
pub(crate) fn forget_after(session: &mut Session, table: TableOf<'_>, chunks: u64) -> Result<()> {
    let sql =
        format!("DELETE FROM pgapace.difference WHERE {} AND chunk >= {chunks}", table.condition());
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}

/// Forgets the differences of one chunk, which is compared again.
pub(crate) fn forget_chunk(session: &mut Session, table: TableOf<'_>, chunk: u64) -> Result<()> {
    let sql =
        format!("DELETE FROM pgapace.difference WHERE {} AND chunk = {chunk}", table.condition());
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}

/// How many differences of a table are recorded.
pub(crate) fn recorded(session: &mut Session, table: TableOf<'_>) -> Result<u64> {
    let sql =
        format!("SELECT pg_catalog.count(*) FROM pgapace.difference WHERE {}", table.condition());
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
        "INSERT INTO pgapace.difference (subscription, schema_name, table_name, chunk, lsn, kind, key, \
           row_values, columns, copies) \
         SELECT {}, {}, {}, {chunk}, '{lsn}', v.* FROM (VALUES {}) v",
        table.id.0,
        quote_literal(table.schema),
        quote_literal(table.name),
        values.join(", ")
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}

/// Where the verification of a table stands.
#[derive(Debug)]
pub(crate) struct Standing<'a> {
    pub(crate) lsn: Lsn,
    /// All that is compared up to the position.
    pub(crate) counts: Counts,
    pub(crate) position: Option<&'a [String]>,
    pub(crate) result: Option<&'static str>,
}

/// Records where the verification of a table stands.
pub(crate) fn advance(
    session: &mut Session,
    table: TableOf<'_>,
    standing: &Standing<'_>,
) -> Result<()> {
    let quoted =
        |text: Option<String>| text.map_or_else(|| "NULL".to_owned(), |t| quote_literal(&t));
    let Standing { lsn, counts, position, result } = standing;
    let sql = format!(
        "UPDATE pgapace.verification SET lsn = '{lsn}', rows = {}, bytes = {}, chunks = {}, \
           missing = {}, extra = {}, different = {}, position = {}, result = {}, \
           started_at = coalesce(started_at, pg_catalog.now()), \
           finished_at = CASE WHEN {} THEN pg_catalog.now() END \
         WHERE {}",
        counts.rows,
        counts.bytes,
        counts.chunks,
        counts.missing,
        counts.extra,
        counts.different,
        quoted(position.map(name_array)),
        quoted(result.map(str::to_owned)),
        result.is_some(),
        table.condition()
    );
    session.simple(&sql).map_err(|e| writing(&e))?;
    Ok(())
}
