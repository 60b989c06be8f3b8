//! The description of a subscriber table: the parts of the system catalogues that applying needs.
//!
//! All objects are read by oid or by schema-qualified name, with an empty search path. So no user
//! object can take the place of a system object.
//!
//! No query here waits for a lock on a table. While the leader waits, nothing is applied and no
//! stream is abandoned. A user's ALTER TABLE may wait for just that stream, and every reader of the
//! table queues behind the ALTER. So nothing here calls functions that lock a table: `pg_get_expr`,
//! `pg_get_indexdef`, `pg_relation_size` and `pg_partition_tree` do. The functions that a default
//! calls are read from its stored expression tree.

use rustc_hash::FxHashMap;
use wire::{Row, Rows, Session, quote_ident};

use crate::error::{Failure, Result};
use crate::subscriber::elsewhere::{self, elsewhere};
use crate::subscriber::oid;

/// How a search compares two values of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Equality {
    /// By this schema-qualified operator. Under an empty search path, `=` of an extension's type is
    /// not found, or a built-in operator silently takes its place (citext).
    Operator(String),
    /// By the subscriber's text form, byte by byte, because the type has no equality (json, xml,
    /// point).
    Text,
}

impl Equality {
    fn operator(schema: &str, name: &str) -> Self {
        Self::Operator(format!("OPERATOR({}.{name})", quote_ident(schema)))
    }
}

/// The function with which an assignment enforces a column's length or precision
/// (`find_typmod_coercion_function` in `parse_coerce.c`). It rounds, cuts trailing blanks, or
/// refuses values that do not fit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Coercion {
    /// The schema-qualified, quoted name.
    function: String,
    /// Whether the function takes a third argument (`isExplicit`). pgapace passes false, because an
    /// explicit cast would cut values that do not fit.
    tells_casts: bool,
    /// Whether it is applied to each element of an array.
    of_elements: bool,
    modifier: i32,
    /// The base type with its modifier, as SQL.
    type_sql: String,
}

impl Coercion {
    /// Returns SQL for `value`, of the column's base type, as the column stores it.
    pub(crate) fn apply(&self, value: &str) -> String {
        let Self { function, modifier, type_sql, .. } = self;
        let implicit = if self.tells_casts { ", false" } else { "" };
        match (self.of_elements, self.tells_casts) {
            (false, _) => format!("{function}({value}, {modifier}{implicit})"),
            (true, false) => format!("({value})::{type_sql}"),
            // The condition applies the function to each element, and fails for values that do not
            // fit. The explicit cast alone would cut them.
            (true, true) => format!(
                "CASE WHEN (SELECT pg_catalog.count({function}(e, {modifier}{implicit})) \
                 FROM pg_catalog.unnest({value}) AS e) OPERATOR(pg_catalog.>=) 0 \
                 THEN ({value})::{type_sql} END"
            ),
        }
    }
}

/// `pg_attribute.attidentity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    None,
    /// UPDATE cannot set the column; INSERT needs OVERRIDING SYSTEM VALUE.
    Always,
    ByDefault,
}

/// One column of a subscriber table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) attnum: i16,
    /// The type below all domains. Parameters are declared with this type, so that the assignment
    /// checks lengths and domain constraints. An explicit cast would truncate silently.
    pub(crate) base_type: u32,
    /// Name of the declared type, for messages.
    pub(crate) type_name: String,
    /// The base type as quoted SQL. Quotes keep the grammar from adding a length: `bit` in a cast
    /// means `bit(1)`, `"bit"` does not.
    pub(crate) base_type_sql: String,
    /// Oid of the array type of the base type, 0 if there is none.
    pub(crate) array_type: u32,
    /// Whether the base type is itself an array.
    pub(crate) is_array: bool,
    /// `pg_type.typtype` of the base type.
    pub(crate) type_kind: char,
    /// Whether the column's collation is deterministic; true if the column has none.
    pub(crate) deterministic: bool,
    pub(crate) identity: Identity,
    pub(crate) generated: bool,
    pub(crate) not_null: bool,
    /// The equality of the type's default operator class.
    pub(crate) equality: Equality,
    /// `atttypmod`, or `typtypmod` of the innermost domain; -1 for none.
    pub(crate) type_modifier: i32,
    /// The function that an assignment calls to enforce `type_modifier`.
    pub(crate) coercion: Option<Coercion>,
    /// The default, if each evaluation may return another value.
    pub(crate) volatile_default: Option<VolatileDefault>,
    /// A function that is not IMMUTABLE, called by a check constraint of the column's domain.
    pub(crate) domain_code: Option<String>,
    /// Whether a user-defined cast from text to the base type exists.
    pub(crate) cast_from_text: bool,
}

