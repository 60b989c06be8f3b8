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

#[cfg(test)]
mod cost;
mod queries;
mod reader;

use engine::table_name::TableName;
use wire::{Row, Rows, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::subscriber::citus::Placement;
use crate::subscriber::key_index::Index;
use crate::subscriber::oid;
use crate::table_name::sql_name;

pub(crate) use reader::{CatalogueReader, TableFacts, fingerprints, oid_array};

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

    /// Whether it is `=` of the built-in types.
    pub(crate) fn is_built_in(&self) -> bool {
        *self == Self::operator("pg_catalog", "=")
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
    /// Oid of the declared type, which may be a domain.
    pub(crate) declared_type: u32,
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
    /// Whether new rows must have a value: the constraint may be NOT VALID.
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
    pub(crate) text_input: TextInput,
    /// Whether the base type has a function that reads binary values.
    pub(crate) receives_binary: bool,
}

/// How a statement turns text into a value of the base type, as the type's input function does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TextInput {
    /// By a cast, which calls the input function.
    Cast,
    /// By a call of the input function, because a cast from text exists that may read something else: PostGIS
    /// has one for geometry. `arguments` are those behind the text.
    Function { function: String, arguments: String },
    /// Not at all: there is such a cast, and the result of the input function is polymorphic.
    None,
}

/// The type of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowType {
    pub(crate) oid: u32,
    /// The type of its arrays.
    pub(crate) array: u32,
    /// Number of columns, with those that were dropped (`pg_class.relnatts`).
    pub(crate) attributes: i16,
}

impl Column {
    /// The expression that turns a text into a value of the base type.
    pub(crate) fn read_text(&self, text: &str) -> String {
        match &self.text_input {
            TextInput::Cast | TextInput::None => format!("{text}::{}", self.base_type_sql),
            TextInput::Function { function, arguments } => {
                format!("{function}(pg_catalog.textout({text}){arguments})")
            }
        }
    }

    pub(crate) fn is_domain_over_enum(&self) -> bool {
        self.type_kind == 'e' && self.declared_type != self.base_type
    }

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

    /// Whether binary values can be elements of an array parameter. An array cannot be an element of an array (its text
    /// can, see [`array_text`](super::statement)), and unnest expands composite elements into columns.
    pub(crate) fn has_binary_elements(&self) -> bool {
        self.array_type != 0 && !self.is_array && self.type_kind != 'c'
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
    /// In index order.
    pub(crate) columns: Vec<KeyColumn>,
}

/// A column of a unique index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyColumn {
    pub(crate) attnum: i16,
    pub(crate) equality: Equality,
    /// The collation of the index as SQL, if that of the column takes several of its values for equal.
    pub(crate) collation: Option<String>,
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

/// The server's error contains this if the name of a table leads to another table.
pub(crate) const ANOTHER_TABLE: &str = "pgapace found another table under this name";

/// Part of the error message of [`Table::has_no_new_columns`].
pub(crate) const NEW_COLUMNS: &str = "pgapace found new columns in this table";

/// One subscriber table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) oid: u32,
    /// Changes when a catalogue row changes that this description depends on. Taken in the first
    /// query.
    pub(crate) fingerprint: String,
    /// The topmost partitioned table above this one, or the table itself.
    pub(crate) root: u32,
    pub(crate) name: TableName,
    pub(crate) partitioned: bool,
    /// The number of tables that hold its rows: the leaf partitions, or 1 of a plain table.
    pub(crate) leaves: usize,
    /// Where Citus keeps its rows.
    pub(crate) placement: Placement,
    pub(crate) row_security: bool,
    pub(crate) hooks: Hooks,
    pub(crate) columns: Vec<Column>,
    /// The replica identity index if one is set, otherwise the primary key.
    pub(crate) identity_key: Option<Key>,
    /// Unique, immediate, non-partial indexes over NOT NULL columns, except `identity_key`.
    pub(crate) unique_keys: Vec<Key>,
    /// For a partitioned table without `identity_key`: name and key columns of each leaf partition.
    pub(crate) leaf_keys: Vec<(String, Option<Vec<String>>)>,
    /// All valid indexes.
    pub(crate) indexes: Vec<Index>,
    pub(crate) row_type: RowType,
}

