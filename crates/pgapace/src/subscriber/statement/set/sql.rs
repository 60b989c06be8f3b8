//! The text of set statements: one array parameter per column.
//!
//! Values in binary come as an array of the column's base type. Values in text come as `text[]`
//! and are cast to the base type, which runs its input function; the base type has no length, so
//! that the assignment to the column still checks lengths and domains (reference 7.3).

use wire::quote_ident;

use crate::subscriber::catalogue::{Column, Equality};
use crate::subscriber::mapping::{SearchColumn, TableMap};
use crate::subscriber::statement::cache::Shape;
use crate::subscriber::statement::row::{Source, Statement};
use crate::subscriber::statement::search::{self, Identical};

/// PostgreSQL's oids of `text[]` and `int4[]`.
const TEXT_ARRAY: u32 = 1009;
const INT4_ARRAY: u32 = 1007;

/// A change of many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetOperation {
    Update,
    Delete,
    /// Finds the rows and changes nothing.
    Probe,
    /// Reads the rows and locks nothing; returns how many there are.
    ReadAhead,
    /// Deletes some of the rows that are equal to each class of rows. One more parameter: how many
    /// of each class.
    DeleteEqual,
    /// Updates some of the rows that are equal to each class of rows. Two more parameters: the
    /// class of each new row, counted from 1, and the number of its row in the class, from 1.
    UpdateEqual,
}

/// Member of [`Shape::text`]: the search value of a column is in text.
pub(crate) fn text_of_search(column: usize) -> usize {
    column
}

/// Member of [`Shape::text`]: the new value of a column is in text.
pub(crate) fn text_of_new(columns: usize, column: usize) -> usize {
    columns + column
}

/// Member of [`Shape::nulls`]: the search column is NULL in some of the rows to find.
pub(crate) fn some_null(column: usize) -> usize {
    column
}

/// Member of [`Shape::nulls`]: the search column is NULL in all rows to find, and has no array.
pub(crate) fn all_null(columns: usize, column: usize) -> usize {
    columns + column
}

/// Whether values in binary can be elements of an array parameter. An array cannot be an element
/// of an array, and unnest takes composite elements apart.
pub(crate) fn has_binary_elements(column: &Column) -> bool {
    column.array_type != 0 && !column.is_array && column.type_kind != 'c'
}

/// Lets the planner choose a hash join and one scan of the table, by the sizes of the arrays:
/// without a key there may be no index, and then one lookup per row would be one scan per row.
/// Merge joins stay off: the planner knows nothing of the arrays' values, takes a hash join for
/// worse than it is, and would sort the whole table.
pub(crate) const PLANNER_FREE: &str = "SELECT \
    pg_catalog.set_config('enable_seqscan', 'on', true), \
    pg_catalog.set_config('enable_hashjoin', 'on', true), \
    pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true)";

/// Back to what every session has set.
pub(crate) const PLANNER_BOUND: &str = "SELECT \
    pg_catalog.set_config('enable_seqscan', 'off', true), \
    pg_catalog.set_config('enable_hashjoin', 'off', true), \
    pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true)";

/// The statement of a shape.
pub(crate) fn statement(map: &TableMap, operation: SetOperation, shape: &Shape<'_>) -> Statement {
    let mut builder = Builder { map, shape, types: Vec::new(), sources: Vec::new() };
    let sql = match operation {
        SetOperation::Update => builder.update(),
        SetOperation::Delete => builder.delete(),
        SetOperation::Probe => builder.probe(),
        SetOperation::ReadAhead => builder.read_ahead(),
        SetOperation::DeleteEqual => builder.delete_equal(),
        SetOperation::UpdateEqual => builder.update_equal(),
    };
    Statement { sql, types: builder.types, sources: builder.sources }
}

struct Builder<'a> {
    map: &'a TableMap,
    shape: &'a Shape<'a>,
    types: Vec<u32>,
    sources: Vec<Source>,
}

/// Array parameters and the names of their columns in the FROM clause.
#[derive(Default)]
struct Arrays {
    parameters: Vec<String>,
    names: Vec<String>,
}

impl Arrays {
    /// `AS v` with the arrays side by side. Unqualified, because only then the grammar takes more
    /// than one array; the search path is empty, so it is the function of `pg_catalog`.
    fn unnested(&self, ordinality: Option<&str>) -> String {
        let names: Vec<_> = self.names.iter().map(String::as_str).chain(ordinality).collect();
        format!(
            "unnest({}){} AS v({})",
            self.parameters.join(", "),
            if ordinality.is_some() { " WITH ORDINALITY" } else { "" },
            names.join(", ")
        )
    }
}

