//! Objects that logical replication does not carry: large objects, materialized views, sequences
//! that no publication leads to, generated columns that are not published.

use engine::table_name::TableName;
use wire::{Session, quote_ident};

use crate::check::report::{Reporter, Side};
use crate::check::{failed, listed, one, shown_conninfo};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::sequences::PublisherSequence;
use crate::subscriber::catalogue::{field, oid_array};
use crate::subscriber::named::named;
use crate::subscriber::state::{name_array, table_name_arrays};

/// Large objects stand in a system catalogue, which no publication can contain.
pub(super) fn large_objects(
    publisher_session: &mut Session,
    config: &Config,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let sql = "SELECT pg_catalog.count(*) FROM pg_catalog.pg_largeobject_metadata";
    let number = one(publisher_session, Side::Publisher, sql, "counting its large objects")?;
    if number != "0" {
        reporter
            .warn(
                "large_objects",
                format!(
                    "the publisher's database has large objects ({number}), which logical \
                     replication does not carry: copy them while nobody writes them, at the latest \
                     before the switchover"
                ),
            )
            .command(format!(
                "pg_dump -b --data-only --no-owner --no-privileges --exclude-table='*.*' {} | \
                 psql {}",
                shown_conninfo(&config.publisher),
                shown_conninfo(&config.subscriber),
            ));
    }
    Ok(())
}

/// Materialized views of schemas with published tables: nothing refreshes them on the subscriber. `created`: whether
/// the copy of the schema creates those that are missing.
pub(super) fn materialized_views(
    (publisher_session, subscriber_session): (&mut Session, &mut Session),
    published: &[PublishedTable],
    created: bool,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    const SQL: &str = "\
        SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname) \
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
        WHERE c.relkind = 'm' AND n.nspname = ANY ($1::pg_catalog.text[]) ORDER BY 1";
    let mut schemas: Vec<_> = published.iter().map(|table| table.name.schema.clone()).collect();
    schemas.dedup();
    let schemas = crate::subscriber::state::name_array(&schemas);
    let names = |session: &mut Session, side| -> Result<Vec<String>> {
        let rows = session
            .query(SQL, &[Some(&schemas)])
            .map_err(|e| failed(side, &e, "reading its materialized views"))?;
        rows.iter().map(|row| field(&row, 0)).collect()
    };
    let there = names(publisher_session, Side::Publisher)?;
    let here = names(subscriber_session, Side::Subscriber)?;
    let missing: Vec<_> = there.iter().filter(|name| !here.contains(name)).cloned().collect();
    let refresh = |names: &[String]| {
        let refresh = names.iter().map(|name| format!("REFRESH MATERIALIZED VIEW {name};"));
        refresh.collect::<Vec<_>>().join(" ")
    };
    if !missing.is_empty() && created {
        let message = format!(
            "--copy-schema creates materialized views without their rows, and replication does not refresh them: \
             {}. Refresh them after the copy, and at the latest before the switchover",
            listed(&missing)
        );
        reporter.note("materialized_views", message).sql(refresh(&missing));
    } else if !missing.is_empty() {
        let message = format!(
            "materialized views of the publisher do not exist: {}. Create them before the \
             switchover (pg_dump --schema-only has them)",
            listed(&missing)
        );
        reporter.note("materialized_views", message);
    }
    if !here.is_empty() {
        let message = format!(
            "replication does not refresh materialized views: {}. Refresh them when they are read, \
             at the latest before the switchover",
            listed(&here)
        );
        reporter.note("materialized_views", message).sql(refresh(&here));
    }
    Ok(())
}

