//! What `check` asks the subscriber about many tables at once. A query for each table would be a round trip each, and
//! take minutes with thousands of tables.

use std::collections::HashMap;

use wire::{Row, Session};

use crate::check::failed;
use crate::check::report::Side;
use crate::error::Result;
use crate::subscriber::catalogue::{Table, field, oid_array};

const SIDE: Side = Side::Subscriber;

/// Answers, by oid of the table or type.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Names of base types.
    pub(super) types: HashMap<u32, String>,
    /// Privileges that the role lacks.
    pub(super) lacking: HashMap<u32, Vec<Lacking>>,
    /// Triggers and rules that run although `session_replication_role` is replica.
    pub(super) hooks: HashMap<u32, Vec<Hook>>,
}

/// A trigger or a rule of a table or one of its partitions.
#[derive(Debug)]
pub(super) struct Hook {
    pub(super) is_rule: bool,
    pub(super) name: String,
    /// The table, as SQL.
    pub(super) on: String,
}

/// A privilege on a table that the role lacks.
#[derive(Debug)]
pub(super) struct Lacking {
    pub(super) privilege: String,
    /// Only on this column, because it was granted for others.
    pub(super) column: Option<String>,
}

/// INSERT and UPDATE may be granted for columns. But some changes begin with LOCK TABLE, which needs one privilege to write
/// on the whole table.
const LACKING: &str = "\
SELECT w.oid, p.name, a.attname
FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid)
CROSS JOIN (VALUES (1, 'SELECT', false), (2, 'INSERT', true), (3, 'UPDATE', true), (4, 'DELETE', false),
    (5, 'TRUNCATE', false)) AS p (place, name, by_column)
LEFT JOIN pg_catalog.pg_attribute a ON p.by_column AND a.attrelid = w.oid AND a.attnum > 0 AND NOT a.attisdropped
  AND pg_catalog.has_table_privilege(w.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
WHERE pg_catalog.has_table_privilege(w.oid, p.name) IS NOT TRUE
  AND (a.attnum IS NULL OR pg_catalog.has_column_privilege(w.oid, a.attnum, p.name) IS NOT TRUE)
ORDER BY w.oid, p.place";

impl Asked {
    pub(super) fn read(session: &mut Session, tables: &[&Table]) -> Result<Self> {
        let columns = tables.iter().flat_map(|table| &table.columns);
        let mut types: Vec<_> = columns.map(|column| column.base_type).collect();
        types.sort_unstable();
        types.dedup();
        let tables: Vec<_> = tables.iter().map(|table| table.oid).collect();
        let (types, tables) = (oid_array(&types), oid_array(&tables));
        let mut asked = Self::default();
        let rows = session
            .query(
                "SELECT t.oid, pg_catalog.format_type(t.oid, NULL) FROM pg_catalog.pg_type t \
                 WHERE t.oid = ANY ($1::pg_catalog.oid[])",
                &[Some(&types)],
            )
            .map_err(|e| failed(SIDE, &e, "reading types"))?;
        for row in rows.iter() {
            asked.types.insert(field(&row, 0)?, field(&row, 1)?);
        }
        let rows = session
            .query(LACKING, &[Some(&tables)])
            .map_err(|e| failed(SIDE, &e, "reading privileges"))?;
        for row in rows.iter() {
            let lacking =
                Lacking { privilege: field(&row, 1)?, column: row.get(2).map(str::to_owned) };
            asked.lacking.entry(field(&row, 0)?).or_default().push(lacking);
        }
        let rows = session
            .query(
                "SELECT w.oid, hook.* FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid) \
                 CROSS JOIN LATERAL (SELECT w.oid AS relid \
                   UNION SELECT relid FROM pg_catalog.pg_partition_tree(w.oid::pg_catalog.regclass)) tree \
                 CROSS JOIN LATERAL ( \
                   SELECT 'trigger' AS kind, t.tgname, tree.relid::pg_catalog.regclass AS relid \
                   FROM pg_catalog.pg_trigger t WHERE t.tgrelid = tree.relid \
                     AND NOT t.tgisinternal AND t.tgparentid = 0 AND t.tgenabled IN ('R', 'A') \
                   UNION ALL \
                   SELECT 'rule', r.rulename, tree.relid::pg_catalog.regclass \
                   FROM pg_catalog.pg_rewrite r WHERE r.ev_class = tree.relid \
                     AND r.ev_type <> '1' AND r.ev_enabled IN ('R', 'A')) hook \
                 ORDER BY 1, 2, 4, 3",
                &[Some(&tables)],
            )
            .map_err(|e| failed(SIDE, &e, "reading the triggers"))?;
        for row in rows.iter() {
            asked.hooks.entry(field(&row, 0)?).or_default().push(hook(&row)?);
        }
        Ok(asked)
    }
}

fn hook(row: &Row<'_>) -> Result<Hook> {
    Ok(Hook { is_rule: row.get(1) == Some("rule"), name: field(row, 2)?, on: field(row, 3)? })
}
