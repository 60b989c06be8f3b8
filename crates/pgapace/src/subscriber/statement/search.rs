//! The conditions by which a row is found: a column and the value that it must have.

use wire::quote_ident;

use crate::subscriber::catalogue::Equality;
use crate::subscriber::mapping::{SearchColumn, TableMap};

/// What a column is compared with: a value of its base type as the column would store it, in the
/// form that its equality takes.
pub(super) fn comparand(map: &TableMap, column: &SearchColumn, value: &str) -> String {
    let stored = match &map.local(column.remote).coercion {
        Some(coercion) if column.coerced => coercion.apply(value),
        _ => value.to_owned(),
    };
    match column.equality {
        Equality::Operator(_) => stored,
        Equality::Text => format!("({stored})::pg_catalog.text"),
    }
}

/// `column = comparand`, as the subscriber compares the column. `prefix` is what stands before the
/// column's name: nothing, or the name of its table with a dot.
pub(super) fn equal(
    map: &TableMap,
    column: &SearchColumn,
    prefix: &str,
    comparand: &str,
) -> String {
    let name = quote_ident(&map.remote.columns[column.remote].name);
    match &column.equality {
        Equality::Operator(operator) => format!("{prefix}{name} {operator} {comparand}"),
        Equality::Text => format!(
            "({prefix}{name}::pg_catalog.text COLLATE pg_catalog.\"C\") OPERATOR(pg_catalog.=) \
             {comparand}"
        ),
    }
}

/// That a row is identical to what is searched, in the columns where one that is equal need not be
/// (`1.0` and `1.00`): by the bytes that are stored (`record_image_eq`). `None` without such columns.
///
/// Only these may be chosen freely among: what has no equality is compared by its text, and a key
/// finds one row.
#[derive(Debug, Default)]
pub(super) struct Identical {
    stored: Vec<String>,
    searched: Vec<String>,
}

impl Identical {
    /// Takes a column, with what [`equal`] takes.
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
        // The cast takes a domain away: what is searched has none.
        let name = quote_ident(&map.remote.columns[column.remote].name);
        self.stored.push(format!("{prefix}{name}::{}", local.base_type_sql));
        self.searched.push(comparand.to_owned());
    }

    pub(super) fn condition(&self) -> Option<String> {
        // Without the casts the grammar would compare column by column.
        (!self.stored.is_empty()).then(|| {
            format!(
                "ROW({})::pg_catalog.record OPERATOR(pg_catalog.*=) ROW({})::pg_catalog.record",
                self.stored.join(", "),
                self.searched.join(", ")
            )
        })
    }
}
