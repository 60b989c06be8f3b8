//! Permission to read: with a token file, requests that carry the token; otherwise, requests from this machine.

use std::net::IpAddr;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{HeaderMap, StatusCode};

use crate::config::SecretFile;
use crate::error::{Class, Failure, Result};

/// Shortest token.
const SHORTEST: usize = 16;

/// The rule of a server.
#[derive(Clone)]
pub(crate) struct Access {
    token: Option<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token is not shown.
        f.debug_struct("Access").field("has_token", &self.has_token()).finish()
    }
}

impl Access {
    /// Without a token. Requests must name this machine by a loopback address or `localhost`, so that a page
    /// of another site cannot read by a name that it resolves to 127.0.0.1.
    pub(crate) fn local() -> Self {
        Self { token: None }
    }

    /// With the token in a file: its first line.
    pub(crate) fn with_token_of(file: &Path) -> Result<Self> {
        let shown = file.display();
        let hint = format!("head -c 24 /dev/urandom | base64 > {shown}; chmod 0600 {shown}");
        let failed = |what: &str| {
            Failure::new(Class::Config, format!("--http-token-file {shown}: {what}")).hint(&hint)
        };
        let read =
            SecretFile::read(file, "--http-token-file").map_err(|failure| failure.hint(&hint))?;
        read.keeps("a token")?;
        let token = read.text.lines().next().unwrap_or_default().trim().to_owned();
        if token.len() < SHORTEST {
            return Err(failed(&format!("the token has fewer than {SHORTEST} characters")));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(failed("the token has characters that a header cannot have"));
        }
        Ok(Self { token: Some(token) })
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether a request may be answered; if not, with what status.
    pub(crate) fn judge(&self, headers: &HeaderMap) -> std::result::Result<(), StatusCode> {
        let Some(token) = &self.token else {
            // Of several, each must.
            let are_local =
                headers.get_all(HOST).iter().all(|host| host.to_str().is_ok_and(is_local));
            return if are_local { Ok(()) } else { Err(StatusCode::FORBIDDEN) };
        };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| {
            let (scheme, rest) = value.split_once(' ')?;
            match scheme.to_ascii_lowercase().as_str() {
                "bearer" => Some(rest.trim().to_owned()),
                // Browsers ask for user and password; the password is the token.
                "basic" => {
                    let text = String::from_utf8(STANDARD.decode(rest.trim()).ok()?).ok()?;
                    text.split_once(':').map(|(_, password)| password.to_owned())
                }
                _ => None,
            }
        });
        match given {
            Some(given) if are_equal(given.as_bytes(), token.as_bytes()) => Ok(()),
            _ => Err(StatusCode::UNAUTHORIZED),
        }
    }
}

/// Whether a Host header names this machine.
fn is_local(host: &str) -> bool {
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (name, port) = match bracketed {
        Some((name, "")) => (name, None),
        Some((name, rest)) => match rest.strip_prefix(':') {
            Some(port) => (name, Some(port)),
            None => return false,
        },
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    if port.is_some_and(|port| !port.bytes().all(|byte| byte.is_ascii_digit())) {
        return false;
    }
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Takes as long for every wrong token of this length.
fn are_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use hyper::header::{AUTHORIZATION, HOST};
    use hyper::{HeaderMap, StatusCode};

    use super::Access;

    fn headers(name: hyper::header::HeaderName, value: &str) -> HeaderMap {
        [(name, value.parse().expect("a header"))].into_iter().collect()
    }

    #[test]
    fn a_token_is_wanted_where_there_is_one() {
        let access = Access { token: Some("0123456789abcdef".to_owned()) };
        let judge = |value| access.judge(&headers(AUTHORIZATION, value));
        assert_eq!(judge("Bearer 0123456789abcdef"), Ok(()));
        // user:0123456789abcdef
        assert_eq!(judge("Basic dXNlcjowMTIzNDU2Nzg5YWJjZGVm"), Ok(()));
        for wrong in ["Bearer 0123456789abcdeg", "Bearer", "Basic dXNlcjo=", "Basic !", "x y"] {
            assert_eq!(judge(wrong), Err(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        assert_eq!(access.judge(&HeaderMap::new()), Err(StatusCode::UNAUTHORIZED));
        assert!(!format!("{access:?}").contains("0123"));
    }

    #[test]
    fn without_a_token_only_names_of_this_machine_are_answered() {
        let judge = |host| Access::local().judge(&headers(HOST, host));
        for local in ["localhost:9187", "127.0.0.1", "127.3.2.1:80", "[::1]:9187", "LOCALHOST"] {
            assert_eq!(judge(local), Ok(()), "{local}");
        }
        for other in [
            "evil.example",
            "127.0.0.1.evil.example:9187",
            "10.0.0.1",
            "",
            "localhost:80@evil.example",
            "localhost:evil.example:80",
            "[::1]evil.example",
            "[::1]:80@evil.example",
            "user@localhost",
        ] {
            assert_eq!(judge(other), Err(StatusCode::FORBIDDEN), "{other}");
        }
        let mut two = headers(HOST, "localhost");
        assert_eq!(Access::local().judge(&two), Ok(()));
        two.append(HOST, "evil.example".parse().expect("a header"));
        assert_eq!(Access::local().judge(&two), Err(StatusCode::FORBIDDEN));
    }
}
