//! A session after START_REPLICATION: CopyData in both directions.
//!
//! The reader determines how fast the publisher can send. A walsender calls send(2) for every
//! message. While the client's receive window is open, each message becomes a packet of its own.
//! Each packet must be sent, received and acknowledged, and wakes a waiting reader. That costs the
//! sender more than the message itself. Messages that find the window full are combined in the
//! sender's send buffer.
//!
//! The reader therefore takes all available data into a large buffer and then pauses (naps) before
//! it reads again. For a server on the same machine the receive window is small (see
//! `stream::socket`). An idle connection must not be delayed, so the reader naps only if data
//! arrived just before.
//!
//! A nap lasts 200 us while data flows, longer while several sessions of the publisher commit, and
//! there is none while one of a few sessions waits for each commit. In a backlog it doubles, up to
//! 9.6 ms, for as long as much arrives (400 us on a Unix socket). On a loopback connection the
//! module `pace` determines when a backlog is read, and how much of it.
//!
//! The receive buffer of a loopback connection is 24 kB, set before connect(2): a sender that has
//! seen a larger window considers a smaller one silly and waits. Its segments are so short that a
//! window always holds one, for the same reason. A window limits what can be sent
//! per round trip, so over a network the system's default is used.

mod buffers;
mod chunk;
mod outgoing;
mod pace;
#[cfg(test)]
mod tests;
mod waker;

pub use chunk::{CopyChunk, Frames};
pub use outgoing::StatusSender;
pub use waker::Waker;

use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::error::{Error, Result, ServerError};
use crate::protection::Protection;
use crate::session::{Session, unexpected};
use crate::stream::{Stream, Want, after, from_io, header, log_notice};
use buffers::{BUFFER_SIZE, Buffers};
use outgoing::StreamOutgoing;
use pace::{Found, Pace, Step};

/// With less free space than this, another buffer is taken.
const MIN_ROOM: usize = 64 * 1024;
/// A read that returns fewer bytes means that the sender has no more data ready.
const SHORT_READ: usize = 1024;
/// After reading this much the reader does not nap, because the caller has enough work.
const MUCH: usize = BUFFER_SIZE / 2;
/// After so long without data, buffers are freed.
const QUIET: Duration = Duration::from_secs(1);
/// Pause between two reads.
const NAP: Duration = Duration::from_micros(200);
/// Pause between two reads with many concurrent committers on the publisher.
const COMMITTERS_NAP: Duration = Duration::from_micros(800);
/// The same where threads wait for processors.
///
/// Under a load of 80 sessions of two-phase transactions on 2 processors, pgapace took 66 to 72 µs of
/// CPU for a transaction with this, and 81 to 93 without it (docs/performance-trials.md).
const SCARCE_NAP: Duration = Duration::from_micros(1600);
/// Longest pause with [`Haste::None`].
const LONGEST_NAP: Duration = Duration::from_micros(9600);
/// Longest pause on a Unix socket.
///
/// Messages are not combined there, and each takes some 800 bytes of the sender's buffer of 208 kB,
/// so the sender stops after about 260 of them. 200 000 transactions with one update each took
/// 2.0 s with 200 us, 1.9 with 400, 2.4 with 800, 3.8 with 1600 and 12.3 with 9600; 1.6 over TCP.
const LONGEST_NAP_ON_UNIX_SOCKET: Duration = Duration::from_micros(400);
/// Data counts as a flow if the previous data arrived within this many naps.
const FLOW_NAPS: u32 = 5;
/// Bytes per microsecond of a nap above which the next nap may be longer.
const FLOW_RATE: u128 = 2;
/// More unsent feedback than this means that the server has stopped reading.
const MAX_UNSENT: usize = 1024 * 1024;
/// How long [`ReplicationStream::finish`] waits for the server's CommandComplete.
const FINISH_PATIENCE: Duration = Duration::from_secs(5);

/// How long the reader may collect flowing data before it returns a chunk. A single message on an
/// idle connection is never delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Haste {
    /// Do not collect: a session of the publisher waits.
    Immediate,
    /// Collect for 200 µs.
    #[default]
    Prompt,
    /// Collect for 800 µs: many sessions of the publisher commit concurrently and are confirmed
    /// together.
    ConcurrentCommitters,
    /// Collect for 1.6 ms: several sessions of the publisher commit concurrently, and threads of this
    /// machine wait for processors.
    ScarceProcessors,
    /// Collect for up to 9.6 ms while much data arrives, or for up to 14.4 ms from a server on the
    /// same machine: the publisher sends a backlog, or the received changes keep the apply workers
    /// busy.
    None,
}

