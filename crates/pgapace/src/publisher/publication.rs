//! The contents of the publications: tables, columns, row filters.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use engine::published::{PublishedBy, Relation};
use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use wire::{Session, quote_ident, quote_literal};

use crate::encoding_error;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::CURRENT_LSN;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::table_name::{TableNameFields, sql_name};

/// A published table, under the name with which the stream sends its changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublishedTable {
    pub(crate) oid: u32,
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    /// A partitioned table is copied with its partitions, a plain table without its inheritance
    /// children.
    pub(crate) partitioned: bool,
    pub(crate) columns: Vec<PublishedColumn>,
    /// Row filters, combined with OR; empty if all rows are published. [`UNREAD`] stands for each filter of a
    /// [`PublicationContents`].
    pub(crate) filters: Vec<String>,
    /// `pg_class.relreplident`; `has_identity` tells whether the index that it names exists.
    pub(crate) replica_identity: char,
    /// The table is partitioned and has replica identity FULL, but not all of its partitions have. The walsender sends
    /// what the partition has logged, and says that it is FULL.
    #[serde(default)]
    pub(crate) full_by_name: bool,
    pub(crate) has_identity: bool,
    /// Whether the publications publish updates or deletes.
    pub(crate) updates_or_deletes: bool,
    pub(crate) truncates: bool,
    pub(crate) row_security: bool,
    pub(crate) readable: bool,
    /// The rows of the publisher's catalogue that publish the table. They mean nothing elsewhere, so they are
    /// not in a recording.
    #[serde(skip)]
    pub(crate) published_by: PublishedBy,
}

/// Takes the place of the text of a row filter. Reading that waits for the lock of a session that has locked the
/// table, and that session may itself wait: its commit for the subscription. No server executes this.
const UNREAD: &str = "row filter that was not read";

/// Whether the text of row filters is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowFilters {
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

/// A published column with its declared and its base type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublishedColumn {
    pub(crate) name: String,
    /// The declared type, whose oid the stream sends.
    pub(crate) declared_type: u32,
    pub(crate) base_type: u32,
    /// `pg_type.typtype` of the base type.
    pub(crate) type_kind: char,
    /// `atttypmod`, or `typtypmod` of the innermost domain; -1 for none.
    pub(crate) base_type_modifier: i32,
    /// A generated column that is published as a value (18 or later).
    pub(crate) generated: bool,
    /// Name of the base type, with its schema unless it is built in.
    pub(crate) base_type_name: String,
    /// The declared type, with its modifier.
    pub(crate) type_name: String,
    /// Whether the column is part of the replica identity.
    pub(crate) key: bool,
}

impl PublishedColumn {
    /// Its name and its declared type.
    pub(crate) fn named(&self) -> (&str, Option<&str>) {
        (&self.name, Some(&self.type_name))
    }
}

impl PublishedTable {
    /// The quoted, schema-qualified name.
    pub(crate) fn sql_name(&self) -> String {
        sql_name(&self.name)
    }

    /// The table or query that COPY … TO reads for the initial copy of the table.
    pub(crate) fn copy_source(&self) -> String {
        let table = self.sql_name();
        // COPY of a table refuses generated columns.
        let generated = self.columns.iter().any(|column| column.generated);
        if !self.partitioned && self.filters.is_empty() && !self.columns.is_empty() && !generated {
            return format!("{table} ({})", self.column_list());
        }
        let only = if self.partitioned { "" } else { "ONLY " };
        self.select(&format!("{only}{table}"), &[])
    }

    /// A query that returns whether a condition is true for any row of the initial copy.
    pub(crate) fn any_row(&self, condition: &str) -> String {
        let only = if self.partitioned { "" } else { "ONLY " };
        let rows = self.select(&format!("{only}{}", self.sql_name()), &[]);
        format!("SELECT EXISTS (SELECT FROM {rows} AS copied WHERE {condition})")
    }

    /// Like [`Self::copy_source`], for the rows of a plain table or of one partition that meet all
    /// conditions.
    pub(crate) fn copy_source_of(&self, relation: &str, conditions: &[String]) -> String {
        self.select(&format!("ONLY {relation}"), conditions)
    }

    fn select(&self, relation: &str, conditions: &[String]) -> String {
        let mut all = conditions.to_vec();
        if !self.filters.is_empty() {
            let parts: Vec<_> = self.filters.iter().map(|f| format!("({f})")).collect();
            all.push(format!("({})", parts.join(" OR ")));
        }
        let filter =
            if all.is_empty() { String::new() } else { format!(" WHERE {}", all.join(" AND ")) };
        format!("(SELECT {} FROM {relation}{filter})", self.column_list())
    }

    fn column_list(&self) -> String {
        let columns: Vec<_> = self.columns.iter().map(|c| quote_ident(&c.name)).collect();
        columns.join(", ")
    }
}

