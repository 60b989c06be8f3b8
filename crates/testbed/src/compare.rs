//! Comparison of the rows of tables on two servers.
//!
//! Two tables are equal if they hold the same multiset of rows: the same number of copies of each
//! row, in any order. A row is the text of its columns, by name in the publisher's order. The
//! subscriber may therefore order its columns differently and have additional ones. Each server
//! sums two 64-bit hashes of every row, in which two hashes stand for a long text. Rows are fetched only
//! when the sums differ, and only from the parts of the hash range that differ.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use postgres::{Client, IsolationLevel, Row, Transaction};

use crate::error::{Context, Error, Result};

/// Maximum number of rows shown for each table that differs.
const EXAMPLES_MAX: usize = 10;
/// Maximum number of characters shown of each such row.
const ROW_TEXT_MAX: usize = 400;

/// Bytes beyond which hashes stand for a text in the sums.
const HASHED_BYTES: u32 = 256;

/// Settings under which every server writes values as the same text.
const TEXT_FORM: &str = "
    SET LOCAL datestyle = 'ISO, YMD';
    SET LOCAL intervalstyle = 'postgres';
    SET LOCAL timezone = 'UTC';
    SET LOCAL extra_float_digits = 3;
    SET LOCAL bytea_output = 'hex';
    SET LOCAL lc_monetary = 'C';
    SET LOCAL xmlbinary = 'base64';
    SET LOCAL search_path = 'pg_catalog'";

/// A table's schema and name, unquoted. Its Display form is quoted for SQL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The schema.
    pub schema: String,
    /// The table.
    pub name: String,
}

impl TableName {
    /// Builds a name from unquoted parts.
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
    /// Parses `schema.table`, or `table` in schema public, both unquoted.
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
    /// The first server.
    Publisher,
    /// The second server.
    Subscriber,
}

/// Options of a comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompareOptions {
    /// Requires the same columns on both sides. Otherwise only the publisher's columns that the
    /// subscriber also has are compared.
    pub same_columns: bool,
    /// Ignores columns that are generated on either side.
    pub skip_generated: bool,
}

/// The number of rows and the sums of their hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The number of rows.
    pub rows: i64,
    /// Sums of two 64-bit hashes of the rows, as decimal numbers.
    pub sums: [String; 2],
}

/// A difference in one table.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The table.
    pub table: TableName,
    /// The kind of difference.
    pub kind: DifferenceKind,
}

/// The kinds of differences between two tables.
#[derive(Clone, Debug)]
pub enum DifferenceKind {
    /// One side has no such table.
    Missing(Side),
    /// The columns differ although [`CompareOptions::same_columns`] is set.
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

/// A row whose number of copies differs between the sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowExample {
    /// The row's text.
    pub row: String,
    /// Number of copies on the publisher.
    pub publisher: i64,
    /// Number of copies on the subscriber.
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

/// The checksum over all columns of a table, in the table's column order.
pub fn table_checksum(client: &mut Client, table: &TableName) -> Result<Checksum> {
    let mut session = snapshot(client)?;
    let shape = Shape::read(&mut session, table)?
        .ok_or_else(|| Error::other(format!("no table {table}")))?;
    let columns: Vec<&str> = shape.columns.iter().map(|column| column.name.as_str()).collect();
    checksum(&mut session, &shape.source(table, &columns))
}

/// Compares the columns of the publisher's tables that the subscriber also has.
pub fn compare_tables(
    publisher: &mut Client,
    subscriber: &mut Client,
    tables: &[TableName],
) -> Result<Vec<Difference>> {
    compare_tables_with(publisher, subscriber, tables, CompareOptions::default())
}

/// Compares tables, with one snapshot on each server. Returns an empty list if they are equal.
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

/// Returns an error that lists the differences, if there are any.
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

/// The tables of a publication: partitions or their root, as it publishes them.
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
        let (mut publisher_names, mut subscriber_names) =
            (publisher_shape.names(), subscriber_shape.names());
        publisher_names.sort();
        subscriber_names.sort();
        if publisher_names != subscriber_names {
            return Ok(Some(DifferenceKind::Columns {
                publisher: publisher_names,
                subscriber: subscriber_names,
            }));
        }
    }
    let mut shared = Vec::new();
    let mut hashed = Vec::new();
    for column in &publisher_shape.columns {
        let same = subscriber_shape.columns.iter().find(|other| other.name == column.name);
        let Some(other) = same else { continue };
        if options.skip_generated && (column.generated || other.generated) {
            continue;
        }
        shared.push(column.name.as_str());
        hashed.push(if column.text && other.text {
            short_text(&column.name)
        } else {
            full_text(&column.name)
        });
    }
    let publisher_sum = checksum(publisher, &publisher_shape.source_of(table, &hashed))?;
    let subscriber_sum = checksum(subscriber, &subscriber_shape.source_of(table, &hashed))?;
    if publisher_sum == subscriber_sum {
        return Ok(None);
    }
    let publisher_source = publisher_shape.source(table, &shared);
    let subscriber_source = subscriber_shape.source(table, &shared);
    Ok(Some(DifferenceKind::Rows {
        publisher: publisher_sum.rows,
        subscriber: subscriber_sum.rows,
        examples: examples(publisher, &publisher_source, subscriber, &subscriber_source)?,
    }))
}

