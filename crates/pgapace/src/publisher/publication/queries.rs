//! The queries that read the contents of publications from the catalogue of each version.

use std::borrow::Cow;

use wire::quote_literal;

/// Takes the place of the text of a row filter. Reading that waits for the lock of a session that has locked the
/// table, and that session may itself wait: its commit for the subscription. No server executes this.
pub(super) const UNREAD: &str = "row filter that was not read";

/// Whether the text of row filters is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RowFilters {
    Read,
    Unread,
}

impl RowFilters {
    /// SQL for the text of a filter, from its expression and the OID of its table.
    fn sql(self, expression: &str, relation: &str) -> String {
        match self {
            Self::Read => format!("pg_catalog.pg_get_expr({expression}, {relation})"),
            Self::Unread => {
                format!("CASE WHEN {expression} IS NOT NULL THEN {} END", quote_literal(UNREAD))
            }
        }
    }
}

/// SQL expression for the OID of the publisher's database.
pub(crate) const DATABASE: &str = "(SELECT d.oid FROM pg_catalog.pg_database d \
     WHERE d.datname = pg_catalog.current_database())";

/// SQL for [`super::PublishedTable::full_by_name`] of table `c`. `pg_partition_tree` would lock the partitions.
const FULL_BY_NAME: &str = "\
CASE WHEN c.relkind = 'p' AND c.relreplident = 'f' THEN EXISTS ( \
  WITH RECURSIVE below AS ( \
    SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid AND NOT i.inhdetachpending \
    UNION ALL SELECT i.inhrelid FROM below b JOIN pg_catalog.pg_inherits i ON i.inhparent = b.inhrelid \
      AND NOT i.inhdetachpending \
  ) SELECT FROM below b JOIN pg_catalog.pg_class l ON l.oid = b.inhrelid \
    WHERE l.relkind = 'r' AND l.relreplident <> 'f') ELSE false END";

/// SQL for the published tables. A table in several publications may have several rows, which follow each other.
/// `only` is a further condition.
pub(super) fn listing(major: u32, names: &str, only: &str, filters: RowFilters) -> String {
    let listed = Listed::of(major, names, filters);
    let Listed { with, columns: listed_columns, source, condition } = &listed;
    format!(
        "{with} \
             SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, \
               pg_catalog.row_security_active(c.oid), \
               pg_catalog.has_table_privilege(c.oid, 'SELECT'), \
               EXISTS (SELECT 1 FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid \
                 AND CASE c.relreplident WHEN 'i' THEN i.indisreplident \
                          WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE false END), \
               (SELECT pg_catalog.bool_or(p.pubupdate OR p.pubdelete) \
                FROM pg_catalog.pg_publication p WHERE p.pubname IN ({names})), \
               (SELECT pg_catalog.bool_or(p.pubtruncate) \
                FROM pg_catalog.pg_publication p WHERE p.pubname IN ({names})), \
               {listed_columns}, {FULL_BY_NAME} \
             FROM {source} \
             JOIN pg_catalog.pg_class c ON c.oid = g.relid \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname <> 'pgapace'{condition}{only} \
             ORDER BY n.nspname, c.relname"
    )
}

/// The parts of a query that reads the contents of each publication: relation, column list and row
/// filter. In each version the result is that of its walsender (`get_rel_sync_entry` and
/// `pgoutput_column_list_init` in `pgoutput.c`).
struct Listed {
    with: String,
    /// Column list and row filter.
    columns: Cow<'static, str>,
    source: String,
    condition: &'static str,
}