/// Checks that the publications exist; a missing one would later stop the stream.
pub(crate) fn check_exist(session: &mut Session, publications: &[String]) -> Result<()> {
    let found = query(session, &exist_sql(publications))?;
    check_missing(&found, publications)
}

/// The same. Returns the rows of another query, which runs in the same round trip.
pub(crate) fn check_exist_and(
    session: &mut Session,
    publications: &[String],
    other: &str,
) -> Result<wire::Rows> {
    let [found, rows] = query_each(session, [&exist_sql(publications), other])?;
    check_missing(&found, publications)?;
    Ok(rows)
}

fn check_missing(found: &wire::Rows, publications: &[String]) -> Result<()> {
    missing_failure(&missing_in(found, publications)).map_or(Ok(()), Err)
}

/// The failure of a run whose publications are `missing`, unless none is.
pub(crate) fn missing_failure(missing: &[&str]) -> Option<Failure> {
    let names: Vec<_> = missing.iter().map(|name| quote_ident(name)).collect();
    let message = format!("the publisher has no publication {}", names.join(", "));
    let create = format!(
        "In the database of --publisher: CREATE PUBLICATION {} FOR TABLE …;",
        quote_ident(missing.first()?)
    );
    // A running subscription waits until the publication is created again.
    Some(Failure::new(Class::Mismatch, message).transient(true).hint(create))
}

/// Returns the publications that do not exist.
pub(crate) fn missing<'a>(
    session: &mut Session,
    publications: &'a [String],
) -> Result<Vec<&'a str>> {
    let found = query(session, &exist_sql(publications))?;
    Ok(missing_in(&found, publications))
}

fn exist_sql(publications: &[String]) -> String {
    format!(
        "SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({})",
        literals(publications)
    )
}

fn missing_in<'a>(rows: &wire::Rows, publications: &'a [String]) -> Vec<&'a str> {
    let found: Vec<_> = rows.iter().filter_map(|row| row.get(0).map(str::to_owned)).collect();
    publications.iter().filter(|name| !found.contains(name)).map(String::as_str).collect()
}

/// The contents of the publications at one moment.
#[derive(Debug)]
pub(crate) struct PublicationContents {
    /// Transactions that commit before this LSN were published as in `tables`, if an earlier
    /// reading has the same.
    pub(crate) lsn: Lsn,
    /// The OID of the publisher's database.
    pub(crate) database: u32,
    pub(crate) tables: Vec<PublishedTable>,
}

/// Reads the current contents of the publications, except for the text of row filters: it waits for no lock of a
/// table.
pub(crate) fn read_contents(
    session: &mut Session,
    publications: &[String],
) -> Result<PublicationContents> {
    // Read before the catalogue: `tables` may or may not contain a change that a publication gets
    // later.
    load(session, publications, "", RowFilters::Unread)
}

/// Returns all tables of the publications, except those of schema `pgapace`, to read their rows. It waits for
/// the locks of tables that have a row filter.
pub(crate) fn tables(
    session: &mut Session,
    publications: &[String],
) -> Result<Vec<PublishedTable>> {
    Ok(load(session, publications, "", RowFilters::Read)?.tables)
}

/// SQL expression for the OID of the publisher's database.
const DATABASE: &str = "(SELECT d.oid FROM pg_catalog.pg_database d \
     WHERE d.datname = pg_catalog.current_database())";

/// Returns the OID of the publisher's database.
pub(crate) fn database(session: &mut Session) -> Result<u32> {
    let results = session
        .simple(&format!("SELECT {DATABASE}"))
        .map_err(|e| Failure::publisher(&e, "reading the OID of its database"))?;
    field(&first_row(&results, "the query for the database")?, 0)
}

/// Returns those of the oids with which the publisher has no table any more.
pub(crate) fn dropped(session: &mut Session, oids: &[u32]) -> Result<FxHashSet<u32>> {
    let listed: Vec<_> = oids.iter().map(u32::to_string).collect();
    let sql = format!(
        "SELECT o.oid FROM pg_catalog.unnest('{{{}}}'::pg_catalog.oid[]) AS o (oid) \
         WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_class c WHERE c.oid = o.oid)",
        listed.join(",")
    );
    let rows = session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "looking for tables that were dropped"))?;
    rows.iter().flatten().map(|row| field(&row, 0)).collect()
}

/// Returns one table by name, if it is published, as a [`read_contents`] does.
pub(crate) fn table(
    session: &mut Session,
    publications: &[String],
    name: &TableName,
) -> Result<Option<PublishedTable>> {
    let only = format!(
        " AND n.nspname = {} AND c.relname = {}",
        quote_literal(&name.schema),
        quote_literal(&name.name)
    );
    Ok(load(session, publications, &only, RowFilters::Unread)?.tables.pop())
}

