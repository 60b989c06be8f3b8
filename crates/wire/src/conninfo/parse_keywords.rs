//! The `keyword = value` form of a connection string.
//!
//! Source: `conninfo_parse` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-KEYWORD-VALUE>.

use super::{ConnInfoError, Given, character_number, options};

/// Parses pairs into `given`; a repeated keyword replaces the earlier value.
pub(super) fn parse(text: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = rest.find(|c| c == '=' || is_space(c)).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let after = after.trim_start_matches(is_space);
        let Some(after) = after.strip_prefix('=') else {
            let number = character_number(text, name);
            return Err(ConnInfoError::new(if options::is_known(name) {
                format!(
                    "missing \"=\" after \"{name}\" at character {number} of the connection string"
                )
            } else {
                format!(
                    "missing \"=\" after the word at character {number} of the connection string"
                )
            }));
        };
        let at_value = after.trim_start_matches(is_space);
        let (value, after) = parse_value(at_value).ok_or_else(|| {
            ConnInfoError::new(format!(
                "missing end quote of the value at character {} of the connection string",
                character_number(text, at_value)
            ))
        })?;
        if !options::is_known(name) {
            return Err(unknown(text, name, rest[end..].starts_with('=')));
        }
        given.set(name, &value)?;
        rest = after.trim_start_matches(is_space);
    }
    Ok(())
}

/// The error for an unknown option. It shows the name only when the name cannot be part of a
/// password.
fn unknown(text: &str, name: &str, before_equals: bool) -> ConnInfoError {
    let legal = |c: char| c.is_ascii_lowercase() || c == '_';
    if before_equals && !name.is_empty() && name.chars().all(legal) {
        return ConnInfoError::new(format!("invalid connection option \"{name}\""));
    }
    ConnInfoError::new(format!(
        "invalid connection option at character {} of the connection string",
        character_number(text, name)
    ))
}

/// Parses a value, quoted or not. Returns it with the remaining text, or `None` when the closing
/// quote is missing.
fn parse_value(text: &str) -> Option<(String, &str)> {
    let (quoted, body) = match text.strip_prefix('\'') {
        Some(body) => (true, body),
        None => (false, text),
    };
    let mut value = String::new();
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            // A backslash takes the next character literally; libpq drops a backslash at the end.
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => return Some((value, &body[at + 1..])),
            c if !quoted && is_space(c) => return Some((value, &body[at..])),
            c => value.push(c),
        }
    }
    (!quoted).then_some((value, ""))
}

/// isspace(3) in the C locale.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r')
}

/// Quotes a value so that [`parse`] returns it unchanged.
pub(super) fn quote(value: &str) -> String {
    let plain = !value.is_empty() && !value.contains(|c| is_space(c) || c == '\'' || c == '\\');
    if plain {
        return value.to_owned();
    }
    let mut quoted = String::with_capacity(value.len() + 2);
    quoted.push('\'');
    for c in value.chars() {
        if c == '\'' || c == '\\' {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('\'');
    quoted
}
