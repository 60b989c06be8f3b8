//! One connection: passed through to the publisher, until a stream starts.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
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
            Startup::Encryption => (&mut &*client).write_all(b"N")?,
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
    thread::Builder::new().name(format!("{THREADS} answers")).spawn(move || pass(answers))?;
    let served = queries(shared, &mut from_client, client, &mut publisher, &parameters);
    let _ = publisher.shutdown(Shutdown::Both);
    served
}

/// Passes the publisher's bytes on until its end. It ends also while a stream is replayed, if the
/// publisher stops; it says nothing else then.
fn pass((mut publisher, mut client): (TcpStream, TcpStream)) {
    let _ = io::copy(&mut publisher, &mut client);
    let _ = client.shutdown(Shutdown::Both);
}

/// Passes messages on to the publisher, except for START_REPLICATION.
fn queries(
    shared: &Shared,
    from_client: &mut impl Read,
    client: &TcpStream,
    publisher: &mut TcpStream,
    session: &std::collections::BTreeMap<String, String>,
) -> io::Result<()> {
    let mut received = Vec::new();
    loop {
        let kind = read_message(from_client, &mut received)?;
        let query = String::from_utf8_lossy(&received[5..]);
        if kind != b'Q' || !starts_replication(&query) {
            publisher.write_all(&received)?;
            continue;
        }
        let refuse =
            |sqlstate, text: &str| (&mut &*client).write_all(&error_response(sqlstate, text));
        let Some(start) = StartReplication::parse(&query) else {
            refuse(FEATURE_NOT_SUPPORTED, "only logical slots are replayed")?;
            continue;
        };
        let request = Request { session: session.clone(), options: start.options };
        let Some(recording) = shared.recording(request) else {
            refuse(FEATURE_NOT_SUPPORTED, "no recording answers this request")?;
            continue;
        };
        let Some((slot, flushed)) = shared.take(&start.slot) else {
            let text = format!("replication slot \"{}\" is active for another session", start.slot);
            refuse(OBJECT_IN_USE, &text)?;
            continue;
        };
        // CopyBothResponse: text, no columns.
        (&mut &*client).write_all(&message(b'W', &[0, 0, 0]))?;
        let acknowledge = |flushed| shared.acknowledge(&slot, flushed);
        if !stream::replay(&recording, start.from.max(flushed), client, from_client, &acknowledge)?
        {
            return Ok(());
        }
        drop(slot);
        let mut end = message(b'C', b"COPY 0\0");
        end.extend(message(b'Z', b"I"));
        (&mut &*client).write_all(&end)?;
    }
}
