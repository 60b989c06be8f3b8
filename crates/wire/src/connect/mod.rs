//! Connecting: tries the hosts of a connection string in order, starts TLS, authenticates, and
//! checks `target_session_attrs`.

mod auth;
mod cancel;
mod encryption;
mod resolve;
mod session_attrs;
mod startup;
mod tls_config;
mod verify;
mod version_1;

pub use cancel::CancelHandle;

use std::fmt::Write as _;
use std::time::Instant;

use crate::conninfo::{ConnInfo, Host, Place, SessionAttrs, Settings, SslMode};
use crate::error::{Error, Result};
use crate::protection::Protection;
use crate::session::Session;
use crate::stream::{Address, SocketOptions, Stream, after, peer_uid};

/// SO_RCVBUF, in bytes, of a replication connection over the loopback interface.
///
/// The value was measured; `crate::replication` explains how the receive window determines throughput.
const STREAM_RECEIVE_BUFFER: usize = 24 * 1024;

/// Startup parameters that the program adds to the user's connection string.
#[derive(Debug, Clone, Default)]
pub struct Startup {
    /// `application_name`, unless the connection string has one.
    pub application_name: Option<String>,
    /// Opens a replication connection to a database (`replication=database`).
    pub replication: bool,
    /// Server settings for this session, sent as startup parameters. They override all other
    /// sources.
    pub settings: Vec<(String, String)>,
}

impl Session {
    /// Connects to the first host that accepts the session and satisfies `target_session_attrs`.
    /// The error reports the result for each host.
    ///
    /// As with libpq, a host that rejects the login ends the search. A host that is unreachable, is
    /// starting up or shutting down, or does not satisfy `target_session_attrs` does not.
    pub fn connect(info: &ConnInfo, startup: &Startup) -> Result<Session> {
        let mut hosts = info.hosts().to_vec();
        if info.settings().load_balance_random {
            resolve::shuffle(&mut hosts);
        }
        let wanted = info.settings().session_attrs;
        let passes = match wanted {
            SessionAttrs::PreferStandby => &[SessionAttrs::Standby, SessionAttrs::Any][..],
            _ => &[wanted],
        };
        let mut failures = Failures::default();
        for &wanted in passes {
            for host in &hosts {
                match connect_host(info, host, startup, wanted, &mut failures) {
                    Search::Found(session) => return Ok(*session),
                    Search::GoOn => {}
                    Search::Stop => return Err(failures.into_error(&hosts)),
                }
            }
        }
        Err(failures.into_error(&hosts))
    }
}

enum Search {
    Found(Box<Session>),
    GoOn,
    Stop,
}

/// Tries all addresses of one host.
fn connect_host(
    info: &ConnInfo,
    host: &Host,
    startup: &Startup,
    wanted: SessionAttrs,
    failures: &mut Failures,
) -> Search {
    let addresses = match resolve::addresses(host) {
        Ok(mut addresses) => {
            if info.settings().load_balance_random {
                resolve::shuffle(&mut addresses);
            }
            addresses
        }
        Err(error) => {
            failures.add(&format!("could not translate host name \"{}\"", host.name), error);
            return Search::GoOn;
        }
    };
    let mut endpoint = Endpoint { info, host, address: addresses[0].clone() };
    for address in addresses {
        endpoint.address = address;
        let result = endpoint.connect(startup, failures).and_then(|mut session| {
            session_attrs::check(&mut session, wanted)?;
            Ok(session)
        });
        match result {
            Ok(session) => return Search::Found(Box::new(session)),
            Err(error) => {
                let reached = matches!(error, Error::Server(_) | Error::Auth(_));
                let refused = match &error {
                    Error::Auth(_) => true,
                    Error::Server(_) => !error.is_connection_loss(),
                    _ => false,
                };
                let wrong_kind = matches!(error, Error::UnexpectedResult(_));
                failures.add(&format!("connection to server {endpoint} failed"), error);
                if refused {
                    return Search::Stop;
                }
                if reached || wrong_kind {
                    return Search::GoOn;
                }
            }
        }
    }
    Search::GoOn
}

/// The errors of all attempts.
#[derive(Default)]
struct Failures {
    lines: Vec<String>,
    last: Option<Error>,
}

impl Failures {
    fn add(&mut self, attempt: &str, error: Error) {
        let mut line = format!("{attempt}: {error}");
        if let Some(detail) = error.server_error().and_then(|error| error.detail()) {
            let _ = write!(line, "\nDETAIL: {detail}");
        }
        if let Some(hint) = error.server_error().and_then(|error| error.hint()) {
            let _ = write!(line, "\nHINT: {hint}");
        }
        // The second pass of prefer-standby repeats the errors of the first.
        if !self.lines.contains(&line) {
            self.lines.push(line);
        }
        self.last = Some(error);
    }

