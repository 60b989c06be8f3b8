//! TCP_USER_TIMEOUT for a peer that is busy.
//!
//! The option ends a connection whose peer acknowledges nothing for some time: it is dead, or cannot be reached.
//! On Linux it also ends one whose peer has had no room to receive for that long, although it answers every
//! probe (`tcp(7)`). A backend reads nothing while it executes a statement or waits for a lock, so the rest of
//! a pipeline fills its receive window. Therefore the limit moves on for as long as such a peer answers. When
//! it answers no more, the system ends the connection at the limit of that moment.
//!
//! The state of a connection is read from `/proc/self/net/tcp`: Rust has no safe interface to TCP_INFO. If it cannot be read, the limit of the system applies (`tcp_retries2`), which knows the difference.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::socket::set_user_timeout;

/// Within the limit, a peer that is busy is noticed so many times.
const LOOKS: u32 = 4;

/// The limit of one connection.
#[derive(Debug)]
pub(super) struct UserTimeout {
    limit: Duration,
    /// The limit of the socket. None is that of the system.
    current: Cell<Option<Duration>>,
    sending: Cell<Sending>,
}

/// What is known about bytes that were written to the socket.
#[derive(Debug, Clone, Copy)]
enum Sending {
    /// The peer has acknowledged all.
    Nothing,
    /// Some were written since then.
    Written,
    /// The peer may not have acknowledged all. It has acknowledged none since `since`, and `unacknowledged`
    /// was their number at the last look.
    Since { since: Instant, looked: Instant, unacknowledged: u64 },
    /// The system does not tell.
    Unknown,
}

impl UserTimeout {
    pub(super) fn new(limit: Duration) -> Self {
        let current = Cell::new(Some(limit));
        Self { limit, current, sending: Cell::new(Sending::Nothing) }
    }

    /// Bytes were written to the socket.
    pub(super) fn wrote(&self) {
        if matches!(self.sending.get(), Sending::Nothing) {
            self.sending.set(Sending::Written);
        }
    }

    /// The peer has read all bytes and answered, which takes no look, unless the limit has to move back.
    pub(super) fn answered(&self) {
        if self.current.get() == Some(self.limit) {
            self.sending.set(Sending::Nothing);
        }
    }

    /// When to [look](Self::look) at the connection. None if the peer has acknowledged all.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let looked = match self.sending.get() {
            Sending::Nothing | Sending::Unknown => return None,
            Sending::Since { looked, .. } => looked,
            Sending::Written => {
                let now = Instant::now();
                let unacknowledged = u64::MAX;
                self.sending.set(Sending::Since { since: now, looked: now, unacknowledged });
                now
            }
        };
        looked.checked_add(self.limit / LOOKS)
    }

    /// Moves the limit on if the peer is busy and answers.
    pub(super) fn look(&self, socket: &Socket) {
        let Sending::Since { since, unacknowledged, .. } = self.sending.get() else { return };
        let now = Instant::now();
        let (next, limit) = match Connection::of(socket) {
            Err(_) => (Sending::Unknown, None),
            Ok(Connection { unacknowledged: 0, .. }) => (Sending::Nothing, Some(self.limit)),
            Ok(found) => {
                let moves = found.unacknowledged < unacknowledged;
                let since = if moves { now } else { since };
                let limit = match found.peer {
                    Peer::Busy => Some(self.limit + now.duration_since(since)),
                    Peer::Silent => self.current.get(),
                    Peer::Reads => Some(self.limit),
                };
                let unacknowledged = found.unacknowledged;
                (Sending::Since { since, looked: now, unacknowledged }, limit)
            }
        };
        self.sending.set(next);
        if self.current.replace(limit) != limit {
            // A connection that is gone already cannot be changed.
            let _ = set_user_timeout(socket, limit);
        }
    }
}

/// What the system knows about a connection.
#[derive(Debug, PartialEq, Eq)]
struct Connection {
    /// Bytes that were written and that the peer has not acknowledged.
    unacknowledged: u64,
    peer: Peer,
}

/// The other end of a connection over which bytes are sent.
#[derive(Debug, PartialEq, Eq)]
enum Peer {
    /// It has room to receive.
    Reads,
    /// It has no room, and answers probes. A probe may be unanswered: Linux answers two within half a second
    /// once (`tcp_invalid_ratelimit`).
    Busy,
    /// It has not answered the last packets.
    Silent,
}

