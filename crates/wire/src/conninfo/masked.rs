//! Hides the passwords of connection strings within other text, such as messages that repeat an argument.

use std::borrow::Cow;
use std::ops::Range;

const MASK: &str = "****";

const SCHEMES: [&str; 2] = ["postgres://", "postgresql://"];

/// The text with `****` for each password of a connection string in it, URI or keywords. It may hide more than
/// the password, never less.
pub fn without_passwords(text: &str) -> Cow<'_, str> {
    let lower = text.to_ascii_lowercase();
    let mut secrets = Vec::new();
    for scheme in SCHEMES {
        secrets.extend(
            lower.match_indices(scheme).filter_map(|(at, _)| in_uri(&lower, at + scheme.len())),
        );
    }
    let keyword = "password";
    secrets.extend(
        lower.match_indices(keyword).filter_map(|(at, _)| in_keywords(&lower, at + keyword.len())),
    );
    if secrets.is_empty() {
        return Cow::Borrowed(text);
    }
    secrets.sort_by_key(|secret| secret.start);
    let mut masked = String::with_capacity(text.len());
    let mut shown = 0;
    for Range { start, end } in secrets {
        if start >= shown {
            masked.push_str(&text[shown..start]);
            masked.push_str(MASK);
        }
        shown = shown.max(end);
    }
    masked.push_str(&text[shown..]);
    Cow::Owned(masked)
}

/// The password of a URI whose user begins at `start`. It may have characters that should be encoded, so it ends at the
/// last `@` of the line.
fn in_uri(text: &str, start: usize) -> Option<Range<usize>> {
    let line = text[start..].lines().next()?;
    let end = line.rfind('@')?;
    let colon = line[..end].find(':')?;
    Some(start + colon + 1..start + end)
}

/// The value after a keyword that ends at `end`. A `&` ends it in a URI only: elsewhere it is part of the password.
fn in_keywords(text: &str, end: usize) -> Option<Range<usize>> {
    let rest = text[end..].trim_start();
    let value = rest.strip_prefix('=')?.trim_start();
    let start = text.len() - value.len();
    let quoted = value.strip_prefix('\'');
    let word = text[..end].rsplit(char::is_whitespace).next()?;
    let is_in_uri = SCHEMES.iter().any(|scheme| word.contains(scheme));
    let mut escaped = false;
    let ends = |c: char| {
        let is_escaped = escaped;
        escaped = c == '\\' && !is_escaped;
        !is_escaped
            && match quoted {
                Some(_) => c == '\'',
                None => c.is_whitespace() || is_in_uri && c == '&',
            }
    };
    let length = match quoted {
        None => value.find(ends).unwrap_or(value.len()),
        Some(quoted) => quoted.find(ends).map_or(value.len(), |at| at + 2),
    };
    (length > 0).then(|| start..start + length)
}

#[cfg(test)]
mod tests {
    use super::without_passwords;

    #[test]
    fn passwords_are_hidden_and_the_rest_is_shown() {
        for (text, shown) in [
            ("--name \"postgres://u:pw@h/d\" is bad", "--name \"postgres://u:****@h/d\" is bad"),
            ("'postgresql://u:p w/@x?@h:1/d'", "'postgresql://u:****@h:1/d'"),
            ("POSTGRES://u:pw@h\nnext: a@b", "POSTGRES://u:****@h\nnext: a@b"),
            ("postgres://h/d?password=pw&a=b", "postgres://h/d?password=****&a=b"),
            ("host=h password=pw user=u", "host=h password=**** user=u"),
            ("host=h password=Tr0ub&dor3 user=u", "host=h password=**** user=u"),
            ("postgres://h/d and password=a&b", "postgres://h/d and password=****"),
            ("password=a\\ b user=u", "password=**** user=u"),
            ("password=a\\\\ user=u", "password=**** user=u"),
            ("Password = 'p\\' w' user=u", "Password = **** user=u"),
            ("sslpassword='p w", "sslpassword=****"),
            ("postgres://u:a@b password=c@d", "postgres://u:****"),
            (
                "postgres://u@h:1/d, password authentication failed",
                "postgres://u@h:1/d, password authentication failed",
            ),
            ("password=", "password="),
        ] {
            assert_eq!(without_passwords(text), shown, "{text}");
        }
    }
}
