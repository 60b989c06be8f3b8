//! Whether tables on two servers hold the same rows.
//!
//! Equal means the same multiset of rows: as many copies of each, in any order. A row is the text
//! of its columns, by name in the publisher's order, so the subscriber may order its columns
//! differently and may have more of them. Each server adds up two 64-bit hashes of every row; only
//! when the sums differ are rows fetched, and only from the parts of the hash range that differ.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use postgres::{Client, IsolationLevel, Transaction};

use crate::error::{Context, Error, Result};

/// Rows shown for each table that differs.
const EXAMPLES_MAX: usize = 10;
/// Characters shown of each such row.
const ROW_TEXT_MAX: usize = 400;

/// How values look as text, on every server alike.
const TEXT_FORM: &str = "
    SET LOCAL datestyle = 'ISO, YMD';
    SET LOCAL intervalstyle = 'postgres';
    SET LOCAL timezone = 'UTC';
    SET LOCAL extra_float_digits = 3;
    SET LOCAL bytea_output = 'hex';
    SET LOCAL lc_monetary = 'C';
    SET LOCAL xmlbinary = 'base64';
    SET LOCAL search_path = 'pg_catalog'";

/// A table's name with its schema, unquoted. Displayed, it is quoted and fit for SQL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The schema.
    pub schema: String,
    /// The table.
    pub name: String,
}

impl TableName {
    /// From the unquoted parts.
    pub fn new(schema: impl Into<String>, name: impl Into<String>) -> Self {
        Self { schema: schema.into(), name: name.into() }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", quote(&self.schema), quote(&self.name))
    }
}

impl From<&str> for TableName {
    /// From `schema.table` or `table` (then in schema public), both unquoted.
    fn from(text: &str) -> Self {
        let (schema, name) = text.split_once('.').unwrap_or(("public", text));
        Self::new(schema, name)
    }
}

impl FromStr for TableName {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        Ok(text.into())
    }
}

/// Quotes an identifier for SQL.
pub(crate) fn quote(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// One of the two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first.
    Publisher,
    /// The second.
    Subscriber,
}

/// What to compare beyond the rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompareOptions {
    /// The tables must have the same columns, rather than those of the publisher that the subscriber
    /// has too.
    pub same_columns: bool,
    /// Leaves out columns that either side generates.
    pub skip_generated: bool,
}

/// The number of rows and the sums of both halves of their hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The number of rows.
    pub rows: i64,
    /// Sums of two 64-bit hashes of the rows, as decimal numbers.
    pub sums: [String; 2],
}

/// How one table differs.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The table.
    pub table: TableName,
    /// How.
    pub kind: DifferenceKind,
}

/// The ways in which a table can differ.
#[derive(Clone, Debug)]
pub enum DifferenceKind {
    /// One side has no such table.
    Missing(Side),
    /// The columns differ and were to be the same.
    Columns {
        /// The publisher's columns.
        publisher: Vec<String>,
        /// The subscriber's columns.
        subscriber: Vec<String>,
    },
    /// The rows differ.
    Rows {
        /// Rows on the publisher.
        publisher: i64,
        /// Rows on the subscriber.
        subscriber: i64,
        /// Some of the rows that differ.
        examples: Vec<RowExample>,
    },
}

/// A row that one side has more often than the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowExample {
    /// The row's text.
    pub row: String,
    /// How often the publisher has it.
    pub publisher: i64,
    /// How often the subscriber has it.
    pub subscriber: i64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            DifferenceKind::Missing(side) => write!(f, "{}: missing on the {side:?}", self.table),
            DifferenceKind::Columns { publisher, subscriber } => {
                write!(f, "{}: columns {publisher:?} and {subscriber:?}", self.table)
            }
            DifferenceKind::Rows { publisher, subscriber, examples } => {
                write!(
                    f,
                    "{}: {publisher} rows on the publisher, {subscriber} on the subscriber; ",
                    self.table
                )?;
                write!(f, "times on publisher and subscriber:")?;
                for example in examples {
                    let mut row: String = example.row.chars().take(ROW_TEXT_MAX).collect();
                    if row.len() < example.row.len() {
                        row.push('…');
                    }
                    write!(f, "\n  {} {} {row}", example.publisher, example.subscriber)?;
                }
                Ok(())
            }
        }
    }
}

