//! Tables that other subscriptions change too, as where several publishers are merged into one table.
//!
//! Nothing tells which subscription a row belongs to. So pgapace empties no such table, and a rebase would delete the
//! rows of the others. A copy of such a table is one transaction, so that an interruption leaves no rows to remove.

use std::collections::{BTreeMap, BTreeSet};

use engine::table_name::TableName;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, parse_name_array};
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
SELECT t.ord, pg_catalog.format('native subscription %I', s.subname), n.nspname, c.relname, s.subslotname,
  s.subpublications::pg_catalog.text, NULL::pg_catalog.text, true,
  EXISTS (SELECT FROM pg_catalog.pg_stat_subscription w
    WHERE w.subid = s.oid AND w.relid IS NULL AND w.pid IS NOT NULL), true, true, false
FROM sharing t
JOIN pg_catalog.pg_class c ON c.oid = t.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_subscription_rel r ON r.srrelid = t.oid
JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid AND s.subslotname IS NOT NULL
JOIN pg_catalog.pg_database d ON d.oid = s.subdbid AND d.datname = pg_catalog.current_database()";

/// Those of pgapace that have not been switched over, and have not applied every change that was published to them. The
/// progress may have gaps: everything up to its first row is applied.
const OURS: &str = "\
SELECT t.ord, pg_catalog.format('subscription %s of pgapace', s.name), n.nspname, c.relname, s.slot_name,
  s.publications::pg_catalog.text, s.system_identifier, false, false, r.state NOT IN ('init', 'blocked'),
  s.copy_data, u.found
FROM sharing t
JOIN pg_catalog.pg_class c ON c.oid = t.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pgapace.relation r ON r.schema_name = n.nspname AND r.table_name = c.relname
JOIN pgapace.subscription s ON s.id = r.subscription AND s.name <> $1
CROSS JOIN LATERAL (SELECT pg_catalog.strpos(coalesce(r.published_by, ''), 'unpublished ') > 0) AS u (found)
WHERE (NOT u.found OR coalesce(
    (SELECT pg_catalog.min(p.lsn) FROM pgapace.progress p WHERE p.subscription = s.id)
    < coalesce(pg_catalog.substring(r.published_by, 'unpublished [^ ]+ ([0-9A-F/]+)')::pg_catalog.pg_lsn,
      s.published_lsn), true))
  AND NOT EXISTS (SELECT FROM pgapace.switchover w WHERE w.subscription = s.id
    AND w.step IN ('ended', 'opened'))";

/// Used in place of [`OURS`] where the role may not read that. It names the parameter, because the server cannot find the type of an unused one.
const NONE_OF_OURS: &str = "\
SELECT 0::pg_catalog.int8, $1::pg_catalog.text, ''::pg_catalog.name, ''::pg_catalog.name, ''::pg_catalog.name,
  ''::pg_catalog.text, ''::pg_catalog.text, false, false, false, false, false WHERE false";

/// Whether the role may read what [`OURS`] reads.
const READABLE: &str = "\
SELECT pg_catalog.count(*) FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgapace' AND c.relname IN ('subscription', 'relation', 'progress', 'switchover')
  AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')";

/// Another subscription that changes a table.
#[derive(Debug)]
pub(crate) struct OtherSubscription {
    /// The place of the table among those that were asked for.
    pub(crate) place: usize,
    /// Its name, in words for a message.
    pub(crate) label: String,
    /// The table that it changes: the one asked for, or one of the same partition tree.
    pub(crate) table: TableName,
    pub(crate) slot: String,
    pub(crate) publications: Vec<String>,
    /// The system identifier of its publisher, if pgapace knows it.
    pub(crate) system_identifier: Option<String>,
    pub(crate) is_native: bool,
    /// Whether the worker of a native subscription runs.
    pub(crate) has_worker: bool,
    /// Whether the table is copied, or is being copied.
    pub(crate) is_copied: bool,
    /// Whether its first tables were copied, as far as is known.
    pub(crate) copies_data: bool,
    /// Whether it is one of pgapace that has found the table unpublished, but has not applied all changes from before.
    is_unpublished: bool,
}

/// The next step for tables that another subscription no longer publishes, while it may still apply changes of them.
pub(crate) const EARLIER_HINT: &str = "\
The changes that it has still to apply would overwrite newer rows. It has applied them as soon as it has looked at its \
publications (--refresh-interval) and has caught up: see pgapace status. Start it if it does not run, or pgapace drop it.";

/// The other subscriptions that change tables. `name` is that of pgapace's subscription.
pub(crate) fn list(
    session: &mut Session,
    name: &str,
    tables: &[TableName],
) -> Result<Vec<OtherSubscription>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "looking for other subscriptions");
    let rows = session.query(READABLE, &[]).map_err(|e| failed(&e))?;
    let readable = rows.first().is_some_and(|row| row.get(0) == Some("4"));
    let ours = if readable { OURS } else { NONE_OF_OURS };
    let [schemas, names] = table_name_arrays(tables);
    let sql = format!(
        "{SHARING} SELECT DISTINCT o.* FROM ({NATIVE} UNION ALL {ours}) AS o ORDER BY 1, 2, 3, 4"
    );
    let arguments = [Some(name), Some(&schemas), Some(&names)];
    let rows = session.query(&sql, &arguments).map_err(|e| failed(&e))?;
    let other = |row: wire::Row<'_>| {
        Ok(OtherSubscription {
            place: field::<usize>(&row, 0)? - 1,
            label: field(&row, 1)?,
            table: TableName { schema: field(&row, 2)?, name: field(&row, 3)? },
            slot: field(&row, 4)?,
            publications: parse_name_array(&field::<String>(&row, 5)?)?,
            system_identifier: row.get(6).map(str::to_owned),
            is_native: boolean(&row, 7)?,
            has_worker: boolean(&row, 8)?,
            is_copied: boolean(&row, 9)?,
            copies_data: boolean(&row, 10)?,
            is_unpublished: boolean(&row, 11)?,
        })
    };
    rows.iter().map(other).collect()
}

/// The other subscriptions that change tables, in words, by the place of the table.
pub(crate) fn read(
    session: &mut Session,
    name: &str,
    tables: &[TableName],
) -> Result<BTreeMap<usize, String>> {
    Ok(labels(&list(session, name, tables)?))
}

/// The same of subscriptions that were listed.
pub(crate) fn labels(others: &[OtherSubscription]) -> BTreeMap<usize, String> {
    let mut named: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
    for other in others {
        named.entry(other.place).or_default().insert(&other.label);
    }
    let listed = |labels: BTreeSet<&str>| labels.into_iter().collect::<Vec<_>>().join(", ");
    named.into_iter().map(|(place, labels)| (place, listed(labels))).collect()
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
    let listed = list(session, name, tables)?;
    if listed.is_empty() {
        return Ok(());
    }
    let others = labels(&listed);
    let hint = if listed.iter().all(|other| other.is_unpublished) { EARLIER_HINT } else { hint };
    let named = |(place, others): (usize, String)| format!("{} ({others})", tables[place]);
    let named: Vec<_> = others.into_iter().map(named).collect();
    Err(Failure::new(Class::Mismatch, format!("{what}: {}", named.join(", "))).hint(hint))
}
