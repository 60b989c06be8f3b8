//! Sockets: TCP or Unix domain, non-blocking, with libpq's socket options.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::{Want, wait};

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    /// The socket file, or an abstract name that starts with a NUL byte.
    Unix(PathBuf),
}

/// The TCP socket options of <https://www.postgresql.org/docs/current/libpq-connect.html>. Zero or
/// none selects the system's default.
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    pub(crate) keepalives: bool,
    pub(crate) keepalives_idle: Option<Duration>,
    pub(crate) keepalives_interval: Option<Duration>,
    pub(crate) keepalives_count: Option<u32>,
    pub(crate) tcp_user_timeout: Option<Duration>,
    /// Size in bytes of the receive buffer on a loopback connection. A small window limits the data
    /// per round trip and can never grow, so it must not be used over a network.
    pub(crate) loopback_receive_buffer: Option<usize>,
}

#[cfg(test)]
impl SocketOptions {
    /// The system's defaults.
    pub(super) fn defaults() -> Self {
        Self {
            keepalives: true,
            keepalives_idle: None,
            keepalives_interval: None,
            keepalives_count: None,
            tcp_user_timeout: None,
            loopback_receive_buffer: None,
        }
    }
}

/// Time limit for a Unix socket whose listen queue is full, when no `connect_timeout` is set. With
/// a non-blocking socket connect(2) does not wait for a free place in the queue.
const FULL_QUEUE_PATIENCE: Duration = Duration::from_secs(10);

/// The longest segment, in bytes, that a server sends over the loopback interface into a small receive buffer.
///
/// The interface allows 64 kB, of which the server takes half of the largest window that it has seen. The kernel announces a
/// smaller window when it finds that segments need more of the buffer. Below the length of a segment, the server takes the
/// window for closed: a segment came every 200 ms, and a backlog of a web shop was received with 0.1 MB/s (Linux 6.18, MSS 22116
/// with a window of 21182). The least that the kernel was seen to allow (`rcv_ssthresh`) with a buffer of 24 kB is 26 kB.
/// With segments of 8 kB, `wide` took up to 1.8 times as long as without a limit, and with 12, 16 and 20 kB as long;
/// `bulk-insert` reads a little slower with 12 kB.
#[cfg(target_os = "linux")]
const LOOPBACK_SEGMENT: u32 = 16 * 1024;

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
    // Every flush contains a whole group of messages, so Nagle's algorithm could only delay its
    // end.
    socket.set_tcp_nodelay(true)?;
    if let Some(size) = options.loopback_receive_buffer
        && address.ip().is_loopback()
    {
        // Must precede connect(2), because an announced window cannot be reduced.
        socket.set_recv_buffer_size(size)?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_mss(LOOPBACK_SEGMENT)?;
    }
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
    if options.tcp_user_timeout.is_some() {
        set_user_timeout(&socket, options.tcp_user_timeout)?;
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

/// Sets TCP_USER_TIMEOUT, where it exists.
#[cfg(target_os = "linux")]
pub(super) fn set_user_timeout(socket: &Socket, limit: Option<Duration>) -> io::Result<()> {
    socket.set_tcp_user_timeout(limit)
}

/// Sets TCP_USER_TIMEOUT, where it exists.
#[cfg(not(target_os = "linux"))]
pub(super) fn set_user_timeout(_socket: &Socket, _limit: Option<Duration>) -> io::Result<()> {
    Ok(())
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

/// An interrupted connect(2) continues in the background, like one in progress.
fn is_in_progress(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    errno == Some(rustix::io::Errno::INPROGRESS) || errno == Some(rustix::io::Errno::INTR)
}

/// The user ID of the process at the other end of a Unix socket (for `requirepeer`).
#[cfg(target_os = "linux")]
pub(crate) fn peer_uid(socket: &Socket) -> io::Result<u32> {
    Ok(rustix::net::sockopt::socket_peercred(socket)?.uid.as_raw())
}

/// The user ID of the process at the other end of a Unix socket (for `requirepeer`).
#[cfg(not(target_os = "linux"))]
pub(crate) fn peer_uid(_socket: &Socket) -> io::Result<u32> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    fn options(loopback_receive_buffer: Option<usize>) -> SocketOptions {
        SocketOptions { loopback_receive_buffer, ..SocketOptions::defaults() }
    }

    /// The limit holds for both directions, and at the server it shows only when its window has grown.
    #[cfg(target_os = "linux")]
    #[test]
    fn segments_on_loopback_are_short() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let deadline = Some(Instant::now() + Duration::from_secs(30));
        let limited = connect_tcp(address, &options(Some(24 << 10)), deadline).unwrap();
        let others = connect_tcp(address, &options(None), deadline).unwrap();
        let longest = [&limited, &others].map(|socket| socket.tcp_mss().unwrap());
        assert!(longest[0] <= LOOPBACK_SEGMENT && LOOPBACK_SEGMENT < longest[1], "{longest:?}");
    }

    /// The receive window is small from the start, and all data passes through it.
    #[test]
    fn the_receive_buffer_on_loopback() {
        const SENT: usize = 8 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let deadline = Some(Instant::now() + Duration::from_secs(30));
        let large = connect_tcp(address, &options(None), deadline).unwrap();
        drop(listener.accept().unwrap());
        let mut small = connect_tcp(address, &options(Some(16 << 10)), deadline).unwrap();
        // Linux doubles the size, to account for its own overhead.
        let size = small.recv_buffer_size().unwrap();
        assert!(size <= 32 << 10 && size < large.recv_buffer_size().unwrap(), "{size}");
        let (mut server, _) = listener.accept().unwrap();
        let writer = std::thread::spawn(move || {
            // Alternate small and large pieces.
            let bytes = vec![7; 100_000];
            let mut sent = 0;
            for piece in [80, 100_000, 9, 3000].into_iter().cycle() {
                let piece = piece.min(SENT - sent);
                if piece == 0 {
                    break;
                }
                server.write_all(&bytes[..piece]).unwrap();
                sent += piece;
            }
        });
        small.set_nonblocking(false).unwrap();
        small.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut got = 0;
        let mut buffer = vec![0; 64 << 10];
        while got < SENT {
            let count = small.read(&mut buffer).unwrap();
            assert!(count > 0, "the end after {got} bytes");
            got += count;
        }
        writer.join().unwrap();
    }
}