impl Column {
    /// Whether equal values are always identical: no `1.0` and `1.00`, no `0` and `-0`, no
    /// difference in case. True only for built-in types for which that is certain.
    pub(crate) fn equal_is_identical(&self) -> bool {
        match self.base_type {
            oid::BOOL
            | oid::BYTEA
            | oid::CHAR
            | oid::NAME
            | oid::INT8
            | oid::INT2
            | oid::INT4
            | oid::TEXT
            | oid::OID
            | oid::TID
            | oid::XID
            | oid::CID
            | oid::CIDR
            | oid::MONEY
            | oid::MACADDR8
            | oid::MACADDR
            | oid::INET
            | oid::VARCHAR
            | oid::DATE
            | oid::TIME
            | oid::TIMESTAMP
            | oid::TIMESTAMPTZ
            | oid::TIMETZ
            | oid::BIT
            | oid::VARBIT
            | oid::UUID
            | oid::PG_LSN
            | oid::XID8 => self.deterministic,
            // With a length, all values have the same number of trailing blanks.
            oid::BPCHAR => self.deterministic && self.type_modifier != -1,
            _ => self.type_kind == 'e',
        }
    }
}

/// A default that INSERT evaluates for each row if it does not name the column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolatileDefault {
    /// The functions that the default calls, separated by commas.
    pub(crate) calls: String,
    /// Whether one of these functions is user-defined.
    pub(crate) user_code: bool,
}

/// The columns of a unique index, with the operators that find a row by them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    /// Name of the unique index, for messages.
    pub(crate) index: String,
    /// `attnum` and equality of each column, in index order.
    pub(crate) columns: Vec<(i16, Equality)>,
}

/// Triggers enabled for replica, rules and constraints that run when a row changes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Hooks {
    /// The table has BEFORE ROW UPDATE or DELETE triggers, or rules. They may be the reason why a
    /// statement affects no row.
    pub(crate) may_swallow_rows: bool,
    /// The table has an UPDATE trigger. `UPDATE OF` triggers fire for every replicated column, as
    /// in native logical replication.
    pub(crate) on_update: bool,
    /// The table has rewrite rules that are enabled for replica. In native logical replication,
    /// rules never run.
    pub(crate) rules: bool,
    /// The first trigger, rule or constraint that runs user code, as a sentence.
    pub(crate) code: Option<String>,
}

/// One subscriber table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) oid: u32,
    /// Changes when a catalogue row changes that this description depends on. Taken in the first
    /// query.
    pub(crate) fingerprint: String,
    /// The topmost partitioned table above this one, or the table itself.
    pub(crate) root: u32,
    pub(crate) schema: String,
    pub(crate) name: String,
    pub(crate) partitioned: bool,
    pub(crate) row_security: bool,
    pub(crate) hooks: Hooks,
    pub(crate) columns: Vec<Column>,
    /// The replica identity index if one is set, otherwise the primary key.
    pub(crate) identity_key: Option<Key>,
    /// Unique, immediate, non-partial indexes over NOT NULL columns, except `identity_key`.
    pub(crate) unique_keys: Vec<Key>,
    /// For a partitioned table without `identity_key`: name and key columns of each leaf partition.
    pub(crate) leaf_keys: Vec<(String, Option<Vec<String>>)>,
}

