//! The URI form of a connection string.
//!
//! Source: `conninfo_uri_parse_options` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS>. Its order
//! of decisions is kept, because that is what defines the corner cases.

use super::{ConnInfoError, Given};

/// What follows the scheme, if `text` is a connection URI.
pub(super) fn strip_scheme(text: &str) -> Option<&str> {
    text.strip_prefix("postgresql://").or_else(|| text.strip_prefix("postgres://"))
}

/// Reads the URI `uri`, whose part after the scheme is `rest`.
pub(super) fn parse(uri: &str, mut rest: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    // Credentials, when an @ comes before any slash.
    if let Some(at) = rest.find(['@', '/']).filter(|&at| rest.as_bytes()[at] == b'@') {
        let (user, password) = match rest[..at].split_once(':') {
            Some((user, password)) => (user, password),
            None => (&rest[..at], ""),
        };
        if !user.is_empty() {
            given.set("user", &decode(user)?)?;
        }
        if !password.is_empty() {
            let decoded = decode(password).map_err(|_| {
                ConnInfoError::new("invalid percent-encoding in the password of the URI")
            })?;
            given.set("password", &decoded)?;
        }
        rest = &rest[at + 1..];
    }

    let mut hosts = String::new();
    let mut ports = String::new();
    loop {
        let host;
        if let Some(bracketed) = rest.strip_prefix('[') {
            let Some(end) = bracketed.find(']') else {
                return Err(ConnInfoError::new(format!(
                    "end of string reached when looking for matching \"]\" in IPv6 host address in \
                     URI: \"{}\"",
                    mask_password(uri)
                )));
            };
            if end == 0 {
                return Err(ConnInfoError::new(format!(
                    "IPv6 host address may not be empty in URI: \"{}\"",
                    mask_password(uri)
                )));
            }
            (host, rest) = (&bracketed[..end], &bracketed[end + 1..]);
            if let Some(odd) = rest.chars().next().filter(|c| !":/?,".contains(*c)) {
                return Err(ConnInfoError::new(format!(
                    "unexpected character \"{odd}\" at position {} in URI (expected \":\" or \
                     \"/\"): \"{}\"",
                    uri.len() - rest.len() + 1,
                    mask_password(uri)
                )));
            }
        } else {
            let end = rest.find([':', '/', '?', ',']).unwrap_or(rest.len());
            (host, rest) = rest.split_at(end);
        }
        hosts.push_str(host);
        if let Some(after) = rest.strip_prefix(':') {
            let end = after.find(['/', '?', ',']).unwrap_or(after.len());
            ports.push_str(&after[..end]);
            rest = &after[end..];
        }
        let Some(next) = rest.strip_prefix(',') else { break };
        hosts.push(',');
        ports.push(',');
        rest = next;
    }
    if !hosts.is_empty() {
        given.set("host", &decode(&hosts)?)?;
    }
    if !ports.is_empty() {
        given.set("port", &decode(&ports)?)?;
    }

    if let Some(path) = rest.strip_prefix('/') {
        let end = path.find('?').unwrap_or(path.len());
        if end > 0 {
            given.set("dbname", &decode(&path[..end])?)?;
        }
        rest = &path[end..];
    }
    match rest.strip_prefix('?') {
        Some(params) => parse_params(params, given),
        None => Ok(()),
    }
}

fn parse_params(params: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    // A trailing & is fine, an empty parameter elsewhere is not.
    let params = params.strip_suffix('&').unwrap_or(params);
    if params.is_empty() {
        return Ok(());
    }
    for pair in params.split('&') {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(ConnInfoError::new(format!(
                "missing key/value separator \"=\" in URI query parameter: \"{pair}\""
            )));
        };
        if value.contains('=') {
            return Err(ConnInfoError::new(format!(
                "extra key/value separator \"=\" in URI query parameter: \"{name}\""
            )));
        }
        let (name, value) = (decode(name)?, decode(value)?);
        // As JDBC writes it.
        if name == "ssl" && value == "true" {
            given.set("sslmode", "require")?;
        } else if super::options::find(&name).is_none() && name != "requiressl" {
            return Err(ConnInfoError::new(format!("invalid URI query parameter: \"{name}\"")));
        } else {
            given.set(&name, &value)?;
        }
    }
    Ok(())
}

/// Percent-decoding. Blanks around are skipped, blanks within are an error, as in libpq 18.
fn decode(text: &str) -> Result<String, ConnInfoError> {
    let trimmed = text.trim_matches(super::parse_keywords::is_space);
    if trimmed.contains(super::parse_keywords::is_space) {
        return Err(ConnInfoError::new(format!(
            "unexpected spaces found in \"{text}\", use percent-encoded spaces (%20) instead"
        )));
    }
    let mut decoded = Vec::with_capacity(trimmed.len());
    let mut rest = trimmed.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        let value = match (digit(0), digit(1)) {
            (Some(high), Some(low)) => u8::try_from(high * 16 + low).unwrap_or_default(),
            _ => {
                return Err(ConnInfoError::new(format!(
                    "invalid percent-encoded token: \"{text}\""
                )));
            }
        };
        if value == 0 {
            return Err(ConnInfoError::new(format!(
                "forbidden value %00 in percent-encoded value: \"{text}\""
            )));
        }
        decoded.push(value);
        rest = &after[2..];
    }
    String::from_utf8(decoded)
        .map_err(|_| ConnInfoError::new(format!("percent-encoded value is no UTF-8: \"{text}\"")))
}

/// The URI for a message: libpq prints it whole, we leave the password out.
fn mask_password(uri: &str) -> String {
    let scheme = uri.find("://").map_or(0, |at| at + 3);
    let rest = &uri[scheme..];
    if let Some(at) = rest.find(['@', '/']).filter(|&at| rest.as_bytes()[at] == b'@')
        && let Some(colon) = rest[..at].find(':')
    {
        return format!("{}{}:****{}", &uri[..scheme], &rest[..colon], &rest[at..]);
    }
    uri.to_owned()
}