impl Builder<'_> {
    fn array(&mut self, arrays: &mut Arrays, name: String, array_type: u32) {
        self.types.push(array_type);
        arrays.parameters.push(format!("${}", self.types.len()));
        arrays.names.push(name);
    }

    /// Adds the array of a search column; gives in SQL what the column is compared with.
    fn comparand(&mut self, arrays: &mut Arrays, column: &SearchColumn) -> String {
        let (remote, local) = (column.remote, self.map.local(column.remote));
        let text = self.shape.text.contains(text_of_search(remote));
        self.sources.push(Source::Search(remote));
        self.array(arrays, format!("k{remote}"), if text { TEXT_ARRAY } else { local.array_type });
        let value = if text {
            format!("v.k{remote}::{}", local.base_type_sql)
        } else {
            format!("v.k{remote}")
        };
        search::comparand(self.map, column, &value)
    }

    /// Adds the array of a column that is set; gives its value in SQL.
    fn new_value(&mut self, arrays: &mut Arrays, remote: usize) -> String {
        let (columns, local) = (self.map.columns.len(), self.map.local(remote));
        let text = self.shape.text.contains(text_of_new(columns, remote));
        self.sources.push(Source::New(remote));
        self.array(arrays, format!("n{remote}"), if text { TEXT_ARRAY } else { local.array_type });
        if text { format!("v.n{remote}::{}", local.base_type_sql) } else { format!("v.n{remote}") }
    }

    fn column(&self, remote: usize) -> String {
        quote_ident(&self.map.remote.columns[remote].name)
    }

    /// [`search::equal`] where NULL is equal to NULL.
    ///
    /// `IS NOT DISTINCT FROM` would look its operator up by name, and no join can hash it. Arrays
    /// of one element are equal by the type's default equality, as elsewhere, or by both being
    /// NULL, and can be hashed where the type can: so a hash join does not need a column without
    /// NULLs, and rows that differ in few columns only do not all meet in one bucket.
    fn equal_or_both_null(&self, table: &str, column: &SearchColumn, value: &str) -> String {
        let (name, local) = (self.column(column.remote), self.map.local(column.remote));
        match &column.equality {
            Equality::Operator(operator) if local.is_array || local.array_type == 0 => format!(
                "({table}.{name} {operator} {value} OR ({table}.{name} IS NOT DISTINCT FROM NULL \
                 AND {value} IS NOT DISTINCT FROM NULL))"
            ),
            // The cast takes a domain away: the other side has none.
            Equality::Operator(_) => format!(
                "ARRAY[{table}.{name}::{}] OPERATOR(pg_catalog.=) ARRAY[{value}]",
                local.base_type_sql
            ),
            Equality::Text => format!(
                "ARRAY[{table}.{name}::pg_catalog.text COLLATE pg_catalog.\"C\"] \
                 OPERATOR(pg_catalog.=) ARRAY[{value}]"
            ),
        }
    }

    /// The condition that finds the rows of a table with a key.
    ///
    /// Written as `= ANY (ARRAY[value])`, which an index can look up but no merge join can use:
    /// else a whole index in order is a way to read the table, and the best one while the table is
    /// known to be empty; the plan would stay when it is empty no more.
    fn keys(&mut self, arrays: &mut Arrays) -> String {
        let map = self.map;
        let conditions: Vec<_> = map
            .search_columns()
            .iter()
            .map(|column| {
                let mut value = self.comparand(arrays, column);
                let is_element = has_binary_elements(map.local(column.remote));
                if is_element && matches!(column.equality, Equality::Operator(_)) {
                    value = format!("ANY (ARRAY[{value}])");
                }
                search::equal(map, column, "subscriber.", &value)
            })
            .collect();
        conditions.join(" AND ")
    }

    fn assignments(&mut self, arrays: &mut Arrays) -> Vec<(String, String)> {
        (0..self.map.columns.len())
            .filter(|remote| self.shape.set.contains(*remote))
            .map(|remote| (self.column(remote), self.new_value(arrays, remote)))
            .collect()
    }

    fn update(&mut self) -> String {
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        let set: Vec<_> = self
            .assignments(&mut arrays)
            .into_iter()
            .map(|(column, value)| format!("{column} = {value}"))
            .collect();
        format!(
            "UPDATE {} AS subscriber SET {} FROM {} WHERE {condition}",
            self.map.table.sql_only(),
            set.join(", "),
            arrays.unnested(None)
        )
    }

    fn delete(&mut self) -> String {
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        format!(
            "DELETE FROM {} AS subscriber USING {} WHERE {condition}",
            self.map.table.sql_only(),
            arrays.unnested(None)
        )
    }

    fn probe(&mut self) -> String {
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        format!(
            "SELECT 1 FROM {}, {} AS subscriber WHERE {condition} FOR NO KEY UPDATE OF subscriber",
            arrays.unnested(None),
            self.map.table.sql_only()
        )
    }

    /// An index has no addresses to give out, so the rows themselves are read.
    fn read_ahead(&mut self) -> String {
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        format!(
            "SELECT pg_catalog.count(subscriber.ctid) FROM {}, {} AS subscriber WHERE {condition}",
            arrays.unnested(None),
            self.map.table.sql_only()
        )
    }

    /// The rows identical to each class, numbered: one join of the table with all classes.
    ///
    /// Rows that are equal without being identical (`1.0` and `1.00`) are no hits: they may be
    /// identical to another class, and two classes would take one row. If too few are identical, the
    /// changes are made one by one, each to an equal row where none is identical; so the rows that are
    /// changed do not depend on what else is in the statement.
    ///
    /// `count` names one more array.
    fn hits(&mut self, count: Option<&str>) -> String {
        let map = self.map;
        let mut arrays = Arrays::default();
        let mut values = vec!["v.class".to_owned()];
        let mut conditions = Vec::new();
        let mut identical = Identical::default();
        for column in map.search_columns() {
            let remote = column.remote;
            if self.shape.nulls.contains(all_null(map.columns.len(), remote)) {
                // Unlike IS NULL, this is not true of a composite whose fields are all NULL.
                conditions.push(format!("t.{} IS NOT DISTINCT FROM NULL", self.column(remote)));
                continue;
            }
            values.push(format!("{} AS k{remote}", self.comparand(&mut arrays, column)));
            let value = format!("old.k{remote}");
            identical.add(map, column, "t.", &value);
            conditions.push(if self.shape.nulls.contains(some_null(remote)) {
                self.equal_or_both_null("t", column, &value)
            } else {
                search::equal(map, column, "t.", &value)
            });
        }
        conditions.extend(identical.condition());
        let mut carried = "old.class".to_owned();
        if let Some(count) = count {
            self.array(&mut arrays, count.to_owned(), INT4_ARRAY);
            values.push(format!("v.{count}"));
            carried = format!("{carried}, old.{count}");
        }
        if arrays.names.is_empty() {
            // One class, all of whose values are NULL.
            return format!(
                "WITH hit AS MATERIALIZED (SELECT t.tableoid AS relation, t.ctid AS address, \
                 1 AS class, pg_catalog.row_number() OVER () AS nth FROM {} AS t WHERE {})",
                map.table.sql_only(),
                conditions.join(" AND ")
            );
        }
        format!(
            "WITH old AS MATERIALIZED (SELECT {} FROM {}), \
             hit AS MATERIALIZED (SELECT t.tableoid AS relation, t.ctid AS address, {carried}, \
             pg_catalog.row_number() OVER (PARTITION BY old.class) AS nth \
             FROM {} AS t, old WHERE {})",
            values.join(", "),
            arrays.unnested(Some("class")),
            map.table.sql_only(),
            conditions.join(" AND ")
        )
    }

    /// A row's address is unique only together with its partition. The second comparison is no
    /// condition by which rows are found: it is checked again where a row has been changed since
    /// it was found, and its newest version has another address. Scans by address do
    /// that themselves only since minor versions of late 2025.
    fn by_address() -> &'static str {
        "subscriber.ctid OPERATOR(pg_catalog.=) hit.address \
         AND subscriber.tableoid OPERATOR(pg_catalog.=) hit.relation \
         AND (subscriber.ctid OPERATOR(pg_catalog.=) hit.address) IS NOT FALSE"
    }

    fn delete_equal(&mut self) -> String {
        let hits = self.hits(Some("wanted"));
        format!(
            "{hits} DELETE FROM {} AS subscriber USING hit \
             WHERE hit.nth OPERATOR(pg_catalog.<=) hit.wanted AND {}",
            self.map.table.sql_only(),
            Self::by_address()
        )
    }

    fn update_equal(&mut self) -> String {
        let hits = self.hits(None);
        let mut arrays = Arrays::default();
        let assignments = self.assignments(&mut arrays);
        self.array(&mut arrays, "class".to_owned(), INT4_ARRAY);
        self.array(&mut arrays, "nth".to_owned(), INT4_ARRAY);
        let set: Vec<_> =
            assignments.iter().map(|(column, value)| format!("{column} = {value}")).collect();
        format!(
            "{hits} UPDATE {} AS subscriber SET {} FROM hit, {} \
             WHERE v.class OPERATOR(pg_catalog.=) hit.class \
             AND v.nth OPERATOR(pg_catalog.=) hit.nth AND {}",
            self.map.table.sql_only(),
            set.join(", "),
            arrays.unnested(None),
            Self::by_address()
        )
    }
}
