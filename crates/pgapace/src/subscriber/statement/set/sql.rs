//! The SQL of set statements, with one array parameter per column, or one of whole rows.
//!
//! Values in binary format are an array of the column's base type. Values in text format are a
//! `text[]`, and the statement casts its elements to the base type, which calls the type's input
//! function, or calls that function itself. The base type has no length, so the assignment to the column still checks lengths and
//! domains.
//!
//! Keys are not compared with a plain `=`: a generic plan that was made while the table was empty would read the
//! whole index ([`search::is_one_of`]).

use wire::quote_ident;

use crate::subscriber::catalogue::Equality;
use crate::subscriber::citus::Placement;
use crate::subscriber::mapping::{SearchColumn, TableMap};
use crate::subscriber::oid::{INT4_ARRAY, INT8, TEXT_ARRAY};
use crate::subscriber::statement::cache::{Check, Shape};
use crate::subscriber::statement::row::{Source, Statement};
use crate::subscriber::statement::search::{self, Identical};

/// A change of many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SetOperation {
    Update,
    /// The same while unique values move between the rows.
    UpdateMoving,
    /// Updates of keys, of which some rows take those of others.
    UpdateKeys,
    Delete,
    /// Finds the rows and changes nothing.
    Probe,
    /// Reads the rows without locks; returns their number.
    Prefetch,
    /// Deletes some of the rows that equal each class of rows. Additional parameter: the number of
    /// rows to delete per class. If it lists the missing rows: see [`Builder::listed`].
    DeleteEqual,
    /// Updates some of the rows that equal each class of rows. Additional parameters: the class of
    /// each new row, and its number within the class, both from 1.
    UpdateEqual,
    /// The same while unique values move between the rows.
    UpdateEqualMoving,
}

/// Member of [`Shape::text`]: the search value of a column is text.
pub(crate) fn text_of_search(column: usize) -> usize {
    column
}

/// Member of [`Shape::text`]: the new value of a column is text.
pub(crate) fn text_of_new(columns: usize, column: usize) -> usize {
    columns + column
}

/// Member of [`Shape::nulls`]: the search column is NULL in some of the searched rows.
pub(crate) fn some_null(column: usize) -> usize {
    column
}

/// Member of [`Shape::nulls`]: the search column is NULL in all searched rows, and has no array.
pub(crate) fn all_null(columns: usize, column: usize) -> usize {
    columns + column
}

/// Lets the planner choose a hash join and one scan of the table, depending on the array sizes.
/// Without a key there may be no index, and then a lookup per row would be a scan per row. Merge
/// joins stay disabled: the planner has no statistics of the arrays' values, overestimates the cost
/// of a hash join, and would sort the whole table.
///
/// With the default cost of a page that is read out of order, it prefers a hash table of 300 000 rows to 10 000 lookups
/// in an index, which take a third of the time and no temporary file. Native's worker uses an index at any cost.
pub(crate) const PLANNER_FREE: &str = "SELECT \
    pg_catalog.set_config('enable_seqscan', 'on', true), \
    pg_catalog.set_config('enable_hashjoin', 'on', true), \
    pg_catalog.set_config('random_page_cost', LEAST(1.1, \
      pg_catalog.current_setting('random_page_cost')::pg_catalog.float8)::pg_catalog.text, true), \
    pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true)";

/// Plans a statement for one row with its values: see [`super::leaves`].
pub(crate) const CUSTOM_PLANS: &str =
    "SELECT pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true)";

/// Restores the settings that every session has; where Citus is loaded, plans are custom plans.
pub(crate) const PLANNER_BOUND: &str = "SELECT \
    pg_catalog.set_config('enable_seqscan', 'off', true), \
    pg_catalog.set_config('enable_hashjoin', 'off', true), \
    pg_catalog.set_config('random_page_cost', NULL, true), \
    pg_catalog.set_config('plan_cache_mode', CASE \
      WHEN pg_catalog.current_setting('citus.version', true) IS NULL THEN 'force_generic_plan' \
      ELSE 'force_custom_plan' END, true)";

/// The largest number of arguments of a function (`FUNC_MAX_ARGS`).
const ARGUMENTS: usize = 100;

