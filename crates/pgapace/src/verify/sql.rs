//! The queries of a comparison, for one table on one server. Pure.
//!
//! A row is hashed twice with two seeds ([`crate::verify::row_hash`]), which gives 128 bits; sums of the
//! hashes are numeric and do not overflow. A third hash, of the key, orders rows and puts them into
//! buckets. Without a key, the hash of the order is one of the two.

use engine::table_name::TableName;
use wire::{quote_ident, quote_literal};

use crate::table_name::sql_name;
use crate::verify::columns::{ColumnSql, ComparedColumn, HashedBy, LiteralType};
use crate::verify::range::{KeyColumn, KeyRange, literal_row};
use crate::verify::row_hash::{RowField, RowHash, hash_row, hash_text, hash_value, sum_of_bytes};

/// A share is a number of such parts.
const PARTS: u64 = 1_000_000;

/// Shows whether both servers hash alike: the hash depends on the byte order of the machine.
pub(crate) fn probe() -> String {
    let uuid = "'0123abcd-0123-4567-89ab-0123456789ab'::pg_catalog.uuid";
    format!(
        "SELECT {}, {}, {}, {}",
        hash_text("'pgapace verify'", "1"),
        hash_text("'long: ' || pg_catalog.repeat('x', 999)", "2"),
        hash_value(HashedBy::Int8, "(-1234567890123)::pg_catalog.int8", "1234567890123"),
        hash_value(HashedBy::Uuid, uuid, "2"),
    )
}

/// Rows that a query reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Selection {
    /// A range of the key.
    pub(crate) range: Option<KeyRange>,
    /// A part of the table's files, for sums only.
    pub(crate) piece: Option<Piece>,
    /// Buckets, of so many.
    pub(crate) buckets: Option<(Vec<u64>, u64)>,
}

/// A range of blocks of a plain table or partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) oid: u32,
    /// The quoted name.
    pub(crate) relation: String,
    pub(crate) from_block: u64,
    /// `None` for all blocks that follow.
    pub(crate) to_block: Option<u64>,
}

/// One table on one server.
#[derive(Debug, Clone)]
pub(crate) struct TableSql {
    pub(crate) oid: u32,
    /// The quoted name.
    name: String,
    partitioned: bool,
    /// `ONLY` and the quoted name.
    pub(crate) relation: String,
    columns: Vec<RowField>,
    /// The columns of the key by their places in `columns`.
    key: Vec<(usize, KeyColumn)>,
    /// Row filters, combined with OR, and `--where`.
    conditions: Vec<String>,
    /// `--where` as it was given.
    given: Option<String>,
    /// Of the rows of a table that is compared by buckets.
    share: Option<f64>,
    /// Whether text is hashed in UTF8, because the encodings of the servers differ.
    converts: bool,
}

/// The arguments for [`TableSql`].
pub(crate) struct Parts<'a> {
    pub(crate) oid: u32,
    pub(crate) name: &'a TableName,
    pub(crate) partitioned: bool,
    pub(crate) filters: &'a [String],
    pub(crate) condition: Option<&'a str>,
    pub(crate) share: Option<f64>,
    pub(crate) converts: bool,
}

