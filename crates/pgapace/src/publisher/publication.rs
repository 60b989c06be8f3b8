//! The contents of the publications: tables, columns, row filters.

mod existence;
mod queries;
mod rows;

use engine::published::PublishedBy;
use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use wire::{Session, quote_ident, quote_literal};

use crate::encoding_error;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::{CURRENT_LSN, END_OF_WRITTEN_WAL};
use crate::sqlstate;
use crate::subscriber::catalogue::{field, first_row};
use crate::table_name::{TableNameFields, sql_name};
pub(crate) use existence::{check_exist, check_exist_and, missing, missing_failure};
pub(crate) use queries::DATABASE;
use queries::{RowFilters, literals};

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
    /// Row filters, combined with OR; empty if all rows are published. [`UNREAD`](queries::UNREAD) stands for each
    /// filter of a [`PublicationContents`].
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

/// The contents of the publications at one moment.
#[derive(Debug)]
pub(crate) struct PublicationContents {
    /// Transactions that commit before this LSN were published as in `tables`, if an earlier
    /// reading has the same.
    pub(crate) lsn: Lsn,
    /// The end of WAL after the reading: every change of the catalogue that it has seen was written before.
    pub(crate) end: Lsn,
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

/// Returns the oid of a table, and those of all partitions below it.
pub(crate) fn with_partitions(session: &mut Session, oid: u32) -> Result<FxHashSet<u32>> {
    let sql = format!(
        "WITH RECURSIVE below AS ( \
           SELECT '{oid}'::pg_catalog.oid AS oid \
           UNION ALL SELECT i.inhrelid FROM below b \
             JOIN pg_catalog.pg_class c ON c.oid = b.oid AND c.relkind = 'p' \
             JOIN pg_catalog.pg_inherits i ON i.inhparent = b.oid) \
         SELECT b.oid FROM below b"
    );
    let rows =
        session.simple(&sql).map_err(|e| Failure::publisher(&e, "looking for partitions"))?;
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

/// Reads all tables with a fixed number of queries, and the end of WAL before the first one and after the last one.
fn load(
    session: &mut Session,
    publications: &[String],
    only: &str,
    filters: RowFilters,
) -> Result<PublicationContents> {
    let names = literals(publications);
    let major = session.server_version().major();
    let place = format!("SELECT {CURRENT_LSN}, {DATABASE}");
    let listing = queries::listing(major, &names, only, filters);
    let [place, listed] = query_each(session, [&place, &listing])?;
    let place = first_row(std::slice::from_ref(&place), "the query for an LSN")?;
    let (lsn, database) = (field(&place, 0)?, field(&place, 1)?);
    let mut oids = listed.iter().map(|row| field(&row, 0)).collect::<Result<Vec<u32>>>()?;
    oids.dedup();
    let tables_asked = oids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let asked = [
        queries::columns(&tables_asked),
        queries::entries(major, &names, &tables_asked),
        queries::relations(&tables_asked),
        format!("SELECT {END_OF_WRITTEN_WAL}"),
    ];
    let [found, entries, relations, end] =
        query_each(session, asked.each_ref().map(String::as_str))?;
    let columns = rows::columns(&found)?;
    let mut tables = rows::tables(&listed, columns, major)?;
    let mut published_by = rows::published_by(&entries, &relations)?;
    for table in &mut tables {
        table.published_by = published_by.remove(&table.oid).unwrap_or_default();
    }
    let end = field(&first_row(std::slice::from_ref(&end), "the query for an LSN")?, 0)?;
    Ok(PublicationContents { lsn, end, database, tables })
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