/// The condition that all of these columns are NULL; none if there are none.
///
/// Columns are often NULL together, and the planner takes them for independent: with one test for each, it expects one row
/// where there are thousands, and compares each of them with each searched row. It takes a function for true for a third
/// of the rows (`function_selectivity` in `plancat.c`). Like IS NOT DISTINCT FROM NULL and unlike IS NULL, `num_nulls` does not
/// count a composite value whose fields are all NULL.
fn are_null(columns: &[String]) -> Option<String> {
    let counts = columns
        .chunks(ARGUMENTS)
        .map(|columns| format!("pg_catalog.num_nulls({})", columns.join(", ")));
    let sum = counts.reduce(|sum, count| format!("{sum} OPERATOR(pg_catalog.+) {count}"))?;
    Some(format!("pg_catalog.int4eq({sum}, {})", columns.len()))
}

/// Returns the statement of a shape.
pub(crate) fn statement(map: &TableMap, operation: SetOperation, shape: &Shape<'_>) -> Statement {
    let whole = map.row_values.as_ref().filter(|_| shape.whole);
    let types = whole.map(|form| form.row_type.array).into_iter().collect();
    let mut builder = Builder { map, shape, types, sources: Vec::new() };
    let sql = match operation {
        SetOperation::Update => builder.update(),
        SetOperation::UpdateMoving => builder.update_moving(),
        SetOperation::UpdateKeys => builder.update_keys(),
        SetOperation::Delete => builder.delete(),
        SetOperation::Probe => builder.probe(),
        SetOperation::Prefetch => builder.prefetch(),
        SetOperation::DeleteEqual => builder.delete_equal(),
        SetOperation::UpdateEqual => builder.update_equal(),
        SetOperation::UpdateEqualMoving => builder.update_moving(),
    };
    Statement { sql, types: builder.types, sources: builder.sources }
}

pub(super) struct Builder<'a> {
    pub(super) map: &'a TableMap,
    pub(super) shape: &'a Shape<'a>,
    pub(super) types: Vec<u32>,
    pub(super) sources: Vec<Source>,
}

/// Array parameters, and the names of their columns in the FROM clause.
pub(super) struct Arrays {
    /// The name of the FROM item.
    item: &'static str,
    parameters: Vec<String>,
    names: Vec<String>,
    /// The first parameter is one of whole rows: their fields are the columns that find rows, and with a key new values.
    has_rows: bool,
}

impl Default for Arrays {
    fn default() -> Self {
        Self { item: "v", parameters: Vec::new(), names: Vec::new(), has_rows: false }
    }
}

impl Arrays {
    /// The FROM item with all arrays side by side. `unnest` is not qualified, because the
    /// grammar accepts several arrays only then. The search path is empty, so the function is that
    /// of `pg_catalog`.
    pub(super) fn unnested(&self, ordinality: Option<&str>) -> String {
        let names: Vec<_> = self.names.iter().map(String::as_str).chain(ordinality).collect();
        format!(
            "unnest({}){} AS {}({})",
            self.parameters.join(", "),
            if ordinality.is_some() { " WITH ORDINALITY" } else { "" },
            self.item,
            names.join(", ")
        )
    }
}