impl Table {
    /// The quoted, schema-qualified name.
    pub(crate) fn sql_name(&self) -> String {
        format!("{}.{}", quote_ident(&self.schema), quote_ident(&self.name))
    }

    /// The name for a search or DML statement. A plain table gets ONLY, because replication treats
    /// its inheritance children as other tables. A partitioned table includes its partitions.
    pub(crate) fn sql_only(&self) -> String {
        if self.partitioned { self.sql_name() } else { format!("ONLY {}", self.sql_name()) }
    }

    pub(crate) fn display_name(&self) -> String {
        format!("{}.{}", self.schema, self.name)
    }

    pub(crate) fn column(&self, name: &str) -> Option<(usize, &Column)> {
        self.columns.iter().enumerate().find(|(_, column)| column.name == name)
    }
}

/// One value for each `root` of the CTE `tree`. It changes whenever a relevant catalogue row
/// changes. Only the relevant columns of pg_class are included, because TRUNCATE changes others.
/// ANALYZE and VACUUM change none of these values.
macro_rules! fingerprint {
    () => {
        "\
SELECT part.root, pg_catalog.sum(pg_catalog.hashtextextended(part.text, 0))::pg_catalog.text
         AS fingerprint
FROM (
  SELECT t.root, pg_catalog.concat_ws(' ', 'c', c.oid, c.relnamespace, c.relname, c.relkind,
           c.relreplident, c.relrowsecurity, c.relforcerowsecurity, c.relowner) AS text
  FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'a', a.attrelid, a.attnum, a.xmin)
  FROM tree t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attnum > 0
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'i', i.indexrelid, i.xmin)
  FROM tree t JOIN pg_catalog.pg_index i ON i.indrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 't', g.oid, g.xmin)
  FROM tree t JOIN pg_catalog.pg_trigger g ON g.tgrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'r', r.oid, r.xmin)
  FROM tree t JOIN pg_catalog.pg_rewrite r ON r.ev_class = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'd', d.oid, d.xmin)
  FROM tree t JOIN pg_catalog.pg_attrdef d ON d.adrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'k', k.oid, k.xmin)
  FROM tree t JOIN pg_catalog.pg_constraint k ON k.conrelid = t.relid
  UNION ALL
  SELECT t.root, pg_catalog.concat_ws(' ', 'x', ct.oid, ct.xmin)
  FROM tree t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.relid AND a.attnum > 0
  JOIN pg_catalog.pg_cast ct ON ct.casttarget = a.atttypid
  WHERE ct.castsource = 25 AND ct.oid >= 16384
) part
GROUP BY part.root"
    };
}

