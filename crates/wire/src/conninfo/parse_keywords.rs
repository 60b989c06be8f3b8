//! The `keyword = value` form of a connection string.
//!
//! Source: `conninfo_parse` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-KEYWORD-VALUE>.

use super::{ConnInfoError, Given};

/// Reads pairs into `given`; a keyword that comes again replaces the earlier value.
pub(super) fn parse(text: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = rest.find(|c| c == '=' || is_space(c)).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let after = after.trim_start_matches(is_space);
        let Some(after) = after.strip_prefix('=') else {
            return Err(ConnInfoError::new(format!(
                "missing \"=\" after \"{name}\" in connection info string"
            )));
        };
        let (value, after) = parse_value(after.trim_start_matches(is_space))?;
        given.set(name, &value)?;
        rest = after.trim_start_matches(is_space);
    }
    Ok(())
}

/// A value, quoted or not, and what follows it.
fn parse_value(text: &str) -> Result<(String, &str), ConnInfoError> {
    let (quoted, body) = match text.strip_prefix('\'') {
        Some(body) => (true, body),
        None => (false, text),
    };
    let mut value = String::new();
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            // A backslash takes the next character as it is; at the very end it is dropped.
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => return Ok((value, &body[at + 1..])),
            c if !quoted && is_space(c) => return Ok((value, &body[at..])),
            c => value.push(c),
        }
    }
    if quoted {
        return Err(ConnInfoError::new("unterminated quoted string in connection info string"));
    }
    Ok((value, ""))
}

/// isspace(3) of the C locale.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r')
}

/// Writes a value so that [`parse`] reads it back.
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