/// A replication connection that is streaming.
///
/// One thread owns the stream, receives and sends. Other threads can [wake](Waker) it, and [send
/// status messages](StatusSender).
pub struct ReplicationStream {
    stream: Stream,
    /// Always fully initialised. `..filled` has been read; `..whole` of it are complete CopyData
    /// messages.
    buffer: BytesMut,
    filled: usize,
    whole: usize,
    /// The first chunk of `buffer`, once there is one, and the size of the buffer then.
    first: Option<(Bytes, usize)>,
    buffers: Buffers,
    /// Time of the last read that returned data.
    last_data: Option<Instant>,
    /// Length of the next nap.
    nap: Duration,
    /// How to read a backlog, on a loopback connection without TLS.
    pace: Option<Pace>,
    longest_nap: Duration,
    haste: Haste,
    outgoing: StreamOutgoing,
    waker: Waker,
    host: String,
}

/// Result of [`ReplicationStream::receive`].
#[derive(Debug)]
pub enum Received {
    /// Complete CopyData messages.
    Chunk(CopyChunk),
    /// A NoticeResponse of severity WARNING.
    Warning(Box<ServerError>),
    /// No complete message arrived within the timeout.
    Idle,
    /// Another thread called [`Waker::wake`].
    Woken,
    /// The stream has ended; the connection can only be dropped.
    Ended(EndReason),
}

/// The reason why a replication stream ended.
#[derive(Debug)]
pub enum EndReason {
    /// The server reported an error.
    Error(Box<ServerError>),
    /// The server ended the COPY regularly, because of its shutdown or because the client asked.
    Done,
    /// The connection was closed without a message.
    Closed,
}

/// Result of [`ReplicationStream::wait_without_reading`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Another thread called [`Waker::wake`].
    Woken,
    /// The timeout expired.
    Timeout,
}