/// The checksum of all columns of a table, in the table's own order.
pub fn table_checksum(client: &mut Client, table: &TableName) -> Result<Checksum> {
    let mut session = snapshot(client)?;
    let shape = Shape::read(&mut session, table)?
        .ok_or_else(|| Error::other(format!("no table {table}")))?;
    let columns: Vec<&str> = shape.columns.iter().map(|column| column.name.as_str()).collect();
    checksum(&mut session, &shape.source(table, &columns))
}

/// Compares tables by their publisher's columns that the subscriber has too.
pub fn compare_tables(
    publisher: &mut Client,
    subscriber: &mut Client,
    tables: &[TableName],
) -> Result<Vec<Difference>> {
    compare_tables_with(publisher, subscriber, tables, CompareOptions::default())
}

/// Compares tables, each server in one snapshot. No difference, no element.
pub fn compare_tables_with(
    publisher: &mut Client,
    subscriber: &mut Client,
    tables: &[TableName],
    options: CompareOptions,
) -> Result<Vec<Difference>> {
    let mut publisher = snapshot(publisher)?;
    let mut subscriber = snapshot(subscriber)?;
    let mut differences = Vec::new();
    for table in tables {
        if let Some(kind) = compare_table(&mut publisher, &mut subscriber, table, options)? {
            differences.push(Difference { table: table.clone(), kind });
        }
    }
    Ok(differences)
}

/// An error that shows the differences, if there are any.
pub fn expect_equal(
    publisher: &mut Client,
    subscriber: &mut Client,
    tables: &[TableName],
) -> Result<()> {
    let differences = compare_tables(publisher, subscriber, tables)?;
    if differences.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = differences.iter().map(Difference::to_string).collect();
    Err(Error::other(format!("the tables differ\n{}", lines.join("\n"))))
}

/// The tables of a publication; partitions or their root, as it publishes them.
pub fn published_tables(client: &mut Client, publication: &str) -> Result<Vec<TableName>> {
    let sql = "SELECT schemaname::text, tablename::text FROM pg_catalog.pg_publication_tables \
               WHERE pubname = $1 ORDER BY 1, 2";
    let rows = client
        .query(sql, &[&publication])
        .context(|| format!("list the tables of publication {publication}"))?;
    Ok(rows
        .iter()
        .map(|row| TableName::new(row.get::<_, &str>(0), row.get::<_, &str>(1)))
        .collect())
}

fn snapshot(client: &mut Client) -> Result<Transaction<'_>> {
    let mut transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .read_only(true)
        .start()?;
    transaction.batch_execute(TEXT_FORM)?;
    Ok(transaction)
}

fn compare_table(
    publisher: &mut Transaction<'_>,
    subscriber: &mut Transaction<'_>,
    table: &TableName,
    options: CompareOptions,
) -> Result<Option<DifferenceKind>> {
    let Some(publisher_shape) = Shape::read(publisher, table)? else {
        return Ok(Some(DifferenceKind::Missing(Side::Publisher)));
    };
    let Some(subscriber_shape) = Shape::read(subscriber, table)? else {
        return Ok(Some(DifferenceKind::Missing(Side::Subscriber)));
    };
    if options.same_columns {
        let (mut ours, mut theirs) = (publisher_shape.names(), subscriber_shape.names());
        ours.sort();
        theirs.sort();
        if ours != theirs {
            return Ok(Some(DifferenceKind::Columns { publisher: ours, subscriber: theirs }));
        }
    }
    let shared: Vec<&str> = publisher_shape
        .columns
        .iter()
        .filter(|column| {
            let same = subscriber_shape.columns.iter().find(|other| other.name == column.name);
            same.is_some_and(|other| {
                !(options.skip_generated && (column.generated || other.generated))
            })
        })
        .map(|column| column.name.as_str())
        .collect();
    let publisher_source = publisher_shape.source(table, &shared);
    let subscriber_source = subscriber_shape.source(table, &shared);
    let publisher_sum = checksum(publisher, &publisher_source)?;
    let subscriber_sum = checksum(subscriber, &subscriber_source)?;
    if publisher_sum == subscriber_sum {
        return Ok(None);
    }
    Ok(Some(DifferenceKind::Rows {
        publisher: publisher_sum.rows,
        subscriber: subscriber_sum.rows,
        examples: examples(publisher, &publisher_source, subscriber, &subscriber_source)?,
    }))
}

struct Column {
    name: String,
    generated: bool,
}

/// What a server says about a table.
struct Shape {
    columns: Vec<Column>,
    /// A plain table is read without the tables that inherit from it, as it is published.
    plain: bool,
}