/// Reads one table and its hooks.
///
/// Partitions are found in `pg_inherits`, which needs no lock on them. A lock could wait for a
/// user's ALTER TABLE that itself waits for an open transaction of pgapace.
///
/// `code` is the first trigger, rule or check constraint that runs user code when a row changes.
/// That includes foreign key triggers if they are enabled for replica, and check constraints that
/// call functions that are not IMMUTABLE.
const TABLE_SQL: &str = concat!(
    "\
WITH RECURSIVE root AS (
  SELECT c.oid, c.relkind, c.relreplident
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relname = $2
), tree AS (
  SELECT r.oid AS root, r.oid AS relid FROM root r
  UNION ALL
  SELECT t.root, p.oid FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid
  JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid AND p.relispartition
), hook AS (
  SELECT tree.relid, 'trigger' AS kind, t.tgname AS name, t.tgenabled::pg_catalog.text AS detail,
         t.tgisinternal AS internal, t.tgtype::pg_catalog.int4 AS fires
  FROM tree JOIN pg_catalog.pg_trigger t ON t.tgrelid = tree.relid AND t.tgenabled IN ('R', 'A')
  UNION ALL
  SELECT tree.relid, 'rule', r.rulename, r.ev_enabled::pg_catalog.text, false, 0
  FROM tree JOIN pg_catalog.pg_rewrite r
    ON r.ev_class = tree.relid AND r.ev_enabled IN ('R', 'A') AND r.ev_type <> '1'
  UNION ALL
  SELECT tree.relid, 'constraint', k.conname, p.proname::pg_catalog.text, false, 0
  FROM tree
  JOIN pg_catalog.pg_constraint k ON k.conrelid = tree.relid AND k.contype = 'c'
  JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
    AND d.objid = k.oid AND d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
  JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid AND p.provolatile <> 'i'
), fingerprint AS (",
    fingerprint!(),
    ")
SELECT root.oid, root.relkind, root.relreplident, pg_catalog.row_security_active(root.oid),
       coalesce(h.swallow, false), coalesce(h.on_update, false), coalesce(h.rules, false),
       coalesce(pg_catalog.pg_partition_root(root.oid)::pg_catalog.oid, root.oid),
       code.kind, code.name, code.detail, code.relation, f.fingerprint,
       ",
    elsewhere!("tree"),
    "
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
) code ON true"
);

/// Reads the fingerprints of tables, by oid.
const FINGERPRINTS_SQL: &str = concat!(
    "\
WITH RECURSIVE tree AS (
  SELECT r.oid AS root, r.oid AS relid FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS r (oid)
  UNION ALL
  SELECT t.root, p.oid FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid
  JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid AND p.relispartition
)
",
    fingerprint!()
);