impl ReplicationStream {
    /// Sends `command`, a START_REPLICATION, and waits until the server begins to stream.
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
        let longest_nap = match session.protection() {
            Protection::Socket => LONGEST_NAP_ON_UNIX_SOCKET,
            _ => LONGEST_NAP,
        };
        let is_loopback = session.protection() == Protection::Loopback;
        let (stream, unread) = session.channel.into_parts();
        let stream = ReplicationStream::new(stream, &unread, host, longest_nap)?;
        Ok(ReplicationStream { pace: is_loopback.then(|| Pace::new(Instant::now())), ..stream })
    }

    fn new(
        stream: Stream,
        unread: &[u8],
        host: String,
        longest_nap: Duration,
    ) -> Result<ReplicationStream> {
        let mut buffers = Buffers::default();
        let mut buffer = buffers.take(unread.len())?;
        buffer[..unread.len()].copy_from_slice(unread);
        Ok(ReplicationStream {
            stream,
            buffer,
            filled: unread.len(),
            whole: 0,
            first: None,
            buffers,
            last_data: None,
            nap: NAP,
            pace: None,
            longest_nap,
            haste: Haste::default(),
            outgoing: StreamOutgoing::default(),
            waker: Waker::new()?,
            host,
        })
    }

    /// The server's host and port, for messages.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Time of the last bytes from the server, including bytes of an incomplete message; `None`
    /// before the first bytes of the stream.
    ///
    /// Receiving a single huge value can outlast the timeouts of several calls of
    /// [`receive`](Self::receive), which then return [`Received::Idle`]. Arriving bytes still prove
    /// that the server is alive, so a check for a silent server must use this time. It does not
    /// advance during [`wait_without_reading`](Self::wait_without_reading), which reads nothing.
    pub fn last_data(&self) -> Option<Instant> {
        self.last_data
    }

    /// Sets how long the reader collects data; larger chunks save work on both sides.
    pub fn set_haste(&mut self, haste: Haste) {
        self.haste = haste;
    }

    /// A handle that makes a blocked receive return.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Waits for data, a wake-up, or `timeout`. With a zero timeout it returns the data that is
    /// already there.
    ///
    /// A message on an idle connection is returned at once. While data flows, one nap of the length
    /// that [`Haste`] sets may delay the chunk, so that it becomes larger. A wake-up ends the nap.
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
            // A huge message may take longer than the interval in which the caller must send its
            // status.
            if has_read && passed(Instant::now()) {
                return Ok(Received::Idle);
            }
            self.make_room()?;
            if self.haste == Haste::None
                && let Some(pace) = &mut self.pace
            {
                let step = pace.step(Instant::now());
                match self.take_step(step, deadline)? {
                    ControlFlow::Continue(count) => has_read |= count > 0,
                    ControlFlow::Break(received) => return Ok(received),
                }
                continue;
            }
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
                    // Return this data first; the next read reports the end of the stream.
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
            if let ControlFlow::Break(received) = self.wait_for_data(deadline)? {
                return Ok(received);
            }
        }
    }

    /// Waits until something can be read or written, and sends what was not sent yet. Breaks off at
    /// a wake-up, and at the deadline.
    fn wait_for_data(&mut self, deadline: Option<Instant>) -> Result<ControlFlow<Received, bool>> {
        let want = Want { read: true, write: self.has_unsent() };
        let Some(ready) = self.stream.wait(want, Some(self.waker.descriptor()), deadline)? else {
            if self.last_data.is_none_or(|last| last.elapsed() > QUIET) {
                self.buffers.clear();
            }
            return Ok(ControlFlow::Break(Received::Idle));
        };
        if ready.writable {
            self.push()?;
        }
        if ready.woken {
            self.waker.drain();
            return Ok(ControlFlow::Break(Received::Woken));
        }
        Ok(ControlFlow::Continue(ready.readable))
    }

    /// Takes a step of [`Pace`], and returns the number of bytes read. A pause that would outlast the
    /// deadline is left out. Breaks off at a wake-up, at the deadline, and at the end of the stream.
    fn take_step(
        &mut self,
        step: Step,
        deadline: Option<Instant>,
    ) -> Result<ControlFlow<Received, usize>> {
        let limit = match step {
            Step::Read(limit) => limit,
            Step::Pause(until) if deadline.is_some_and(|deadline| until >= deadline) => None,
            Step::Pause(until) => {
                self.push()?;
                self.waker.wait(until.saturating_duration_since(Instant::now()))?;
                if self.waker.take() {
                    return Ok(ControlFlow::Break(Received::Woken));
                }
                return Ok(ControlFlow::Continue(0));
            }
            Step::Wait => {
                match self.wait_for_data(deadline)? {
                    ControlFlow::Break(received) => return Ok(ControlFlow::Break(received)),
                    ControlFlow::Continue(false) => {}
                    ControlFlow::Continue(true) => {
                        let unread = self.stream.unread()?;
                        if let Some(pace) = &mut self.pace {
                            pace.arrived(Instant::now(), unread);
                        }
                    }
                }
                return Ok(ControlFlow::Continue(0));
            }
        };
        match self.read_paced(limit) {
            Ok(count) => Ok(ControlFlow::Continue(count)),
            Err(Error::Closed) => Ok(ControlFlow::Break(Received::Ended(EndReason::Closed))),
            Err(error) => Err(error),
        }
    }

    /// Takes [`Step::Read`] and returns the number of bytes read; 0 when there is no data,
    /// [`Error::Closed`] at the end.
    fn read_paced(&mut self, limit: Option<usize>) -> Result<usize> {
        let Some(pace) = &mut self.pace else { return Ok(0) };
        let before = self.filled;
        let mut unread = 0;
        let mut found = Found::More;
        while found == Found::More && self.filled < self.buffer.len() {
            match self.stream.read(&mut self.buffer[self.filled..]) {
                Ok(0) if self.filled == before => return Err(Error::Closed),
                Ok(count) => {
                    self.filled += count;
                    unread = self.stream.unread()?;
                    found = pace.after_read(limit, self.filled - before, unread);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (unread, found) = (0, Found::Little);
                }
                Err(error) => return Err(from_io(error)),
            }
        }
        if self.filled == self.buffer.len() {
            // The rest did not fit, which says nothing about the sender.
            found = Found::More;
        }
        let (now, count) = (Instant::now(), self.filled - before);
        if count > 0 {
            self.last_data = Some(now);
        }
        pace.has_read(now, count, unread, found);
        Ok(count)
    }

    /// Whether to nap after a read of `count` bytes (0 included), because data is flowing.
    /// `previous_data` is the time of the data before it.
    fn should_nap(&mut self, count: usize, previous_data: Option<Instant>) -> bool {
        if self.haste == Haste::Immediate {
            return false;
        }
        let flows = previous_data.is_some_and(|last| last.elapsed() < self.nap * FLOW_NAPS);
        if !flows {
            self.nap = NAP;
        }
        flows && count < MUCH && self.filled < self.buffer.len()
    }

    /// Chooses the length of the next nap, after a nap that collected `count` bytes.
    ///
    /// After the reader has emptied the window, the sender's first bytes fill it with packets as
    /// small as its messages. Later messages are combined in the send buffer and then cost the
    /// sender almost nothing. The longer the nap, the smaller the share of small packets. A single
    /// nap that collects little may only mean that the sender had no CPU time.
    fn adapt(&mut self, count: usize) {
        let much = count as u128 >= FLOW_RATE * self.nap.as_micros();
        self.nap = match (self.haste, much) {
            (Haste::Prompt | Haste::Immediate, _) => NAP,
            (Haste::ConcurrentCommitters, _) => COMMITTERS_NAP.min(self.longest_nap),
            (Haste::ScarceProcessors, _) => SCARCE_NAP.min(self.longest_nap),
            (Haste::None, true) => (2 * self.nap).min(self.longest_nap),
            (Haste::None, false) => (self.nap / 2).max(NAP),
        };
    }

    /// Reads the available data, as far as it fits; 0 when there is none, [`Error::Closed`] at the
    /// end.
    ///
    /// With a small receive window the sender's data arrives one window at a time. Stop at a short
    /// read: the next messages then combine in the send buffer. Reading on would cost one read and
    /// one packet for each message.
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

    /// Makes room to read into, when the buffer holds at most the beginning of one message.
    /// Takes another buffer when little of this one is free. A message larger than a buffer gets
    /// its whole size at once, which its header states.
    fn make_room(&mut self) -> Result<()> {
        let fits = match header(&self.buffer[..self.filled])? {
            Some((_, length)) if length > self.buffer.len() => Err(length),
            Some(_) => Ok(self.filled < self.buffer.len()),
            None => Ok(self.buffer.len() - self.filled >= MIN_ROOM),
        };
        let size = match fits {
            Ok(true) => return Ok(()),
            Ok(false) => BUFFER_SIZE,
            Err(needed) => needed,
        };
        let mut fresh = self.buffers.take(size)?;
        fresh[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
        self.buffer = fresh;
        if let Some((first, size)) = self.first.take() {
            self.buffers.filled(first, size);
        }
        Ok(())
    }

    /// Returns a chunk of complete CopyData messages from the buffer, or else the other message at
    /// its front.
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
                b'c' => self.outgoing.end(&mut self.stream)?,
                b'E' => {
                    let error = Box::new(ServerError::parse(body));
                    return Ok(Some(Received::Ended(EndReason::Error(error))));
                }
                b'C' | b'Z' => return Ok(Some(Received::Ended(EndReason::Done))),
                tag => return Err(unexpected(tag, "in a replication stream")),
            }
        }
    }

    /// Splits `length` bytes off the front of the buffer.
    fn split(&mut self, length: usize) -> Bytes {
        let size = self.buffer.len();
        let front = self.buffer.split_to(length).freeze();
        self.first.get_or_insert_with(|| (front.clone(), size));
        self.filled -= length;
        self.whole = 0;
        front
    }

    /// Queues one CopyData message and never blocks. A later send or receive writes the bytes that
    /// the socket does not accept now. More than 1 MiB of unsent bytes is an error.
    pub fn send(&mut self, copy_data: &[u8]) -> Result<()> {
        self.outgoing.send(&mut self.stream, copy_data)
    }

    /// Sends from another thread.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn status_sender(&self) -> Result<StatusSender> {
        self.outgoing.sender(&self.stream, &self.waker).map_err(from_io)
    }

    fn has_unsent(&self) -> bool {
        self.outgoing.has_unsent(&self.stream)
    }

    /// Writes as much as the socket accepts now.
    fn push(&mut self) -> Result<()> {
        self.outgoing.push(&mut self.stream)
    }

    /// Waits for a wake-up only and leaves the publisher's data unread: back pressure. If the peer
    /// has closed the connection, the result is [`Error::Closed`]; data that it sent before can
    /// still be received.
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

    /// Ends the stream regularly: sends CopyDone and discards data until the server confirms the
    /// end, or for 5 seconds at most.
    pub fn finish(mut self) -> Result<()> {
        let deadline = Instant::now() + FINISH_PATIENCE;
        self.outgoing.end(&mut self.stream)?;
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
