//! Negotiation of TLS with a server.
//!
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SSL>.

use std::io;
use std::time::Instant;

use rustls::pki_types::ServerName;

use super::tls_config;
use crate::conninfo::{ConnInfo, Host, SslMode};
use crate::error::{Error, Result, ServerError};
use crate::protection::Verified;
use crate::stream::{Stream, Want, from_io};

/// SSLRequest: its length, and 1234.5679 in place of a protocol version.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// Starts TLS on a new connection, and returns the verified properties of the server. `None` means
/// that the server does not offer TLS and `sslmode` permits that.
pub(super) fn start_tls(
    stream: &mut Stream,
    info: &ConnInfo,
    host: &Host,
    deadline: Option<Instant>,
) -> Result<Option<Verified>> {
    let settings = info.settings();
    // First of all, so that a missing certificate file is reported as such before anything is sent.
    let tls = tls_config::client(info, host)?;
    if !settings.ssl_direct && !request(stream, settings.sslmode, deadline)? {
        return Ok(None);
    }
    let name = match ServerName::try_from(host.name.clone()) {
        Ok(name) => name,
        Err(_) if settings.sslmode == SslMode::VerifyFull => {
            return Err(Error::Tls(format!(
                "\"{}\" cannot be verified: it is neither a host name nor an address",
                host.name
            )));
        }
        // The certificate check ignores this name and the client does not send it: see tls_config.
        Err(_) => ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into()),
    };
    stream.start_tls(tls.config, name, settings.ssl_direct, deadline)?;
    if tls.requires_client_certificate && !tls_config::was_asked(&tls.asked) {
        return Err(Error::Tls(
            "server accepted connection without a valid SSL certificate (sslcertmode=require)"
                .to_owned(),
        ));
    }
    Ok(Some(tls.verified))
}

/// Sends SSLRequest. Returns true when the server agrees.
fn request(stream: &mut Stream, mode: SslMode, deadline: Option<Instant>) -> Result<bool> {
    let mut written = 0;
    let mut answer = [0];
    loop {
        let result = if written < SSL_REQUEST.len() {
            stream.write(&SSL_REQUEST[written..]).map(|count| {
                written += count;
                None
            })
        } else {
            // Read exactly one byte. Everything after it must already be TLS; otherwise an attacker
            // could inject bytes that the client takes for part of the encrypted stream
            // (CVE-2021-23222).
            stream.read(&mut answer).map(Some)
        };
        match result {
            Ok(None) => {}
            Ok(Some(0)) => return Err(Error::Closed),
            Ok(Some(_)) => break,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let write = written < SSL_REQUEST.len();
                if stream.wait(Want { read: !write, write }, None, deadline)?.is_none() {
                    return Err(Error::Timeout);
                }
            }
            Err(error) => return Err(from_io(error)),
        }
    }
    match answer[0] {
        b'S' => Ok(true),
        b'N' if mode >= SslMode::Require => {
            Err(Error::Tls("server does not support SSL, but SSL was required".to_owned()))
        }
        b'N' => Ok(false),
        // The server cannot start a process. The error text is not shown, because it is not
        // authenticated: it may not come from the server.
        b'E' => Err(Error::Server(Box::new(ServerError::refusal(
            "server sent an error response during SSL exchange",
        )))),
        other => Err(Error::Protocol(format!(
            "received invalid response to SSL negotiation: {}",
            other.escape_ascii()
        ))),
    }
}
