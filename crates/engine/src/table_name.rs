//! The name of a table.

use std::fmt::{self, Write as _};

/// Schema and name of a table. Other relations, such as sequences, share the names of tables, and have
/// names of this type, too.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// Name of the schema.
    pub schema: String,
    /// Name within the schema.
    pub name: String,
}

/// `schema.name` for messages, without quotes. New lines are escaped as psql does it, so that a name feigns no line.
impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_on_one_line(&self.schema, f)?;
        f.write_char('.')?;
        write_on_one_line(&self.name, f)
    }
}

fn write_on_one_line(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (index, line) in name.split('\n').enumerate() {
        if index > 0 {
            f.write_str("\\x0A")?;
        }
        f.write_str(line)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::TableName;

    #[test]
    fn a_name_stays_on_one_line() {
        let name = |name: &str| TableName { schema: "s".to_owned(), name: name.to_owned() };
        assert_eq!(name("t").to_string(), "s.t");
        assert_eq!(name("t\npublic.u  equal\n").to_string(), "s.t\\x0Apublic.u  equal\\x0A");
    }
}
