//! The catalogue queries for applying. Each reads many tables at once.
//!
//! The part for one table stands in a LATERAL subquery. So the time grows with the number of tables
//! and not with its square, and a table's result does not depend on the other tables. The planner
//! sees one table, whatever the number is. OFFSET 0 keeps it from beginning with a catalogue: without
//! statistics it takes that for cheap, and reads all of `pg_depend` for each table.

use crate::subscriber::elsewhere::elsewhere;
use crate::subscriber::named::named;
use crate::subscriber::partitions::partitions_below;

/// One value for each `root` of the CTE `tree`. It changes whenever a relevant catalogue row
/// changes. Only the relevant columns of pg_class are included, because TRUNCATE changes others.
/// ANALYZE and VACUUM change none of these values. The name of the schema is included: another schema may get it,
/// with another table.
///
/// Each catalogue stands in a LATERAL subquery: a CTE counts as a hundred rows for the planner, so it would read all of
/// `pg_trigger` for each table.
macro_rules! fingerprint {
    () => {
        "\
SELECT part.root, pg_catalog.sum(pg_catalog.hashtextextended(part.text, 0))::pg_catalog.text
         AS fingerprint
FROM (
  SELECT t.root, pg_catalog.concat_ws(' ', 'c', c.oid,
           (SELECT n.nspname FROM pg_catalog.pg_namespace n WHERE n.oid = c.relnamespace), c.relname,
           c.relkind, c.relreplident, c.relrowsecurity, c.relforcerowsecurity, c.relowner) AS text
  FROM tree t CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_class c WHERE c.oid = t.relid OFFSET 0
  ) c
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'a', a.attrelid, a.attnum, a.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT a.attrelid, a.attnum, a.xmin FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = t.relid AND a.attnum > 0 OFFSET 0
  ) a
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'i', i.indexrelid, i.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT i.indexrelid, i.xmin FROM pg_catalog.pg_index i WHERE i.indrelid = t.relid OFFSET 0
  ) i
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 't', g.oid, g.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT g.oid, g.xmin FROM pg_catalog.pg_trigger g WHERE g.tgrelid = t.relid OFFSET 0
  ) g
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'r', r.oid, r.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT r.oid, r.xmin FROM pg_catalog.pg_rewrite r WHERE r.ev_class = t.relid OFFSET 0
  ) r
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'd', d.oid, d.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT d.oid, d.xmin FROM pg_catalog.pg_attrdef d WHERE d.adrelid = t.relid OFFSET 0
  ) d
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'k', k.oid, k.xmin)
  FROM tree t CROSS JOIN LATERAL (
    SELECT k.oid, k.xmin FROM pg_catalog.pg_constraint k WHERE k.conrelid = t.relid OFFSET 0
  ) k
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'x', ct.oid, ct.xmin)
  FROM (
    SELECT ct.oid, ct.xmin, ct.casttarget FROM pg_catalog.pg_cast ct
    WHERE ct.castsource = 25 AND ct.oid >= 16384 OFFSET 0
  ) ct CROSS JOIN tree t CROSS JOIN LATERAL (
    SELECT FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = t.relid AND a.attnum > 0 AND a.atttypid = ct.casttarget OFFSET 0
  ) a
) part
GROUP BY part.root"
    };
}

