//! Types of the publisher that the subscriber needs for missing tables and columns, and does not have.
//!
//! The statements that create tables and columns name these types, and `pg_dump --table` leaves them out.

use std::collections::{BTreeMap, HashSet};

use wire::Session;

use crate::check::failed;
use crate::check::report::{Reporter, Side};
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{field, oid_array};
use crate::subscriber::named::named;
use crate::subscriber::oid::FIRST_USER_OID;
use crate::subscriber::state::name_array;

/// Reports the types. A type that exists under another definition is none of them.
pub(super) fn missing(
    publisher: &mut Session,
    subscriber: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let columns: Vec<_> = published
        .iter()
        .flat_map(|table| table.columns.iter().map(move |column| (table, column)))
        .filter(|(_, column)| column.declared_type >= FIRST_USER_OID)
        .collect();
    if columns.is_empty() {
        return Ok(());
    }
    let names = |of: &dyn Fn(&PublishedTable, &str) -> String| {
        name_array(&columns.iter().map(|(table, c)| of(table, &c.name)).collect::<Vec<_>>())
    };
    let lacking = subscriber
        .query(
            concat!(
                "SELECT w.ord FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
               pg_catalog.unnest($2::pg_catalog.text[]), pg_catalog.unnest($3::pg_catalog.text[])) \
               WITH ORDINALITY AS w (schema_name, table_name, column_name, ord) \
             WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a \
               JOIN pg_catalog.pg_class c ON c.oid = a.attrelid \
               WHERE ",
                named!("c", "w.schema_name", "w.table_name"),
                " \
                 AND a.attname = w.column_name AND NOT a.attisdropped)"
            ),
            &[
                Some(&names(&|table, _| table.name.schema.clone())),
                Some(&names(&|table, _| table.name.name.clone())),
                Some(&names(&|_, column| column.to_owned())),
            ],
        )
        .map_err(|e| failed(Side::Subscriber, &e, "looking for missing columns"))?;
    let mut needed: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for row in lacking.iter() {
        let (table, column) = columns[field::<usize>(&row, 0)? - 1];
        let users = needed.entry(column.declared_type).or_default();
        users.push(format!("{}.{}", table.name, column.name));
    }
    if needed.is_empty() {
        return Ok(());
    }
    let oids: Vec<_> = needed.keys().copied().collect();
    let types = publisher
        .query(
            "SELECT t.oid, n.nspname, e.typname, pg_catalog.format_type(e.oid, NULL), e.typtype, \
               pg_catalog.format_type(nullif(e.typbasetype, 0), e.typtypmod), \
               (SELECT pg_catalog.string_agg(pg_catalog.quote_literal(l.enumlabel), ', ' \
                  ORDER BY l.enumsortorder) FROM pg_catalog.pg_enum l WHERE l.enumtypid = e.oid), \
               coalesce((SELECT pg_catalog.format(' COLLATE %I.%I', kn.nspname, k.collname) \
                 FROM pg_catalog.pg_collation k JOIN pg_catalog.pg_namespace kn ON kn.oid = k.collnamespace \
                 JOIN pg_catalog.pg_type b ON b.oid = e.typbasetype \
                 WHERE k.oid = e.typcollation AND k.oid <> b.typcollation), '') || \
               coalesce(' DEFAULT ' || pg_catalog.pg_get_expr(e.typdefaultbin, 0), '') || \
               CASE WHEN e.typnotnull THEN ' NOT NULL' ELSE '' END || coalesce( \
                 (SELECT pg_catalog.string_agg(pg_catalog.format(' CONSTRAINT %I %s', c.conname, \
                    pg_catalog.pg_get_constraintdef(c.oid)), '' ORDER BY c.conname) \
                  FROM pg_catalog.pg_constraint c WHERE c.contypid = e.oid AND c.contype = 'c'), '') \
             FROM pg_catalog.pg_type t \
             JOIN pg_catalog.pg_type e \
               ON e.oid = CASE WHEN t.typcategory = 'A' AND t.typelem <> 0 THEN t.typelem ELSE t.oid END \
             JOIN pg_catalog.pg_namespace n ON n.oid = e.typnamespace \
             WHERE t.oid = ANY ($1::pg_catalog.oid[]) ORDER BY n.nspname, e.typname",
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(Side::Publisher, &e, "reading types"))?;
    let there = subscriber
        .query(
            "SELECT n.nspname, t.typname FROM pg_catalog.pg_type t \
             JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace",
            &[],
        )
        .map_err(|e| failed(Side::Subscriber, &e, "reading types"))?;
    let mut there: HashSet<(String, String)> =
        there.iter().map(|row| Ok((field(&row, 0)?, field(&row, 1)?))).collect::<Result<_>>()?;
    for row in types.iter() {
        // A type and its array are one type.
        if !there.insert((field(&row, 1)?, field(&row, 2)?)) {
            continue;
        }
        let (oid, name): (u32, String) = (field(&row, 0)?, field(&row, 3)?);
        let users = needed.get(&oid).map(|users| users.join(", ")).unwrap_or_default();
        let message = format!("type {name} does not exist, which the publisher has for {users}");
        let create = match (row.get(4), row.get(5), row.get(6)) {
            (Some("e"), _, labels) => {
                format!("CREATE TYPE {name} AS ENUM ({});", labels.unwrap_or_default())
            }
            (Some("d"), Some(base), _) => {
                format!("CREATE DOMAIN {name} AS {base}{};", row.get(7).unwrap_or_default())
            }
            _ => {
                let message = format!("{message}: create it, or the extension that it is part of");
                reporter.block("types", message).on(&name);
                continue;
            }
        };
        reporter.block("types", message).on(&name).sql(create);
    }
    Ok(())
}
