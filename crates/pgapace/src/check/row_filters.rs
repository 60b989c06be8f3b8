//! Row filters of tables with values that the publisher may not send.

use wire::{Session, quote_literal};

use crate::check::failed;
use crate::check::report::{Reporter, Side};
use crate::error::Result;
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::subscriber::catalogue::{field, oid_array};

/// Warns of tables with a row filter whose unchanged TOASTed values are not sent when an UPDATE brings a row into the
/// filter. Only the old row of REPLICA IDENTITY FULL has them.
pub(super) fn unsent_values(
    session: &mut Session,
    publications: &[String],
    tables: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let may_lack = |table: &&PublishedTable| {
        !table.filters.is_empty() && table.updates_or_deletes && table.replica_identity != 'f'
    };
    let tables: Vec<_> = tables.iter().filter(may_lack).collect();
    if tables.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = publications.iter().map(|name| quote_literal(name)).collect();
    let oids: Vec<_> = tables.iter().map(|table| table.oid).collect();
    let rows = session
        .query(
            &format!(
                "SELECT w.ord, a.attname \
                 FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord) \
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND a.attnum > 0 \
                   AND NOT a.attisdropped AND a.attstorage IN ('x', 'e') \
                 WHERE EXISTS (SELECT 1 FROM pg_catalog.pg_publication p \
                   WHERE p.pubupdate AND p.pubname IN ({})) \
                 ORDER BY w.ord, a.attnum",
                names.join(", ")
            ),
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(Side::Publisher, &e, "reading columns that may be TOASTed"))?;
    let mut toasted = vec![Vec::<String>::new(); tables.len()];
    for row in rows.iter() {
        let (ord, name): (usize, String) = (field(&row, 0)?, field(&row, 1)?);
        let is_published = |column: &PublishedColumn| column.name == name && !column.key;
        if tables[ord - 1].columns.iter().any(is_published) {
            toasted[ord - 1].push(name);
        }
    }
    for (table, columns) in tables.iter().zip(&toasted).filter(|(_, columns)| !columns.is_empty()) {
        reporter
            .warn(
                "row_filter",
                format!(
                    "table {} has a row filter: an UPDATE that brings a row into it does not send unchanged TOASTed \
                     values ({}), which become NULL on the subscriber",
                    table.name,
                    columns.join(", ")
                ),
            )
            .on(table.name.to_string())
            .sql(format!("ALTER TABLE {} REPLICA IDENTITY FULL;", table.sql_name()));
    }
    Ok(())
}