impl Shape {
    fn read(session: &mut Transaction<'_>, table: &TableName) -> Result<Option<Self>> {
        let found = session.query_opt(
            "SELECT c.oid, c.relkind = 'r' \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2",
            &[&table.schema, &table.name],
        )?;
        let Some(found) = found else { return Ok(None) };
        let columns = session.query(
            "SELECT attname::text, attgenerated <> '' FROM pg_attribute \
             WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            &[&found.get::<_, u32>(0)],
        )?;
        let columns =
            columns.iter().map(|row| Column { name: row.get(0), generated: row.get(1) }).collect();
        Ok(Some(Self { columns, plain: found.get(1) }))
    }

    fn names(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.name.clone()).collect()
    }

    /// A query of rows `r`, each the text of these columns. A row's text tells null from empty.
    fn source(&self, table: &TableName, columns: &[&str]) -> String {
        let texts: Vec<String> =
            columns.iter().map(|column| format!("{}::text", quote(column))).collect();
        let only = if self.plain { "ONLY " } else { "" };
        format!("SELECT ROW({})::text AS r FROM {only}{table}", texts.join(", "))
    }
}

/// The aggregate over `h`, the MD5 of a row's text, that does not depend on the order of rows.
const SUMS: &str = "count(*), \
    coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint), 0)::text, \
    coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint), 0)::text";

fn checksum(session: &mut Transaction<'_>, source: &str) -> Result<Checksum> {
    // Two 64-bit hashes of the bytes, the same on every server, and several times faster than MD5.
    let sums = "count(*), coalesce(sum(hashtextextended(r, 0)), 0)::text, \
                coalesce(sum(hashtextextended(r, 1)), 0)::text";
    let sql = format!("SELECT {sums} FROM ({source}) AS s");
    let row = session.query_one(&sql, &[]).context(|| format!("sum up {source}"))?;
    Ok(Checksum { rows: row.get(0), sums: [row.get(1), row.get(2)] })
}

fn examples(
    publisher: &mut Transaction<'_>,
    publisher_source: &str,
    subscriber: &mut Transaction<'_>,
    subscriber_source: &str,
) -> Result<Vec<RowExample>> {
    let ours = buckets(publisher, publisher_source)?;
    let theirs = buckets(subscriber, subscriber_source)?;
    let mut prefixes: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
    prefixes.sort();
    prefixes.dedup();
    let mut examples = Vec::new();
    for prefix in prefixes.into_iter().filter(|prefix| ours.get(*prefix) != theirs.get(*prefix)) {
        let ours = row_counts(publisher, publisher_source, prefix)?;
        let mut theirs = row_counts(subscriber, subscriber_source, prefix)?;
        for (row, times) in ours {
            let subscriber_times = theirs.remove(&row).unwrap_or(0);
            if times != subscriber_times {
                examples.push(RowExample { row, publisher: times, subscriber: subscriber_times });
            }
        }
        let missing = theirs.into_iter();
        examples.extend(missing.map(|(row, times)| RowExample {
            row,
            publisher: 0,
            subscriber: times,
        }));
        if examples.len() >= EXAMPLES_MAX {
            break;
        }
    }
    // Both versions of a changed row come to stand together.
    examples.sort_by(|a, b| a.row.cmp(&b.row));
    examples.truncate(EXAMPLES_MAX);
    Ok(examples)
}

/// The checksum of each of 4096 parts of the hash range.
fn buckets(
    session: &mut Transaction<'_>,
    source: &str,
) -> Result<BTreeMap<String, (i64, String, String)>> {
    let sql = format!(
        "SELECT substr(h, 1, 3), {SUMS} \
         FROM (SELECT md5(r) AS h FROM ({source}) AS s) AS t GROUP BY 1"
    );
    let rows = session.query(&sql, &[])?;
    Ok(rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2), row.get(3)))).collect())
}

/// The rows of one part and how often each occurs.
fn row_counts(
    session: &mut Transaction<'_>,
    source: &str,
    prefix: &str,
) -> Result<BTreeMap<String, i64>> {
    let sql = format!(
        "SELECT r, count(*) FROM ({source}) AS s WHERE substr(md5(r), 1, 3) = $1 GROUP BY 1"
    );
    let rows = session.query(&sql, &[&prefix])?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        assert_eq!(TableName::from("t").to_string(), r#""public"."t""#);
        assert_eq!(TableName::from("A b.c\"d").to_string(), r#""A b"."c""d""#);
    }
}
