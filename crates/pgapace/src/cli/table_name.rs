//! Names of tables, sequences and columns on the command line.

/// Schema and name; without a schema it is public. A name in double quotes may contain dots. No name
/// is folded to lower case.
pub(crate) fn split(name: &str) -> (String, String) {
    match name.contains('"').then(|| parts(name)).flatten().as_deref() {
        Some([name]) => ("public".to_owned(), name.clone()),
        Some([schema, name]) => (schema.clone(), name.clone()),
        _ => {
            let (schema, name) = name.split_once('.').unwrap_or(("public", name));
            (schema.to_owned(), name.to_owned())
        }
    }
}

/// A table and its column; `None` if there is no dot between them.
pub(crate) fn split_column(name: &str) -> Option<((String, String), String)> {
    match name.contains('"').then(|| parts(name)).flatten().as_deref() {
        Some([table, column]) => Some((("public".to_owned(), table.clone()), column.clone())),
        Some([schema, table, column]) => Some(((schema.clone(), table.clone()), column.clone())),
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

    fn pair(schema: &str, name: &str) -> (String, String) {
        (schema.to_owned(), name.to_owned())
    }

    #[test]
    fn names_with_and_without_quotes() {
        assert_eq!(split("t"), pair("public", "t"));
        assert_eq!(split("Sales.Orders"), pair("Sales", "Orders"));
        assert_eq!(split("public.a.b"), pair("public", "a.b"));
        assert_eq!(split("\"a.b\".\"c \"\"d\"\"\""), pair("a.b", "c \"d\""));
        assert_eq!(split("\"a.b\""), pair("public", "a.b"));
        assert_eq!(split("s.\"a.b\""), pair("s", "a.b"));
        // Not well formed: as it is.
        assert_eq!(split("it's \"odd"), pair("public", "it's \"odd"));
        assert_eq!(split("s.t\"x\""), pair("s", "t\"x\""));
    }

    #[test]
    fn columns() {
        let column =
            |schema: &str, table: &str, name: &str| Some((pair(schema, table), name.to_owned()));
        assert_eq!(split_column("t.v"), column("public", "t", "v"));
        assert_eq!(split_column("s.t.v"), column("s", "t", "v"));
        assert_eq!(split_column("\"a.b\".\"c.d\""), column("public", "a.b", "c.d"));
        assert_eq!(split_column("\"a.b\".t.\"c.d\""), column("a.b", "t", "c.d"));
        assert_eq!(split_column("v"), None);
        assert_eq!(split_column("t."), None);
    }
}