impl TableSql {
    /// `of` selects the server's part of a column; `key` are its columns with the types of literals, or
    /// `None` for a column that is found by its text.
    pub(crate) fn new(
        parts: &Parts<'_>,
        columns: &[ComparedColumn],
        of: impl Fn(&ComparedColumn) -> &ColumnSql,
        key: &[(String, Option<LiteralType>)],
    ) -> Self {
        // Replication treats inheritance children as other tables.
        let only = if parts.partitioned { "" } else { "ONLY " };
        let mut conditions = Vec::new();
        if !parts.filters.is_empty() {
            let filters: Vec<_> = parts.filters.iter().map(|f| format!("({f})")).collect();
            conditions.push(format!("({})", filters.join(" OR ")));
        }
        conditions.extend(parts.condition.map(enclosed));
        let field = |column: &ComparedColumn| RowField {
            sql: of(column).clone(),
            by: column.by,
            nullable: column.nullable,
        };
        let key = key.iter().filter_map(|(name, literals)| {
            let place = columns.iter().position(|column| column.name == *name)?;
            let column = &columns[place];
            let literal = match literals {
                Some(literals) => {
                    KeyColumn::of_type(quote_ident(name), &literals.type_sql, literals.casts)
                }
                None => KeyColumn::of_type(of(column).text.clone(), "pg_catalog.text", false),
            };
            Some((place, literal))
        });
        let name = sql_name(parts.name);
        Self {
            oid: parts.oid,
            relation: format!("{only}{name}"),
            name,
            partitioned: parts.partitioned,
            columns: columns.iter().map(field).collect(),
            key: key.collect(),
            conditions,
            given: parts.condition.map(str::to_owned),
            share: parts.share,
            converts: parts.converts,
        }
    }

    pub(crate) fn keyed(&self) -> bool {
        !self.key.is_empty()
    }

    fn key_columns(&self) -> Vec<KeyColumn> {
        self.key.iter().map(|(_, column)| column.clone()).collect()
    }

    /// Rows, bytes and the sums of both hashes of the selected rows of a table with a key.
    pub(crate) fn sums(&self, selection: &Selection) -> String {
        let rows = self.read(selection, &self.hashed_columns());
        format!("SELECT {} FROM {rows}", self.sums_of_rows(&self.hash(RowHash::First)))
    }

    /// The same for each bucket, of `buckets`.
    pub(crate) fn bucket_sums(&self, selection: &Selection, buckets: u64) -> String {
        let rows = self.read(selection, &self.hashed_columns());
        let sample = self.sample("o").map(|c| format!(" WHERE {c}")).unwrap_or_default();
        format!(
            "SELECT o & {mask}, {sums} FROM (SELECT {order} AS o, * FROM {rows} OFFSET 0) hashed{sample} \
             GROUP BY 1",
            mask = buckets - 1,
            order = self.order(),
            sums = self.sums_of_rows(&self.first_hash("o"))
        )
    }

