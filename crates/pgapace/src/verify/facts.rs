//! Facts about the tables of one server that a comparison needs, read with the same queries on both.

use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::{Row, Rows, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field, parse_name_array};
use crate::subscriber::named::named;
use crate::subscriber::oid::FIRST_USER_OID;
use crate::verify::columns::{RecordForm, SideColumn};
use crate::verify::key::SideIndex;

/// One table on one server.
#[derive(Debug, Clone)]
pub(crate) struct SideTable {
    pub(crate) oid: u32,
    pub(crate) kind: String,
    pub(crate) row_security: bool,
    /// As the server estimates.
    pub(crate) rows: u64,
    /// Whether the table is larger than a quarter of the server's cache.
    pub(crate) exceeds_cache: bool,
    pub(crate) columns: Vec<SideColumn>,
    pub(crate) indexes: Vec<SideIndex>,
}

impl SideTable {
    /// Whether nothing changed that a comparison of the published columns rests on. New indexes and other
    /// columns do not matter.
    pub(crate) fn is_as(&self, other: &Self, published: impl Fn(&str) -> bool) -> bool {
        let of = |name: &str| other.columns.iter().find(|column| column.name == name);
        let mut columns = self.columns.iter().filter(|column| published(&column.name));
        self.oid == other.oid
            && self.kind == other.kind
            && self.row_security == other.row_security
            && columns.all(|column| of(&column.name).is_some_and(|other| column.is_as(other)))
            && self.indexes.iter().all(|index| other.indexes.contains(index))
    }
}

/// Turns an error of this server into a failure.
pub(crate) type Explain = fn(&wire::Error, &str) -> Failure;

/// Whether `isspace` may be true for other bytes than those of ASCII: in encodings of single bytes, and on
/// macOS in all. (A byte of UTF8 or another multi-byte encoding is no character elsewhere.)
const QUOTES_BY_LOCALE: &str = "(SELECT d.datctype NOT IN ('C', 'POSIX') \
      AND (pg_catalog.pg_encoding_max_length(d.encoding) = 1 OR pg_catalog.version() ~ 'apple-darwin') \
    FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())";

/// Whether no row has a NULL in column `a`. Since PostgreSQL 18, `attnotnull` is true for a constraint that is
/// NOT VALID too: rows from before it may have one.
pub(crate) const HAS_NO_NULL: &str = "(a.attnotnull AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k \
    WHERE k.conrelid = a.attrelid AND k.contype = 'n' AND NOT k.convalidated AND a.attnum = ANY (k.conkey)))";

/// Whether a composite or a range of a user is in type `t`; and of a composite the oids of its types, if all
/// are built in.
fn record_forms() -> String {
    format!(
        "t.oid >= {FIRST_USER_OID} AND (WITH RECURSIVE tree (oid) AS (SELECT t.oid UNION \
             SELECT p.oid FROM tree r JOIN pg_catalog.pg_type y ON y.oid = r.oid CROSS JOIN LATERAL ( \
               SELECT y.typelem UNION ALL SELECT y.typbasetype UNION ALL \
               SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = y.typrelid \
                 AND y.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped UNION ALL \
               SELECT g.rngsubtype FROM pg_catalog.pg_range g WHERE y.oid IN (g.rngtypid, g.rngmultitypid) \
             ) p (oid) WHERE p.oid <> 0) \
           SELECT pg_catalog.bool_or(y.typtype = 'c' OR y.typtype IN ('r', 'm') AND y.oid >= {FIRST_USER_OID}) \
           FROM tree r JOIN pg_catalog.pg_type y ON y.oid = r.oid), \
         CASE WHEN t.typtype = 'c' THEN (SELECT CASE WHEN pg_catalog.max(a.atttypid::pg_catalog.int8) \
             < {FIRST_USER_OID} THEN pg_catalog.string_agg(a.atttypid::pg_catalog.int8::pg_catalog.text, ',' \
               ORDER BY a.attnum) END \
           FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 \
             AND NOT a.attisdropped) END"
    )
}

