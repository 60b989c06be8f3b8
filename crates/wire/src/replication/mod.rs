//! A session after START_REPLICATION: CopyData both ways.
//!
//! The reader decides how fast the publisher can send. A walsender makes one send(2) for every
//! message, and while our receive window is open, each is a packet of its own: sent, received,
//! acknowledged, and a wake-up if somebody waits for it, which costs the sender more than the
//! message. Messages that find the window full come together in the sender's send buffer. So the
//! reader takes what is there into a large buffer and then naps before it reads again, and the
//! window of a server on the same machine is small (see `stream::socket`). An idle connection must
//! not pay for that: a nap needs data to have come just before.

mod chunk;
#[cfg(test)]
mod tests;
mod waker;

pub use chunk::{CopyChunk, Frames};
pub use waker::Waker;

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use postgres_protocol::message::frontend;

use crate::error::{Error, Result, ServerError};
use crate::session::{Session, unexpected};
use crate::stream::{MAX_MESSAGE, Stream, Want, after, from_io, header, log_notice};

/// What is allocated for reading at a time.
const BUFFER_SIZE: usize = 256 * 1024;
/// With less room than this left, a new buffer is taken.
const MIN_ROOM: usize = 64 * 1024;
/// A read that gives less than this means that the sender has nothing more ready.
const SHORT_READ: usize = 1024;
/// After a read of so much there is no nap: there is enough to do.
const MUCH: usize = BUFFER_SIZE / 2;
/// How long the sender is left alone after a read.
const NAP: Duration = Duration::from_micros(200);
/// The same where many sessions of the publisher commit side by side.
const COMMITTERS_NAP: Duration = Duration::from_micros(800);
/// How long at most, when the reader is in no hurry.
const LONGEST_NAP: Duration = Duration::from_micros(9600);
/// Data that came so many naps ago does not make a flow.
const FLOW_NAPS: u32 = 5;
/// A nap that brought so many bytes for each of its microseconds may be longer the next time.
const FLOW_RATE: u128 = 2;
/// Unsent feedback beyond this means that the server has not read for a very long time.
const MAX_UNSENT: usize = 1024 * 1024;
/// How long [`ReplicationStream::finish`] waits for the server's good-bye.
const FINISH_PATIENCE: Duration = Duration::from_secs(5);

/// How much what flows may come together before it is returned. Without effect on a lone message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Haste {
    /// For 200 µs.
    #[default]
    Prompt,
    /// For 800 µs: many sessions of the publisher commit side by side, and are answered together.
    ConcurrentCommitters,
    /// For up to 9.6 ms while much comes: a backlog is sent, or there is enough to do with what was
    /// received.
    None,
}

/// A replication connection that is streaming.
///
/// One thread owns it and both receives and sends; other threads can only [wake](Waker) it.
pub struct ReplicationStream {
    stream: Stream,
    /// Always fully initialised; `..filled` was read, of which `..whole` are complete CopyData
    /// messages.
    buffer: BytesMut,
    filled: usize,
    whole: usize,
    /// When a read last gave something.
    last_data: Option<Instant>,
    /// How long the next nap is.
    nap: Duration,
    haste: Haste,
    out: BytesMut,
    written: usize,
    waker: Waker,
    host: String,
    /// Whether CopyDone has been sent.
    copy_done: bool,
}

/// What [`ReplicationStream::receive`] found.
#[derive(Debug)]
pub enum Received {
    /// Data.
    Chunk(CopyChunk),
    /// A message of the server that it calls a warning.
    Warning(Box<ServerError>),
    /// Nothing came in time.
    Idle,
    /// Somebody called [`Waker::wake`].
    Woken,
    /// The stream is over; the connection can only be dropped.
    Ended(EndReason),
}

/// How a replication stream came to its end.
#[derive(Debug)]
pub enum EndReason {
    /// The server reported an error.
    Error(Box<ServerError>),
    /// The server ended the copy in good order (it is being shut down, or we asked).
    Done,
    /// The connection was closed without a word.
    Closed,
}