struct Column {
    name: String,
    generated: bool,
    /// Whether its type is `text` or `varchar`, whose length is known without reading the value.
    text: bool,
}

/// The text of a column.
fn full_text(column: &str) -> String {
    format!("{}::text", quote(column))
}

/// The text of a column of type `text` or `varchar`; of a long one, two hashes. Writing a row as text takes several
/// times longer than hashing it.
fn short_text(column: &str) -> String {
    let column = quote(column);
    let hash = |seed| format!("hashtextextended({column}::text COLLATE \"C\", {seed})");
    format!(
        "CASE WHEN octet_length({column}) > {HASHED_BYTES} THEN concat({}, ' ', {}) \
         ELSE {column}::text END",
        hash(0),
        hash(1)
    )
}

/// The structure of a table on one server.
struct Shape {
    columns: Vec<Column>,
    /// A plain table is read with ONLY, because logical replication publishes it without its
    /// inheritance children.
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
            "SELECT attname::text, attgenerated <> '', \
               atttypid IN ('text'::regtype, 'varchar'::regtype) FROM pg_attribute \
             WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            &[&found.get::<_, u32>(0)],
        )?;
        let column =
            |row: &Row| Column { name: row.get(0), generated: row.get(1), text: row.get(2) };
        let columns = columns.iter().map(column).collect();
        Ok(Some(Self { columns, plain: found.get(1) }))
    }

    fn names(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.name.clone()).collect()
    }

    /// A query that returns rows `r`, each the text of these columns. The text distinguishes null
    /// from an empty string.
    fn source(&self, table: &TableName, columns: &[&str]) -> String {
        let texts: Vec<String> = columns.iter().map(|column| full_text(column)).collect();
        self.source_of(table, &texts)
    }

    /// The same with these expressions for the columns.
    fn source_of(&self, table: &TableName, texts: &[String]) -> String {
        let only = if self.plain { "ONLY " } else { "" };
        format!("SELECT ROW({})::text AS r FROM {only}{table}", texts.join(", "))
    }
}

/// An aggregate over `h`, the MD5 of a row's text, that is independent of the order of rows.
const SUMS: &str = "count(*), \
    coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint), 0)::text, \
    coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint), 0)::text";

fn checksum(session: &mut Transaction<'_>, source: &str) -> Result<Checksum> {
    // Two 64-bit hashes of the bytes, equal on every server and several times faster than MD5.
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
    let publisher_side = buckets(publisher, publisher_source)?;
    let subscriber_side = buckets(subscriber, subscriber_source)?;
    let mut prefixes: Vec<&String> = publisher_side.keys().chain(subscriber_side.keys()).collect();
    prefixes.sort();
    prefixes.dedup();
    let mut examples = Vec::new();
    for prefix in prefixes
        .into_iter()
        .filter(|prefix| publisher_side.get(*prefix) != subscriber_side.get(*prefix))
    {
        let publisher_side = row_counts(publisher, publisher_source, prefix)?;
        let mut subscriber_side = row_counts(subscriber, subscriber_source, prefix)?;
        for (row, times) in publisher_side {
            let subscriber_times = subscriber_side.remove(&row).unwrap_or(0);
            if times != subscriber_times {
                examples.push(RowExample { row, publisher: times, subscriber: subscriber_times });
            }
        }
        let missing = subscriber_side.into_iter();
        examples.extend(missing.map(|(row, times)| RowExample {
            row,
            publisher: 0,
            subscriber: times,
        }));
        if examples.len() >= EXAMPLES_MAX {
            break;
        }
    }
    // Sorting places both versions of a changed row together.
    examples.sort_by(|a, b| a.row.cmp(&b.row));
    examples.truncate(EXAMPLES_MAX);
    Ok(examples)
}

/// The checksums of 4096 parts of the hash range.
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

/// The rows of one part with their number of copies.
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