/// Tables, columns, indexes and correlations, each with the position of the table.
fn queries(names: &[TableName]) -> [String; 4] {
    let wanted: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(place, table)| {
            format!(
                "({place}, {}::pg_catalog.text, {}::pg_catalog.text)",
                quote_literal(&table.schema),
                quote_literal(&table.name)
            )
        })
        .collect();
    let names = format!("(VALUES {}) v (place, schema_name, table_name)", wanted.join(", "));
    let wanted = format!(
        "wanted AS (SELECT v.place, c.oid AS relid, c.relkind FROM {names} \
           JOIN pg_catalog.pg_class c ON {})",
        named!("c", "v.schema_name", "v.table_name")
    );
    // Locales of the builtin provider order strings byte by byte in UTF8.
    let database = "(SELECT CASE coalesce(pg_catalog.to_jsonb(d) ->> 'datlocprovider', 'c') \
        WHEN 'b' THEN true WHEN 'c' THEN d.datcollate IN ('C', 'POSIX') ELSE false END \
        FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())";
    let record_forms = record_forms();
    [
        format!(
            "WITH {wanted} SELECT w.place, w.relid, w.relkind, pg_catalog.row_security_active(w.relid), \
               (SELECT greatest(c.reltuples, 0)::pg_catalog.int8 FROM pg_catalog.pg_class c \
                WHERE c.oid = w.relid), \
               (WITH RECURSIVE tree AS (SELECT w.relid UNION ALL SELECT i.inhrelid FROM tree t \
                  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid AND w.relkind = 'p') \
                SELECT coalesce(pg_catalog.sum(c.relpages::pg_catalog.int8), 0) \
                  * pg_catalog.current_setting('block_size')::pg_catalog.int8 * 4 \
                  > pg_catalog.pg_size_bytes(pg_catalog.current_setting('effective_cache_size')) \
                FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.relid) \
             FROM wanted w"
        ),
        format!(
            "WITH RECURSIVE {wanted}, chain AS ( \
               SELECT w.place, a.attnum, a.attname, a.atttypid AS typ, a.atttypmod AS modifier, \
                 {HAS_NO_NULL} AS attnotnull, a.attgenerated <> '' AS generated, a.attcollation, w.relid \
               FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.relid \
                 AND a.attnum > 0 AND NOT a.attisdropped \
               UNION ALL \
               SELECT c.place, c.attnum, c.attname, t.typbasetype, \
                 t.typtypmod, c.attnotnull, c.generated, c.attcollation, c.relid \
               FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype = 'd') \
             SELECT c.place, c.attname, t.oid, pg_catalog.format_type(t.oid, NULL), \
               pg_catalog.format_type(t.oid, c.modifier), t.typname, t.typtype, t.typcategory, c.modifier, \
               t.typelem <> 0 AND t.typlen = -1, \
               CASE WHEN t.typsend <> 0 THEN (SELECT pg_catalog.quote_ident(pn.nspname) || '.' || \
                 pg_catalog.quote_ident(p.proname) FROM pg_catalog.pg_proc p \
                 JOIN pg_catalog.pg_namespace pn ON pn.oid = p.pronamespace WHERE p.oid = t.typsend) END, \
               c.attnotnull, c.generated, \
               CASE WHEN c.attcollation = 0 THEN true WHEN c.attcollation = 100 THEN {database} \
                 ELSE coalesce((SELECT co.collname IN ('C', 'POSIX', 'ucs_basic') AND co.collnamespace = 11 \
                   FROM pg_catalog.pg_collation co WHERE co.oid = c.attcollation), false) END, \
               pg_catalog.has_column_privilege(c.relid, c.attnum, 'SELECT'), \
               {record_forms}, {QUOTES_BY_LOCALE} \
             FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype <> 'd' \
             ORDER BY c.place, c.attnum"
        ),
        format!(
            "WITH {wanted} \
             SELECT w.place, \
               (SELECT pg_catalog.array_agg(a.attname ORDER BY k.ord) \
                FROM pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k (ord) \
                JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord]), \
               i.indisunique AND i.indimmediate, \
               CASE (SELECT c.relreplident FROM pg_catalog.pg_class c WHERE c.oid = w.relid) \
                 WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END, \
               (SELECT pg_catalog.bool_and(oc.opcdefault AND i.indcollation[k.ord] = a.attcollation \
                  AND i.indoption[k.ord] = 0) \
                FROM pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k (ord) \
                JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k.ord] \
                JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[k.ord]) \
             FROM wanted w JOIN pg_catalog.pg_index i ON i.indrelid = w.relid \
             JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid \
             JOIN pg_catalog.pg_am am ON am.oid = ic.relam \
             WHERE am.amname = 'btree' AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL \
             ORDER BY w.place, i.indexrelid"
        ),
        // A query of its own: looked up for each column, the view costs minutes with thousands of tables. So it does
        // without a hash join, which sessions do not have otherwise.
        format!(
            "SET LOCAL enable_hashjoin = on; \
             SELECT v.place, s.attname, s.correlation FROM pg_catalog.pg_stats s \
             JOIN {names} ON s.schemaname = v.schema_name AND s.tablename = v.table_name \
             WHERE NOT s.inherited AND s.correlation IS NOT NULL"
        ),
    ]
}

