//! Objects that logical replication does not carry: large objects, materialized views, sequences
//! that no publication leads to.

use engine::table_name::TableName;
use wire::Session;

use crate::check::report::{Reporter, Side};
use crate::check::{failed, listed, one, shown_conninfo};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::sequences::PublisherSequence;
use crate::subscriber::catalogue::field;

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
