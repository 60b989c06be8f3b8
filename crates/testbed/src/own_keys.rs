//! A TCP proxy that resembles the proxy of Neon: each client has a backend of its own, but the proxy sends cancel
//! keys of its own, and passes only a few startup parameters on.

use std::collections::HashMap;
use std::io::{Read, Result as IoResult, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::cluster::Cluster;
use crate::error::{Context, Result};

/// Startup parameters that are passed on.
const PASSED: [&str; 5] = ["user", "database", "application_name", "replication", "options"];
const CANCEL_REQUEST: [u8; 4] = [0x04, 0xd2, 0x16, 0x2e];
/// The first process ID that is told to a client. No server has it.
const FIRST_PID: u32 = 1 << 30;

/// Process ID and secret, as a cancel request has them.
type Key = [u8; 8];

/// A listening address that forwards to a cluster. It accepts no connections after it is dropped.
#[derive(Debug)]
pub struct OwnKeysProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    closed: AtomicBool,
    next_pid: AtomicU32,
    /// The server's keys by those that clients were told.
    keys: Mutex<HashMap<Key, Key>>,
}

impl OwnKeysProxy {
    /// Starts a proxy that forwards to a cluster's TCP port.
    pub fn in_front_of(cluster: &Cluster) -> Result<Self> {
        let listener =
            TcpListener::bind(("127.0.0.1", 0)).context(|| "listen for the proxy".to_string())?;
        let address = listener.local_addr().context(|| "ask for the proxy's port".to_string())?;
        let shared = Arc::new(Shared {
            server: SocketAddr::from(([127, 0, 0, 1], cluster.port())),
            closed: AtomicBool::new(false),
            next_pid: AtomicU32::new(FIRST_PID),
            keys: Mutex::default(),
        });
        let acceptor = Arc::clone(&shared);
        thread::Builder::new()
            .name("own keys".into())
            .spawn(move || {
                for client in listener.incoming().flatten() {
                    if acceptor.closed.load(Ordering::Acquire) {
                        return;
                    }
                    let shared = Arc::clone(&acceptor);
                    // A client that is gone concerns nobody else.
                    thread::spawn(move || shared.serve(client));
                }
            })
            .context(|| "start the proxy's thread".to_string())?;
        Ok(Self { address, shared })
    }

    /// A connection string through the proxy, as superuser `postgres`. `host` is the name by which clients
    /// know the proxy; it is not looked up.
    pub fn conninfo(&self, host: &str, dbname: &str) -> String {
        let dbname = dbname.replace('\\', "\\\\").replace('\'', "\\'");
        let port = self.address.port();
        format!(
            "host='{host}' hostaddr='127.0.0.1' port={port} user=postgres dbname='{dbname}' sslmode=disable"
        )
    }
}

impl Drop for OwnKeysProxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn keys(&self) -> MutexGuard<'_, HashMap<Key, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut client: TcpStream) -> IoResult<()> {
        client.set_nodelay(true)?;
        let mut server = TcpStream::connect(self.server)?;
        server.set_nodelay(true)?;
        let request = untagged(&mut client)?;
        let (code, rest) = request.split_at(4);
        if code == CANCEL_REQUEST {
            let key = rest.try_into().ok().and_then(|key: Key| self.keys().get(&key).copied());
            if let Some(key) = key {
                server.write_all(&with_length(&[&CANCEL_REQUEST[..], &key].concat()))?;
                // The server closes the connection after it has sent the signal.
                std::io::copy(&mut server, &mut client)?;
            }
            return Ok(());
        }
        server.write_all(&with_length(&[code, &passed(rest)].concat()))?;
        let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
        let upward = thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            to.shutdown(std::net::Shutdown::Write)
        });
        self.forward_answers(&mut server, &mut client)?;
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = upward.join();
        Ok(())
    }

    /// Forwards what the server sends, with another cancel key.
    fn forward_answers(&self, server: &mut TcpStream, client: &mut TcpStream) -> IoResult<()> {
        loop {
            let mut tag = [0];
            server.read_exact(&mut tag)?;
            let mut body = untagged(server)?;
            if tag == *b"K" {
                let pid = self.next_pid.fetch_add(1, Ordering::Relaxed).to_be_bytes();
                let told = [pid, *b"mine"].concat();
                if let (Ok(told), Ok(key)) = (told[..].try_into(), body[..].try_into()) {
                    self.keys().insert(told, key);
                }
                body = told;
            }
            client.write_all(&[&tag[..], &with_length(&body)].concat())?;
            if tag == *b"Z" {
                return std::io::copy(server, client).map(|_| ());
            }
        }
    }
}

/// Reads a message without its tag: a length, which is not returned, and the body.
fn untagged(from: &mut TcpStream) -> IoResult<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut body = vec![0; (u32::from_be_bytes(length) as usize).saturating_sub(4)];
    from.read_exact(&mut body)?;
    Ok(body)
}

fn with_length(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], body].concat()
}

/// Startup parameters without those that are not passed on.
fn passed(parameters: &[u8]) -> Vec<u8> {
    let words: Vec<&[u8]> = parameters.split(|byte| *byte == 0).collect();
    let mut kept = Vec::new();
    for pair in words.chunks_exact(2) {
        if PASSED.iter().any(|name| name.as_bytes() == pair[0]) {
            kept.extend([pair[0], b"\0", pair[1], b"\0"].concat());
        }
    }
    kept.push(0);
    kept
}
