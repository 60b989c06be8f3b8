//! How the subscriber stores published tables that are not ordinary logged heap tables.

use wire::{Rows, Session};

use crate::error::Failure;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::named::named;
use crate::subscriber::state::table_name_arrays;

/// A table that is not an ordinary heap, or that has such a partition.
#[derive(Debug)]
pub(crate) struct TableStorage<'p> {
    pub(crate) table: &'p PublishedTable,
    /// An unlogged table is empty after a crash of the server and on standbys; its progress is not
    /// lost.
    pub(crate) unlogged: bool,
    /// The access methods other than heap, separated by commas.
    pub(crate) access_method: Option<String>,
}

/// The query for [`stored`], without locks. Parameters: [`names`].
pub(crate) const STORAGE: &str = concat!(
    "\
    WITH RECURSIVE tree AS ( \
      SELECT w.ord, c.oid, c.relkind, c.relpersistence, c.relam \
      FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
        pg_catalog.unnest($2::pg_catalog.text[])) \
        WITH ORDINALITY AS w (schema_name, table_name, ord) \
      JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    " \
      UNION ALL \
      SELECT t.ord, p.oid, p.relkind, p.relpersistence, p.relam FROM tree t \
      JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND t.relkind = 'p' \
      JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid \
    ) \
    SELECT t.ord, pg_catalog.bool_or(t.relpersistence = 'u'), \
      pg_catalog.string_agg(DISTINCT a.amname::pg_catalog.text, ', ') \
    FROM tree t LEFT JOIN pg_catalog.pg_am a ON a.oid = t.relam AND a.amname <> 'heap' \
    WHERE t.relkind = 'r' AND (t.relpersistence = 'u' OR a.oid IS NOT NULL) \
    GROUP BY t.ord ORDER BY t.ord"
);

/// Schemas and names of tables, as arrays.
pub(crate) fn names(published: &[PublishedTable]) -> [String; 2] {
    table_name_arrays(published.iter().map(|table| &table.name))
}

/// Reads how the published tables are stored, with one query for all of them.
pub(crate) fn read<'p>(
    session: &mut Session,
    published: &'p [PublishedTable],
) -> Result<Vec<TableStorage<'p>>> {
    let [schemas, names] = names(published);
    let rows = session
        .query(STORAGE, &[Some(&schemas), Some(&names)])
        .map_err(|e| Failure::subscriber(&e, "reading how the tables are stored"))?;
    stored(&rows, published)
}

/// From the rows of [`STORAGE`].
fn stored<'p>(rows: &Rows, published: &'p [PublishedTable]) -> Result<Vec<TableStorage<'p>>> {
    rows.iter()
        .map(|row| {
            let ordinal: usize = field(&row, 0)?;
            let table = published
                .get(ordinal.wrapping_sub(1))
                .ok_or_else(|| Failure::internal("a catalogue query returned an unknown table"))?;
            let (unlogged, access_method) = (boolean(&row, 1)?, row.get(2).map(str::to_owned));
            Ok(TableStorage { table, unlogged, access_method })
        })
        .collect()
}

/// Logs a warning for each unlogged table. From the rows of [`STORAGE`].
pub(crate) fn warn_of_unlogged(rows: &Rows, published: &[PublishedTable]) -> Result<()> {
    for storage in stored(rows, published)?.iter().filter(|storage| storage.unlogged) {
        tracing::warn!(
            event = "unlogged_table",
            table = storage.table.name.to_string(),
            "table is unlogged on the subscriber: it is empty after a crash of the server"
        );
    }
    Ok(())
}