/// Sequences of the publisher that neither a published table nor a published schema leads to.
pub(super) fn sequences_outside(
    publisher_session: &mut Session,
    found: &[PublisherSequence],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    // A sequence that a column owns goes with its table, which may be left out on purpose.
    let rows = publisher_session
        .query(
            "SELECT n.nspname, s.relname FROM pg_catalog.pg_class s \
             JOIN pg_catalog.pg_namespace n ON n.oid = s.relnamespace \
             WHERE s.relkind = 'S' AND s.relpersistence <> 't' \
               AND n.nspname NOT IN ('pgapace', 'information_schema') AND n.nspname !~ '^pg_' \
               AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.objid = s.oid \
                 AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass \
                 AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass \
                 AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0) ORDER BY 1, 2",
            &[],
        )
        .map_err(|e| failed(Side::Publisher, &e, "reading its sequences"))?;
    let mut outside = Vec::new();
    for row in rows.iter() {
        let name = TableName { schema: field(&row, 0)?, name: field(&row, 1)? };
        if !found.iter().any(|one| one.name == name) {
            outside.push(name.to_string());
        }
    }
    if !outside.is_empty() {
        let message = format!(
            "pgapace does not set sequences that no published table uses and no published schema \
             contains: {}. Set them by hand at the switchover",
            listed(&outside)
        );
        reporter.note("sequences", message);
    }
    Ok(())
}

/// Generated columns that are not published, of tables that the subscriber has without them. Replication does not need them,
/// and applications do after a switchover.
pub(super) fn generated_columns(
    (publisher_session, subscriber_session): (&mut Session, &mut Session),
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let oids: Vec<_> = published.iter().map(|table| table.oid).collect();
    let rows = publisher_session
        .query(
            "SELECT w.ord, a.attname FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord) \
             JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND a.attgenerated <> '' AND NOT a.attisdropped \
             ORDER BY w.ord, a.attnum",
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(Side::Publisher, &e, "looking for its generated columns"))?;
    let mut generated = Vec::new();
    for row in rows.iter() {
        let (table, name) = (&published[field::<usize>(&row, 0)? - 1], field::<String>(&row, 1)?);
        if table.columns.iter().all(|column| column.name != name) {
            generated.push((table, name));
        }
    }
    if generated.is_empty() {
        return Ok(());
    }
    let [schemas, tables] = table_name_arrays(generated.iter().map(|(table, _)| &table.name));
    let names = name_array(&generated.iter().map(|(_, name)| name).collect::<Vec<_>>());
    let lacking = subscriber_session
        .query(LACK_COLUMN, &[Some(&schemas), Some(&tables), Some(&names)])
        .map_err(|e| failed(Side::Subscriber, &e, "looking for generated columns"))?;
    let has_virtual = subscriber_session.server_version().major() >= 18;
    for lacks in lacking.iter() {
        let (table, name) = &generated[field::<usize>(&lacks, 0)? - 1];
        let altered: String = field(&lacks, 1)?;
        let rows = publisher_session
            .query(EXPRESSION, &[Some(&table.oid.to_string()), Some(name)])
            .map_err(|e| failed(Side::Publisher, &e, "reading its generated columns"))?;
        // Dropped meanwhile.
        let Some(row) = rows.first() else { continue };
        let how = if row.get(0) == Some("v") && has_virtual { "VIRTUAL" } else { "STORED" };
        let (declared, expression) = (field::<String>(&row, 1)?, field::<String>(&row, 2)?);
        let message = format!(
            "table {} lacks column {name}, which the publisher generates, and does not publish: add it before the \
             switchover",
            table.name
        );
        reporter.note("generated_columns", message).on(table.name.to_string()).sql(format!(
            "ALTER TABLE {altered} ADD COLUMN {} {declared} GENERATED ALWAYS AS ({expression}) {how};",
            quote_ident(name)
        ));
    }
    Ok(())
}

/// Of these columns of tables, those that their tables lack, with the table that gets them: a partition gets columns with the
/// root of its tree.
const LACK_COLUMN: &str = concat!(
    "SELECT w.ord, coalesce(pg_catalog.pg_partition_root(c.oid), c.oid::pg_catalog.regclass) \
     FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]), \
       pg_catalog.unnest($3::pg_catalog.text[])) WITH ORDINALITY AS w (schema_name, table_name, column_name, ord) \
     JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    " WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid \
        AND a.attname = w.column_name AND NOT a.attisdropped)"
);

const EXPRESSION: &str = "\
    SELECT a.attgenerated, pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.pg_get_expr(d.adbin, d.adrelid) \
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
    WHERE a.attrelid = $1::pg_catalog.oid AND a.attname = $2";