impl Listed {
    /// The view pg_publication_tables is not used: it returns names, whose lookup is much slower.
    fn of(major: u32, names: &str, filters: RowFilters) -> Self {
        if (16..19).contains(&major) {
            return Self::without_locks(names, filters);
        }
        if major >= 19 {
            // All publications in one call: of a partition and its root, only one is published. A
            // relation without a column list returns all of its columns.
            return Self {
                with: String::new(),
                columns: format!("g.attrs, {}", filters.sql("g.qual", "g.relid")).into(),
                source: format!(
                    "pg_catalog.pg_get_publication_tables(VARIADIC ( \
                       SELECT pg_catalog.array_agg(p.pubname::pg_catalog.text) \
                       FROM pg_catalog.pg_publication p WHERE p.pubname IN ({names}))) g"
                ),
                condition: "",
            };
        }
        Self {
            with: format!(
                "WITH listed AS MATERIALIZED ( \
                   SELECT g.* FROM pg_catalog.pg_publication p \
                   CROSS JOIN LATERAL \
                   pg_catalog.pg_get_publication_tables(p.pubname::pg_catalog.text) g \
                   WHERE p.pubname IN ({names}))"
            ),
            // The walsender of 15 treats a list with `relnatts` columns as no list.
            columns: if major == 15 {
                format!(
                    "CASE WHEN pg_catalog.array_length(g.attrs, 1) \
                      OPERATOR(pg_catalog.<>) c.relnatts THEN g.attrs END, {}",
                    filters.sql("g.qual", "g.relid")
                )
                .into()
            } else {
                "NULL, NULL".into()
            },
            source: "listed g".to_owned(),
            // The walsender sends changes as those of the topmost ancestor in any publication, with
            // the column lists and row filters of the publications that contain that ancestor.
            condition: NO_PARTITIONS_OF_LISTED,
        }
    }
}

impl Listed {
    /// The result of `pg_get_publication_tables`, which locks each relation that has no column list. The
    /// session that has locked one may itself wait: its commit for the subscription that is to start.
    fn without_locks(names: &str, filters: RowFilters) -> Self {
        let list = "(SELECT {} FROM pg_catalog.pg_publication_rel r \
           WHERE r.prpubid = g.pubid AND r.prrelid = c.oid AND NOT EXISTS ( \
             SELECT FROM pg_catalog.pg_publication_namespace s \
             WHERE s.pnpubid = g.pubid AND s.pnnspid = c.relnamespace))";
        let columns = format!(
            "coalesce({}, (SELECT pg_catalog.string_agg(a.attnum::text, ' ') \
               FROM pg_catalog.pg_attribute a \
               WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped \
                 AND (a.attgenerated = '' OR a.attgenerated = 's' AND g.generated))), {}",
            list.replace("{}", "r.prattrs::text"),
            list.replace("{}", &filters.sql("r.prqual", "r.prrelid"))
        );
        Self {
            with: format!("WITH RECURSIVE {}", LISTED_SQL.replace("{NAMES}", names)),
            columns: columns.into(),
            source: "listed g".to_owned(),
            condition: NO_PARTITIONS_OF_LISTED,
        }
    }
}

/// `pg_get_publication_tables` and the functions that it calls in `pg_publication.c`. Relations with lower
/// oids belong to the server (`is_publishable_class`).
const LISTED_SQL: &str = "\
publication AS (
  SELECT p.oid, p.puballtables, p.pubviaroot,
    coalesce(pg_catalog.to_jsonb(p) ->> 'pubgencols' = 's', false) AS generated
  FROM pg_catalog.pg_publication p WHERE p.pubname IN ({NAMES})
), publishable AS (
  SELECT c.oid, c.relkind, c.relnamespace, c.relispartition FROM pg_catalog.pg_class c
  WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384::pg_catalog.oid
), tree AS (
  SELECT n.pubid, n.relid, c.relkind
  FROM (SELECT r.prpubid AS pubid, r.prrelid AS relid FROM pg_catalog.pg_publication_rel r
        UNION
        SELECT s.pnpubid, c.oid FROM pg_catalog.pg_publication_namespace s
        JOIN publishable c ON c.relnamespace = s.pnnspid) n
  JOIN publication p ON p.oid = n.pubid
  JOIN pg_catalog.pg_class c ON c.oid = n.relid
  UNION
  SELECT t.pubid, i.inhrelid, c.relkind FROM tree t
  JOIN publication p ON p.oid = t.pubid AND NOT p.pubviaroot
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid AND t.relkind = 'p' AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
), listed AS MATERIALIZED (
  SELECT p.oid AS pubid, t.relid, p.generated FROM tree t JOIN publication p ON p.oid = t.pubid
  WHERE t.relkind <> 'p' OR p.pubviaroot
  UNION
  SELECT p.oid, c.oid, p.generated FROM publication p
  JOIN publishable c ON c.relkind = 'r' AND NOT (c.relispartition AND p.pubviaroot)
    OR c.relkind = 'p' AND p.pubviaroot AND NOT c.relispartition
  WHERE p.puballtables
)";