/// Reads the columns of a table.
///
/// The equality of a type comes from its default btree operator class, else from its hash operator
/// class. The operator class may also belong to a polymorphic type that covers the type, or to a
/// type to which it is binary coercible. Every element type of an array or composite must have an
/// equality too: `json[]` has an operator `=`, but it fails at execution.
///
/// A user-defined cast from text (its oid is not from initdb) runs instead of the input function.
///
/// A default counts as volatile if it calls a volatile built-in function, or a user-defined
/// function that is not IMMUTABLE. `pg_depend` lists only user-defined functions, so built-in ones
/// are searched in the stored expression tree. `pg_get_expr` is not used because it locks the
/// table: it could wait for a user's ALTER TABLE that itself waits for an open transaction of
/// pgapace.
const COLUMNS_SQL: &str = "\
WITH RECURSIVE attribute AS (
  SELECT a.attnum, a.attname, a.atttypid, a.atttypmod, a.attidentity, a.attgenerated, a.attnotnull,
         a.attcollation
  FROM pg_catalog.pg_attribute a
  WHERE a.attrelid = $1::pg_catalog.oid AND a.attnum > 0 AND NOT a.attisdropped
), domain_chain AS (
  SELECT attnum, atttypid AS typ, atttypmod AS modifier, 0 AS depth FROM attribute
  UNION ALL
  SELECT d.attnum, t.typbasetype, t.typtypmod, d.depth + 1
  FROM domain_chain d JOIN pg_catalog.pg_type t ON t.oid = d.typ WHERE t.typtype = 'd'
), base AS (
  SELECT DISTINCT ON (attnum) attnum, typ, modifier FROM domain_chain ORDER BY attnum, depth DESC
), initial AS (
  SELECT DISTINCT ON (attnum) attnum, class, object, tree
  FROM (
    SELECT d.adnum AS attnum, -1 AS depth, 'pg_catalog.pg_attrdef'::pg_catalog.regclass AS class,
           d.oid AS object, d.adbin::pg_catalog.text AS tree
    FROM pg_catalog.pg_attrdef d WHERE d.adrelid = $1::pg_catalog.oid
    UNION ALL
    SELECT c.attnum, c.depth, 'pg_catalog.pg_type'::pg_catalog.regclass, t.oid,
           t.typdefaultbin::pg_catalog.text
    FROM domain_chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ
    WHERE t.typdefault IS NOT NULL
  ) candidate
  ORDER BY attnum, depth
), part AS (
  SELECT attnum, typ FROM base
  UNION
  SELECT p.attnum, next.typ
  FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.typ
  CROSS JOIN LATERAL (
    SELECT t.typbasetype AS typ WHERE t.typtype = 'd'
    UNION ALL
    SELECT t.typelem WHERE t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc
    UNION ALL
    SELECT ca.atttypid FROM pg_catalog.pg_attribute ca
    WHERE t.typtype = 'c' AND ca.attrelid = t.typrelid AND ca.attnum > 0 AND NOT ca.attisdropped
  ) next
), comparable AS (
  SELECT p.attnum, p.typ, eq.nspname, eq.oprname
  FROM part p JOIN pg_catalog.pg_type t ON t.oid = p.typ
  LEFT JOIN LATERAL (
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
  WHERE t.typtype <> 'd'
)
SELECT a.attname, a.attnum, b.typ, pg_catalog.format_type(a.atttypid, a.atttypmod),
       a.attidentity, a.attgenerated <> '', a.attnotnull, own.nspname, own.oprname,
       (SELECT pg_catalog.bool_and(c.oprname IS NOT NULL) FROM comparable c
        WHERE c.attnum = a.attnum),
       bn.nspname, bt.typname, bt.typarray,
       bt.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc, bt.typtype,
       coalesce(co.collisdeterministic, true), b.modifier,
       volatile.calls, volatile.code, checked.name,
       EXISTS (SELECT 1 FROM pg_catalog.pg_cast ct
               WHERE ct.castsource = 25 AND ct.casttarget = b.typ AND ct.castmethod = 'f'
                 AND ct.oid >= 16384),
       fit.nspname, fit.proname, fit.pronargs = 3, pg_catalog.format_type(b.typ, b.modifier)
FROM attribute a
JOIN base b ON b.attnum = a.attnum
JOIN pg_catalog.pg_type bt ON bt.oid = b.typ
JOIN pg_catalog.pg_namespace bn ON bn.oid = bt.typnamespace
LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation
LEFT JOIN comparable own ON own.attnum = a.attnum AND own.typ = b.typ
LEFT JOIN initial i ON i.attnum = a.attnum AND a.attgenerated = ''
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
    WHERE d.classid = i.class AND d.objid = i.object
    UNION ALL
    SELECT false, called.oids[1]::pg_catalog.oid
    FROM pg_catalog.regexp_matches(i.tree, ':(?:func|opfunc)id ([0-9]+)', 'g') AS called (oids)
  ) found
  JOIN pg_catalog.pg_proc p ON p.oid = found.called
    AND CASE WHEN found.code THEN p.provolatile <> 'i' ELSE p.provolatile = 'v' END
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
) volatile ON true
LEFT JOIN LATERAL (
  SELECT p.proname AS name
  FROM domain_chain c
  JOIN pg_catalog.pg_constraint k ON k.contypid = c.typ
  JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
    AND d.objid = k.oid AND d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
  JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid AND p.provolatile <> 'i'
  WHERE c.attnum = a.attnum
  ORDER BY p.proname LIMIT 1
) checked ON true
ORDER BY a.attnum";

/// Reads the key columns of the unique indexes that can find a row, with the equality operator of
/// each column's operator class. The operator is NULL for access methods other than btree and hash,
/// whose strategy numbers have other meanings. Then the default equality of the type is used, which
/// such an index enforces too.
const KEYS_SQL: &str = "\
SELECT i.indexrelid, ic.relname, i.indisreplident, i.indisprimary, a.attnum, a.attnotnull,
       n.nspname, o.oprname
FROM pg_catalog.pg_index i
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
WHERE i.indrelid = $1::pg_catalog.oid AND i.indisunique AND i.indimmediate AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
ORDER BY i.indisprimary DESC, i.indexrelid, k.ord";

