//! The URI form of a connection string.
//!
//! Source: `conninfo_uri_parse_options` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS>. The checks
//! run in the same order as there, because that order defines the corner cases.

use super::{ConnInfoError, Given, character_number};

/// The text after the scheme, if `text` is a connection URI.
pub(super) fn strip_scheme(text: &str) -> Option<&str> {
    text.strip_prefix("postgresql://").or_else(|| text.strip_prefix("postgres://"))
}

/// Parses the URI `uri`, whose part after the scheme is `rest`.
pub(super) fn parse(uri: &str, mut rest: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    // Credentials exist only if an @ comes before the first slash.
    if let Some(at) = rest.find(['@', '/']).filter(|&at| rest.as_bytes()[at] == b'@') {
        let (user, password) = match rest[..at].split_once(':') {
            Some((user, password)) => (user, password),
            None => (&rest[..at], ""),
        };
        if !user.is_empty() {
            given.set("user", &decode(uri, user, user, "user")?)?;
        }
        if !password.is_empty() {
            given.set("password", &decode(uri, password, password, "password")?)?;
        }
        rest = &rest[at + 1..];
    }

    let (mut hosts, at_hosts) = (String::new(), rest);
    let (mut ports, mut at_ports) = (String::new(), None);
    loop {
        let host;
        if let Some(bracketed) = rest.strip_prefix('[') {
            let Some(end) = bracketed.find(']') else {
                return Err(ConnInfoError::new(format!(
                    "missing \"]\" after the \"[\" of the IPv6 host address at character {} of the \
                     URI",
                    character_number(uri, rest)
                )));
            };
            if end == 0 {
                return Err(ConnInfoError::new(format!(
                    "IPv6 host address may not be empty (character {} of the URI)",
                    character_number(uri, rest)
                )));
            }
            (host, rest) = (&bracketed[..end], &bracketed[end + 1..]);
            if rest.chars().next().is_some_and(|c| !":/?,".contains(c)) {
                return Err(ConnInfoError::new(format!(
                    "unexpected character at character {} of the URI (expected \":\" or \"/\")",
                    character_number(uri, rest)
                )));
            }
        } else {
            let end = rest.find([':', '/', '?', ',']).unwrap_or(rest.len());
            (host, rest) = rest.split_at(end);
            // libpq would look up the remainder of a password as a host name and show it in the
            // error. At the start, an @ means an abstract socket.
            if let Some(at) = host.rfind('@').filter(|&at| at > 0) {
                return Err(ConnInfoError::new(format!(
                    "unexpected \"@\" at character {} of the URI (in a user name or password it is \
                     written %40)",
                    character_number(uri, &host[at..])
                )));
            }
        }
        hosts.push_str(host);
        if let Some(after) = rest.strip_prefix(':') {
            let end = after.find(['/', '?', ',']).unwrap_or(after.len());
            ports.push_str(&after[..end]);
            at_ports = at_ports.or(Some(after));
            rest = &after[end..];
        }
        let Some(next) = rest.strip_prefix(',') else { break };
        hosts.push(',');
        ports.push(',');
        rest = next;
    }
    if !hosts.is_empty() {
        given.set("host", &decode(uri, at_hosts, &hosts, "host")?)?;
    }
    if !ports.is_empty() {
        given.set("port", &decode(uri, at_ports.unwrap_or(rest), &ports, "port")?)?;
    }

    if let Some(path) = rest.strip_prefix('/') {
        let end = path.find('?').unwrap_or(path.len());
        if end > 0 {
            given.set("dbname", &decode(uri, path, &path[..end], "database name")?)?;
        }
        rest = &path[end..];
    }
    match rest.strip_prefix('?') {
        Some(params) => parse_params(uri, params, given),
        None => Ok(()),
    }
}

fn parse_params(uri: &str, params: &str, given: &mut Given) -> Result<(), ConnInfoError> {
    // A trailing & is valid; an empty parameter elsewhere is not.
    let params = params.strip_suffix('&').unwrap_or(params);
    if params.is_empty() {
        return Ok(());
    }
    for pair in params.split('&') {
        let number = character_number(uri, pair);
        let Some((name, value)) = pair.split_once('=') else {
            return Err(ConnInfoError::new(format!(
                "missing key/value separator \"=\" in the query parameter \
                 at character {number} of the \
                 URI"
            )));
        };
        if value.contains('=') {
            return Err(ConnInfoError::new(format!(
                "extra key/value separator \"=\" in the query parameter \
                 at character {number} of the URI"
            )));
        }
        let name = decode(uri, name, name, "query parameter")?;
        let value = decode(uri, value, value, "query parameter's value")?;
        // The spelling of JDBC URIs.
        if name == "ssl" && value == "true" {
            given.set("sslmode", "require")?;
        } else if !super::options::is_known(&name) {
            return Err(ConnInfoError::new(format!(
                "invalid query parameter at character {number} of the URI"
            )));
        } else {
            given.set(&name, &value)?;
        }
    }
    Ok(())
}

/// Decodes percent-encoded text. As in libpq 18, surrounding blanks are skipped and inner blanks
/// are an error.
///
/// Error messages name the text `what` and give the position of `place`, a slice of `uri`.
fn decode(uri: &str, place: &str, text: &str, what: &str) -> Result<String, ConnInfoError> {
    let error = |problem: &str| {
        let number = character_number(uri, place);
        ConnInfoError::new(format!("{problem} in the {what} at character {number} of the URI"))
    };
    let trimmed = text.trim_matches(super::parse_keywords::is_space);
    if trimmed.contains(super::parse_keywords::is_space) {
        return Err(error("unexpected spaces (they are written %20)"));
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
            _ => return Err(error("invalid percent-encoded token")),
        };
        if value == 0 {
            return Err(error("forbidden value %00"));
        }
        decoded.push(value);
        rest = &after[2..];
    }
    String::from_utf8(decoded).map_err(|_| error("percent-encoded bytes that are not valid UTF-8"))
}
