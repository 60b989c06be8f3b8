//! One connection: passed through to the publisher, until a stream starts.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::protocol::{
    Request, StartReplication, Startup, error_response, message, read_message, read_startup,
    starts_replication,
};
use super::server::Shared;
use super::{THREADS, stream};

/// SQLSTATEs of the refusals.
const OBJECT_IN_USE: &str = "55006";
const FEATURE_NOT_SUPPORTED: &str = "0A000";

/// Serves a client until one side ends the connection.
pub(super) fn serve(shared: &Arc<Shared>, client: &TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut from_client = BufReader::new(client);
    let (packet, mut parameters) = loop {
        match read_startup(&mut from_client)? {
            Startup::Encryption => (&*client).write_all(b"N")?,
            Startup::Cancel(packet) => {
                return TcpStream::connect(shared.publisher)?.write_all(&packet);
            }
            Startup::Session(packet, parameters) => break (packet, parameters),
        }
    };
    // The name of a session changes nothing in its stream.
    parameters.remove("application_name");
    let mut publisher = TcpStream::connect(shared.publisher)?;
    publisher.set_nodelay(true)?;
    publisher.write_all(&packet)?;
    let answers = (publisher.try_clone()?, client.try_clone()?);
    let replaying = Arc::new(AtomicBool::new(false));
    let silent = Arc::clone(&replaying);
    thread::Builder::new()
        .name(format!("{THREADS} answers"))
        .spawn(move || pass(answers, &silent))?;
    let mut session = Session { shared, client, publisher: &mut publisher, parameters, replaying };
    let served = session.queries(&mut from_client);
    let _ = publisher.shutdown(Shutdown::Both);
    served
}

/// Passes the publisher's bytes on until its end. While a stream is replayed, there is no place for
/// them: whatever the publisher says then, as that it stops, ends the session.
fn pass((mut publisher, mut client): (TcpStream, TcpStream), replaying: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = publisher.read(&mut buffer) {
        if replaying.load(Ordering::Acquire) || client.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// A session of a client and its counterpart on the publisher.
struct Session<'a> {
    shared: &'a Shared,
    client: &'a TcpStream,
    publisher: &'a mut TcpStream,
    /// Parameters of the startup packet that a stream depends on.
    parameters: BTreeMap<String, String>,
    replaying: Arc<AtomicBool>,
}

impl Session<'_> {
    /// Passes messages on to the publisher, except for START_REPLICATION.
    fn queries(&mut self, from_client: &mut impl Read) -> io::Result<()> {
        let mut received = Vec::new();
        loop {
            let kind = read_message(from_client, &mut received)?;
            let query = String::from_utf8_lossy(&received[5..]);
            if kind != b'Q' || !starts_replication(&query) {
                self.publisher.write_all(&received)?;
            } else if !self.start(&query, from_client)? {
                return Ok(());
            }
        }
    }

    /// Replays a stream, or refuses to. Returns false if the client has ended the connection.
    fn start(&mut self, command: &str, from_client: &mut impl Read) -> io::Result<bool> {
        let mut client = self.client;
        let Some(start) = StartReplication::parse(command) else {
            return self.refuse(FEATURE_NOT_SUPPORTED, "only logical slots are replayed");
        };
        let request = Request { session: self.parameters.clone(), options: start.options };
        let Some(recording) = self.shared.recording(request) else {
            return self.refuse(FEATURE_NOT_SUPPORTED, "no recording answers this request");
        };
        let Some((slot, flushed)) = self.shared.take(&start.slot) else {
            let text = format!("replication slot \"{}\" is active for another session", start.slot);
            return self.refuse(OBJECT_IN_USE, &text);
        };
        self.replaying.store(true, Ordering::Release);
        // CopyBothResponse: text, no columns.
        client.write_all(&message(b'W', &[0, 0, 0]))?;
        let acknowledge = |flushed| self.shared.acknowledge(&slot, flushed);
        let from = start.from.max(flushed);
        if !stream::replay(&recording, from, client, from_client, &acknowledge)? {
            return Ok(false);
        }
        self.replaying.store(false, Ordering::Release);
        drop(slot);
        let mut end = message(b'C', b"COPY 0\0");
        end.extend(message(b'Z', b"I"));
        client.write_all(&end)?;
        Ok(true)
    }

    fn refuse(&self, sqlstate: &str, text: &str) -> io::Result<bool> {
        let mut client = self.client;
        client.write_all(&error_response(sqlstate, text))?;
        Ok(true)
    }
}
