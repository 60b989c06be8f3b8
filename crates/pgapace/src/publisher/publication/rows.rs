//! Tables, columns and entries of publications, from the rows of [`super::queries`].

use std::collections::{HashMap, HashSet};

use engine::published::{PublishedBy, Relation};
use engine::table_name::TableName;

use super::{PublishedColumn, PublishedTable};
use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field};

/// From the rows of [`super::queries::listing`], and the columns of each table.
pub(super) fn tables(
    rows: &wire::Rows,
    mut columns: HashMap<u32, Vec<(i16, PublishedColumn)>>,
    major: u32,
) -> Result<Vec<PublishedTable>> {
    let mut tables: Vec<PublishedTable> = Vec::with_capacity(columns.len());
    let mut list: Option<HashSet<i16>> = None;
    for row in rows.iter() {
        // The privilege is NULL for a table that was dropped since the query began.
        if row.get(6).is_none() {
            continue;
        }
        let oid: u32 = field(&row, 0)?;
        let filter = row.get(11).map(str::to_owned);
        let attributes = row.get(10).map(attribute_numbers).transpose()?;
        if let Some(table) = tables.last_mut().filter(|table| table.oid == oid) {
            // The table is in another publication too (rules of `fetch_remote_table_info` in
            // `tablesync.c`).
            if attributes != list {
                return Err(Failure::new(
                    Class::Mismatch,
                    format!(
                        "the publications have different column lists for table {}",
                        table.name
                    ),
                )
                .hint(
                    "PostgreSQL cannot send such a table: use the same column list in all \
                     publications.",
                ));
            }
            match filter {
                Some(filter) if !table.filters.is_empty() => table.filters.push(filter),
                _ => table.filters.clear(),
            }
            continue;
        }
        let all = columns.remove(&oid).unwrap_or_default();
        let published = all.into_iter().filter(|(attnum, column)| match &attributes {
            // Before 18, a column list may name generated columns, but they are not published.
            Some(list) => (!column.generated || major >= 18) && list.contains(attnum),
            None => !column.generated,
        });
        tables.push(PublishedTable {
            oid,
            name: TableName { schema: field(&row, 1)?, name: field(&row, 2)? },
            partitioned: row.get(3) == Some("p"),
            columns: published.map(|(_, column)| column).collect(),
            filters: filter.into_iter().collect(),
            replica_identity: field(&row, 4)?,
            row_security: boolean(&row, 5)?,
            readable: boolean(&row, 6)?,
            has_identity: boolean(&row, 7)?,
            updates_or_deletes: boolean(&row, 8)?,
            truncates: boolean(&row, 9)?,
            full_by_name: boolean(&row, 12)?,
            published_by: PublishedBy::default(),
        });
        list = attributes;
    }
    Ok(tables)
}

/// From the rows of [`super::queries::columns`].
pub(super) fn columns(rows: &wire::Rows) -> Result<HashMap<u32, Vec<(i16, PublishedColumn)>>> {
    let mut columns = HashMap::<u32, Vec<(i16, PublishedColumn)>>::new();
    for row in rows.iter() {
        let column = PublishedColumn {
            name: field(&row, 1)?,
            declared_type: field(&row, 2)?,
            base_type: field(&row, 3)?,
            type_kind: field(&row, 4)?,
            base_type_modifier: field(&row, 5)?,
            generated: boolean(&row, 6)?,
            base_type_name: field(&row, 7)?,
            type_name: field(&row, 8)?,
            key: boolean(&row, 9)?,
        };
        columns.entry(field(&row, 0)?).or_default().push((field(&row, 10)?, column));
    }
    Ok(columns)
}

/// From the rows of [`super::queries::entries`] and [`super::queries::relations`].
pub(super) fn published_by(
    rows: &wire::Rows,
    relations: &wire::Rows,
) -> Result<HashMap<u32, PublishedBy>> {
    let mut entries = HashMap::<u32, Vec<_>>::new();
    for row in rows.iter() {
        let entry: String = field(&row, 1)?;
        let entry = entry.parse().map_err(|e| Failure::internal(format!("{e}: {entry}")))?;
        entries.entry(field(&row, 0)?).or_default().push(entry);
    }
    let published = |row: wire::Row<'_>| {
        let text: String = field(&row, 0)?;
        let relation: Relation =
            text.parse().map_err(|e| Failure::internal(format!("{e}: {text}")))?;
        let entries = entries.remove(&relation.oid).unwrap_or_default();
        Ok((relation.oid, PublishedBy::new(relation, entries)))
    };
    relations.iter().map(published).collect()
}

/// Parses an `int2vector`.
fn attribute_numbers(text: &str) -> Result<HashSet<i16>> {
    let parsed: std::result::Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    parsed.map_err(|_| Failure::internal(format!("a catalogue query returned the vector {text:?}")))
}
