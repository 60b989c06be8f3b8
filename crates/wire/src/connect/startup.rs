//! The startup exchange of one connection.
//!
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-START-UP>.

use std::time::{Duration, Instant};

use postgres_protocol::message::frontend;

use super::auth::{self, Credentials};
use super::cancel::CancelHandle;
use super::{Endpoint, Startup};
use crate::conninfo::ConnInfo;
use crate::error::{Error, Result, ServerError};
use crate::protection::Protection;
use crate::session::{Session, unexpected};
use crate::stream::{Buffered, Stream};

/// The time left until a deadline.
pub(super) fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// Sends the startup message, authenticates, and waits until the server is ready.
pub(super) fn start(
    stream: Stream,
    endpoint: &Endpoint<'_>,
    startup: &Startup,
    protection: Protection,
    deadline: Option<Instant>,
) -> Result<Session> {
    let mut channel = Buffered::new(stream);
    let parameters = parameters(endpoint.info, startup);
    let pairs = parameters.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    frontend::startup_message(pairs, &mut channel.out)
        .map_err(|error| Error::Protocol(error.to_string()))?;
    channel.flush(left(deadline))?;
    if let Some(refusal) = channel.refusal(left(deadline))? {
        return Err(Error::Server(Box::new(ServerError::refusal(&refusal))));
    }

    let credentials = Credentials::new(endpoint.info, endpoint.host);
    auth::authenticate(&mut channel, &credentials, deadline)
        .map_err(|error| credentials.explain(error))?;

    let mut key = None;
    loop {
        let message = channel.next(left(deadline))?;
        let body = channel.bytes(message.body);
        match message.tag {
            b'K' => key = parse_key(body),
            b'Z' => break,
            b'E' => return Err(Error::Server(Box::new(ServerError::parse(body)))),
            tag => return Err(unexpected(tag, "during startup")),
        }
    }
    channel.stream_mut().set_established();
    let (pid, secret) = key.unwrap_or_default();
    let encrypted = matches!(protection, Protection::Tls { .. });
    let cancel =
        CancelHandle::new(endpoint.info, endpoint.host, &endpoint.address, encrypted, pid, secret);
    Session::started(channel, cancel, endpoint.to_string(), protection)
}

/// Parses BackendKeyData; the key has four bytes in protocol 3.0.
fn parse_key(body: &[u8]) -> Option<(i32, i32)> {
    let (pid, rest) = body.split_first_chunk::<4>()?;
    let (key, _) = rest.split_first_chunk::<4>()?;
    Some((i32::from_be_bytes(*pid), i32::from_be_bytes(*key)))
}

/// The parameters of the startup message.
fn parameters(info: &ConnInfo, startup: &Startup) -> Vec<(String, String)> {
    let mut parameters = Vec::new();
    let mut add = |name: &str, value: &str| parameters.push((name.to_owned(), value.to_owned()));
    add("user", info.user());
    add("database", info.dbname());
    if startup.replication {
        add("replication", "database");
    }
    if let Some(options) = info.get("options") {
        add("options", options);
    }
    let application_name = info
        .get("application_name")
        .or(startup.application_name.as_deref())
        .or_else(|| info.get("fallback_application_name"));
    if let Some(name) = application_name {
        add("application_name", name);
    }
    // pgapace sends only UTF-8 text. The value "auto" means the client's own encoding.
    let encoding = info.get("client_encoding").filter(|encoding| *encoding != "auto");
    add("client_encoding", encoding.unwrap_or("UTF8"));
    for (name, value) in &startup.settings {
        parameters.retain(|(known, _)| known != name);
        parameters.push((name.clone(), value.clone()));
    }
    parameters
}
