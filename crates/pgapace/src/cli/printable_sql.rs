//! SQL statements without control characters but new lines, for a terminal, which would obey them.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::printable::is_safe;

/// The same statement, in which control characters of literals and of quoted names are written as escapes.
///
/// Source: "Lexical Structure" in PostgreSQL's documentation (`E'...'`, `U&"..."`).
pub(super) fn printable(sql: &str) -> Cow<'_, str> {
    if !sql.contains(is_unsafe) {
        return sql.into();
    }
    let mut shown = String::with_capacity(sql.len() + 32);
    let mut rest = sql;
    while let Some(start) = rest.find(['\'', '"']) {
        let quote = if rest[start..].starts_with('"') { '"' } else { '\'' };
        let (before, quoted) = rest.split_at(start);
        let escapes = quote == '\'' && before.ends_with('E');
        let end = 1 + length(&quoted[1..], quote, escapes);
        let (quoted, after) = quoted.split_at(end);
        shown.push_str(before);
        if !quoted.contains(is_unsafe) {
            shown.push_str(quoted);
        } else if quote == '"' {
            push_name(&mut shown, quoted);
        } else {
            push_literal(&mut shown, quoted, escapes);
        }
        rest = after;
    }
    shown.push_str(rest);
    shown.into()
}

fn is_unsafe(c: char) -> bool {
    !is_safe(c)
}

/// The length up to and with the closing quote. A doubled quote is a quote.
fn length(text: &str, quote: char, escapes: bool) -> usize {
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if escapes && c == '\\' {
            chars.next();
        } else if c == quote && chars.next_if(|(_, next)| *next == quote).is_none() {
            return at + 1;
        }
    }
    text.len()
}

fn push_name(shown: &mut String, quoted: &str) {
    shown.push_str("U&");
    for c in quoted.chars() {
        match c {
            '\\' => shown.push_str("\\\\"),
            c if is_unsafe(c) => {
                let _ = write!(shown, "\\{:04X}", u32::from(c));
            }
            c => shown.push(c),
        }
    }
}

fn push_literal(shown: &mut String, quoted: &str, escapes: bool) {
    if !escapes {
        shown.push('E');
    }
    for c in quoted.chars() {
        match c {
            '\\' if !escapes => shown.push_str("\\\\"),
            '\t' => shown.push_str("\\t"),
            '\r' => shown.push_str("\\r"),
            c if is_unsafe(c) && c.is_ascii() => {
                let _ = write!(shown, "\\x{:02X}", u32::from(c));
            }
            c if is_unsafe(c) => {
                let _ = write!(shown, "\\u{:04X}", u32::from(c));
            }
            c => shown.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_become_escapes() {
        for (sql, shown) in [
            ("INSERT INTO \"t\" VALUES ('a\nb')", "INSERT INTO \"t\" VALUES ('a\nb')"),
            ("VALUES ('a\tb\r\n', 'c')", "VALUES (E'a\\tb\\r\n', 'c')"),
            ("VALUES ('it''s\t', 'b')", "VALUES (E'it''s\\t', 'b')"),
            (r" E'a\\'", r" E'a\\'"),
            (" E'a\\\\\u{1b}''\\'', 'b\u{7f}'", " E'a\\\\\\x1B''\\'', E'b\\x7F'"),
            ("'\u{85}é'", "E'\\u0085é'"),
            ("\"\u{202e}\" = '\u{2066}'", "U&\"\\202E\" = E'\\u2066'"),
            ("\"a\t\"\"\\b\".\"c\"", "U&\"a\\0009\"\"\\\\b\".\"c\""),
            ("\"it's\", '\"\t'", "\"it's\", E'\"\\t'"),
        ] {
            assert_eq!(printable(sql), shown);
        }
    }
}
