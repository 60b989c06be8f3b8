//! Tables that other subscriptions change too, as where several publishers are merged into one table.
//!
//! Nothing tells which subscription a row belongs to. So pgapace empties no such table, and a rebase would delete the
//! rows of the others. A copy of such a table is one transaction, so that an interruption leaves no rows to remove.

use std::collections::BTreeMap;

use engine::table_name::TableName;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::field;
use crate::subscriber::named::named;
use crate::subscriber::state::table_name_arrays;

/// The tables with partitions and partitioned tables that share rows with them. A recursive query takes no lock
/// of a table, unlike pg_partition_tree().
const SHARING: &str = concat!(
    "\
WITH RECURSIVE wanted AS (
  SELECT w.ord, c.oid FROM ROWS FROM (pg_catalog.unnest($2::pg_catalog.text[]),
    pg_catalog.unnest($3::pg_catalog.text[])) WITH ORDINALITY AS w (schema_name, table_name, ord)
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
), up AS (
  SELECT ord, oid FROM wanted
  UNION ALL
  SELECT u.ord, i.inhparent FROM up u JOIN pg_catalog.pg_class c ON c.oid = u.oid AND c.relispartition
  JOIN pg_catalog.pg_inherits i ON i.inhrelid = u.oid
), down AS (
  SELECT ord, oid FROM wanted
  UNION ALL
  SELECT d.ord, i.inhrelid FROM down d JOIN pg_catalog.pg_class c ON c.oid = d.oid AND c.relkind = 'p'
  JOIN pg_catalog.pg_inherits i ON i.inhparent = d.oid
), sharing AS (SELECT * FROM up UNION SELECT * FROM down)"
);

/// Native subscriptions. One without a slot receives nothing: pgapace has adopted it, or a user has detached it.
const NATIVE: &str = "\
SELECT t.ord, pg_catalog.format('native subscription %I', s.subname)
FROM sharing t
JOIN pg_catalog.pg_subscription_rel r ON r.srrelid = t.oid
JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid AND s.subslotname IS NOT NULL
JOIN pg_catalog.pg_database d ON d.oid = s.subdbid AND d.datname = pg_catalog.current_database()";

/// Those of pgapace that have not been switched over.
const OURS: &str = "\
SELECT t.ord, pg_catalog.format('subscription %s of pgapace', s.name)
FROM sharing t
JOIN pg_catalog.pg_class c ON c.oid = t.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pgapace.relation r ON r.schema_name = n.nspname AND r.table_name = c.relname
JOIN pgapace.subscription s ON s.id = r.subscription AND s.name <> $1
WHERE pg_catalog.strpos(coalesce(r.published_by, ''), 'unpublished ') = 0
  AND NOT EXISTS (SELECT FROM pgapace.switchover w WHERE w.subscription = s.id AND w.step = 'ended')";

/// Whether the role may read what [`OURS`] reads.
const READABLE: &str = "\
SELECT pg_catalog.count(*) FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgapace' AND c.relname IN ('subscription', 'relation', 'switchover')
  AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')";

/// The other subscriptions that change tables, by the place of the table. `name` is that of pgapace's subscription.
pub(crate) fn read(
    session: &mut Session,
    name: &str,
    tables: &[TableName],
) -> Result<BTreeMap<usize, String>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "looking for other subscriptions");
    let rows = session.query(READABLE, &[]).map_err(|e| failed(&e))?;
    let readable = rows.first().is_some_and(|row| row.get(0) == Some("3"));
    // A parameter that is not used has no type.
    let ours =
        if readable { OURS } else { "SELECT 0::pg_catalog.int8, $1::pg_catalog.text WHERE false" };
    let [schemas, names] = table_name_arrays(tables);
    let sql = format!(
        "{SHARING} SELECT ord, pg_catalog.string_agg(DISTINCT other, ', ' ORDER BY other) \
         FROM ({NATIVE} UNION ALL {ours}) AS o (ord, other) GROUP BY ord"
    );
    let arguments = [Some(name), Some(&schemas), Some(&names)];
    let rows = session.query(&sql, &arguments).map_err(|e| failed(&e))?;
    rows.iter().map(|row| Ok((field::<usize>(&row, 0)? - 1, field(&row, 1)?))).collect()
}

/// Says that extra rows of these tables may belong to other subscriptions, and how they are left out. Each table comes
/// with these subscriptions.
pub(crate) fn extra_rows_hint(tables: &[(String, &str)]) -> String {
    let named = |(table, others): &(String, &str)| format!("{table} ({others})");
    let named: Vec<_> = tables.iter().map(named).collect();
    format!(
        "Extra rows may be those of other subscriptions: {}. pgapace verify --where with a condition that holds for rows \
         of this publisher alone leaves them out.",
        named.join(", ")
    )
}

/// Returns an error if another subscription changes one of these tables.
pub(crate) fn refuse(
    session: &mut Session,
    name: &str,
    tables: &[TableName],
    (what, hint): (&str, &str),
) -> Result<()> {
    let others = read(session, name, tables)?;
    if others.is_empty() {
        return Ok(());
    }
    let named = |(place, others): (usize, String)| format!("{} ({others})", tables[place]);
    let named: Vec<_> = others.into_iter().map(named).collect();
    Err(Failure::new(Class::Mismatch, format!("{what}: {}", named.join(", "))).hint(hint))
}
