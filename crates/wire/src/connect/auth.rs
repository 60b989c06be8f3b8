//! Authentication: trust, cleartext password, md5, and SCRAM-SHA-256 with or without channel
//! binding.
//!
//! Source: `src/interfaces/libpq/fe-auth.c`,
//! <https://www.postgresql.org/docs/current/sasl-authentication.html>.

use std::path::Path;
use std::time::Instant;

use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ScramSha256};
use postgres_protocol::message::frontend;

use super::startup::left;
use crate::conninfo::{ChannelBinding, ConnInfo, Host, Wanted, lookup_password};
use crate::error::{Error, Result, ServerError};
use crate::session::unexpected;
use crate::stream::Buffered;

/// The user's identity and the means to prove it.
pub(super) struct Credentials<'c> {
    info: &'c ConnInfo,
    password: Option<String>,
    /// The password file, if the password came from there.
    passfile: Option<&'c str>,
}

impl<'c> Credentials<'c> {
    /// Takes the password of the connection string, or else of the matching line in the password
    /// file.
    pub(super) fn new(info: &'c ConnInfo, host: &Host) -> Credentials<'c> {
        if let Some(password) = info.get("password") {
            return Credentials { info, password: Some(password.to_owned()), passfile: None };
        }
        let passfile = info.get("passfile");
        let password = passfile.and_then(|file| {
            let wanted = Wanted {
                host: host.passfile_host(),
                port: &host.port.to_string(),
                dbname: info.dbname(),
                user: info.user(),
            };
            lookup_password(Path::new(file), wanted)
        });
        Credentials { info, passfile: passfile.filter(|_| password.is_some()), password }
    }

    fn password(&self) -> Result<&str> {
        self.password
            .as_deref()
            .ok_or_else(|| Error::Auth("fe_sendauth: no password supplied".to_owned()))
    }

    /// Adds the password file as a hint to a rejected password.
    pub(super) fn explain(&self, error: Error) -> Error {
        match (error, self.passfile) {
            (Error::Server(mut error), Some(file)) if error.code == "28P01" => {
                error.hint.get_or_insert(format!("password retrieved from file \"{file}\""));
                Error::Server(error)
            }
            (error, _) => error,
        }
    }

    /// Enforces `require_auth`.
    fn check_method(&self, method: &str, described: &str) -> Result<()> {
        if self.info.settings().require_auth.allows(method) {
            return Ok(());
        }
        Err(Error::Auth(format!(
            "authentication method requirement \"{}\" failed: {described}",
            self.info.get("require_auth").unwrap_or_default()
        )))
    }

    /// Rejects every method except SCRAM with channel binding under `channel_binding=require`.
    fn check_unbound(&self) -> Result<()> {
        match self.info.settings().channel_binding {
            ChannelBinding::Require => Err(Error::Auth(
                "channel binding required but not supported by server's authentication request"
                    .to_owned(),
            )),
            ChannelBinding::Disable | ChannelBinding::Prefer => Ok(()),
        }
    }
}

/// Answers authentication requests until AuthenticationOk.
pub(super) fn authenticate(
    channel: &mut Buffered,
    credentials: &Credentials<'_>,
    deadline: Option<Instant>,
) -> Result<()> {
    // Whether the server requested any proof, and whether a SCRAM exchange with channel binding
    // completed.
    let mut asked = false;
    let mut bound = false;
    loop {
        let (code, data) = next_request(channel, deadline)?;
        match code {
            0 => {
                if !asked {
                    credentials.check_method("none", "server did not request authentication")?;
                }
                if !bound && credentials.info.settings().channel_binding == ChannelBinding::Require
                {
                    return Err(Error::Auth(
                        "channel binding required, but server authenticated client without \
                         channel binding"
                            .to_owned(),
                    ));
                }
                return Ok(());
            }
            3 => {
                credentials.check_method("password", "server requested a cleartext password")?;
                credentials.check_unbound()?;
                let password = credentials.password()?;
                answer(channel, deadline, |out| {
                    frontend::password_message(password.as_bytes(), out)
                })?;
            }
            5 => {
                credentials.check_method("md5", "server requested a hashed password")?;
                credentials.check_unbound()?;
                let salt = data
                    .first_chunk::<4>()
                    .ok_or_else(|| Error::protocol("malformed AuthenticationMD5Password"))?;
                let password = credentials.password()?;
                let user = credentials.info.user();
                let hash = md5_hash(user.as_bytes(), password.as_bytes(), *salt);
                answer(channel, deadline, |out| frontend::password_message(hash.as_bytes(), out))?;
            }
            10 => {
                credentials
                    .check_method("scram-sha-256", "server requested SASL authentication")?;
                bound = scram(channel, credentials, &data, deadline)?;
            }
            2 | 7 | 8 | 9 => {
                return Err(Error::Auth(
                    "the server requests GSSAPI, SSPI or Kerberos authentication, which is not \
                     supported"
                        .to_owned(),
                ));
            }
            code => {
                return Err(Error::Auth(format!("authentication method {code} not supported")));
            }
        }
        asked = true;
    }
}

/// The SCRAM exchange, including the check of the server's signature. Returns true when the
/// exchange was bound to the TLS channel.
fn scram(
    channel: &mut Buffered,
    credentials: &Credentials<'_>,
    mechanisms: &[u8],
    deadline: Option<Instant>,
) -> Result<bool> {
    let offers = |name: &str| mechanisms.split(|&byte| byte == 0).any(|m| m == name.as_bytes());
    let wanted = credentials.info.settings().channel_binding;
    let (plus, plain) = (offers(sasl::SCRAM_SHA_256_PLUS), offers(sasl::SCRAM_SHA_256));
    let endpoint = channel.stream().tls_server_end_point();
    let encrypted = channel.stream().is_encrypted();

    let (mechanism, binding) = match endpoint {
        Some(hash) if plus && wanted != ChannelBinding::Disable => {
            (sasl::SCRAM_SHA_256_PLUS, sasl::ChannelBinding::tls_server_end_point(hash))
        }
        _ if wanted == ChannelBinding::Require => {
            return Err(Error::Auth(
                if encrypted {
                    "channel binding is required, but server did not offer an authentication \
                     method that supports channel binding"
                } else {
                    "channel binding required, but SSL not in use"
                }
                .to_owned(),
            ));
        }
        // This flag tells the server that the client supports channel binding but received no
        // offer. A server that did offer it then detects a man in the middle who removed the offer.
        // The flag is only correct when the server offered no channel binding.
        Some(_) if plain && !plus && wanted == ChannelBinding::Prefer => {
            (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested())
        }
        _ if plain => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
        _ => {
            return Err(Error::Auth(
                "none of the server's SASL authentication mechanisms are supported".to_owned(),
            ));
        }
    };

    let failed = |error: std::io::Error| Error::Auth(format!("SCRAM exchange failed: {error}"));
    let mut scram = ScramSha256::new(credentials.password()?.as_bytes(), binding);
    answer(channel, deadline, |out| {
        frontend::sasl_initial_response(mechanism, scram.message(), out)
    })?;
    scram.update(&expect_request(channel, 11, deadline)?).map_err(failed)?;
    answer(channel, deadline, |out| frontend::sasl_response(scram.message(), out))?;
    scram.finish(&expect_request(channel, 12, deadline)?).map_err(failed)?;
    Ok(mechanism == sasl::SCRAM_SHA_256_PLUS)
}

/// Reads the next authentication request: its code and data.
fn next_request(channel: &mut Buffered, deadline: Option<Instant>) -> Result<(i32, Vec<u8>)> {
    loop {
        let message = channel.next(left(deadline))?;
        let body = channel.bytes(message.body);
        match message.tag {
            b'R' => {
                let (code, data) = body
                    .split_first_chunk::<4>()
                    .ok_or_else(|| Error::protocol("malformed authentication request"))?;
                return Ok((i32::from_be_bytes(*code), data.to_vec()));
            }
            b'E' => return Err(Error::Server(Box::new(ServerError::parse(body)))),
            // NegotiateProtocolVersion: the client requested 3.0 and sent no protocol options.
            b'v' => {}
            tag => return Err(unexpected(tag, "during authentication")),
        }
    }
}

fn expect_request(
    channel: &mut Buffered,
    wanted: i32,
    deadline: Option<Instant>,
) -> Result<Vec<u8>> {
    match next_request(channel, deadline)? {
        (code, data) if code == wanted => Ok(data),
        (code, _) => Err(Error::Protocol(format!(
            "authentication request {code} where {wanted} was expected"
        ))),
    }
}

fn answer(
    channel: &mut Buffered,
    deadline: Option<Instant>,
    write: impl FnOnce(&mut bytes::BytesMut) -> std::io::Result<()>,
) -> Result<()> {
    write(&mut channel.out).map_err(|error| Error::Auth(error.to_string()))?;
    channel.flush(left(deadline))
}
