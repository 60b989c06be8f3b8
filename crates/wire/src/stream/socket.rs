//! Opening a socket: TCP or Unix domain, non-blocking, with libpq's socket options.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::{Want, wait};

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    /// The socket file, or an abstract name that starts with a NUL byte.
    Unix(PathBuf),
}

/// The options of <https://www.postgresql.org/docs/current/libpq-connect.html> that concern a TCP
/// socket; zero or none leaves the system's default.
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    pub(crate) keepalives: bool,
    pub(crate) keepalives_idle: Option<Duration>,
    pub(crate) keepalives_interval: Option<Duration>,
    pub(crate) keepalives_count: Option<u32>,
    pub(crate) tcp_user_timeout: Option<Duration>,
}

/// How long a Unix socket whose listen queue is full is tried when no `connect_timeout` is set.
/// connect(2) does not wait for room there when the socket is non-blocking.
const FULL_QUEUE_PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn connect(
    address: &Address,
    options: &SocketOptions,
    deadline: Option<Instant>,
) -> io::Result<Socket> {
    match address {
        Address::Tcp(address) => connect_tcp(*address, options, deadline),
        Address::Unix(path) => connect_unix(&SockAddr::unix(path)?, deadline),
    }
}

fn connect_tcp(
    address: SocketAddr,
    options: &SocketOptions,
    deadline: Option<Instant>,
) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // Every flush is a whole group of messages: Nagle could only delay its tail.
    socket.set_tcp_nodelay(true)?;
    if options.keepalives {
        let mut keepalive = TcpKeepalive::new();
        if let Some(idle) = options.keepalives_idle {
            keepalive = keepalive.with_time(idle);
        }
        if let Some(interval) = options.keepalives_interval {
            keepalive = keepalive.with_interval(interval);
        }
        if let Some(count) = options.keepalives_count {
            keepalive = keepalive.with_retries(count);
        }
        socket.set_tcp_keepalive(&keepalive)?;
    }
    #[cfg(target_os = "linux")]
    if options.tcp_user_timeout.is_some() {
        socket.set_tcp_user_timeout(options.tcp_user_timeout)?;
    }
    match socket.connect(&address.into()) {
        Ok(()) => return Ok(socket),
        Err(error) if is_in_progress(&error) => {}
        Err(error) => return Err(error),
    }
    let want = Want { read: false, write: true };
    if wait(socket.as_fd(), want, None, deadline)?.is_none() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match socket.take_error()? {
        None => Ok(socket),
        Some(error) => Err(error),
    }
}

fn connect_unix(address: &SockAddr, deadline: Option<Instant>) -> io::Result<Socket> {
    let deadline = deadline.unwrap_or_else(|| Instant::now() + FULL_QUEUE_PATIENCE);
    loop {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(address) {
            Ok(()) => return Ok(socket),
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error),
        }
    }
}

/// An interrupted connect(2) goes on in the background exactly like one in progress.
fn is_in_progress(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    errno == Some(rustix::io::Errno::INPROGRESS) || errno == Some(rustix::io::Errno::INTR)
}

/// The user id of the process at the other end of a Unix socket (`requirepeer`).
#[cfg(target_os = "linux")]
pub(crate) fn peer_uid(socket: &Socket) -> io::Result<u32> {
    Ok(rustix::net::sockopt::socket_peercred(socket)?.uid.as_raw())
}

/// The user id of the process at the other end of a Unix socket (`requirepeer`).
#[cfg(not(target_os = "linux"))]
pub(crate) fn peer_uid(_socket: &Socket) -> io::Result<u32> {
    Err(io::ErrorKind::Unsupported.into())
}