/// Reads tables by schema (`$1`) and name (`$2`), and their hooks. The last column is
/// the position in the arrays, as in each of these queries.
///
/// Partitions are found in `pg_inherits`, which needs no lock on them. A lock could wait for a
/// user's ALTER TABLE that itself waits for an open transaction of pgapace.
///
/// `code` is the first trigger, rule or check constraint that runs user code when a row changes.
/// That includes foreign key triggers if they are enabled for replica, and check constraints that
/// call functions that are not IMMUTABLE.
pub(super) const TABLES_SQL: &str = concat!(
    "\
SELECT facts.*, w.ord
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
CROSS JOIN LATERAL (
WITH RECURSIVE root AS (
  SELECT c.oid, c.relkind, c.relreplident, c.reltype, c.relnatts
  FROM pg_catalog.pg_class c WHERE ",
    named!("c", "w.schema_name", "w.table_name"),
    "
), tree AS (
  SELECT r.oid AS root, r.oid AS relid, r.relkind FROM root r
  UNION ALL
  SELECT t.root, p.oid, p.relkind FROM tree t
  ",
    partitions_below!("t.relid AND t.relkind = 'p'"),
    "
), hook AS (
  SELECT tree.relid, 'trigger' AS kind, t.tgname AS name, t.tgenabled::pg_catalog.text AS detail,
         t.tgisinternal AS internal, t.tgtype::pg_catalog.int4 AS fires
  FROM tree CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_trigger t WHERE t.tgrelid = tree.relid
    OFFSET 0
  ) t WHERE t.tgenabled IN ('R', 'A')
  UNION ALL
  SELECT tree.relid, 'rule', r.rulename, r.ev_enabled::pg_catalog.text, false, 0
  FROM tree CROSS JOIN LATERAL (
    SELECT r.rulename, r.ev_enabled, r.ev_type FROM pg_catalog.pg_rewrite r WHERE r.ev_class = tree.relid
    OFFSET 0
  ) r WHERE r.ev_enabled IN ('R', 'A') AND r.ev_type <> '1'
  UNION ALL
  SELECT tree.relid, 'constraint', k.conname, p.proname::pg_catalog.text, false, 0
  FROM tree CROSS JOIN LATERAL (
    SELECT k.oid, k.conname FROM pg_catalog.pg_constraint k
    WHERE k.conrelid = tree.relid AND k.contype = 'c'
    OFFSET 0
  ) k CROSS JOIN LATERAL (
    SELECT d.refobjid FROM pg_catalog.pg_depend d
    WHERE d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objid = k.oid
      AND d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
    OFFSET 0
  ) d CROSS JOIN LATERAL (
    SELECT p.proname FROM pg_catalog.pg_proc p
    WHERE p.oid = d.refobjid AND p.provolatile <> 'i'
    OFFSET 0
  ) p
), fingerprint AS (",
    fingerprint!(),
    ")
SELECT root.oid, root.relkind, root.relreplident, pg_catalog.row_security_active(root.oid),
       coalesce(h.swallow, false), coalesce(h.on_update, false), coalesce(h.rules, false),
       coalesce(pg_catalog.pg_partition_root(root.oid)::pg_catalog.oid, root.oid),
       code.kind, code.name, code.detail, code.relation, f.fingerprint,
       ",
    elsewhere!("tree"),
    ",
       (SELECT pg_catalog.array_agg(pg_catalog.concat_ws(' ', i.indisunique,
          i.indisprimary OR i.indisunique AND NOT EXISTS (SELECT FROM pg_catalog.pg_opclass o
            WHERE o.oid = ANY (i.indclass) AND NOT o.opcdefault), i.indnkeyatts, i.indkey))
        FROM pg_catalog.pg_index i WHERE i.indrelid = root.oid AND i.indisvalid),
       root.reltype,
       (SELECT t.typarray FROM pg_catalog.pg_type t WHERE t.oid = root.reltype), root.relnatts,
       (SELECT pg_catalog.count(*) FROM tree WHERE tree.relkind <> 'p')
FROM root
JOIN fingerprint f ON f.root = root.oid
CROSS JOIN (
  SELECT pg_catalog.bool_or(kind = 'rule'
           OR kind = 'trigger' AND NOT internal AND fires & 3 = 3 AND fires & 24 <> 0) AS swallow,
         pg_catalog.bool_or(kind = 'trigger' AND NOT internal AND fires & 16 <> 0) AS on_update,
         pg_catalog.bool_or(kind = 'rule') AS rules
  FROM hook
) h
LEFT JOIN LATERAL (
  SELECT k.kind, k.name, k.detail, n.nspname || '.' || c.relname AS relation
  FROM hook k
  JOIN pg_catalog.pg_class c ON c.oid = k.relid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  ORDER BY k.internal, k.kind DESC, k.relid <> root.oid, k.name LIMIT 1
) code ON true
) facts"
);