const LEAVES_SQL: &str = "\
WITH RECURSIVE tree AS (
  SELECT $1::pg_catalog.oid AS relid
  UNION ALL
  SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid
)
SELECT c.relname, key.columns
FROM tree p
JOIN pg_catalog.pg_class c ON c.oid = p.relid AND c.relkind <> 'p'
LEFT JOIN LATERAL (
  SELECT pg_catalog.array_agg(a.attname ORDER BY k.ord)::pg_catalog.text[] AS columns
  FROM pg_catalog.pg_index i
  CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k(ord)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord]
  WHERE i.indrelid = p.relid AND i.indisvalid AND i.indimmediate
    AND CASE WHEN c.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END
) key ON true";

/// Reads one table. Returns `None` if no relation has that name.
pub(crate) fn load(session: &mut Session, schema: &str, name: &str) -> Result<Option<Table>> {
    let doing = format!("reading the catalogue of {schema}.{name}");
    let failed = |error: &wire::Error| Failure::subscriber(error, &doing);
    let rows = session.query(TABLE_SQL, &[Some(schema), Some(name)]).map_err(|e| failed(&e))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let oid: u32 = field(&row, 0)?;
    let kind: String = field(&row, 1)?;
    let replica_identity: String = field(&row, 2)?;
    let partitioned = kind == "p";
    if !partitioned && kind != "r" {
        return Err(not_a_table(schema, name, &kind));
    }
    if let Some(found) = row.get(13) {
        return Err(elsewhere::refused(schema, name, found));
    }
    let oid_text = oid.to_string();
    // One message with both queries needs one round trip.
    let sql = format!("{COLUMNS_SQL}; {KEYS_SQL}").replace("$1", &oid_text);
    let results = session.simple(&sql).map_err(|e| failed(&e))?;
    let [columns, keys] = &results[..] else {
        return Err(Failure::internal("the catalogue query did not return two results"));
    };
    let columns = columns.iter().map(|row| column(&row)).collect::<Result<Vec<_>>>()?;
    let (identity_key, unique_keys) = keys_of(keys, &columns, &replica_identity)?;
    let mut leaf_keys = Vec::new();
    if partitioned && identity_key.is_none() {
        for row in session.query(LEAVES_SQL, &[Some(&oid_text)]).map_err(|e| failed(&e))?.iter() {
            let columns = row.get(1).map(parse_name_array).transpose()?;
            leaf_keys.push((field::<String>(&row, 0)?, columns));
        }
    }
    let root = field(&row, 7)?;
    Ok(Some(Table {
        oid,
        root,
        fingerprint: field(&row, 12)?,
        schema: schema.to_owned(),
        name: name.to_owned(),
        partitioned,
        row_security: boolean(&row, 3)?,
        hooks: Hooks {
            may_swallow_rows: boolean(&row, 4)?,
            on_update: boolean(&row, 5)?,
            rules: boolean(&row, 6)?,
            code: user_code(&row)?,
        },
        columns,
        identity_key,
        unique_keys,
        leaf_keys,
    }))
}

/// Returns the current fingerprints of these tables, `None` for a table that was dropped.
pub(crate) fn fingerprints(
    session: &mut Session,
    tables: &[u32],
) -> Result<FxHashMap<u32, Option<String>>> {
    let oids: Vec<_> = tables.iter().map(u32::to_string).collect();
    let rows = session
        .query(FINGERPRINTS_SQL, &[Some(&format!("{{{}}}", oids.join(",")))])
        .map_err(|e| Failure::subscriber(&e, "reading the fingerprints of the tables"))?;
    let mut found: FxHashMap<_, _> = tables.iter().map(|oid| (*oid, None)).collect();
    for row in rows.iter() {
        found.insert(field(&row, 0)?, Some(field(&row, 1)?));
    }
    Ok(found)
}

