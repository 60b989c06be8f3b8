//! Quoting of identifiers and literals in SQL text.

/// Quotes an identifier, even if it needs no quotes: `a"b` becomes `"a""b"`.
///
/// Source: `PQescapeIdentifier`, `src/interfaces/libpq/fe-exec.c`.
pub fn quote_ident(ident: &str) -> String {
    let mut quoted = String::with_capacity(ident.len() + 2);
    quoted.push('"');
    for c in ident.chars() {
        if c == '"' {
            quoted.push('"');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

/// Quotes a string literal: `it's` becomes `'it''s'`. A literal with a backslash becomes ` E'...'`,
/// which has the same meaning under every setting of `standard_conforming_strings`. The leading
/// space separates the E from a preceding word.
///
/// Source: `PQescapeLiteral`, `src/interfaces/libpq/fe-exec.c`.
pub fn quote_literal(literal: &str) -> String {
    let escape = literal.contains('\\');
    let mut quoted = String::with_capacity(literal.len() + 4);
    quoted.push_str(if escape { " E'" } else { "'" });
    for c in literal.chars() {
        if c == '\'' || c == '\\' {
            quoted.push(c);
        }
        quoted.push(c);
    }
    quoted.push('\'');
    quoted
}

/// Quotes a string literal in a replication command, in which a backslash is a character as any other: `a\b'` becomes
/// `'a\b'''`.
///
/// Source: `src/backend/replication/repl_scanner.l`, which knows no `E'...'`.
pub fn quote_replication_literal(literal: &str) -> String {
    format!("'{}'", literal.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes() {
        assert_eq!(quote_ident("plain"), "\"plain\"");
        assert_eq!(quote_ident("a\"b c"), "\"a\"\"b c\"");
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal(r"a\b'"), r" E'a\\b'''");
        assert_eq!(quote_literal(""), "''");
        assert_eq!(quote_replication_literal(r"a\b'"), r"'a\b'''");
    }
}
