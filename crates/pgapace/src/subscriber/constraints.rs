//! The constraints of a subscriber table that make one row conflict with another, or depend on it.
//!
//! They are read for the whole partition tree of the table. An index of a leaf partition also
//! restricts rows that are inserted through the root, and an index of the root also restricts rows
//! that are inserted into the leaf.

use wire::Row;

use crate::error::Result;
use crate::subscriber::catalogue::{boolean, field, parse_name_array};
use crate::subscriber::partitions::partitions_below;

/// The constraints of the topmost partitioned table, or of the table itself if it is not a
/// partition. A column has the same name in all tables of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Constraints {
    pub(crate) unique: Vec<Unique>,
    /// Foreign keys of tables in the tree.
    pub(crate) foreign: Vec<ForeignKey>,
    /// Foreign keys that reference tables in the tree.
    pub(crate) referenced: Vec<ForeignKey>,
}

/// Unique indexes over the same columns, or exclusion constraints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unique {
    /// The smallest oid of these indexes. It is the same in each session as long as no index is
    /// added or dropped.
    pub(crate) index: u32,
    /// Sorted by name; empty for exclusion constraints and indexes over expressions.
    pub(crate) columns: Vec<String>,
    /// Whether the index compares with the default equality of each column's type, under
    /// deterministic collations only.
    pub(crate) plain: bool,
    pub(crate) nulls_not_distinct: bool,
    /// Whether an index of them has a predicate.
    pub(crate) partial: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ForeignKey {
    pub(crate) constraint: u32,
    /// Oid of the referenced table, or of its topmost partitioned table.
    pub(crate) parent: u32,
    /// The columns on this side, in the order of the constraint.
    pub(crate) columns: Vec<String>,
    /// Whether each column has the same type as its counterpart, or both are integers, or both are
    /// text or varchar.
    pub(crate) same_types: bool,
}

/// Returns one row per unique index or exclusion constraint, and one row per foreign key. Indexes
/// and foreign keys of partitions that belong to one of the parent are left out. Indexes over the
/// same columns, such as those of several leaf partitions, count as one. A partial index counts as
/// if it had no predicate.
///
/// Foreign keys that reference a table are found through `pg_depend`, because `pg_constraint` has
/// no index on `confrelid`. OFFSET 0 and the cast of `conparentid` keep the planner from reading
/// all of `pg_constraint` for each table, which seems cheap to it for a single one. PostgreSQL 14
/// has no `indnullsnotdistinct`.
///
/// `$1` is an array of oids; the last column is the position there. The rows of one table come in a
/// fixed order.
pub(super) const SQL: &str = concat!(
    "\
SELECT facts.*, w.ord
FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord)
CROSS JOIN LATERAL (
WITH RECURSIVE tree AS (
  SELECT w.oid AS relid
  UNION ALL
  SELECT p.oid FROM tree t
  ",
    partitions_below!("t.relid"),
    "
), foreign_key AS (
  SELECT 'foreign' AS kind, k.oid, k.conrelid AS relid, k.conkey AS own, k.confrelid AS other,
         k.confkey AS others, k.confrelid
  FROM tree CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_constraint k
    WHERE k.conrelid = tree.relid AND k.contype = 'f' AND k.conparentid::pg_catalog.int8 = 0
    OFFSET 0
  ) k
  UNION ALL
  SELECT DISTINCT 'referenced', k.oid, k.confrelid, k.confkey, k.conrelid, k.conkey, k.confrelid
  FROM tree CROSS JOIN LATERAL (
    SELECT d.objid FROM pg_catalog.pg_depend d
    WHERE d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = tree.relid
      AND d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
    OFFSET 0
  ) d CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_constraint k
    WHERE k.oid = d.objid AND k.confrelid = tree.relid AND k.contype = 'f'
      AND k.conparentid::pg_catalog.int8 = 0
    OFFSET 0
  ) k
)
SELECT 'unique', pg_catalog.min(u.indexrelid)::pg_catalog.text, '0', u.columns, u.plain,
       u.nulls_not_distinct, pg_catalog.bool_or(u.partial)
FROM (
  SELECT i.indexrelid,
         coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::pg_catalog.bool, false)
           AS nulls_not_distinct,
         i.indpred IS NOT NULL AS partial,
         CASE WHEN key.named AND NOT i.indisexclusion THEN key.columns
              ELSE '{}'::pg_catalog.text[] END AS columns,
         key.named AND NOT i.indisexclusion AND key.plain AS plain
  FROM tree CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_index i
    WHERE i.indrelid = tree.relid AND (i.indisunique OR i.indisexclusion)
      AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_inherits p WHERE p.inhrelid = i.indexrelid)
    OFFSET 0
  ) i
  CROSS JOIN LATERAL (
    SELECT pg_catalog.array_agg(a.attname ORDER BY a.attname)::pg_catalog.text[] AS columns,
           pg_catalog.bool_and(a.attname IS NOT NULL) AS named,
           pg_catalog.bool_and(oc.opcdefault AND coalesce(co.collisdeterministic, true)) AS plain
    FROM pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k(ord)
    JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[k.ord]
    LEFT JOIN pg_catalog.pg_attribute a
      ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord] AND a.attnum <> 0
    LEFT JOIN pg_catalog.pg_collation co ON co.oid = i.indcollation[k.ord]
  ) key
) u
GROUP BY u.columns, u.plain, u.nulls_not_distinct
UNION ALL
SELECT f.kind, f.oid::pg_catalog.text,
       coalesce(pg_catalog.pg_partition_root(f.confrelid)::pg_catalog.oid,
                f.confrelid)::pg_catalog.text,
       key.columns, key.same, false, false
FROM foreign_key f
CROSS JOIN LATERAL (
  SELECT pg_catalog.array_agg(a.attname ORDER BY k.ord)::pg_catalog.text[] AS columns,
         pg_catalog.bool_and(
           a.atttypid = b.atttypid OR a.atttypid IN (20, 21, 23) AND b.atttypid IN (20, 21, 23)
           OR a.atttypid IN (25, 1043) AND b.atttypid IN (25, 1043)) AS same
  FROM pg_catalog.generate_subscripts(f.own, 1) AS k(ord)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = f.relid AND a.attnum = f.own[k.ord]
  JOIN pg_catalog.pg_attribute b ON b.attrelid = f.other AND b.attnum = f.others[k.ord]
) key
) facts
ORDER BY w.ord, 1, 2"
);

impl Constraints {
    /// From the rows of [`SQL`] for one table.
    pub(super) fn read(rows: &[Row<'_>]) -> Result<Self> {
        let mut found = Self::default();
        for row in rows {
            let (kind, oid, parent): (String, u32, u32) =
                (field(row, 0)?, field(row, 1)?, field(row, 2)?);
            let columns = parse_name_array(&field::<String>(row, 3)?)?;
            let certain = boolean(row, 4)?;
            if kind == "unique" {
                let nulls_not_distinct = boolean(row, 5)?;
                found.unique.push(Unique {
                    index: oid,
                    columns,
                    plain: certain,
                    nulls_not_distinct,
                    partial: boolean(row, 6)?,
                });
                continue;
            }
            let key = ForeignKey { constraint: oid, parent, columns, same_types: certain };
            if kind == "foreign" { &mut found.foreign } else { &mut found.referenced }.push(key);
        }
        Ok(found)
    }
}
