//! A TCP proxy that delays, cuts, freezes and refuses connections, to simulate network failures.
//!
//! Each direction of a connection has two threads. One reads chunks and stamps them with their due
//! time, the other waits until a chunk is due and writes it. A delay therefore costs latency but
//! not bandwidth.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Result};

const CHUNK: usize = 64 << 10;
/// Maximum number of chunks in transit in one direction. If the reader is slower, the sender
/// blocks.
const CHUNKS_IN_FLIGHT_MAX: usize = 512;
/// The command that starts the stream of a replication connection.
const START: &[u8] = b"START_REPLICATION ";

/// A listening address that forwards to a server. Dropping it cuts every connection.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    delay_us: AtomicU64,
    refuse: AtomicBool,
    closed: AtomicBool,
    forwarded_bytes: AtomicU64,
    /// The round trips of each connection so far, in the order in which they were opened.
    round_trips: Mutex<Vec<Arc<AtomicU64>>>,
    held: Mutex<Held>,
    released: Condvar,
    connections: Mutex<Vec<Connection>>,
    /// How many connections there have been.
    opened: AtomicU64,
}

/// The data that the proxy holds back.
#[derive(Debug, Default)]
struct Held {
    all: bool,
    streams: bool,
    answers: bool,
    /// Connections with a lower number are silent.
    silent_below: u64,
}

#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// Number of directions that are still open.
    open: Arc<AtomicU64>,
}

/// One direction of a connection.
#[derive(Clone)]
struct Direction {
    /// Of the connection.
    number: u64,
    to_client: bool,
    /// Whether the client has sent START_REPLICATION.
    streams: Arc<AtomicBool>,
    /// Whether the client has sent something that the server has not answered.
    asks: Arc<AtomicBool>,
    round_trips: Arc<AtomicU64>,
}

/// Bytes and the time to forward them; none marks the end of the direction.
type Chunk = (Instant, Option<Vec<u8>>);

impl Proxy {
    /// Starts a proxy on a free local port.
    pub fn start(server: SocketAddr) -> Result<Self> {
        let listener =
            TcpListener::bind(("127.0.0.1", 0)).context(|| "listen for the proxy".to_string())?;
        let address = listener.local_addr().context(|| "ask for the proxy's port".to_string())?;
        let shared = Arc::new(Shared {
            server,
            delay_us: AtomicU64::new(0),
            refuse: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            forwarded_bytes: AtomicU64::new(0),
            round_trips: Mutex::default(),
            held: Mutex::default(),
            released: Condvar::new(),
            connections: Mutex::new(Vec::new()),
            opened: AtomicU64::new(0),
        });
        let acceptor = Arc::clone(&shared);
        thread::Builder::new()
            .name("proxy".into())
            .spawn(move || acceptor.accept(&listener))
            .context(|| "start the proxy's thread".to_string())?;
        Ok(Self { address, shared })
    }

    /// Starts a proxy that forwards to a cluster's TCP port.
    pub fn in_front_of(cluster: &crate::Cluster) -> Result<Self> {
        Self::start(SocketAddr::from(([127, 0, 0, 1], cluster.port())))
    }

    /// The address on which the proxy listens.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// A connection string through the proxy, as superuser `postgres`.
    pub fn conninfo(&self, dbname: &str) -> String {
        let dbname = dbname.replace('\\', "\\\\").replace('\'', "\\'");
        format!("host='127.0.0.1' port={} user=postgres dbname='{dbname}'", self.address.port())
    }

    /// Delays each direction by this time, starting with the next chunk.
    pub fn set_delay(&self, one_way: Duration) {
        let delay = u64::try_from(one_way.as_micros()).unwrap_or(u64::MAX);
        self.shared.delay_us.store(delay, Ordering::Relaxed);
    }

    /// Closes every connection at once. Bytes in transit are lost.
    pub fn cut_all(&self) {
        for connection in self.shared.connections().drain(..) {
            connection.cut();
        }
    }

    /// Forwards nothing until [`unfreeze`](Self::unfreeze). Connections stay open and silent, as if
    /// the network dropped every packet.
    pub fn freeze(&self) {
        self.shared.held().all = true;
    }

    /// Forwards the data that was held back.
    pub fn unfreeze(&self) {
        self.shared.held().all = false;
        self.shared.released.notify_all();
    }

    /// Drops whatever is sent over the connections that there are, although both ends believe that it has arrived. Later
    /// connections work.
    pub fn silence_connections(&self) {
        let mut held = self.shared.held();
        held.silent_below = self.shared.opened.load(Ordering::Acquire);
    }

    /// Holds back all replication streams after the message that starts them, or releases them.
    /// Other connections are not affected.
    pub fn hold_streams(&self, hold: bool) {
        self.shared.held().streams = hold;
        self.shared.released.notify_all();
    }

    /// Holds back all data from servers, or releases it. Data from clients is still forwarded.
    pub fn hold_answers(&self, hold: bool) {
        self.shared.held().answers = hold;
        self.shared.released.notify_all();
    }