/// Reads the fingerprints of tables, by oid.
pub(super) const FINGERPRINTS_SQL: &str = concat!(
    "\
WITH RECURSIVE tree AS (
  SELECT r.oid AS root, r.oid AS relid FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS r (oid)
  UNION ALL
  SELECT t.root, p.oid FROM tree t
  ",
    partitions_below!("t.relid"),
    "
)
",
    fingerprint!()
);

/// The calls of a default `i` (its `class`, `object` and expression `tree`) that make it volatile, and whether a
/// user-defined function is among them; NULLs if it calls none. Most defaults are constants, for which nothing is searched.
macro_rules! volatile_calls {
    () => {
        "
    SELECT pg_catalog.bool_or(found.code) AS code,
           pg_catalog.string_agg(DISTINCT CASE WHEN n.nspname = 'pg_catalog' THEN ''
             ELSE n.nspname || '.' END || p.proname || '()', ', ') AS calls
    FROM (
      SELECT true AS code,
             CASE d.refclassid WHEN 'pg_catalog.pg_proc'::pg_catalog.regclass THEN d.refobjid
                               ELSE o.oprcode::pg_catalog.oid END AS called
      FROM pg_catalog.pg_depend d
      LEFT JOIN pg_catalog.pg_operator o
        ON d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass AND o.oid = d.refobjid
      WHERE d.classid = i.class AND d.objid = i.object AND NOT pg_catalog.starts_with(i.tree, '{CONST ')
      UNION ALL
      SELECT false, called.oids[1]::pg_catalog.oid
      FROM pg_catalog.regexp_matches(i.tree, ':(?:func|opfunc)id ([0-9]+)', 'g') AS called (oids)
      WHERE NOT pg_catalog.starts_with(i.tree, '{CONST ')
    ) found
    JOIN pg_catalog.pg_proc p ON p.oid = found.called
      AND CASE WHEN found.code THEN p.provolatile <> 'i' ELSE p.provolatile = 'v' END
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  "
    };
}

/// Reads the columns of tables, by oid (`$1`). What depends on the declared type alone is read by [`DECLARED_SQL`].
///
/// A default counts as volatile if it calls a volatile built-in function, or a user-defined
/// function that is not IMMUTABLE. `pg_depend` lists only user-defined functions, so built-in ones
/// are searched in the stored expression tree. `pg_get_expr` is not used because it locks the
/// table: it could wait for a user's ALTER TABLE that itself waits for an open transaction of
/// pgapace.
///
/// Joins here go from an outer row to the rows of an index: the sessions have no other ones, and a join with a
/// common table expression reads all of its rows for each outer row. `OFFSET 0` keeps them in this order.
pub(super) const COLUMNS_SQL: &str = concat!(
    "\
SELECT a.attname, a.attnum, a.atttypid, a.atttypmod, a.attidentity, a.attgenerated <> '', a.attnotnull,
       coalesce(co.collisdeterministic, true), initial.object IS NOT NULL, initial.calls, initial.code, w.ord
FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord)
CROSS JOIN LATERAL (
  SELECT * FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = w.oid AND a.attnum > 0 AND NOT a.attisdropped
  ORDER BY a.attnum OFFSET 0
) a
LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation
LEFT JOIN LATERAL (
  SELECT i.object, volatile.*
  FROM (
    SELECT 'pg_catalog.pg_attrdef'::pg_catalog.regclass AS class, d.oid AS object,
           d.adbin::pg_catalog.text AS tree
    FROM pg_catalog.pg_attrdef d
    WHERE a.atthasdef AND a.attgenerated = '' AND d.adrelid = a.attrelid AND d.adnum = a.attnum
    OFFSET 0
  ) i
  CROSS JOIN LATERAL (",
    volatile_calls!(),
    ") volatile
) initial ON true
ORDER BY w.ord, a.attnum"
);