impl Connection {
    fn of(socket: &Socket) -> io::Result<Self> {
        let inode = rustix::fs::fstat(socket)?.st_ino.to_string();
        let v6 = socket.local_addr()?.is_ipv6();
        let table = File::open(if v6 { "/proc/self/net/tcp6" } else { "/proc/self/net/tcp" })?;
        for line in BufReader::new(table).lines() {
            if let Some(connection) = Self::parse(&line?, &inode) {
                return Ok(connection);
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// From a line of `/proc/net/tcp`, if it has this inode (`get_tcp4_sock` in `net/ipv4/tcp_ipv4.c`).
    fn parse(line: &str, inode: &str) -> Option<Self> {
        /// A value of `timer_active`.
        const RETRANSMISSION: &str = "01";
        const PROBE_OF_THE_WINDOW: &str = "04";
        let mut fields = line.split_ascii_whitespace().skip(4);
        let [queues, timer, retransmissions, _, probes, found] =
            std::array::from_fn(|_| fields.next().unwrap_or_default());
        if found != inode {
            return None;
        }
        let unacknowledged = u64::from_str_radix(queues.split_once(':')?.0, 16).ok()?;
        let retransmissions = u64::from_str_radix(retransmissions, 16).ok()?;
        let probes: u64 = probes.parse().ok()?;
        let peer = match timer.split_once(':')?.0 {
            PROBE_OF_THE_WINDOW if probes <= 1 => Peer::Busy,
            PROBE_OF_THE_WINDOW => Peer::Silent,
            RETRANSMISSION if retransmissions > 0 => Peer::Silent,
            _ => Peer::Reads,
        };
        Some(Self { unacknowledged, peer })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;

    use super::*;
    use crate::stream::{Address, SocketOptions, Stream, Want};

    #[test]
    fn what_the_system_knows() {
        let line = |timer: &str, retransmissions: &str, probes: &str| {
            format!(
                "   9: 0100007F:8124 0100007F:1538 01 0000A3F0:00000010 {timer}:0000004E \
                 {retransmissions}     0        {probes} 7301 2 ffff8881 20 4 30 10 -1"
            )
        };
        let parse = |line: String| Connection::parse(&line, "7301");
        let with = |peer| Some(Connection { unacknowledged: 0xa3f0, peer });
        assert_eq!(parse(line("04", "00000000", "0")), with(Peer::Busy));
        assert_eq!(parse(line("04", "00000000", "1")), with(Peer::Busy));
        assert_eq!(parse(line("04", "00000000", "2")), with(Peer::Silent));
        assert_eq!(parse(line("01", "00000003", "0")), with(Peer::Silent));
        assert_eq!(parse(line("01", "00000000", "0")), with(Peer::Reads));
        assert_eq!(Connection::parse(&line("04", "00000000", "0"), "730"), None);
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt";
        assert_eq!(Connection::parse(head, "7301"), None);
    }

    /// The peer reads nothing for twice the limit, and then all of it.
    #[test]
    fn a_busy_peer_is_not_given_up() {
        const LIMIT: Duration = Duration::from_secs(2);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let options = SocketOptions { tcp_user_timeout: Some(LIMIT), ..SocketOptions::defaults() };
        let deadline = Some(Instant::now() + Duration::from_secs(30));
        let mut stream = Stream::connect(&address, &options, deadline).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut sent = 0;
        while let Ok(count) = stream.write(&[7; 64 << 10]) {
            sent += count;
        }
        let nothing = Want { read: true, write: false };
        let ready = stream.wait(nothing, None, Some(Instant::now() + 2 * LIMIT)).unwrap();
        assert!(ready.is_none(), "{ready:?}: {:?}", stream.socket().take_error());
        let limit = |stream: &Stream| stream.socket().tcp_user_timeout().unwrap();
        assert!(limit(&stream).unwrap() > 2 * LIMIT);
        let reader = std::thread::spawn(move || {
            let mut received = vec![0; sent];
            server.read_exact(&mut received).map(|()| server)
        });
        // It looks again after a quarter of the limit, and finds that everything has arrived.
        let _server = reader.join().unwrap().unwrap();
        assert!(stream.wait(nothing, None, Some(Instant::now() + LIMIT)).unwrap().is_none());
        assert_eq!(limit(&stream), Some(LIMIT));
        assert!(stream.user_timeout.as_ref().unwrap().next_look().is_none());
    }
}