/// SQL for [`PublishedTable::full_by_name`] of table `c`. `pg_partition_tree` would lock the partitions.
const FULL_BY_NAME: &str = "\
CASE WHEN c.relkind = 'p' AND c.relreplident = 'f' THEN EXISTS ( \
  WITH RECURSIVE below AS ( \
    SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid \
    UNION ALL SELECT i.inhrelid FROM below b JOIN pg_catalog.pg_inherits i ON i.inhparent = b.inhrelid \
  ) SELECT FROM below b JOIN pg_catalog.pg_class l ON l.oid = b.inhrelid \
    WHERE l.relkind = 'r' AND l.relreplident <> 'f') ELSE false END";

/// Reads all tables with a fixed number of queries, and the end of WAL before the first one.
fn load(
    session: &mut Session,
    publications: &[String],
    only: &str,
    filters: RowFilters,
) -> Result<PublicationContents> {
    let names = literals(publications);
    let major = session.server_version().major();
    let listed = Listed::of(major, &names, filters);
    let Listed { with, columns: listed_columns, source, condition } = &listed;
    let listing = format!(
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
    );
    let place = format!("SELECT {CURRENT_LSN}, {DATABASE}");
    let [place, rows] = query_each(session, [&place, &listing])?;
    let place = first_row(std::slice::from_ref(&place), "the query for an LSN")?;
    let (lsn, database) = (field(&place, 0)?, field(&place, 1)?);
    let mut oids = rows.iter().map(|row| field(&row, 0)).collect::<Result<Vec<u32>>>()?;
    oids.dedup();
    let tables_asked = oids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let asked = [
        columns_sql(&tables_asked),
        entries_sql(major, &names, &tables_asked),
        relations_sql(&tables_asked),
    ];
    let [found, entries, relations] = query_each(session, asked.each_ref().map(String::as_str))?;
    let mut columns = columns(&found)?;
    let mut tables: Vec<PublishedTable> = Vec::with_capacity(oids.len());
    let mut list: Option<HashSet<i16>> = None;
    for row in rows.iter() {
        // The privilege is NULL for a table that was dropped since the query began.
        if row.get(6).is_none() {
            continue;
        }
        let oid: u32 = field(&row, 0)?;
        let filter = row.get(11).map(str::to_owned);
        let attributes = row.get(10).map(attribute_numbers).transpose()?;
        if let Some(table) = tables.last_mut().filter(|table| table.oid == oid) {
            // The table is in another publication too (rules of `fetch_remote_table_info` in
            // `tablesync.c`).
            if attributes != list {
                return Err(Failure::new(
                    Class::Mismatch,
                    format!(
                        "the publications have different column lists for table {}",
                        table.name
                    ),
                )
                .hint(
                    "PostgreSQL cannot send such a table: use the same column list in all \
                     publications.",
                ));
            }
            match filter {
                Some(filter) if !table.filters.is_empty() => table.filters.push(filter),
                _ => table.filters.clear(),
            }
            continue;
        }
        let all = columns.remove(&oid).unwrap_or_default();
        let published = all.into_iter().filter(|(attnum, column)| match &attributes {
            // Before 18, a column list may name generated columns, but they are not published.
            Some(list) => (!column.generated || major >= 18) && list.contains(attnum),
            None => !column.generated,
        });
        tables.push(PublishedTable {
            oid,
            name: TableName { schema: field(&row, 1)?, name: field(&row, 2)? },
            partitioned: row.get(3) == Some("p"),
            columns: published.map(|(_, column)| column).collect(),
            filters: filter.into_iter().collect(),
            replica_identity: field(&row, 4)?,
            row_security: boolean(&row, 5)?,
            readable: boolean(&row, 6)?,
            has_identity: boolean(&row, 7)?,
            updates_or_deletes: boolean(&row, 8)?,
            truncates: boolean(&row, 9)?,
            full_by_name: boolean(&row, 12)?,
            published_by: PublishedBy::default(),
        });
        list = attributes;
    }
    let mut published_by = published_by(&entries, &relations)?;
    for table in &mut tables {
        table.published_by = published_by.remove(&table.oid).unwrap_or_default();
    }
    Ok(PublicationContents { lsn, database, tables })
}