    /// Closes each new connection at once, or stops doing so.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refuse.store(refuse, Ordering::Relaxed);
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        let mut connections = self.shared.connections();
        connections.retain(|connection| connection.open.load(Ordering::Acquire) > 0);
        connections.len()
    }

    /// For each connection so far, in the order in which they were opened: how often the client has
    /// sent something after an answer of the server. Several messages without an answer in between
    /// count once.
    pub fn round_trips(&self) -> Vec<u64> {
        let counts = self.shared.round_trips.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// Number of bytes forwarded so far in both directions.
    pub fn forwarded_bytes(&self) -> u64 {
        self.shared.forwarded_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        self.cut_all();
        self.shared.held().silent_below = 0;
        self.unfreeze();
        self.hold_streams(false);
        self.hold_answers(false);
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl Connection {
    fn cut(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let Ok(client) = client else { continue };
            if self.refuse.load(Ordering::Relaxed) {
                continue;
            }
            if let Err(error) = self.connect(client) {
                tracing::debug!(%error, "the proxy could not connect");
            }
        }
    }

    fn connect(self: &Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let server = TcpStream::connect_timeout(&self.server, Duration::from_secs(5))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let open = Arc::new(AtomicU64::new(2));
        let connection = Connection {
            client: client.try_clone()?,
            server: server.try_clone()?,
            open: Arc::clone(&open),
        };
        {
            let mut connections = self.connections();
            connections.retain(|connection| connection.open.load(Ordering::Acquire) > 0);
            connections.push(connection);
        }
        let up = Direction {
            number: self.opened.fetch_add(1, Ordering::AcqRel),
            to_client: false,
            streams: Arc::default(),
            asks: Arc::default(),
            round_trips: Arc::default(),
        };
        {
            let mut counts = self.round_trips.lock().unwrap_or_else(PoisonError::into_inner);
            counts.push(Arc::clone(&up.round_trips));
        }
        let down = Direction { to_client: true, ..up.clone() };
        self.direction(client.try_clone()?, server.try_clone()?, Arc::clone(&open), up)?;
        self.direction(server, client, open, down)
    }

    fn direction(
        self: &Arc<Self>,
        from: TcpStream,
        to: TcpStream,
        open: Arc<AtomicU64>,
        direction: Direction,
    ) -> std::io::Result<()> {
        let (sender, receiver) = sync_channel(CHUNKS_IN_FLIGHT_MAX);
        let (reader, writer) = (Arc::clone(self), Arc::clone(self));
        let read = direction.clone();
        thread::Builder::new().spawn(move || reader.read(from, &sender, &read))?;
        thread::Builder::new().spawn(move || {
            writer.write(to, &receiver, &direction);
            open.fetch_sub(1, Ordering::AcqRel);
        })?;
        Ok(())
    }

    fn read(&self, mut from: TcpStream, sender: &SyncSender<Chunk>, direction: &Direction) {
        let mut buffer = vec![0; CHUNK];
        loop {
            let length = from.read(&mut buffer).unwrap_or(0);
            let delay = Duration::from_micros(self.delay_us.load(Ordering::Relaxed));
            let bytes = (length > 0).then(|| buffer[..length].to_vec());
            if direction.to_client {
                direction.asks.store(false, Ordering::Relaxed);
            } else if length > 0 && !direction.asks.swap(true, Ordering::Relaxed) {
                direction.round_trips.fetch_add(1, Ordering::Relaxed);
            }
            let asks = |bytes: &Vec<u8>| bytes.windows(START.len()).any(|window| window == START);
            if !direction.to_client && bytes.as_ref().is_some_and(asks) {
                direction.streams.store(true, Ordering::Release);
            }
            if sender.send((Instant::now() + delay, bytes)).is_err() || length == 0 {
                return;
            }
        }
    }

    fn write(&self, mut to: TcpStream, receiver: &Receiver<Chunk>, direction: &Direction) {
        // The server's first message after START_REPLICATION reports that the stream begins.
        let mut begun = false;
        while let Ok((due, bytes)) = receiver.recv() {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let streams = direction.to_client && direction.streams.load(Ordering::Acquire);
            let answer = match &bytes {
                Some(bytes) if streams && !std::mem::replace(&mut begun, true) => message(bytes),
                _ => 0,
            };
            self.wait(direction, streams && answer == 0);
            let Some(bytes) = bytes else {
                let _ = to.shutdown(Shutdown::Write);
                return;
            };
            let (answer, rest) = bytes.split_at(answer);
            let written = to.write_all(answer).and_then(|()| {
                if !answer.is_empty() && !rest.is_empty() {
                    self.wait(direction, true);
                }
                to.write_all(rest)
            });
            if written.is_err() {
                // The reader's side must end, too; otherwise its peer would wait forever.
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
            self.forwarded_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    /// Waits while the data of this direction is held back.
    fn wait(&self, direction: &Direction, streamed: bool) {
        let mut held = self.held();
        while held.all
            || direction.number < held.silent_below
            || streamed && held.streams
            || direction.to_client && held.answers
        {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The length of the first message from a server, which must be complete.
fn message(bytes: &[u8]) -> usize {
    let length = bytes.get(1..5).and_then(|length| length.try_into().ok());
    length.map_or(0, |length| bytes.len().min(1 + u32::from_be_bytes(length) as usize))
}