impl Table {
    /// How many relations a statement that changes rows locks: the table and its indexes. It locks all partitions of a
    /// partitioned table, and the indexes of those that have the rows.
    pub(crate) fn locked_relations(&self) -> usize {
        let parts = if self.partitioned { self.leaves } else { 0 };
        1 + parts + self.indexes.len()
    }

    /// The quoted, schema-qualified name.
    pub(crate) fn sql_name(&self) -> String {
        sql_name(&self.name)
    }

    /// The name for a search or DML statement. A plain table gets ONLY, because replication treats
    /// its inheritance children as other tables. A partitioned table includes its partitions.
    pub(crate) fn sql_only(&self) -> String {
        if self.partitioned { self.sql_name() } else { format!("ONLY {}", self.sql_name()) }
    }

    /// A condition for the rows of a search: the statement fails if the name leads to another table than this one.
    ///
    /// A user may rename tables or schemas, and the server then analyses a prepared statement anew. UPDATE ONLY
    /// of a partitioned table finds no row, without an error, as if rows were missing. The condition costs
    /// nothing: the server looks the name up when it analyses the statement, with the table locked, and
    /// evaluates the rest when it plans the statement. Then no condition is left, or the cast fails.
    ///
    /// `None` if Citus keeps the rows elsewhere: there, the same table has another oid.
    pub(crate) fn is_this_one(&self) -> Option<String> {
        self.placement.is_plain().then(|| {
            format!(
                "CASE WHEN {}::pg_catalog.regclass OPERATOR(pg_catalog.=) '{}'::pg_catalog.oid THEN true \
                 ELSE '{ANOTHER_TABLE}'::pg_catalog.text::pg_catalog.bool END",
                quote_literal(&self.sql_name()),
                self.oid
            )
        })
    }

    /// A condition for the rows of a search: the statement fails if columns were added since the table was described.
    ///
    /// Then fields of its row type can have moved. The server evaluates the condition once in each execution, in some
    /// three microseconds. It compares the number of columns that the table has ever had, as of the statement's snapshot.
    /// For what was committed while the statement waited for its lock on the table, it looks for three columns in its
    /// cache: the function returns NULL for a column that does not exist or was dropped; the name of the privilege does
    /// not matter. A constant would be cast, and fail, when the statement is planned: `concat` is not IMMUTABLE.
    pub(crate) fn has_no_new_columns(&self) -> String {
        let (oid, attributes) = (self.oid, self.row_type.attributes);
        let next = (1..=3).filter_map(|n| attributes.checked_add(n)).map(|attnum| {
            format!("pg_catalog.has_column_privilege('{oid}'::pg_catalog.oid, '{attnum}'::pg_catalog.int2, 'SELECT')")
        });
        let next: Vec<_> = next.collect();
        format!(
            "CASE WHEN coalesce({}) IS NULL AND (SELECT c.relnatts FROM pg_catalog.pg_class c \
               WHERE c.oid OPERATOR(pg_catalog.=) '{oid}'::pg_catalog.oid) OPERATOR(pg_catalog.=) \
               '{attributes}'::pg_catalog.int2 THEN true \
             ELSE pg_catalog.concat('{NEW_COLUMNS}')::pg_catalog.bool END",
            next.join(", ")
        )
    }

    /// A query of a FROM item with the columns of this table, from which a row is inserted again. The server
    /// refuses it ([`SYNTAX_ERROR`](crate::sqlstate::SYNTAX_ERROR) or another error of class 42) if the table has
    /// other columns by now: of one that was added, the row would lose its value. The server compares the columns
    /// when it analyses the statement, with the table locked; the second part returns nothing.
    pub(crate) fn no_other_columns(&self, from: &str) -> String {
        let names: Vec<_> = self.columns.iter().map(|column| quote_ident(&column.name)).collect();
        format!(
            "SELECT * FROM {from} UNION ALL SELECT {} FROM {from} WHERE false",
            names.join(", ")
        )
    }

    pub(crate) fn column(&self, name: &str) -> Option<(usize, &Column)> {
        self.columns.iter().enumerate().find(|(_, column)| column.name == name)
    }
}

/// The relation with this name is not a table.
pub(crate) fn not_a_table(table: &TableName, kind: &str) -> Failure {
    Failure::new(
        crate::error::Class::Mismatch,
        format!("subscriber relation {table} is {}", describe_kind(kind)),
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