/// What ended [`ReplicationStream::wait_without_reading`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Somebody called [`Waker::wake`].
    Woken,
    /// The time is over.
    Timeout,
}

impl ReplicationStream {
    /// Sends `command` (a START_REPLICATION) and expects the server to begin streaming.
    pub fn start(mut session: Session, command: &str) -> Result<ReplicationStream> {
        let message = session.start_streaming(command)?;
        match message.tag {
            b'W' => {}
            b'E' => {
                let error = ServerError::parse(session.channel.bytes(message.body));
                return Err(Error::Server(Box::new(error)));
            }
            tag => return Err(unexpected(tag, "after START_REPLICATION")),
        }
        let host = session.host();
        let (stream, unread) = session.channel.into_parts();
        ReplicationStream::new(stream, &unread, host)
    }

    fn new(stream: Stream, unread: &[u8], host: String) -> Result<ReplicationStream> {
        let mut buffer = BytesMut::zeroed(BUFFER_SIZE.max(unread.len()));
        buffer[..unread.len()].copy_from_slice(unread);
        Ok(ReplicationStream {
            stream,
            buffer,
            filled: unread.len(),
            whole: 0,
            last_data: None,
            nap: NAP,
            haste: Haste::default(),
            out: BytesMut::new(),
            written: 0,
            waker: Waker::new()?,
            host,
            copy_done: false,
        })
    }

    /// What the stream is connected to, for messages.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// When bytes last came from the server, those of a message that is not complete yet
    /// included; `None` when none have come since streaming began.
    ///
    /// A single huge value can take longer than the timeout of a [`receive`](Self::receive), or
    /// several of them, which then find [`Received::Idle`]. Bytes that flow are a sign of life all
    /// the same: whoever gives up on a silent server has to look here. What the server sends
    /// during [`wait_without_reading`](Self::wait_without_reading) is not read, and not seen here.
    pub fn last_data(&self) -> Option<Instant> {
        self.last_data
    }

    /// How long data is left to come together, which spares both sides work.
    pub fn set_haste(&mut self, haste: Haste) {
        self.haste = haste;
    }