/// Of a partition and a table above it, only the latter is published. One above it is listed only if a
/// publication publishes via the root.
const NO_PARTITIONS_OF_LISTED: &str = " AND NOT (c.relispartition AND EXISTS ( \
    SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) AS a \
    WHERE a.relid <> c.oid AND a.relid IN (SELECT l.relid FROM listed l)))";

/// SQL for the catalogue rows that publish each of these tables. A partition is published with the
/// tables above it; of one above it that is published by its schema, the row type is told. Columns that do not exist in
/// this version are NULL.
pub(super) fn entries(major: u32, names: &str, oids: &str) -> String {
    // PostgreSQL 14 cannot publish schemas.
    let schemas = if major >= 15 {
        "UNION ALL \
         SELECT p.*, 'schema:' || n.oid, NULL, NULL, c.oid, pg_catalog.concat_ws(':', y.xmin, y.typowner) \
         FROM publication p JOIN pg_catalog.pg_publication_namespace n ON n.pnpubid = p.oid \
         JOIN pg_catalog.pg_class c ON c.relnamespace = n.pnnspid \
         LEFT JOIN pg_catalog.pg_type y ON y.oid = c.reltype \
         WHERE c.oid IN (SELECT t.above FROM tree t)"
    } else {
        ""
    };
    // Two joins with equality: one join with OR would compare every table with every entry.
    format!(
        "WITH RECURSIVE publication AS ( SELECT p.oid, p.xmin, p.pubowner, p.puballtables, \
             pg_catalog.concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' \
             END, CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END, CASE \
             WHEN p.pubviaroot THEN 'v' END, CASE WHEN pg_catalog.to_jsonb(p) ->> 'pubgencols' NOT \
             IN ('n', 'f', 'false') THEN 'g' END) AS options FROM pg_catalog.pg_publication p \
             WHERE p.pubname IN ({names}) ), tree AS ( SELECT relid, relid AS above, \
             NULL::pg_catalog.text AS path FROM pg_catalog.unnest('{{{oids}}}'::pg_catalog.oid[]) \
             AS u (relid) UNION ALL SELECT t.relid, i.inhparent, pg_catalog.concat_ws(',', t.path, \
             i.xmin) FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.above AND \
             c.relispartition JOIN pg_catalog.pg_inherits i ON i.inhrelid = t.above ), entry AS ( \
             SELECT p.*, 'all' AS by, NULL AS filter, NULL AS list, NULL::pg_catalog.oid AS relid, \
             NULL::pg_catalog.text AS named FROM publication p WHERE p.puballtables UNION ALL SELECT p.*, 'table:' || r.oid, \
             pg_catalog.md5(pg_catalog.to_jsonb(r) ->> 'prqual'), \
             pg_catalog.replace(pg_catalog.to_jsonb(r) ->> 'prattrs', ' ', ','), r.prrelid, \
             NULL FROM publication p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid {schemas} ), \
             published AS ( SELECT t.relid AS published, t.path, e.* FROM tree t JOIN entry e ON \
             e.relid = t.above UNION ALL SELECT t.relid, t.path, e.* FROM tree t CROSS JOIN entry \
             e WHERE e.relid IS NULL AND t.relid = t.above ) SELECT DISTINCT e.published, \
             pg_catalog.concat_ws(' ', e.oid, e.xmin, e.pubowner, CASE e.options WHEN '' THEN '-' \
             ELSE e.options END, e.by, coalesce(e.filter, '-'), coalesce(e.list, '-'), \
             coalesce(e.path, '-'), CASE WHEN e.relid <> e.published THEN coalesce(e.named, '-') \
             ELSE '-' END) FROM published e",
    )
}