fn column(row: &Row<'_>) -> Result<Column> {
    let comparable = row.get(9) == Some("t");
    let equality = match (row.get(7), row.get(8)) {
        (Some(schema), Some(operator)) if comparable => Equality::operator(schema, operator),
        _ => Equality::Text,
    };
    let is_array = boolean(row, 13)?;
    let type_modifier = field(row, 16)?;
    let quoted = |schema: usize, name: usize| -> Result<String> {
        let schema = quote_ident(&field::<String>(row, schema)?);
        Ok(format!("{schema}.{}", always_quoted(&field::<String>(row, name)?)))
    };
    let coercion = match row.get(21) {
        Some(_) => Some(Coercion {
            function: quoted(21, 22)?,
            tells_casts: boolean(row, 23)?,
            of_elements: is_array,
            modifier: type_modifier,
            type_sql: field(row, 24)?,
        }),
        None => None,
    };
    Ok(Column {
        name: field(row, 0)?,
        attnum: field(row, 1)?,
        base_type: field(row, 2)?,
        type_name: field(row, 3)?,
        identity: match row.get(4) {
            Some("a") => Identity::Always,
            Some("d") => Identity::ByDefault,
            _ => Identity::None,
        },
        generated: boolean(row, 5)?,
        not_null: boolean(row, 6)?,
        equality,
        base_type_sql: quoted(10, 11)?,
        array_type: field(row, 12)?,
        is_array,
        type_kind: field(row, 14)?,
        deterministic: boolean(row, 15)?,
        type_modifier,
        coercion,
        volatile_default: match (row.get(17), row.get(18)) {
            (Some(calls), Some(code)) => {
                Some(VolatileDefault { calls: calls.to_owned(), user_code: code == "t" })
            }
            _ => None,
        },
        domain_code: row.get(19).map(str::to_owned),
        cast_from_text: boolean(row, 20)?,
    })
}

fn user_code(row: &Row<'_>) -> Result<Option<String>> {
    let Some(kind) = row.get(8) else { return Ok(None) };
    let (name, detail): (String, String) = (field(row, 9)?, field(row, 10)?);
    let relation: String = field(row, 11)?;
    let enabled = if detail == "A" { "ENABLE ALWAYS" } else { "ENABLE REPLICA" };
    Ok(Some(match kind {
        "constraint" => format!(
            "constraint {name} of {relation} calls function {detail}, which is not IMMUTABLE"
        ),
        kind => format!("{kind} {name} ({enabled}) on {relation} runs user code"),
    }))
}

/// Splits the candidate indexes into the key that finds rows and the other unique keys.
///
/// The choice is that of `GetRelationIdentityOrPK` in `relation.c`: the index named by REPLICA
/// IDENTITY USING INDEX, otherwise the primary key. REPLICA IDENTITY FULL or NOTHING of the
/// subscriber table has no effect.
fn keys_of(
    rows: &wire::Rows,
    columns: &[Column],
    replica_identity: &str,
) -> Result<(Option<Key>, Vec<Key>)> {
    struct Candidate {
        index_oid: u32,
        is_identity: bool,
        is_primary: bool,
        all_not_null: bool,
        key: Key,
    }
    let mut candidates: Vec<Candidate> = Vec::new();
    for row in rows.iter() {
        let index_oid: u32 = field(&row, 0)?;
        let attnum: i16 = field(&row, 4)?;
        let equality = match (row.get(6), row.get(7)) {
            (Some(schema), Some(operator)) => Equality::operator(schema, operator),
            _ => columns
                .iter()
                .find(|column| column.attnum == attnum)
                .map(|column| column.equality.clone())
                .ok_or_else(|| Failure::internal("an index column is not a column of its table"))?,
        };
        if candidates.last().is_none_or(|last| last.index_oid != index_oid) {
            candidates.push(Candidate {
                index_oid,
                is_identity: boolean(&row, 2)?,
                is_primary: boolean(&row, 3)?,
                all_not_null: true,
                key: Key { index: field(&row, 1)?, columns: Vec::new() },
            });
        }
        let not_null = boolean(&row, 5)?;
        if let Some(last) = candidates.last_mut() {
            last.all_not_null &= not_null;
            last.key.columns.push((attnum, equality));
        }
    }
    let chosen =
        if replica_identity == "i" { candidates.iter().position(|c| c.is_identity) } else { None }
            .or_else(|| candidates.iter().position(|c| c.is_primary));
    let identity = chosen.map(|index| candidates.remove(index).key);
    let unique = candidates.into_iter().filter(|c| c.all_not_null).map(|c| c.key).collect();
    Ok((identity, unique))
}

