//! The list of hosts in a connection string.
//!
//! Source: `pqConnectOptions2` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-MULTIPLE-HOSTS>.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::{ConnInfoError, Given};

/// The socket directories of Debian's packages and of PostgreSQL's own default.
const SOCKET_DIRS: [&str; 2] = ["/var/run/postgresql", "/tmp"];
const DEFAULT_PORT: u16 = 5432;

/// One host of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The host name as given, used for certificates, the password file and messages. For a Unix
    /// socket: its directory.
    pub(crate) name: String,
    pub(crate) port: u16,
    pub(crate) place: Place,
}

/// How to reach a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Look up the name.
    Name,
    /// An address from `hostaddr`; no lookup.
    Address(IpAddr),
    /// A Unix socket in the directory `name`, or an abstract socket when the name starts with `@`.
    Socket,
}

impl Host {
    /// The socket file, or the abstract name with its leading NUL.
    pub(crate) fn socket_path(&self) -> PathBuf {
        let path = format!("{}/.s.PGSQL.{}", self.name, self.port);
        match path.strip_prefix('@') {
            Some(name) => PathBuf::from(format!("\0{name}")),
            None => PathBuf::from(path),
        }
    }

    /// The host name in the password file: `localhost` for a socket in the default directory.
    pub(crate) fn passfile_host(&self) -> &str {
        if self.place == Place::Socket && SOCKET_DIRS.contains(&self.name.as_str()) {
            "localhost"
        } else {
            &self.name
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, port) = (&self.name, self.port);
        match &self.place {
            Place::Socket => write!(f, "on socket \"{name}/.s.PGSQL.{port}\""),
            Place::Address(address) if address.to_string() != *name => {
                write!(f, "at \"{name}\" ({address}), port {port}")
            }
            Place::Name | Place::Address(_) => write!(f, "at \"{name}\", port {port}"),
        }
    }
}

/// Returns the hosts in the order of the connection string.
pub(super) fn hosts(given: &Given) -> Result<Vec<Host>, ConnInfoError> {
    let names: Option<Vec<&str>> = given.get("host").map(|list| list.split(',').collect());
    let addresses: Option<Vec<&str>> = given.get("hostaddr").map(|list| list.split(',').collect());
    let ports: Vec<&str> = given.get("port").unwrap_or_default().split(',').collect();

    let count = addresses.as_ref().or(names.as_ref()).map_or(1, Vec::len);
    if let (Some(names), Some(addresses)) = (&names, &addresses)
        && names.len() != addresses.len()
    {
        return Err(ConnInfoError::new(format!(
            "could not match {} host names to {} hostaddr values",
            names.len(),
            addresses.len()
        )));
    }
    // A single port applies to all hosts.
    if ports.len() != 1 && ports.len() != count {
        return Err(ConnInfoError::new(format!(
            "could not match {} port numbers to {count} hosts",
            ports.len()
        )));
    }
    (0..count)
        .map(|at| {
            let port_at = if ports.len() == 1 { 0 } else { at };
            let port = parse_port(ports[port_at], port_at + 1)?;
            let name = names.as_ref().map_or("", |names| names[at]);
            let address = addresses.as_ref().map_or("", |addresses| addresses[at]);
            host(name, address, port, at + 1)
        })
        .collect()
}

/// Checks one host; `number` is its position in the list, for messages.
fn host(name: &str, address: &str, port: u16, number: usize) -> Result<Host, ConnInfoError> {
    if !address.is_empty() {
        let parsed = address.parse().map_err(|_| {
            ConnInfoError::new(format!(
                "could not parse network address (entry {number} of hostaddr)"
            ))
        })?;
        let name = if name.is_empty() { address } else { name };
        return Ok(Host { name: name.to_owned(), port, place: Place::Address(parsed) });
    }
    let name = if name.is_empty() { default_host(port) } else { name };
    let place = if name.starts_with(['/', '@']) { Place::Socket } else { Place::Name };
    Ok(Host { name: name.to_owned(), port, place })
}

/// A local socket if one exists. libpq has one directory compiled in, which differs between
/// packages. pgapace therefore takes the directory that contains the server's socket.
fn default_host(port: u16) -> &'static str {
    let socket = |dir: &&&str| Path::new(dir).join(format!(".s.PGSQL.{port}")).exists();
    match SOCKET_DIRS.iter().find(socket) {
        Some(dir) => dir,
        None if Path::new(SOCKET_DIRS[0]).is_dir() => SOCKET_DIRS[0],
        None => "localhost",
    }
}

/// Parses one port; `number` is its position in the list, for messages.
fn parse_port(text: &str, number: usize) -> Result<u16, ConnInfoError> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(DEFAULT_PORT);
    }
    match text.parse::<i64>() {
        Ok(port) => u16::try_from(port).ok().filter(|&port| port > 0).ok_or_else(|| {
            ConnInfoError::new(format!(
                "invalid port number (entry {number} of port): must be between 1 and 65535"
            ))
        }),
        Err(_) => Err(ConnInfoError::new(format!(
            "invalid integer value for connection option \"port\" (entry {number} of the list)"
        ))),
    }
}
