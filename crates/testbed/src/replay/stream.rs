//! The replay of a stream: one thread sends the recording, another one reads the client's messages.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use super::THREADS;
use super::protocol::{be_u32, be_u64, invalid, message, read_message};
use super::recording::Recording;

/// Bytes to send at once; a network delivers a fast stream in large pieces, too.
const CHUNK: usize = 64 << 10;
/// Seconds from 1970 to 2000, where PostgreSQL's time begins.
const EPOCH_SECONDS: u64 = 946_684_800;

/// The wishes of the client that the stream has not fulfilled.
#[derive(Debug, Default)]
struct Wanted {
    /// Whether it waits for a keepalive.
    answer: bool,
    /// Whether the stream must end.
    end: bool,
}

#[derive(Debug, Default)]
struct Wishes {
    wanted: Mutex<Wanted>,
    changed: Condvar,
}

impl Wishes {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Wanted)) {
        change(&mut self.wanted());
        self.changed.notify_all();
    }

    /// Takes the wishes of the client; its wish for an answer is then fulfilled.
    fn take(&self) -> Wanted {
        let mut wanted = self.wanted();
        Wanted { answer: std::mem::take(&mut wanted.answer), end: wanted.end }
    }

    /// Waits until the client wants anything.
    fn wait(&self) -> Wanted {
        let wanted = self.wanted();
        let idle = |wanted: &mut Wanted| !wanted.answer && !wanted.end;
        drop(self.changed.wait_while(wanted, idle).unwrap_or_else(PoisonError::into_inner));
        self.take()
    }
}

/// Sends the recording from a position on, and keepalives after it, until the client ends the
/// stream. Returns false if the client has ended the connection instead.
pub(super) fn replay(
    recording: &Recording,
    from: u64,
    client: &TcpStream,
    from_client: &mut impl Read,
    acknowledge: &dyn Fn(u64),
) -> io::Result<bool> {
    let wishes = Wishes::default();
    thread::scope(|scope| {
        let sender = thread::Builder::new()
            .name(format!("{THREADS} stream"))
            .spawn_scoped(scope, || send(recording, from, client, &wishes))?;
        let listened = listen(from_client, &wishes, acknowledge);
        if !matches!(listened, Ok(true)) {
            // The sender may wait for a client that does not read.
            let _ = client.shutdown(Shutdown::Both);
        }
        wishes.change(|wanted| wanted.end = true);
        let sent = sender.join().map_err(|_| io::Error::other("the sender panicked"))?;
        let goes_on = listened?;
        if goes_on {
            sent?;
        }
        Ok(goes_on)
    })
}

/// Reads the client's messages until it ends the stream (true) or the connection (false).
fn listen(
    from_client: &mut impl Read,
    wishes: &Wishes,
    acknowledge: &dyn Fn(u64),
) -> io::Result<bool> {
    let mut received = Vec::new();
    loop {
        match read_message(from_client, &mut received)? {
            b'c' => return Ok(true),
            b'X' => return Ok(false),
            // Other CopyData, as hot standby feedback, asks for nothing.
            b'd' if received.get(5) == Some(&b'r') => {
                acknowledge(be_u64(&received, 14)?);
                if received.get(38).is_some_and(|reply| *reply != 0) {
                    wishes.change(|wanted| wanted.answer = true);
                }
            }
            b'd' => {}
            _ => return Err(invalid("a message of the client in the stream")),
        }
    }
}

fn send(
    recording: &Recording,
    from: u64,
    mut client: &TcpStream,
    wishes: &Wishes,
) -> io::Result<()> {
    for range in recording.from(from) {
        let mut at = range.start;
        while at < range.end {
            let wanted = wishes.take();
            if wanted.end {
                return client.write_all(&message(b'c', &[]));
            }
            if wanted.answer {
                client.write_all(&keepalive(from.max(recording.position_at(at))))?;
            }
            let chunk = chunk(recording.messages(at..range.end))?;
            client.write_all(&recording.messages(at..range.end)[..chunk])?;
            at += chunk;
        }
    }
    let end = from.max(recording.end());
    // The position of the end, even if all of the recording was left out.
    client.write_all(&keepalive(end))?;
    while !wishes.wait().end {
        client.write_all(&keepalive(end))?;
    }
    client.write_all(&message(b'c', &[]))
}

/// The length of the first messages, as many as make up a chunk.
fn chunk(messages: &[u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < messages.len() && length < CHUNK {
        length += 1 + be_u32(messages, length + 1)? as usize;
    }
    Ok(length)
}

/// A keepalive that asks for no answer.
fn keepalive(position: u64) -> Vec<u8> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since_1970.as_secs().saturating_sub(EPOCH_SECONDS);
    let now = seconds * 1_000_000 + u64::from(since_1970.subsec_micros());
    let mut body = vec![b'k'];
    body.extend_from_slice(&position.to_be_bytes());
    body.extend_from_slice(&now.to_be_bytes());
    body.push(0);
    message(b'd', &body)
}
