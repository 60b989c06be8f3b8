//! Names of tables, sequences and columns on the command line.

use engine::table_name::TableName;

use crate::publisher::dump_command::shell_quoted;
use crate::table_name::sql_name;

/// The name of a table or sequence; without a schema it is public. A name in double quotes may contain dots. No name
/// is folded to lower case.
pub(crate) fn split(name: &str) -> TableName {
    match name.contains('"').then(|| parts(name)).flatten().as_deref() {
        Some([name]) => TableName { schema: "public".to_owned(), name: name.clone() },
        Some([schema, name]) => TableName { schema: schema.clone(), name: name.clone() },
        _ => {
            let (schema, name) = name.split_once('.').unwrap_or(("public", name));
            TableName { schema: schema.to_owned(), name: name.to_owned() }
        }
    }
}

/// The name as [`split`] reads it, as one word of a shell command.
pub(crate) fn shell_word(table: &TableName) -> String {
    shell_quoted(&argument(table))
}

/// The name as [`split`] reads it: in double quotes only if it needs them.
pub(crate) fn argument(table: &TableName) -> String {
    let plain = table.to_string();
    if split(&plain) == *table { plain } else { sql_name(table) }
}

/// A table and its column; `None` if there is no dot between them.
pub(crate) fn split_column(name: &str) -> Option<(TableName, String)> {
    match name.contains('"').then(|| parts(name)).flatten().as_deref() {
        Some([name, column]) => {
            Some((TableName { schema: "public".to_owned(), name: name.clone() }, column.clone()))
        }
        Some([schema, name, column]) => {
            Some((TableName { schema: schema.clone(), name: name.clone() }, column.clone()))
        }
        _ => {
            let (table, column) = name.rsplit_once('.')?;
            (!column.is_empty()).then(|| (split(table), column.to_owned()))
        }
    }
}

/// The parts of a name between dots that are not quoted; `None` if it is not well formed.
fn parts(name: &str) -> Option<Vec<String>> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut chars = name.chars().peekable();
    loop {
        if chars.next_if_eq(&'"').is_some() {
            loop {
                match chars.next()? {
                    '"' if chars.next_if_eq(&'"').is_some() => part.push('"'),
                    '"' => break,
                    other => part.push(other),
                }
            }
        } else {
            while let Some(other) = chars.next_if(|c| *c != '.' && *c != '"') {
                part.push(other);
            }
        }
        if part.is_empty() {
            return None;
        }
        parts.push(std::mem::take(&mut part));
        match chars.next() {
            None => return Some(parts),
            Some('.') => {}
            Some(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, name: &str) -> TableName {
        TableName { schema: schema.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn names_with_and_without_quotes() {
        assert_eq!(split("t"), table("public", "t"));
        assert_eq!(split("Sales.Orders"), table("Sales", "Orders"));
        assert_eq!(split("public.a.b"), table("public", "a.b"));
        assert_eq!(split("\"a.b\".\"c \"\"d\"\"\""), table("a.b", "c \"d\""));
        assert_eq!(split("\"a.b\""), table("public", "a.b"));
        assert_eq!(split("s.\"a.b\""), table("s", "a.b"));
        // Not well formed: as it is.
        assert_eq!(split("it's \"odd"), table("public", "it's \"odd"));
        assert_eq!(split("s.t\"x\""), table("s", "t\"x\""));
    }

    #[test]
    fn a_written_name_is_read_as_it_is() {
        assert_eq!(shell_word(&table("it's", "o'clock")), r"'it'\''s.o'\''clock'");
        assert_eq!(argument(&table("public", "a.b")), "public.a.b");
        for table in [table("we.ird", "t.x"), table("s", "a\"b.c"), table("a\".b", "*")] {
            assert_eq!(split(&argument(&table)), table);
        }
    }

    #[test]
    fn columns() {
        let column =
            |schema: &str, name: &str, column: &str| Some((table(schema, name), column.to_owned()));
        assert_eq!(split_column("t.v"), column("public", "t", "v"));
        assert_eq!(split_column("s.t.v"), column("s", "t", "v"));
        assert_eq!(split_column("\"a.b\".\"c.d\""), column("public", "a.b", "c.d"));
        assert_eq!(split_column("\"a.b\".t.\"c.d\""), column("a.b", "t", "c.d"));
        assert_eq!(split_column("v"), None);
        assert_eq!(split_column("t."), None);
    }
}