/// Reads the declared types of the columns of tables (`$1`): each type with each modifier once.
///
/// The default of a domain counts as volatile as that of a column does: see [`COLUMNS_SQL`].
///
/// A user-defined cast from text (its oid is not from initdb) runs instead of the input function, and so does that
/// to regclass, which takes `-` and numbers for names of relations.
pub(super) const DECLARED_SQL: &str = concat!(
    "\
WITH RECURSIVE declared AS (
  SELECT DISTINCT a.atttypid AS typ, a.atttypmod AS modifier
  FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid)
  CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = w.oid AND a.attnum > 0 AND NOT a.attisdropped
    OFFSET 0
  ) a
), domain_chain AS (
  SELECT typ AS declared, modifier AS declared_modifier, typ, modifier, ARRAY[typ] AS types FROM declared
  UNION ALL
  SELECT d.declared, d.declared_modifier, t.typbasetype, t.typtypmod,
         pg_catalog.array_append(d.types, t.typbasetype)
  FROM domain_chain d CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_type t WHERE t.oid = d.typ AND t.typtype = 'd'
    OFFSET 0
  ) t
)
SELECT b.declared, b.declared_modifier, b.typ,
       pg_catalog.format_type(b.declared, b.declared_modifier), bn.nspname, bt.typname, bt.typarray,
       bt.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc, bt.typtype, b.modifier,
       initial.calls, initial.code, checked.name,
       EXISTS (SELECT 1 FROM pg_catalog.pg_cast ct
               WHERE ct.castsource = 25 AND ct.casttarget = b.typ AND ct.castmethod = 'f'
                 AND (ct.oid >= 16384 OR b.typ = 'pg_catalog.regclass'::pg_catalog.regtype)),
       fit.nspname, fit.proname, fit.pronargs = 3, pg_catalog.format_type(b.typ, b.modifier),
       bt.typreceive <> 0, input.nspname, input.proname, input.pronargs,
       CASE bt.typelem WHEN 0 THEN bt.oid ELSE bt.typelem END
FROM domain_chain b
CROSS JOIN LATERAL (
  SELECT * FROM pg_catalog.pg_type t WHERE t.oid = b.typ AND t.typtype <> 'd'
  OFFSET 0
) bt
JOIN pg_catalog.pg_namespace bn ON bn.oid = bt.typnamespace
LEFT JOIN LATERAL (
  SELECT n.nspname, p.proname, p.pronargs
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  WHERE p.oid = bt.typinput AND p.prorettype = bt.oid
) input ON true
LEFT JOIN LATERAL (
  SELECT n.nspname, p.proname, p.pronargs
  FROM pg_catalog.pg_cast ct
  JOIN pg_catalog.pg_proc p ON p.oid = ct.castfunc
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  WHERE b.modifier <> -1 AND ct.castsource = ct.casttarget AND ct.castsource =
    CASE WHEN bt.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc
         THEN bt.typelem ELSE bt.oid END
) fit ON true
LEFT JOIN LATERAL (
  SELECT volatile.*
  FROM (
    SELECT 'pg_catalog.pg_type'::pg_catalog.regclass AS class, t.oid AS object,
           t.typdefaultbin::pg_catalog.text AS tree
    FROM pg_catalog.unnest(b.types) WITH ORDINALITY AS u (typ, depth)
    CROSS JOIN LATERAL (
      SELECT * FROM pg_catalog.pg_type t WHERE t.oid = u.typ AND t.typdefault IS NOT NULL
      OFFSET 0
    ) t
    ORDER BY u.depth LIMIT 1
  ) i
  CROSS JOIN LATERAL (",
    volatile_calls!(),
    ") volatile
) initial ON true
LEFT JOIN LATERAL (
  SELECT p.proname AS name
  FROM pg_catalog.unnest(b.types) AS u (typ) CROSS JOIN LATERAL (
    SELECT k.oid FROM pg_catalog.pg_constraint k WHERE k.contypid = u.typ
    OFFSET 0
  ) k CROSS JOIN LATERAL (
    SELECT d.refobjid FROM pg_catalog.pg_depend d
    WHERE d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objid = k.oid
      AND d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
    OFFSET 0
  ) d CROSS JOIN LATERAL (
    SELECT p.proname FROM pg_catalog.pg_proc p
    WHERE p.oid = d.refobjid AND p.provolatile <> 'i'
    OFFSET 0
  ) p
  ORDER BY p.proname LIMIT 1
) checked ON true"
);

