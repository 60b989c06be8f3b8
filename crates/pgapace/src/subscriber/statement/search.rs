//! The conditions that find a row: each compares a column with a value.
//!
//! A column may store a value differently from how it was sent: with another precision or length.
//! The condition then applies the function that assignment applies (`Column::coercion`), in its
//! implicit form, which refuses a value that does not fit. Keys that may be rounded have no
//! comparison form, so such a table is locked as a whole and updated row by row.

use wire::quote_ident;

use crate::subscriber::catalogue::Equality;
use crate::subscriber::key_index;
use crate::subscriber::mapping::{SearchColumn, TableMap};

/// The expression that a column is compared with: a value of its base type as the column would
/// store it, in the form that the column's equality needs.
pub(super) fn comparand(map: &TableMap, column: &SearchColumn, value: &str) -> String {
    let stored = match &map.local(column.remote).coercion {
        Some(coercion) if column.coerced => coercion.apply(value),
        _ => value.to_owned(),
    };
    match column.equality {
        Equality::Operator(_) => match &column.collation {
            Some(collation) => format!("({stored} COLLATE {collation})"),
            None => stored,
        },
        Equality::Text => format!("({stored})::pg_catalog.text"),
    }
}

/// `comparand` as the only element of an array, if the column may be compared with one.
fn in_array(map: &TableMap, column: &SearchColumn, comparand: String) -> String {
    let local = map.local(column.remote);
    // An array cannot be the element of another one.
    if matches!(column.equality, Equality::Text) || local.array_type == 0 || local.is_array {
        return comparand;
    }
    format!("ANY (ARRAY[{comparand}])")
}

/// The condition that finds the rows whose key has one of many values; `comparand` is that of one of them. `prefix` is
/// that of [`equal`].
///
/// The planner must not be able to merge the table with the values. A plan that was made while the table was empty
/// would read the whole index in order, even where merge joins are disabled, and keep doing so after the table has
/// grown. Arrays of values cannot be merged. A key that is an array itself is compared with both ends of a range.
pub(super) fn is_one_of(
    map: &TableMap,
    column: &SearchColumn,
    prefix: &str,
    comparand: String,
) -> String {
    let value = in_array(map, column, comparand);
    let table = &map.table;
    // The server must see an equality to choose partitions, and Citus to choose shards.
    let as_range = map.local(column.remote).is_array
        && column.equality.is_built_in()
        && !table.partitioned
        && table.placement.is_plain();
    if !as_range {
        return equal(map, column, prefix, &value);
    }
    let stored = stored(map, column, prefix);
    ["OPERATOR(pg_catalog.>=)", "OPERATOR(pg_catalog.<=)"]
        .map(|operator| format!("{stored} {operator} {value}"))
        .join(" AND ")
}

/// Replaces the conditions on columns of the key by one on the whole key, if it is compared as a row. `compared` are the
/// columns with their comparands.
pub(super) fn whole_key(
    map: &TableMap,
    prefix: &str,
    compared: &[(&SearchColumn, String)],
) -> Option<String> {
    let order = map.compared_as_row.as_ref()?;
    let find = |remote: &usize| compared.iter().find(|(column, _)| column.remote == *remote);
    let found = order.iter().map(find).collect::<Option<Vec<_>>>()?;
    let columns: Vec<_> = found.iter().map(|(column, _)| stored(map, column, prefix)).collect();
    let values: Vec<_> = found.iter().map(|(_, comparand)| comparand.clone()).collect();
    let equal: Vec<_> =
        found.iter().map(|(column, comparand)| equal(map, column, prefix, comparand)).collect();
    Some(key_index::row_condition(&columns, &values, &equal.join(" AND ")))
}

/// The column as its equality takes it.
///
/// The operators of anyenum take no domain over an enum, unlike those of anyarray and anyrange
/// (`check_generic_type_consistency` in `parse_coerce.c`). An index serves the column with this cast as well.
fn stored(map: &TableMap, column: &SearchColumn, prefix: &str) -> String {
    let local = map.local(column.remote);
    let name = quote_ident(&map.remote.columns[column.remote].name);
    if local.is_domain_over_enum() {
        format!("{prefix}{name}::{}", local.base_type_sql)
    } else {
        format!("{prefix}{name}")
    }
}

/// The condition that a column equals `comparand`, with the column's equality. `prefix` precedes
/// the column's name: empty, or a table name with a dot.
pub(super) fn equal(
    map: &TableMap,
    column: &SearchColumn,
    prefix: &str,
    comparand: &str,
) -> String {
    match &column.equality {
        Equality::Operator(operator) => {
            format!("{} {operator} {comparand}", stored(map, column, prefix))
        }
        Equality::Text => format!(
            "({prefix}{}::pg_catalog.text COLLATE pg_catalog.\"C\") OPERATOR(pg_catalog.=) \
             {comparand}",
            quote_ident(&map.remote.columns[column.remote].name)
        ),
    }
}

/// The condition that a row is identical to the searched row, in the columns where an equal value
/// need not be identical (`1.0` and `1.00`). It compares the stored bytes (`record_image_eq`).
/// `None` if there are no such columns.
///
/// A column without an equality is compared as text, which is exact, so it adds no condition.
#[derive(Debug, Default)]
pub(super) struct Identical {
    stored: Vec<String>,
    searched: Vec<String>,
}

impl Identical {
    /// Adds a column; the parameters are those of [`equal`].
    pub(super) fn add(
        &mut self,
        map: &TableMap,
        column: &SearchColumn,
        prefix: &str,
        comparand: &str,
    ) {
        let local = map.local(column.remote);
        if matches!(column.equality, Equality::Text) || local.equal_is_identical() {
            return;
        }
        // The cast removes a domain, because the comparand has none.
        let name = quote_ident(&map.remote.columns[column.remote].name);
        self.stored.push(format!("{prefix}{name}::{}", local.base_type_sql));
        self.searched.push(comparand.to_owned());
    }

    pub(super) fn condition(&self) -> Option<String> {
        // Without the casts to record, the grammar would compare column by column.
        (!self.stored.is_empty()).then(|| {
            format!(
                "ROW({})::pg_catalog.record OPERATOR(pg_catalog.*=) ROW({})::pg_catalog.record",
                self.stored.join(", "),
                self.searched.join(", ")
            )
        })
    }
}