/// Reads tables by name, in the same order; `None` for one that does not exist.
pub(crate) fn read(
    session: &mut Session,
    names: &[TableName],
    explain: Explain,
) -> Result<Vec<Option<SideTable>>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let queries = queries(names);
    let results = session
        .simple_each(queries.each_ref().map(String::as_str))
        .map_err(|e| explain(&e, "reading the definitions of the tables"))?;
    let [tables, columns, indexes, correlations] =
        results.map(|rows| rows.into_iter().next_back().unwrap_or_default());
    let mut found: Vec<Option<SideTable>> = vec![None; names.len()];
    let mut columns = by_place(&columns, column)?;
    let mut indexes = by_place(&indexes, index)?;
    for row in correlations.iter() {
        let (place, name): (usize, String) = (field(&row, 0)?, field(&row, 1)?);
        let of_table = columns.get_mut(&place).into_iter().flatten().flatten();
        for column in of_table.filter(|column| column.name == name) {
            column.correlation = row.get(2).and_then(|text| text.parse().ok());
        }
    }
    for row in tables.iter() {
        let place: usize = field(&row, 0)?;
        let columns = columns.remove(&place).unwrap_or_default();
        let is_dropped = !columns.is_empty() && columns.iter().all(Option::is_none);
        if is_dropped {
            continue;
        }
        found[place] = Some(SideTable {
            oid: field(&row, 1)?,
            kind: field(&row, 2)?,
            row_security: boolean(&row, 3)?,
            rows: field(&row, 4)?,
            exceeds_cache: boolean(&row, 5)?,
            columns: columns.into_iter().flatten().collect(),
            indexes: indexes.remove(&place).unwrap_or_default(),
        });
    }
    Ok(found)
}

fn by_place<T>(
    rows: &Rows,
    parse: impl Fn(&Row<'_>) -> Result<T>,
) -> Result<FxHashMap<usize, Vec<T>>> {
    let mut all = FxHashMap::<usize, Vec<T>>::default();
    for row in rows.iter() {
        all.entry(field(&row, 0)?).or_default().push(parse(&row)?);
    }
    Ok(all)
}

/// `None` for a column that is dropped, alone or with its table, while the query runs. The query's snapshot shows
/// it, but there is no privilege for it.
fn column(row: &Row<'_>) -> Result<Option<SideColumn>> {
    if row.get(14).is_none() {
        return Ok(None);
    }
    Ok(Some(SideColumn {
        name: field(row, 1)?,
        type_oid: field(row, 2)?,
        type_name: field(row, 3)?,
        type_sql: field(row, 4)?,
        bare_name: field(row, 5)?,
        kind: field(row, 6)?,
        category: field(row, 7)?,
        modifier: field(row, 8)?,
        is_array: boolean(row, 9)?,
        send: row.get(10).map(str::to_owned),
        not_null: boolean(row, 11)?,
        generated: boolean(row, 12)?,
        byte_order: boolean(row, 13)?,
        readable: boolean(row, 14)?,
        correlation: None,
        record: match (boolean(row, 15)?, row.get(16)) {
            (false, _) => RecordForm::None,
            (true, Some(oids)) => {
                let oids: std::result::Result<_, _> = oids.split(',').map(str::parse).collect();
                RecordForm::OfBuiltIns(
                    oids.map_err(|_| Failure::internal("an oid cannot be read"))?,
                )
            }
            (true, None) => RecordForm::Other,
        },
        quotes_by_locale: boolean(row, 17)?,
    }))
}

fn index(row: &Row<'_>) -> Result<SideIndex> {
    Ok(SideIndex {
        columns: parse_name_array(&field::<String>(row, 1)?)?,
        unique: boolean(row, 2)?,
        identity: boolean(row, 3)?,
        default_order: boolean(row, 4)?,
    })
}

#[cfg(test)]
mod tests {
    use testbed::{Cluster, servers};
    use wire::ConnInfo;

    use super::{TableName, read};
    use crate::error::Failure;
    use crate::publisher::slot::BEGIN_READING;
    use crate::subscriber::session::{Purpose, Subscriber};

    #[test]
    fn what_is_dropped_while_it_is_read_does_not_exist() {
        let cluster = Cluster::builder(&servers::find_or_fetch(15).unwrap()).start().unwrap();
        let database = "postgres";
        let tables = "CREATE TABLE t (id int PRIMARY KEY, gone int); CREATE TABLE gone (id int)";
        cluster.sql(database, tables).unwrap();
        let info = ConnInfo::parse_with_env(&cluster.conninfo(database), &|_| None, None).unwrap();
        let mut session = Subscriber::new(info, "facts").connect(Purpose::Look).unwrap();
        // A snapshot that is older than the DROP shows what its queries see during it.
        session.simple(&format!("{BEGIN_READING}; SELECT")).unwrap();
        cluster.sql(database, "ALTER TABLE t DROP COLUMN gone; DROP TABLE gone").unwrap();
        let names = ["t", "gone"]
            .map(|name| TableName { schema: "public".to_owned(), name: name.to_owned() });
        let found = read(&mut session, &names, Failure::subscriber).unwrap();
        let columns: Vec<_> =
            found[0].iter().flat_map(|table| &table.columns).map(|column| &column.name).collect();
        assert_eq!(columns, ["id"]);
        assert!(found[1].is_none());
    }
}