/// SQL for the catalogue rows that publish each of these tables. A partition is published with the
/// tables above it. Columns that do not exist in this version are NULL.
fn entries_sql(major: u32, names: &str, oids: &str) -> String {
    // PostgreSQL 14 cannot publish schemas.
    let schemas = if major >= 15 {
        "UNION ALL \
         SELECT p.*, 'schema:' || n.oid, NULL, NULL, c.oid \
         FROM publication p JOIN pg_catalog.pg_publication_namespace n ON n.pnpubid = p.oid \
         JOIN pg_catalog.pg_class c ON c.relnamespace = n.pnnspid \
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
             SELECT p.*, 'all' AS by, NULL AS filter, NULL AS list, NULL::pg_catalog.oid AS relid \
             FROM publication p WHERE p.puballtables UNION ALL SELECT p.*, 'table:' || r.oid, \
             pg_catalog.md5(pg_catalog.to_jsonb(r) ->> 'prqual'), \
             pg_catalog.replace(pg_catalog.to_jsonb(r) ->> 'prattrs', ' ', ','), r.prrelid FROM \
             publication p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid {schemas} ), \
             published AS ( SELECT t.relid AS published, t.path, e.* FROM tree t JOIN entry e ON \
             e.relid = t.above UNION ALL SELECT t.relid, t.path, e.* FROM tree t CROSS JOIN entry \
             e WHERE e.relid IS NULL AND t.relid = t.above ) SELECT DISTINCT e.published, \
             pg_catalog.concat_ws(' ', e.oid, e.xmin, e.pubowner, CASE e.options WHEN '' THEN '-' \
             ELSE e.options END, e.by, coalesce(e.filter, '-'), coalesce(e.list, '-'), \
             coalesce(e.path, '-')) FROM published e",
    )
}

/// From the rows of [`entries_sql`] and [`relations_sql`].
fn published_by(rows: &wire::Rows, relations: &wire::Rows) -> Result<HashMap<u32, PublishedBy>> {
    let mut entries = HashMap::<u32, Vec<_>>::new();
    for row in rows.iter() {
        let entry: String = field(&row, 1)?;
        let entry = entry.parse().map_err(|e| Failure::internal(format!("{e}: {entry}")))?;
        entries.entry(field(&row, 0)?).or_default().push(entry);
    }
    let published = |row: wire::Row<'_>| {
        let text: String = field(&row, 0)?;
        let relation: Relation =
            text.parse().map_err(|e| Failure::internal(format!("{e}: {text}")))?;
        let entries = entries.remove(&relation.oid).unwrap_or_default();
        Ok((relation.oid, PublishedBy::new(relation, entries)))
    };
    relations.iter().map(published).collect()
}

/// SQL for the identity of these tables, and which partitions were attached to them. The catalogue
/// row of a system column (-6 is tableoid) is never updated, so its xmin is that of the table's
/// creation. Locked tables count as filled, because pg_relation_size would wait for the lock.
fn relations_sql(oids: &str) -> String {
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

/// Parses an `int2vector`.
fn attribute_numbers(text: &str) -> Result<HashSet<i16>> {
    let parsed: std::result::Result<_, _> = text.split_ascii_whitespace().map(str::parse).collect();
    parsed.map_err(|_| Failure::internal(format!("a catalogue query returned the vector {text:?}")))
}

/// SQL for all columns of these tables in their order, published or not.
fn columns_sql(oids: &str) -> String {
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

/// From the rows of [`columns_sql`].
fn columns(rows: &wire::Rows) -> Result<HashMap<u32, Vec<(i16, PublishedColumn)>>> {
    let mut columns = HashMap::<u32, Vec<(i16, PublishedColumn)>>::new();
    for row in rows.iter() {
        let column = PublishedColumn {
            name: field(&row, 1)?,
            declared_type: field(&row, 2)?,
            base_type: field(&row, 3)?,
            type_kind: field(&row, 4)?,
            base_type_modifier: field(&row, 5)?,
            generated: boolean(&row, 6)?,
            base_type_name: field(&row, 7)?,
            type_name: field(&row, 8)?,
            key: boolean(&row, 9)?,
        };
        columns.entry(field(&row, 0)?).or_default().push((field(&row, 10)?, column));
    }
    Ok(columns)
}

fn query(session: &mut Session, sql: &str) -> Result<wire::Rows> {
    let results =
        session.simple(sql).map_err(|e| Failure::publisher(&e, "reading the publications"))?;
    results.into_iter().next().ok_or_else(|| Failure::internal("a query returned nothing"))
}

/// Runs several queries in one round trip.
fn query_each<const N: usize>(session: &mut Session, sql: [&str; N]) -> Result<[wire::Rows; N]> {
    let failed = |e: wire::Error| {
        let failure = Failure::publisher(&e, "reading the publications");
        match e.sqlstate() {
            // The server says so of a name which it cannot convert.
            Some(sqlstate::CHARACTER_NOT_IN_REPERTOIRE) => {
                Failure { class: Class::Mismatch, ..failure }.hint(encoding_error::NAMES_HINT)
            }
            _ => failure,
        }
    };
    let results = session.simple_each(sql).map_err(failed)?;
    Ok(results.map(|rows| rows.into_iter().next().unwrap_or_default()))
}

fn literals(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| quote_literal(name)).collect();
    quoted.join(", ")
}