    /// The selected rows in the order of their hash: for [`crate::verify::merge::RowEntry`].
    pub(crate) fn rows(&self, selection: &Selection) -> String {
        let places: Vec<usize> = match self.keyed() {
            true => self.key.iter().map(|(place, _)| *place).collect(),
            false => (0..self.columns.len()).collect(),
        };
        // A query has 1664 columns at most: what is hashed as its text is read once.
        let (mut columns, mut names) = (self.hashed_columns(), Vec::new());
        for place in places {
            let column = &self.columns[place];
            let is_text = column.sql.stored || column.sql.hashed == column.sql.text;
            if is_text && !self.converts_column(column) {
                names.push(format!("c{place}"));
            } else {
                columns.push(format!("{} AS f{place}", column.sql.text));
                names.push(format!("f{place}"));
            }
        }
        let rows = self.read(selection, &columns);
        let mut conditions: Vec<_> = self.sample("o").into_iter().collect();
        if let Some((wanted, buckets)) = &selection.buckets {
            let wanted: Vec<_> = wanted.iter().map(u64::to_string).collect();
            conditions.push(format!(
                "(o & {}) = ANY ('{{{}}}'::pg_catalog.int8[])",
                buckets - 1,
                wanted.join(",")
            ));
        }
        let filter = match conditions.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", conditions.join(" AND ")),
        };
        format!(
            "COPY (SELECT o, {}, {}{} FROM (SELECT {} AS o, * FROM {rows} OFFSET 0) hashed{filter} \
             ORDER BY o) TO STDOUT",
            self.first_hash("o"),
            self.hash(RowHash::Second),
            names.iter().map(|name| format!(", {name}")).collect::<String>(),
            self.order(),
        )
    }

    /// The rows with these keys: the key, and a hash of each column, NULL for NULL.
    pub(crate) fn column_hashes(&self, keys: &[Vec<Option<String>>]) -> String {
        let seed = RowHash::First.seed();
        let hashes =
            self.columns.iter().map(|column| hash_value(column.by, &self.hashed(column), &seed));
        let fields: Vec<_> = self.key_texts().map(str::to_owned).chain(hashes).collect();
        format!(
            "COPY (SELECT {} FROM {}{}) TO STDOUT",
            fields.join(", "),
            self.relation,
            self.filter(&self.of_keys(keys))
        )
    }

    /// The condition that finds the rows with these keys, and perhaps others.
    pub(crate) fn of_keys(&self, keys: &[Vec<Option<String>>]) -> String {
        let columns = self.key_columns();
        let known = |key: &&Vec<Option<String>>| key.iter().all(Option::is_some);
        let full: Vec<Vec<String>> =
            keys.iter().filter(known).map(|key| key.iter().flatten().cloned().collect()).collect();
        let mut conditions = Vec::new();
        if !full.is_empty() {
            let names: Vec<_> = columns.iter().map(|column| column.compared.as_str()).collect();
            let rows: Vec<_> = full.iter().map(|key| literal_row(&columns, key)).collect();
            conditions.push(match names.as_slice() {
                // Without rows of one column the server looks all keys up in one index scan.
                [one] => {
                    let values: Vec<_> = rows.iter().map(|row| &row["ROW".len()..]).collect();
                    format!("{one} IN ({})", values.join(", "))
                }
                _ => format!("ROW({}) IN ({})", names.join(", "), rows.join(", ")),
            });
        }
        // The key's columns may be NULL on the server that has no such index.
        for key in keys.iter().filter(|key| !known(key)) {
            let parts = columns.iter().zip(key).map(|(column, value)| match value {
                None => format!("{} IS NULL", column.compared),
                Some(value) => format!("{} = {}", column.compared, column.literal(value)),
            });
            conditions.push(format!("({})", parts.collect::<Vec<_>>().join(" AND ")));
        }
        format!("({})", conditions.join(" OR "))
    }

    /// The places, among rows with these ctids, of those whose key is equal to one of these, with the number of that. The
    /// texts of equal keys may differ: 1.0 and 1.00.
    pub(crate) fn places_of_keys(&self, keys: &[Vec<String>], ctids: &[&str]) -> String {
        let columns = self.key_columns();
        let row = |(number, key): (usize, &Vec<String>)| {
            let values: Vec<_> =
                columns.iter().zip(key).map(|(column, value)| column.literal(value)).collect();
            format!("({number}, {})", values.join(", "))
        };
        let rows: Vec<_> = keys.iter().enumerate().map(row).collect();
        let names: Vec<_> = (0..columns.len()).map(|place| format!("pgapace_{place}")).collect();
        let pairs = columns.iter().zip(&names);
        let equal: Vec<_> =
            pairs.map(|(column, name)| format!("{} = {name}", column.compared)).collect();
        format!(
            "SELECT pgapace_number, tableoid, ctid FROM (VALUES {}) pgapace_keys (pgapace_number, {}), {}{}",
            rows.join(", "),
            names.join(", "),
            self.relation,
            self.filter(&format!(
                "{} AND ctid = ANY ('{{\"{}\"}}'::pg_catalog.tid[])",
                equal.join(" AND "),
                ctids.join("\",\""),
            )),
        )
    }

    /// The last key of the next `rows` rows behind a key, in the order of the key. Row filters do not
    /// apply: the walk reads the index only.
    pub(crate) fn walk(&self, after: Option<&Vec<String>>, rows: u64) -> String {
        let key = self.key_columns();
        let names: Vec<_> = key.iter().map(|column| column.name.as_str()).collect();
        let names = names.join(", ");
        let texts: Vec<_> = self.key_texts().collect();
        let range = KeyRange { after: after.cloned(), through: None };
        let conditions = range.conditions(&key);
        let filter = match conditions.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", conditions.join(" AND ")),
        };
        format!(
            "SELECT {} FROM (SELECT {names} FROM {}{filter} ORDER BY {names} OFFSET {} LIMIT 1) last",
            texts.join(", "),
            self.relation,
            rows - 1
        )
    }

    /// Whether a query read other rows than the snapshot should show; it must have locked what it read.
    /// Queries find tables, partitions and files in the newest catalogue, whatever their snapshot:
    ///
    /// - TRUNCATE and some forms of ALTER TABLE give a table another file, without rows that the snapshot shows.
    /// - A partition that was attached or detached since then is read or not read as a part of the table.
    /// - The name may be that of another table now.
    pub(crate) fn is_rewritten(&self, piece: Option<&Piece>) -> String {
        let named = [(self.name.as_str(), self.oid)].into_iter();
        let named = named.chain(piece.map(|piece| (piece.relation.as_str(), piece.oid)));
        let mut changes: Vec<_> = named
            .map(|(name, oid)| {
                let name = quote_literal(name);
                format!("pg_catalog.to_regclass({name}) IS DISTINCT FROM {oid}::pg_catalog.oid")
            })
            .collect();
        if self.partitioned {
            changes.push(format!(
                "(SELECT pg_catalog.array_agg(relid ORDER BY relid) FROM tree) IS DISTINCT FROM \
                 (SELECT pg_catalog.array_agg(p.relid::pg_catalog.oid ORDER BY p.relid::pg_catalog.oid) \
                  FROM pg_catalog.pg_partition_tree({}::pg_catalog.oid::pg_catalog.regclass) p)",
                self.oid
            ));
        }
        let (tree, of_tree) = match self.partitioned {
            true => (tree(self.oid), "JOIN tree t ON c.oid = t.relid".to_owned()),
            false => (String::new(), format!("WHERE c.oid = {}::pg_catalog.oid", self.oid)),
        };
        format!(
            "{tree} SELECT coalesce(pg_catalog.bool_or(c.relfilenode <> 0 \
               AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)), true) OR {} \
             FROM pg_catalog.pg_class c {of_tree}",
            changes.join(" OR ")
        )
    }

    /// A WHERE clause: rows of the comparison for which the condition is true.
    pub(crate) fn filter(&self, condition: &str) -> String {
        let mut conditions = self.conditions.clone();
        conditions.push(condition.to_owned());
        format!(" WHERE {}", conditions.join(" AND "))
    }

    /// A query that is valid if the condition of `--where` is one expression. In parentheses alone
    /// `true) OR (true` would be valid too, and change the meaning of a query.
    pub(crate) fn checks_condition(&self) -> String {
        let given = self.given.as_deref().unwrap_or("true");
        format!(
            "SELECT FROM {} WHERE {} AND CASE WHEN {given}\n THEN true END LIMIT 0",
            self.relation,
            enclosed(given)
        )
    }

    /// Reads these expressions, each with its name, from the table.
    fn read(&self, selection: &Selection, expressions: &[String]) -> String {
        let mut conditions = self.conditions.clone();
        let mut relation = self.relation.clone();
        if let Some(range) = &selection.range {
            conditions.extend(range.conditions(&self.key_columns()));
        }
        if let Some(piece) = &selection.piece {
            relation = format!("ONLY {}", piece.relation);
            if piece.from_block > 0 {
                conditions.push(format!("ctid >= '({},0)'::pg_catalog.tid", piece.from_block));
            }
            if let Some(end) = piece.to_block {
                conditions.push(format!("ctid < '({end},0)'::pg_catalog.tid"));
            }
        }
        let filter = match conditions.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", conditions.join(" AND ")),
        };
        // OFFSET 0 keeps the planner from evaluating an expression once per use.
        let stored = |column: &RowField| column.sql.stored && !self.converts_column(column);
        let once = if self.columns.iter().all(stored) { "" } else { " OFFSET 0" };
        format!("(SELECT {} FROM {relation}{filter}{once}) rows", expressions.join(", "))
    }

    fn sample(&self, order: &str) -> Option<String> {
        let parts = (self.share? * PARTS as f64).round();
        Some(format!("({order} & {}) % {PARTS} < {parts}", i64::MAX))
    }

    /// The expressions that are hashed, each with the column name that the enclosing queries use.
    fn hashed_columns(&self) -> Vec<String> {
        let columns = self.columns.iter().enumerate();
        columns.map(|(place, column)| format!("{} AS c{place}", self.hashed(column))).collect()
    }

    fn named(&self) -> Vec<(String, &RowField)> {
        let columns = self.columns.iter().enumerate();
        columns.map(|(place, column)| (format!("c{place}"), column)).collect()
    }

    fn hash(&self, hash: RowHash) -> String {
        hash_row(&self.named(), hash)
    }

    /// The hash by which rows are ordered: of the key, or of the row.
    fn order(&self) -> String {
        if self.key.is_empty() {
            return self.hash(RowHash::Order);
        }
        let named = self.named();
        let key: Vec<_> = self.key.iter().map(|(place, _)| named[*place].clone()).collect();
        hash_row(&key, RowHash::Order)
    }

    /// The first of the two hashes that are summed, where `order` is that by which rows are ordered. Without a key that
    /// is one of the whole row, and tells NULL from each value.
    fn first_hash(&self, order: &str) -> String {
        if self.keyed() { self.hash(RowHash::First) } else { order.to_owned() }
    }

    fn key_texts(&self) -> impl Iterator<Item = &str> {
        self.key.iter().map(|(place, _)| self.columns[*place].sql.text.as_str())
    }

    /// `first` is the first hash.
    fn sums_of_rows(&self, first: &str) -> String {
        format!(
            "pg_catalog.count(*), {}, coalesce(pg_catalog.sum({first}), 0), \
             coalesce(pg_catalog.sum({}), 0)",
            sum_of_bytes(&self.named()),
            self.hash(RowHash::Second)
        )
    }

    fn converts_column(&self, column: &RowField) -> bool {
        self.converts && column.by == HashedBy::Text
    }

    /// The expression of a column that is hashed. Texts are hashed in UTF8 if the encodings of the
    /// servers differ.
    fn hashed(&self, column: &RowField) -> String {
        let value = &column.sql.hashed;
        match self.converts_column(column) {
            true => format!("pg_catalog.encode(pg_catalog.convert_to({value}, 'UTF8'), 'hex')"),
            false => value.clone(),
        }
    }
}