    fn into_error(self, hosts: &[Host]) -> Error {
        let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
        Error::Connect {
            host: names.join(","),
            detail: self.lines.join("\n"),
            last: Box::new(self.last.unwrap_or(Error::Closed)),
        }
    }
}

/// One address of one host.
struct Endpoint<'t> {
    info: &'t ConnInfo,
    host: &'t Host,
    address: Address,
}

/// Whether the connection uses TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encryption {
    Plain,
    Tls,
}

impl Endpoint<'_> {
    /// Opens a session with the encryption methods that `sslmode` allows, in its order. If both
    /// fail, the first error goes to `failures` and the second is returned.
    fn connect(&self, startup: &Startup, failures: &mut Failures) -> Result<Session> {
        let settings = self.info.settings();
        let deadline = settings.connect_timeout.and_then(after);
        let (first, second) = self.encryption(settings.sslmode);
        match self.attempt(first, startup, deadline) {
            Err(error) => match second {
                Some(second) if may_pass_otherwise(&error) => {
                    match self.attempt(second, startup, deadline) {
                        // Report the same rejection only once.
                        Err(again)
                            if again.sqlstate().is_some_and(|c| error.sqlstate() == Some(c)) =>
                        {
                            Err(error)
                        }
                        Err(again) => {
                            failures.add(&format!("connection to server {self} failed"), error);
                            Err(again)
                        }
                        session => session,
                    }
                }
                _ => Err(error),
            },
            session => session,
        }
    }

    fn encryption(&self, mode: SslMode) -> (Encryption, Option<Encryption>) {
        use Encryption::{Plain, Tls};
        if matches!(self.address, Address::Unix(_)) {
            return (Plain, None);
        }
        match mode {
            SslMode::Disable => (Plain, None),
            SslMode::Allow => (Plain, Some(Tls)),
            SslMode::Prefer => (Tls, Some(Plain)),
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => (Tls, None),
        }
    }

    fn attempt(
        &self,
        encryption: Encryption,
        startup: &Startup,
        deadline: Option<Instant>,
    ) -> Result<Session> {
        let streams = startup.replication;
        let mut stream = open(self.info.settings(), &self.address, streams, deadline)?;
        self.check_peer(&stream)?;
        let verified = match encryption {
            Encryption::Tls => encryption::start_tls(&mut stream, self.info, self.host, deadline)?,
            Encryption::Plain => None,
        };
        let protection = match (&self.address, verified) {
            (Address::Unix(_), _) => Protection::Socket,
            (Address::Tcp(address), None) if address.ip().is_loopback() => Protection::Loopback,
            (Address::Tcp(_), None) => Protection::Nothing,
            (_, Some(verified)) => Protection::Tls { version: stream.tls_version(), verified },
        };
        startup::start(stream, self, startup, protection, deadline)
    }

    /// Enforces `requirepeer`: the server behind a Unix socket must run as this user.
    fn check_peer(&self, stream: &Stream) -> Result<()> {
        let (Some(wanted), Address::Unix(_)) = (self.info.get("requirepeer"), &self.address) else {
            return Ok(());
        };
        let uid = peer_uid(stream.socket())?;
        match crate::conninfo::account(uid) {
            Some(account) if account.name == wanted => Ok(()),
            Some(account) => Err(Error::Auth(format!(
                "requirepeer specifies \"{wanted}\", but actual peer user name is \"{}\"",
                account.name
            ))),
            None => Err(Error::Auth(format!("local user with ID {uid} does not exist"))),
        }
    }
}

/// Whether the other encryption method may succeed: TLS failed, or pg_hba.conf has no entry for
/// this method. A wrong password stays wrong. A lost connection says nothing about the method: a
/// session without encryption must not follow from a failover.
fn may_pass_otherwise(error: &Error) -> bool {
    match error {
        Error::Tls(_) => true,
        Error::Server(error) => error.code == "28000",
        _ => false,
    }
}

/// Opens the socket. `streams` is true for a replication connection.
fn open(
    settings: &Settings,
    address: &Address,
    streams: bool,
    deadline: Option<Instant>,
) -> Result<Stream> {
    let options = SocketOptions {
        keepalives: settings.keepalives,
        keepalives_idle: settings.keepalives_idle,
        keepalives_interval: settings.keepalives_interval,
        keepalives_count: settings.keepalives_count,
        tcp_user_timeout: settings.tcp_user_timeout,
        loopback_receive_buffer: streams.then_some(STREAM_RECEIVE_BUFFER),
    };
    match Stream::connect(address, &options, deadline) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => Err(Error::Timeout),
        result => Ok(result?),
    }
}

impl std::fmt::Display for Endpoint<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.address, &self.host.place) {
            (Address::Tcp(address), Place::Name) if address.ip().to_string() != self.host.name => {
                let (name, ip, port) = (&self.host.name, address.ip(), self.host.port);
                write!(f, "at \"{name}\" ({ip}), port {port}")
            }
            _ => write!(f, "{}", self.host),
        }
    }
}