/// Reads the equality of the columns' base types of tables, by oid (`$1`): schema and name of the
/// operator, and whether all parts of the type have one.
///
/// The equality of a type comes from its default btree operator class, else from its hash operator
/// class. The operator class may also belong to a polymorphic type that covers the type, or to a
/// type to which it is binary coercible. Every element type of an array or composite must have an
/// equality too: `json[]` has an operator `=`, but it fails at execution.
///
/// Many columns have the same type, so this is read once for each type and not for each column.
pub(super) const TYPES_SQL: &str = "\
WITH RECURSIVE chain AS (
  SELECT declared.typ
  FROM (
    SELECT DISTINCT a.atttypid AS typ
    FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND a.attnum > 0 AND NOT a.attisdropped
  ) declared
  UNION
  SELECT t.typbasetype FROM chain d CROSS JOIN LATERAL (
    SELECT t.typbasetype FROM pg_catalog.pg_type t WHERE t.oid = d.typ AND t.typtype = 'd'
    OFFSET 0
  ) t
), part AS (
  SELECT c.typ AS whole, c.typ
  FROM chain c CROSS JOIN LATERAL (
    SELECT 1 FROM pg_catalog.pg_type t WHERE t.oid = c.typ AND t.typtype <> 'd'
    OFFSET 0
  ) t
  UNION
  SELECT p.whole, next.typ
  FROM part p CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_type t WHERE t.oid = p.typ
    OFFSET 0
  ) t CROSS JOIN LATERAL (
    SELECT t.typbasetype AS typ WHERE t.typtype = 'd'
    UNION ALL
    SELECT t.typelem WHERE t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc
    UNION ALL
    SELECT ca.atttypid FROM pg_catalog.pg_attribute ca
    WHERE t.typtype = 'c' AND ca.attrelid = t.typrelid AND ca.attnum > 0 AND NOT ca.attisdropped
  ) next
), comparable AS (
  SELECT t.oid AS typ, eq.nspname, eq.oprname
  FROM (SELECT DISTINCT p.typ FROM part p) p CROSS JOIN LATERAL (
    SELECT * FROM pg_catalog.pg_type t WHERE t.oid = p.typ AND t.typtype <> 'd'
    OFFSET 0
  ) t LEFT JOIN LATERAL (
    SELECT n.nspname, o.oprname
    FROM pg_catalog.pg_opclass oc
    JOIN pg_catalog.pg_amop ao ON ao.amopfamily = oc.opcfamily
      AND ao.amoplefttype = oc.opcintype AND ao.amoprighttype = oc.opcintype
      AND ao.amoppurpose = 's' AND ao.amopstrategy = CASE oc.opcmethod WHEN 403 THEN 3 ELSE 1 END
    JOIN pg_catalog.pg_operator o ON o.oid = ao.amopopr
    JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
    WHERE oc.opcdefault AND oc.opcmethod IN (403, 405) AND (
      oc.opcintype = t.oid
      OR oc.opcintype = CASE t.typtype WHEN 'e' THEN 3500 WHEN 'r' THEN 3831 WHEN 'm' THEN 4537
                                       WHEN 'c' THEN 2249 ELSE 0 END::pg_catalog.oid
      OR (oc.opcintype = 2277
          AND t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc)
      OR EXISTS (SELECT 1 FROM pg_catalog.pg_cast ct
                 WHERE ct.castsource = t.oid AND ct.casttarget = oc.opcintype
                   AND ct.castmethod = 'b' AND ct.castcontext = 'i'))
    ORDER BY oc.opcintype = t.oid DESC, oc.opcmethod LIMIT 1
  ) eq ON true
)
SELECT p.whole, pg_catalog.max(c.nspname::pg_catalog.text) FILTER (WHERE p.typ = p.whole),
       pg_catalog.max(c.oprname::pg_catalog.text) FILTER (WHERE p.typ = p.whole),
       pg_catalog.bool_and(c.oprname IS NOT NULL)