    /// A handle that makes a blocked receive return.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Waits for data, a wake, or `timeout`. A zero timeout takes what is there.
    ///
    /// A message on an idle connection is returned at once. While data flows a chunk may be
    /// held back for one nap, as long as [`Haste`] says, so that more comes together. A wake ends it.
    pub fn receive(&mut self, timeout: Duration) -> Result<Received> {
        if self.waker.take() {
            return Ok(Received::Woken);
        }
        let deadline = after(timeout);
        let passed = |now: Instant| deadline.is_some_and(|deadline| now >= deadline);
        let mut has_read = false;
        let mut may_nap = true;
        loop {
            if let Some(received) = self.take_buffered()? {
                return Ok(received);
            }
            // A huge message may take longer than the caller can go without sending its status.
            if has_read && passed(Instant::now()) {
                return Ok(Received::Idle);
            }
            self.make_room()?;
            let previous_data = self.last_data;
            let count = match self.read_some() {
                Ok(count) => count,
                Err(Error::Closed) => return Ok(Received::Ended(EndReason::Closed)),
                Err(error) => return Err(error),
            };
            if may_nap
                && self.should_nap(count, previous_data)
                && !passed(Instant::now() + self.nap)
            {
                may_nap = false;
                self.waker.wait(self.nap)?;
                let result = self.read_some();
                self.adapt(count + result.as_ref().copied().unwrap_or_default());
                match result {
                    Ok(more) if count + more == 0 => {}
                    // What the end means is found out by the next read, after this data.
                    Ok(_) | Err(Error::Closed) => {
                        has_read = true;
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            } else if count > 0 {
                has_read = true;
                continue;
            }
            let want = Want { read: true, write: self.has_unsent() };
            let Some(ready) = self.stream.wait(want, Some(self.waker.descriptor()), deadline)?
            else {
                return Ok(Received::Idle);
            };
            if ready.writable {
                self.push()?;
            }
            if ready.woken {
                self.waker.drain();
                return Ok(Received::Woken);
            }
        }
    }

    /// Whether to leave the sender alone for a moment after a read of `count` bytes, 0 included:
    /// when data flows. `previous_data` is when data came before it.
    fn should_nap(&mut self, count: usize, previous_data: Option<Instant>) -> bool {
        let flows = previous_data.is_some_and(|last| last.elapsed() < self.nap * FLOW_NAPS);
        if !flows {
            self.nap = NAP;
        }
        flows && count < MUCH && self.filled < self.buffer.len()
    }

    /// Chooses how long the next nap is, after one that brought `count` bytes.
    ///
    /// The first bytes that the sender writes after we have read everything fill the window, in
    /// packets as small as its messages. The others come together in its send buffer, and then
    /// cost it next to nothing: the longer the nap, the smaller the share of the former. A single
    /// nap that brings little may mean no more than that the sender had no processor.
    fn adapt(&mut self, count: usize) {
        let much = count as u128 >= FLOW_RATE * self.nap.as_micros();
        self.nap = match (self.haste, much) {
            (Haste::Prompt, _) => NAP,
            (Haste::ConcurrentCommitters, _) => COMMITTERS_NAP,
            (Haste::None, true) => (2 * self.nap).min(LONGEST_NAP),
            (Haste::None, false) => (self.nap / 2).max(NAP),
        };
    }

    /// Reads what is there and fits; 0 when nothing is there, [`Error::Closed`] at the end.
    ///
    /// Where the receive window is small, what the sender has ready comes a window at a time. A
    /// short read is the last one: what it left comes together again, and going on would be one
    /// read, and one packet, for each message.
    fn read_some(&mut self) -> Result<usize> {
        let before = self.filled;
        let mut largest = 0;
        while self.filled < self.buffer.len() {
            match self.stream.read(&mut self.buffer[self.filled..]) {
                Ok(0) if self.filled > before => break,
                Ok(0) => return Err(Error::Closed),
                Ok(count) => {
                    self.filled += count;
                    self.last_data = Some(Instant::now());
                    largest = largest.max(count);
                    if count < SHORT_READ.max(largest / 2) {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(from_io(error)),
            }
        }
        Ok(self.filled - before)
    }

    /// Makes room to read into, when the buffer holds at most the beginning of one message: a
    /// fresh buffer when little of this one is left, and room for all of a message that is larger
    /// than a buffer at once, because its header says how long it is.
    fn make_room(&mut self) -> Result<()> {
        let fits = match header(&self.buffer[..self.filled])? {
            Some((_, length)) if length > self.buffer.len() => Err(length),
            Some(_) => Ok(self.filled < self.buffer.len()),
            None => Ok(self.buffer.len() - self.filled >= MIN_ROOM),
        };
        let size = match fits {
            Ok(true) => return Ok(()),
            Ok(false) => BUFFER_SIZE,
            Err(needed) => BUFFER_SIZE.max(needed),
        };
        let mut fresh = BytesMut::zeroed(size);
        fresh[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
        self.buffer = fresh;
        Ok(())
    }

    /// Looks at what has been read: a chunk of complete CopyData messages first, else the other
    /// message at the front.
    fn take_buffered(&mut self) -> Result<Option<Received>> {
        loop {
            let mut other = None;
            while let Some((tag, length)) = header(&self.buffer[self.whole..self.filled])? {
                if self.filled - self.whole < length {
                    break;
                }
                if tag != b'd' {
                    other = Some((tag, length));
                    break;
                }
                self.whole += length;
            }
            if self.whole > 0 {
                let bytes = self.split(self.whole);
                return Ok(Some(Received::Chunk(CopyChunk::new(bytes))));
            }
            let Some((tag, length)) = other else { return Ok(None) };
            let message = self.split(length);
            let body = &message[5..];
            match tag {
                b'N' => {
                    let notice = ServerError::parse(body);
                    log_notice(&notice);
                    if notice.severity == "WARNING" {
                        return Ok(Some(Received::Warning(Box::new(notice))));
                    }
                }
                b'S' | b'A' => {}
                b'c' if self.copy_done => {}
                b'c' => {
                    self.copy_done = true;
                    frontend::copy_done(&mut self.out);
                    self.push()?;
                }
                b'E' => {
                    let error = Box::new(ServerError::parse(body));
                    return Ok(Some(Received::Ended(EndReason::Error(error))));
                }
                b'C' | b'Z' => return Ok(Some(Received::Ended(EndReason::Done))),
                tag => return Err(unexpected(tag, "in a replication stream")),
            }
        }
    }

    /// Cuts `length` bytes off the front of the buffer.
    fn split(&mut self, length: usize) -> Bytes {
        let front = self.buffer.split_to(length).freeze();
        self.filled -= length;
        self.whole = 0;
        front
    }

    /// Sends one CopyData message. Never waits: what the socket does not take now goes out
    /// with a later send or receive. It is an error when 1 MiB has come together.
    pub fn send(&mut self, copy_data: &[u8]) -> Result<()> {
        let length = copy_data.len() + 4;
        let word = match u32::try_from(length) {
            Ok(word) if length <= MAX_MESSAGE => word,
            _ => return Err(Error::MessageTooLarge { bytes: length, limit: MAX_MESSAGE }),
        };
        self.out.put_u8(b'd');
        self.out.put_u32(word);
        self.out.put_slice(copy_data);
        self.push()?;
        if self.out.len() - self.written > MAX_UNSENT {
            return Err(Error::protocol("the server does not read what is sent to it"));
        }
        Ok(())
    }

    fn has_unsent(&self) -> bool {
        self.written < self.out.len() || self.stream.has_unsent()
    }

    /// Writes what can be written now.
    fn push(&mut self) -> Result<()> {
        while self.has_unsent() {
            let result = if self.written < self.out.len() {
                self.stream.write(&self.out[self.written..]).map(|count| self.written += count)
            } else {
                self.stream.push()
            };
            match result {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(from_io(error)),
            }
        }
        self.out.clear();
        self.written = 0;
        Ok(())
    }

    /// Waits for a wake only and leaves the publisher's data where it is: back pressure. A peer
    /// that has closed the connection is [`Error::Closed`]; what it sent before that can still
    /// be received.
    pub fn wait_without_reading(&mut self, timeout: Duration) -> Result<WaitOutcome> {
        let deadline = after(timeout);
        loop {
            if self.waker.take() {
                return Ok(WaitOutcome::Woken);
            }
            let want = Want { read: false, write: self.has_unsent() };
            let ready = self.stream.wait(want, Some(self.waker.descriptor()), deadline)?;
            match ready {
                None => return Ok(WaitOutcome::Timeout),
                Some(ready) if ready.woken => {
                    self.waker.drain();
                    return Ok(WaitOutcome::Woken);
                }
                Some(ready) if ready.hangup => return Err(Error::Closed),
                Some(ready) if ready.writable => self.push()?,
                Some(_) => {}
            }
        }
    }

    /// Ends the stream in good order: CopyDone, then whatever still comes is thrown away until
    /// the server says that it is done, for a few seconds at most.
    pub fn finish(mut self) -> Result<()> {
        let deadline = Instant::now() + FINISH_PATIENCE;
        if !self.copy_done {
            self.copy_done = true;
            frontend::copy_done(&mut self.out);
            self.push()?;
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.receive(left)? {
                Received::Chunk(_) | Received::Warning(_) | Received::Woken if !left.is_zero() => {}
                Received::Chunk(_) | Received::Warning(_) | Received::Woken | Received::Idle => {
                    return Err(Error::Timeout);
                }
                Received::Ended(EndReason::Done) => return Ok(()),
                Received::Ended(EndReason::Error(error)) => return Err(Error::Server(error)),
                Received::Ended(EndReason::Closed) => return Err(Error::Closed),
            }
        }
    }
}

impl fmt::Debug for ReplicationStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicationStream").field("host", &self.host).finish_non_exhaustive()
    }
}
