//! The listening side of the replay server, and the state that its sessions share.

use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::protocol::Request;
use super::recording::Recording;
use super::{THREADS, session};
use crate::error::{Context, Result};

/// A replay server in front of a cluster. Dropping it cuts every connection.
#[derive(Debug)]
pub struct ReplayServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// The state that all sessions share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) publisher: SocketAddr,
    recordings: Mutex<Vec<Arc<Recording>>>,
    refused: Mutex<Vec<Request>>,
    slots: Mutex<HashMap<String, SlotProgress>>,
    streams: AtomicU64,
    closed: AtomicBool,
    connections: Mutex<Vec<TcpStream>>,
}

/// The use of a slot by clients.
#[derive(Debug, Default)]
struct SlotProgress {
    in_use: bool,
    flushed: u64,
}

impl ReplayServer {
    /// Starts a server without recordings on a free local port.
    pub fn in_front_of(publisher: &crate::Cluster) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))
            .context(|| "listen for the replay server".to_string())?;
        let address =
            listener.local_addr().context(|| "ask for the replay server's port".to_string())?;
        let shared = Arc::new(Shared {
            publisher: SocketAddr::from(([127, 0, 0, 1], publisher.port())),
            recordings: Mutex::default(),
            refused: Mutex::default(),
            slots: Mutex::default(),
            streams: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let acceptor = Arc::clone(&shared);
        thread::Builder::new()
            .name(THREADS.into())
            .spawn(move || accept(&acceptor, &listener))
            .context(|| "start the replay server's thread".to_string())?;
        Ok(Self { address, shared })
    }

    /// A connection string through the server, as superuser `postgres`.
    pub fn conninfo(&self, dbname: &str) -> String {
        let dbname = dbname.replace('\\', "\\\\").replace('\'', "\\'");
        format!("host='127.0.0.1' port={} user=postgres dbname='{dbname}'", self.address.port())
    }

    /// Answers the recording's request from now on.
    pub fn add(&self, recording: Recording) {
        lock(&self.shared.recordings).push(Arc::new(recording));
    }

    /// The requests that no recording answered, since the last call.
    pub fn refused(&self) -> Vec<Request> {
        std::mem::take(&mut *lock(&self.shared.refused))
    }

    /// Whether a request was refused since the last call of [`refused`](Self::refused).
    pub fn has_refused(&self) -> bool {
        !lock(&self.shared.refused).is_empty()
    }

    /// Number of streams that were started so far.
    pub fn streams(&self) -> u64 {
        self.shared.streams.load(Ordering::Relaxed)
    }

    /// Forgets the acknowledgements of clients: the slots of the publisher are new.
    pub fn forget_slots(&self) {
        for slot in lock(&self.shared.slots).values_mut() {
            slot.flushed = 0;
        }
    }
}

impl Drop for ReplayServer {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        for connection in lock(&self.shared.connections).drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

/// A slot that a session reads. Dropping it releases the slot.
pub(super) struct SlotInUse<'a> {
    shared: &'a Shared,
    name: String,
}

impl Drop for SlotInUse<'_> {
    fn drop(&mut self) {
        lock(&self.shared.slots).entry(self.name.clone()).or_default().in_use = false;
    }
}

impl Shared {
    /// The recording that answers a request; otherwise the request is kept.
    pub(super) fn recording(&self, request: Request) -> Option<Arc<Recording>> {
        let found =
            lock(&self.recordings).iter().find(|one| *one.request() == request).map(Arc::clone);
        if found.is_none() {
            lock(&self.refused).push(request);
        }
        found
    }

    /// Takes a slot for one session, with the position that was acknowledged for it. None if
    /// another session reads it.
    pub(super) fn take(&self, name: &str) -> Option<(SlotInUse<'_>, u64)> {
        let mut slots = lock(&self.slots);
        let slot = slots.entry(name.to_owned()).or_default();
        if std::mem::replace(&mut slot.in_use, true) {
            return None;
        }
        self.streams.fetch_add(1, Ordering::Relaxed);
        Some((SlotInUse { shared: self, name: name.to_owned() }, slot.flushed))
    }

    /// Notes that a client has acknowledged everything up to a position.
    pub(super) fn acknowledge(&self, slot: &SlotInUse<'_>, flushed: u64) {
        if let Some(slot) = lock(&self.slots).get_mut(&slot.name) {
            slot.flushed = slot.flushed.max(flushed);
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    for client in listener.incoming() {
        if shared.closed.load(Ordering::Acquire) {
            return;
        }
        let Ok(client) = client else { continue };
        {
            let mut connections = lock(&shared.connections);
            // A socket that is closed has no peer.
            connections.retain(|connection| connection.peer_addr().is_ok());
            connections.extend(client.try_clone());
        }
        let session = Arc::clone(shared);
        let spawned = thread::Builder::new().name(format!("{THREADS} session")).spawn(move || {
            if let Err(error) = session::serve(&session, &client) {
                tracing::debug!(%error, "a session of the replay server ended");
            }
            let _ = client.shutdown(Shutdown::Both);
        });
        if let Err(error) = spawned {
            tracing::debug!(%error, "the replay server could not start a session");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