FROM part p JOIN comparable c ON c.typ = p.typ
GROUP BY p.whole";

/// Reads the key columns of the unique indexes that can find a row of these tables (`$1`), with whether none of
/// their rows has a NULL there, and the equality operator of each column's operator class. A NOT NULL that is
/// NOT VALID (18 and later) leaves NULLs, of which a unique index may have several. The operator is NULL for access methods other than btree and hash,
/// whose strategy numbers have other meanings. Then the default equality of the type is used, which
/// such an index enforces too.
///
/// The collation of the index is NULL where that of the column finds one row as well: a deterministic one tells more values
/// apart than any other.
pub(super) const KEYS_SQL: &str = "\
SELECT i.indexrelid, ic.relname, i.indisreplident, i.indisprimary, a.attnum,
       a.attnotnull AND NOT EXISTS (
         SELECT 1 FROM pg_catalog.pg_constraint k
         WHERE k.conrelid = a.attrelid AND k.contype = 'n' AND NOT k.convalidated
           AND a.attnum = ANY (k.conkey)),
       n.nspname, o.oprname,
       (SELECT pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname)
        FROM pg_catalog.pg_collation co JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
        WHERE co.oid = i.indcollation[k.ord] AND co.oid <> a.attcollation AND NOT EXISTS (
          SELECT FROM pg_catalog.pg_collation of WHERE of.oid = a.attcollation AND of.collisdeterministic)),
       w.ord
FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord)
JOIN pg_catalog.pg_index i ON i.indrelid = w.oid
JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
JOIN pg_catalog.pg_am am ON am.oid = ic.relam
CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k(ord)
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord]
JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[k.ord]
LEFT JOIN pg_catalog.pg_amop ao ON am.amname IN ('btree', 'hash')
  AND ao.amopfamily = oc.opcfamily AND ao.amoplefttype = oc.opcintype
  AND ao.amoprighttype = oc.opcintype AND ao.amoppurpose = 's'
  AND ao.amopstrategy = CASE am.amname WHEN 'btree' THEN 3 ELSE 1 END
LEFT JOIN pg_catalog.pg_operator o ON o.oid = ao.amopopr
LEFT JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
WHERE i.indisunique AND i.indimmediate AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
ORDER BY w.ord, i.indisprimary DESC, i.indexrelid, k.ord";

/// Those of these tables (`$1`) that do not exist any more.
pub(super) const DROPPED_SQL: &str = "\
SELECT w.oid FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid)
CROSS JOIN LATERAL (SELECT pg_catalog.count(*) AS found FROM pg_catalog.pg_class c WHERE c.oid = w.oid) c
WHERE c.found = 0";

/// Reads the leaf partitions of partitioned tables (`$1`), and the key columns of each leaf.
pub(super) const LEAVES_SQL: &str = concat!(
    "\
WITH RECURSIVE tree AS (
  SELECT w.ord, w.oid AS relid
  FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord)
  UNION ALL
  SELECT t.ord, i.inhrelid FROM tree t
  ",
    partitions_below!("t.relid"),
    "
)
SELECT c.relname, key.columns, p.ord
FROM tree p
JOIN pg_catalog.pg_class c ON c.oid = p.relid AND c.relkind <> 'p'
LEFT JOIN LATERAL (
  SELECT pg_catalog.array_agg(a.attname ORDER BY k.ord)::pg_catalog.text[] AS columns
  FROM pg_catalog.pg_index i
  CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k(ord)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord]
  WHERE i.indrelid = p.relid AND i.indisvalid AND i.indimmediate
    AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END
) key ON true"
);