/// A condition of the user. The line break ends a comment.
fn enclosed(condition: &str) -> String {
    format!("({condition}\n)")
}

/// A table and its partitions of all levels as `tree`, as the snapshot shows them.
fn tree(oid: u32) -> String {
    format!(
        "WITH RECURSIVE tree AS (SELECT {oid}::pg_catalog.oid AS relid UNION ALL \
           SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.relid AND c.relkind = 'p' \
           JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid AND NOT i.inhdetachpending)"
    )
}

/// The plain tables in which a table's rows are, with their blocks: one for a plain table. A role that
/// may read a partitioned table may still lack the privilege to read a partition by its own name, or
/// the column `ctid`.
pub(crate) fn leaves(oid: u32) -> String {
    format!(
        "{} SELECT c.oid, pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname), \
           c.relkind = 'r' AND pg_catalog.has_table_privilege(c.oid, 'SELECT') \
             AND NOT pg_catalog.row_security_active(c.oid), CASE WHEN c.relkind = 'r' THEN coalesce(pg_catalog.pg_relation_size(c.oid), 0) \
             / pg_catalog.current_setting('block_size')::pg_catalog.int8 ELSE 0 END, \
           greatest(c.reltuples, 0)::pg_catalog.int8 \
         FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.relid \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE c.relkind <> 'p'",
        tree(oid)
    )
}