/// Quotes a name even if PostgreSQL would accept it unquoted. Some type names are also keywords of
/// the grammar, with another meaning.
fn always_quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The relation with this name is not a table.
pub(crate) fn not_a_table(schema: &str, name: &str, kind: &str) -> Failure {
    Failure::new(
        crate::error::Class::Mismatch,
        format!("subscriber relation {schema}.{name} is {}", describe_kind(kind)),
    )
    .hint("Use a plain or partitioned table, or remove the table from the publication.")
}

/// Describes a relation of this `pg_class.relkind`.
pub(crate) fn describe_kind(kind: &str) -> &'static str {
    match kind {
        "r" | "p" => "a table",
        "v" => "a view",
        "m" => "a materialized view",
        "f" => "a foreign table",
        "S" => "a sequence",
        "i" | "I" => "an index",
        _ => "not a table",
    }
}

/// Returns the row of a query that always returns one; `what` names the query in the error.
pub(crate) fn first_row<'r>(results: &'r [Rows], what: &str) -> Result<Row<'r>> {
    let row = results.first().and_then(Rows::first);
    row.ok_or_else(|| Failure::internal(format!("{what} returned nothing")))
}

/// Parses a field of a catalogue row that must not be NULL.
pub(crate) fn field<T: std::str::FromStr>(row: &Row<'_>, index: usize) -> Result<T> {
    row.get(index).and_then(|text| text.parse().ok()).ok_or_else(|| {
        Failure::internal(format!(
            "a catalogue query returned {:?} in column {index}",
            row.get(index)
        ))
    })
}

pub(crate) fn boolean(row: &Row<'_>, index: usize) -> Result<bool> {
    match row.get(index) {
        Some("t") => Ok(true),
        Some("f") => Ok(false),
        other => {
            Err(Failure::internal(format!("a catalogue query returned {other:?} for a boolean")))
        }
    }
}

/// Parses the text form of a one-dimensional array of names without NULLs.
pub(crate) fn parse_name_array(text: &str) -> Result<Vec<String>> {
    let bad = || Failure::internal(format!("a catalogue query returned the array {text:?}"));
    let inner = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).ok_or_else(bad)?;
    let mut names = Vec::new();
    let mut characters = inner.chars().peekable();
    while characters.peek().is_some() {
        let mut name = String::new();
        if characters.next_if_eq(&'"').is_some() {
            loop {
                match characters.next().ok_or_else(bad)? {
                    '"' => break,
                    '\\' => name.push(characters.next().ok_or_else(bad)?),
                    other => name.push(other),
                }
            }
        } else {
            while let Some(character) = characters.next_if(|c| *c != ',') {
                name.push(character);
            }
        }
        names.push(name);
        if characters.next().is_some_and(|separator| separator != ',') {
            return Err(bad());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::parse_name_array;

    #[test]
    fn name_arrays() {
        let parse = |text| parse_name_array(text).expect("a valid array");
        assert_eq!(parse("{}"), Vec::<String>::new());
        assert_eq!(parse("{a,b}"), ["a", "b"]);
        assert_eq!(parse(r#"{"a b","c\"d","e\\f","g,h"}"#), ["a b", "c\"d", "e\\f", "g,h"]);
        assert!(parse_name_array("a").is_err());
    }
}