impl Builder<'_> {
    pub(super) fn array(&mut self, arrays: &mut Arrays, name: String, array_type: u32) {
        self.types.push(array_type);
        arrays.parameters.push(format!("${}", self.types.len()));
        arrays.names.push(name);
    }

    /// The arrays of the values that find the rows. Whole rows are the first parameter of the statement.
    ///
    /// Each field gets a name by its place, because columns may have other names or places by now. A column of the
    /// subscriber's table in a row is named as the array of the published column would be.
    fn searched(&self, finds: &[SearchColumn]) -> Arrays {
        let map = self.map;
        if !self.shape.whole {
            return Arrays::default();
        }
        let found = |remote| finds.iter().any(|column| column.remote == remote);
        let names = (0..map.table.columns.len()).map(|local| {
            match map.columns.iter().position(|column| *column == local) {
                Some(remote) if found(remote) => format!("k{remote}"),
                Some(remote) => format!("n{remote}"),
                None => format!("c{local}"),
            }
        });
        let (parameters, names) = (vec!["$1".to_owned()], names.collect());
        Arrays { parameters, names, has_rows: true, ..Arrays::default() }
    }

    /// The condition that fields of whole rows have not moved.
    fn fields_are_in_place(&self) -> Option<String> {
        self.shape.whole.then(|| self.map.table.has_no_new_columns())
    }

    /// Adds the array of a search column; returns the expression that the column is compared with.
    fn comparand(&mut self, arrays: &mut Arrays, column: &SearchColumn) -> String {
        let (remote, local) = (column.remote, self.map.local(column.remote));
        if arrays.has_rows {
            return search::comparand(self.map, column, &format!("{}.k{remote}", arrays.item));
        }
        let text = self.shape.text.contains(text_of_search(remote));
        self.sources.push(Source::Search(remote));
        self.array(arrays, format!("k{remote}"), if text { TEXT_ARRAY } else { local.array_type });
        let value =
            if text { local.read_text(&format!("v.k{remote}")) } else { format!("v.k{remote}") };
        search::comparand(self.map, column, &value)
    }

    /// Adds the array of a column to set; returns the expression for its value.
    pub(super) fn new_value(&mut self, arrays: &mut Arrays, remote: usize) -> String {
        let (columns, local) = (self.map.columns.len(), self.map.local(remote));
        if arrays.has_rows {
            return format!("v.n{remote}");
        }
        let text = self.shape.text.contains(text_of_new(columns, remote));
        self.sources.push(Source::New(remote));
        self.array(arrays, format!("n{remote}"), if text { TEXT_ARRAY } else { local.array_type });
        let value = format!("v.n{remote}");
        if text { local.read_text(&value) } else { value }
    }

    pub(super) fn column(&self, remote: usize) -> String {
        quote_ident(&self.map.remote.columns[remote].name)
    }

    /// Like [`search::equal`], but NULL equals NULL.
    ///
    /// `IS NOT DISTINCT FROM` would look up its operator by name, and no join can hash it. Arrays
    /// of one element are equal by the type's default equality, or if both elements are NULL. They
    /// can be hashed if the type can. So a hash join does not need a column without NULLs, and rows
    /// that differ only in a few columns do not all fall into one bucket.
    fn equal_or_both_null(&self, table: &str, column: &SearchColumn, value: &str) -> String {
        let (name, local) = (self.column(column.remote), self.map.local(column.remote));
        match &column.equality {
            Equality::Operator(operator) if local.is_array || local.array_type == 0 => format!(
                "({table}.{name} {operator} {value} OR ({table}.{name} IS NOT DISTINCT FROM NULL \
                 AND {value} IS NOT DISTINCT FROM NULL))"
            ),
            // The cast removes a domain, because the other side has none.
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

    /// The condition that finds the rows of a table with a key: see [`search::is_one_of`].
    pub(super) fn keys(&mut self, arrays: &mut Arrays) -> String {
        self.all_equal(arrays, self.map.search_columns())
    }

    /// The condition that the row has all of these values.
    fn all_equal(&mut self, arrays: &mut Arrays, columns: &[SearchColumn]) -> String {
        let compared: Vec<_> =
            columns.iter().map(|column| (column, self.comparand(arrays, column))).collect();
        self.all_compared(compared)
    }

    /// The condition that each column has the value of its expression.
    fn all_compared(&self, compared: Vec<(&SearchColumn, String)>) -> String {
        let map = self.map;
        let whole = search::whole_key(map, "subscriber.", &compared);
        let in_key = |remote| map.compared_as_row.as_ref().is_some_and(|key| key.contains(&remote));
        let others = compared.into_iter().filter(|(column, _)| !in_key(column.remote));
        let equal = |(column, value): (&SearchColumn, String)| {
            search::is_one_of(map, column, "subscriber.", value)
        };
        let conditions: Vec<_> =
            whole.into_iter().chain(others.map(equal)).chain(map.table.is_this_one()).collect();
        conditions.join(" AND ")
    }

    /// The published columns that the statement writes.
    pub(super) fn set_columns(&self) -> Vec<usize> {
        (0..self.map.columns.len()).filter(|remote| self.shape.set.contains(*remote)).collect()
    }

    fn assignments(&mut self, arrays: &mut Arrays) -> Vec<(String, String)> {
        self.set_columns()
            .into_iter()
            .map(|remote| (self.column(remote), self.new_value(arrays, remote)))
            .collect()
    }

    fn update(&mut self) -> String {
        let mut finds = self.map.search_columns().to_vec();
        finds.extend(self.map.compared_identities());
        let mut arrays = self.searched(&finds);
        let conditions = [Some(self.all_equal(&mut arrays, &finds)), self.fields_are_in_place()];
        let mut set = Vec::new();
        for remote in self.set_columns() {
            let value = self.new_or_kept_value(&mut arrays, remote);
            set.push(format!("{} = {value}", self.column(remote)));
        }
        format!(
            "UPDATE {} AS subscriber SET {} FROM {} WHERE {}",
            self.map.table.sql_only(),
            set.join(", "),
            arrays.unnested(self.nth()),
            conditions.into_iter().flatten().collect::<Vec<_>>().join(" AND ")
        )
    }

    /// The name of the numbers of the rows, if the statement returns them.
    fn nth(&self) -> Option<&'static str> {
        (self.shape.check == Check::Listed).then_some("nth")
    }

    fn delete(&mut self) -> String {
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        format!(
            "DELETE FROM {} AS subscriber USING {} WHERE {condition}",
            self.map.table.sql_only(),
            arrays.unnested(self.nth())
        )
    }

    fn probe(&mut self) -> String {
        let mut arrays = Arrays::default();
        let mut finds = self.map.search_columns().to_vec();
        finds.extend(self.map.compared_identities());
        let condition = self.all_equal(&mut arrays, &finds);
        // Citus locks rows only in statements that need one shard.
        let lock = match self.map.table.placement {
            Placement::Distributed { .. } => "",
            _ => " FOR NO KEY UPDATE OF subscriber",
        };
        format!(
            "SELECT {} FROM {}, {} AS subscriber WHERE {condition}{lock}",
            if self.nth().is_some() { "v.nth" } else { "1" },
            arrays.unnested(self.nth()),
            self.map.table.sql_only()
        )
    }

    /// An index-only scan does not return ctid, so the rows themselves are read.
    fn prefetch(&mut self) -> String {
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
    /// Rows that are equal but not identical (`1.0` and `1.00`) do not match. They may be identical
    /// to another class, and then two classes would take the same row. If too few rows are
    /// identical, the changes are applied one by one, each to an equal row if none is identical. So
    /// the affected rows do not depend on the other changes in the statement.
    ///
    /// If missing rows are listed, a row that is equal and not identical is a hit, too, but not the `same`. Whether
    /// there is a `same` is the second part of the result.
    ///
    /// Values that are read from text, or rounded, are read once, and stored (`old`). Those of whole rows are complete, and
    /// are not stored a second time.
    ///
    /// `count` is the name of an additional array.
    pub(super) fn hits(&mut self, count: Option<&str>) -> (String, bool) {
        let map = self.map;
        let mut arrays = self.searched(map.search_columns());
        if arrays.has_rows {
            arrays.item = "old";
        }
        let mut values = vec!["v.class".to_owned()];
        let mut conditions = Vec::new();
        let mut all_null_columns = Vec::new();
        let mut identical = Identical::default();
        for column in map.search_columns() {
            let remote = column.remote;
            if self.shape.nulls.contains(all_null(map.columns.len(), remote)) {
                all_null_columns.push(format!("t.{}", self.column(remote)));
                continue;
            }
            let mut value = self.comparand(&mut arrays, column);
            if !arrays.has_rows {
                values.push(format!("{value} AS k{remote}"));
                value = format!("old.k{remote}");
            }
            identical.add(map, column, "t.", &value);
            conditions.push(if self.shape.nulls.contains(some_null(remote)) {
                self.equal_or_both_null("t", column, &value)
            } else {
                search::equal(map, column, "t.", &value)
            });
        }
        let (mut carried, mut class) = ("old.class".to_owned(), "old.class".to_owned());
        let same = identical.condition().filter(|_| self.shape.check == Check::Listed);
        match (&same, identical.condition()) {
            (Some(same), _) => {
                carried = format!("{carried}, {same} AS same");
                class = format!("{class}, {same}");
            }
            (None, identical) => conditions.extend(identical),
        }
        conditions.extend(are_null(&all_null_columns));
        conditions.extend(map.table.is_this_one());
        conditions.extend(self.fields_are_in_place());
        if let Some(count) = count {
            self.array(&mut arrays, count.to_owned(), INT4_ARRAY);
            values.push(format!("v.{count}"));
            carried = format!("{carried}, old.{count}");
        }
        if arrays.names.is_empty() {
            // A single class, whose values are all NULL.
            let hits = format!(
                "hit AS MATERIALIZED (SELECT t.tableoid AS relation, t.ctid AS address, \
                 1 AS class, pg_catalog.row_number() OVER () AS nth FROM {} AS t WHERE {})",
                map.table.sql_only(),
                conditions.join(" AND ")
            );
            return (hits, false);
        }
        let unnested = arrays.unnested(Some("class"));
        let (stored, old) = match arrays.has_rows {
            true => (String::new(), unnested.as_str()),
            false => {
                let values = values.join(", ");
                (format!("old AS MATERIALIZED (SELECT {values} FROM {unnested}), "), "old")
            }
        };
        let hits = format!(
            "{stored}hit AS MATERIALIZED (SELECT t.tableoid AS relation, t.ctid AS address, {carried}, \
             pg_catalog.row_number() OVER (PARTITION BY {class}) AS nth \
             FROM {} AS t, {old} WHERE {})",
            map.table.sql_only(),
            conditions.join(" AND ")
        );
        (hits, same.is_some())
    }

    /// A ctid is unique only within its partition. The last comparison is not used to find rows: it
    /// is evaluated again if another session changed the row after it was found, and its newest
    /// version has another ctid. A TID scan rechecks that itself only since the minor releases of
    /// late 2025.
    fn by_address() -> &'static str {
        "subscriber.ctid OPERATOR(pg_catalog.=) hit.address \
         AND subscriber.tableoid OPERATOR(pg_catalog.=) hit.relation \
         AND (subscriber.ctid OPERATOR(pg_catalog.=) hit.address) IS NOT FALSE"
    }

    fn delete_equal(&mut self) -> String {
        let table = self.map.table.sql_only();
        if self.shape.check == Check::Listed {
            return self
                .listed(|_, chosen| format!("DELETE FROM {table} AS subscriber USING {chosen}"));
        }
        let (hits, _) = self.hits(Some("wanted"));
        format!(
            "WITH {hits} DELETE FROM {table} AS subscriber USING hit \
             WHERE hit.nth OPERATOR(pg_catalog.<=) hit.wanted AND {}",
            Self::by_address()
        )
    }

    fn update_equal(&mut self) -> String {
        let table = self.map.table.sql_only();
        let update = |set: &[(String, String)], chosen: &str| {
            let set: Vec<_> =
                set.iter().map(|(column, value)| format!("{column} = {value}")).collect();
            format!("UPDATE {table} AS subscriber SET {} FROM {chosen}", set.join(", "))
        };
        if self.shape.check == Check::Listed {
            return self.listed(update);
        }
        let (hits, _) = self.hits(None);
        let mut arrays = Arrays::default();
        let set = self.assignments(&mut arrays);
        self.nth_of_class(&mut arrays);
        let chosen = format!("hit, {} WHERE {}", arrays.unnested(None), Self::is_nth_hit());
        format!("WITH {hits} {}", update(&set, &chosen))
    }

    /// A change of rows that equal each class, which returns the numbers, from 1 on, of the changes whose row is
    /// missing, and at last minus the number of rows that it changed. `change` gets the columns to set, and the rows.
    ///
    /// Additional parameters: the number of the change that looks for each of the rows to find, the class of each
    /// change, its number within the class, the number of changes. A row is missing if nothing is equal to any of the
    /// rows that its change looks for. If something is, which other sessions may have locked meanwhile, it is neither
    /// found nor missing.
    fn listed(&mut self, change: impl FnOnce(&[(String, String)], &str) -> String) -> String {
        let mut arrays = Arrays::default();
        let set = self.assignments(&mut arrays);
        let (hits, distinguishes) = self.hits(Some("sought"));
        self.nth_of_class(&mut arrays);
        let same = if distinguishes { " AND hit.same" } else { "" };
        let chosen =
            format!("hit, {} WHERE {}{same}", arrays.unnested(Some("number")), Self::is_nth_hit());
        self.types.push(INT8);
        format!(
            "WITH {hits}, found AS ({} RETURNING v.number) SELECT sought.nth \
             FROM pg_catalog.generate_series(1, ${}) AS sought(nth) \
             WHERE NOT (sought.nth OPERATOR(pg_catalog.=) ANY (SELECT found.number FROM found)) \
             AND NOT (sought.nth OPERATOR(pg_catalog.=) \
               ANY (SELECT hit.sought::pg_catalog.int8 FROM hit)) \
             UNION ALL SELECT OPERATOR(pg_catalog.-) pg_catalog.count(*) FROM found",
            change(&set, &chosen),
            self.types.len(),
        )
    }

    /// Adds the class of each change, and its number within the class.
    pub(super) fn nth_of_class(&mut self, arrays: &mut Arrays) {
        self.array(arrays, "class".to_owned(), INT4_ARRAY);
        self.array(arrays, "nth".to_owned(), INT4_ARRAY);
    }

    /// The condition that a row is the one of a change.
    pub(super) fn is_nth_hit() -> String {
        format!(
            "v.class OPERATOR(pg_catalog.=) hit.class \
             AND v.nth OPERATOR(pg_catalog.=) hit.nth AND {}",
            Self::by_address()
        )
    }
}
