//! The name of a table in SQL and in JSON.

use engine::table_name::TableName;
use serde::{Deserialize, Serialize};
use wire::quote_ident;

/// The quoted, schema-qualified name.
pub(crate) fn sql_name(table: &TableName) -> String {
    format!("{}.{}", quote_ident(&table.schema), quote_ident(&table.name))
}

/// The fields of a [`TableName`] for serde: `#[serde(flatten, with = "TableNameFields")]`.
#[derive(Serialize, Deserialize)]
#[serde(remote = "TableName")]
pub(crate) struct TableNameFields {
    schema: String,
    name: String,
}
