//! The name of a table.

use std::fmt;

/// Schema and name of a table. Other relations, such as sequences, share the names of tables, and have
/// names of this type, too.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// Name of the schema.
    pub schema: String,
    /// Name within the schema.
    pub name: String,
}

/// `schema.name` for messages, without quotes.
impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.schema, self.name)
    }
}