/// SQL for the identity of these tables, and which partitions were attached to them. The catalogue
/// row of a system column (-6 is tableoid) is never updated, so its xmin is that of the table's
/// creation. Locked tables count as filled, because pg_relation_size would wait for the lock.
pub(super) fn relations(oids: &str) -> String {
    format!(
        "WITH RECURSIVE below AS ( \
               SELECT c.oid AS root, i.inhrelid, i.xmin AS attached \
               FROM pg_catalog.pg_class c JOIN pg_catalog.pg_inherits i ON i.inhparent = c.oid \
               WHERE c.oid = ANY ('{{{oids}}}'::pg_catalog.oid[]) AND c.relkind = 'p' \
                 AND NOT i.inhdetachpending \
               UNION ALL \
               SELECT b.root, i.inhrelid, i.xmin FROM below b \
               JOIN pg_catalog.pg_inherits i ON i.inhparent = b.inhrelid \
                 AND NOT i.inhdetachpending \
             ), locked AS MATERIALIZED ( \
               SELECT l.relation FROM pg_catalog.pg_locks l \
               WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' \
             ), attached AS ( \
               SELECT b.root, pg_catalog.string_agg(pg_catalog.concat_ws(':', c.oid, b.attached, \
                 CASE WHEN c.relkind <> 'r' OR c.oid IN (SELECT l.relation FROM locked l) \
                     OR pg_catalog.pg_relation_size(c.oid) > 0 \
                   THEN 'filled' ELSE 'empty' END), ' ' ORDER BY c.oid) AS list \
               FROM below b JOIN pg_catalog.pg_attribute a ON a.attrelid = b.inhrelid \
                 AND a.attnum = -6 AND a.xmin <> b.attached \
               JOIN pg_catalog.pg_class c ON c.oid = b.inhrelid \
               GROUP BY b.root \
             ) \
             SELECT pg_catalog.concat_ws(' ', 'relation', c.oid, t.xmin, t.typowner, a.list) \
             FROM pg_catalog.pg_class c JOIN pg_catalog.pg_type t ON t.oid = c.reltype \
             LEFT JOIN attached a ON a.root = c.oid \
             WHERE c.oid = ANY ('{{{oids}}}'::pg_catalog.oid[])"
    )
}

/// SQL for all columns of these tables in their order, published or not.
pub(super) fn columns(oids: &str) -> String {
    format!(
        "WITH RECURSIVE chain AS ( \
               SELECT a.attrelid, a.attnum, a.attname, a.attgenerated, a.atttypid, \
                 a.atttypid AS typ, a.atttypmod AS modifier, 0 AS depth, \
                 pg_catalog.format_type(a.atttypid, a.atttypmod) AS declared, \
                 c.relreplident = 'f' OR EXISTS ( \
                   SELECT 1 FROM pg_catalog.pg_index i \
                   WHERE i.indrelid = c.oid AND a.attnum = ANY (i.indkey) \
                     AND pg_catalog.array_position(i.indkey::pg_catalog.int2[], a.attnum) \
                       < i.indnkeyatts \
                     AND CASE c.relreplident WHEN 'i' THEN i.indisreplident \
                         WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE false END) AS key \
               FROM pg_catalog.pg_attribute a \
               JOIN pg_catalog.pg_class c ON c.oid = a.attrelid \
               WHERE a.attrelid = ANY ('{{{oids}}}'::pg_catalog.oid[]) AND a.attnum > 0 \
                 AND NOT a.attisdropped \
               UNION ALL \
               SELECT c.attrelid, c.attnum, c.attname, c.attgenerated, c.atttypid, \
                 t.typbasetype, t.typtypmod, c.depth + 1, c.declared, c.key \
               FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype = 'd') \
             SELECT DISTINCT ON (c.attrelid, c.attnum) c.attrelid, c.attname, c.atttypid, c.typ, \
               t.typtype, c.modifier, c.attgenerated <> '', \
               pg_catalog.format_type(c.typ, NULL), c.declared, c.key, c.attnum \
             FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ \
             ORDER BY c.attrelid, c.attnum, c.depth DESC"
    )
}

/// The names as SQL literals, separated by commas.
pub(super) fn literals(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| quote_literal(name)).collect();
    quoted.join(", ")
}
