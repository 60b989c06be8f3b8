//! A buffered stream: splits input into backend messages and collects frontend messages for output.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::BytesMut;

use super::tls::tls_error;
use super::{ActiveSession, Activity, Ready, Stream, Want, after, log_notice};
use crate::error::{Error, Result, ServerError};
use crate::memory;

/// Largest message that is sent, in bytes, including its length word. A server accepts slightly
/// less than 1 GB (`PQ_LARGE_MESSAGE_LIMIT`, `src/include/libpq/libpq.h`).
pub(crate) const MAX_MESSAGE: usize = 0x3fff_fffe;

/// Largest message that is accepted: a replication message adds a header to a value of up to 1 GB.
const MAX_RECEIVED_MESSAGE: usize = MAX_MESSAGE + 64 * 1024;

/// Largest error that is accepted as the first message, as in libpq (`MAX_ERRLEN`).
const MAX_STARTUP_ERROR: u32 = 30_000;

const INPUT_SIZE: usize = 64 * 1024;
/// A buffer that has grown beyond this size for one large message is released afterwards.
const MAX_RETAINED: usize = 4 * 1024 * 1024;
/// The most buffers that are kept beside the one for the next messages: one group of changes is written, and two wait.
const SPARE: usize = 2;
/// Limit in bytes for unread replies while a pipeline is written. Replies have about 50 bytes for
/// each statement, so only a caller that queues millions of SELECTs reaches it.
const MAX_UNREAD: usize = 1 << 30;

/// Tag and position of a backend message. The position is valid until the buffer is used again.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) tag: u8,
    pub(crate) body: Range<usize>,
}

/// The buffers of one connection; see the head of this module.
pub(crate) struct Buffered {
    stream: Stream,
    /// Always fully initialised; `start..end` has been read but not taken.
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Messages that are queued. No byte of them has been written.
    pub(crate) out: BytesMut,
    /// Messages that are being written, in order; the first `written` bytes have been written. They are
    /// apart from `out`, so that messages can be queued, and taken back, while the socket accepts no data.
    writing: VecDeque<BytesMut>,
    written: usize,
    /// Buffers that were written. They are used again, because the system would have to clear the pages of new ones.
    spare: Vec<BytesMut>,
    parameters: Vec<(String, String)>,
    /// A cell, because a reply that borrows the input may prove to be malformed.
    broken: Cell<bool>,
    /// Commits whose wait for synchronous standbys was canceled.
    unreplicated_commits: u64,
    activity: Option<ActiveSession>,
}

impl Buffered {
    pub(crate) fn new(stream: Stream) -> Buffered {
        Buffered {
            stream,
            input: vec![0; INPUT_SIZE],
            start: 0,
            end: 0,
            out: BytesMut::with_capacity(INPUT_SIZE),
            writing: VecDeque::new(),
            written: 0,
            spare: Vec::new(),
            parameters: Vec::new(),
            broken: Cell::new(false),
            unreplicated_commits: 0,
            activity: None,
        }
    }

    /// The stream, and the bytes that were read but not taken.
    pub(crate) fn into_parts(self) -> (Stream, Vec<u8>) {
        let unread = self.input[self.start..self.end].to_vec();
        (self.stream, unread)
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Counts waits for the server there from now on.
    pub(crate) fn set_activity(&mut self, activity: &Activity, backend_pid: i32) {
        self.activity = Some(ActiveSession::new(activity, self.stream.socket(), backend_pid));
    }

    pub(crate) fn set_backend_pid(&self, pid: i32) {
        if let Some(session) = &self.activity {
            session.set_backend_pid(pid);
        }
    }

    fn wait(&self, want: Want, deadline: Option<Instant>) -> io::Result<Option<Ready>> {
        let Some(session) = &self.activity else { return self.stream.wait(want, None, deadline) };
        let _wait = session.wait();
        let ready = self.stream.wait(want, None, deadline);
        if matches!(ready, Ok(Some(_))) {
            session.note_answer();
        }
        ready
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    pub(crate) fn set_broken(&self) {
        self.broken.set(true);
    }

    pub(crate) fn unreplicated_commits(&self) -> u64 {
        self.unreplicated_commits
    }

    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// All parameters that the server has reported, with their present values.
    pub(crate) fn parameters(&self) -> &[(String, String)] {
        &self.parameters
    }

    pub(crate) fn bytes(&self, place: Range<usize>) -> &[u8] {
        &self.input[place]
    }

    /// Takes the next complete message. Notices, parameter changes and notifications are handled
    /// here and never returned.
    pub(crate) fn take(&mut self) -> Result<Option<Message>> {
        let Some((tag, length)) = self.peek()? else { return Ok(None) };
        let body = self.start + 5..self.start + length;
        self.start += length;
        Ok(Some(Message { tag, body }))
    }

    /// Whether [`Buffered::take`] would return a message.
    pub(crate) fn has_message(&mut self) -> Result<bool> {
        match self.peek() {
            Ok(message) => Ok(message.is_some()),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Tag and length of the message that [`Buffered::take`] would return.
    fn peek(&mut self) -> Result<Option<(u8, usize)>> {
        loop {
            let unread = &self.input[self.start..self.end];
            let Some((tag, length)) = header(unread)? else { return Ok(None) };
            if unread.len() < length {
                return Ok(None);
            }
            let body = self.start + 5..self.start + length;
            match tag {
                b'N' => {
                    let notice = ServerError::parse(&self.input[body]);
                    log_notice(&notice);
                    self.unreplicated_commits += u64::from(notice.leaves_commit_unreplicated());
                    if notice.leaves_commit_open() {
                        return Err(Error::Server(Box::new(notice)));
                    }
                }
                b'S' => self.set_parameter(body),
                b'A' => {}
                _ => return Ok(Some((tag, length))),
            }
            self.start += length;
        }
    }

    /// Takes the next message; `timeout` limits the wait for each piece of it.
    pub(crate) fn next(&mut self, timeout: Option<Duration>) -> Result<Message> {
        loop {
            match self.take() {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(error) => return Err(self.fail(error)),
            }
            self.fill(timeout.and_then(after))?;
        }
    }

    /// Waits for the first message. Returns its text if it is an error in the form of protocol 2, which has
    /// no length: a server that cannot start a process for the connection sends one, and closes the
    /// connection. As in libpq, the form is recognised by a length that no error has.
    pub(crate) fn refusal(&mut self, timeout: Option<Duration>) -> Result<Option<String>> {
        let length = loop {
            match self.input[self.start..self.end].split_first_chunk() {
                Some((&[b'E', a, b, c, d], _)) => break u32::from_be_bytes([a, b, c, d]),
                Some(_) => return Ok(None),
                None => self.fill(timeout.and_then(after))?,
            }
        };
        if (8..=MAX_STARTUP_ERROR).contains(&length) {
            return Ok(None);
        }
        self.set_broken();
        // The server sends the whole text at once.
        let text = &self.input[self.start + 1..self.end];
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(Some(String::from_utf8_lossy(text).trim_end().to_owned()))
    }

    /// Reads at least one byte, or waits until `deadline`.
    pub(crate) fn fill(&mut self, deadline: Option<Instant>) -> Result<()> {
        loop {
            if self.try_fill()? {
                return Ok(());
            }
            let want = Want { read: true, write: self.is_writing() };
            match self.wait(want, deadline) {
                Ok(Some(ready)) if ready.writable => {
                    self.write_rest()?;
                }
                Ok(Some(_)) => {}
                Ok(None) => return Err(Error::Timeout),
                Err(error) => return Err(self.fail(error.into())),
            }
        }
    }

    /// Makes one non-blocking read; false when there was no data. The end of the stream is an
    /// error.
    pub(crate) fn try_fill(&mut self) -> Result<bool> {
        if let Err(error) = self.make_room() {
            return Err(self.fail(error));
        }
        match self.stream.read(&mut self.input[self.end..]) {
            Ok(0) => Err(self.fail(Error::Closed)),
            Ok(count) => {
                self.end += count;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.fail(from_io(error))),
        }
    }

    /// Makes room to read into: for the rest of an incomplete message, or a minimum size.
    fn make_room(&mut self) -> Result<()> {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            if self.input.len() > MAX_RETAINED {
                self.input = vec![0; INPUT_SIZE];
            }
            return Ok(());
        }
        let unread = self.end - self.start;
        let needed = match header(&self.input[self.start..self.end])? {
            Some((_, length)) => length.max(unread + INPUT_SIZE / 4),
            None => INPUT_SIZE / 4,
        };
        if self.start + needed <= self.input.len() {
            return Ok(());
        }
        if unread > MAX_UNREAD {
            return Err(Error::protocol("too many unread replies while a pipeline is written"));
        }
        if needed <= self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
        } else {
            // One allocation for a large message; doubling when replies accumulate.
            let doubled = (self.input.len() * 2).min(needed + MAX_MESSAGE);
            let mut larger = match memory::zeroed(needed.max(doubled)) {
                Err(_) if doubled > needed => memory::zeroed(needed)?,
                larger => larger?,
            };
            larger[..unread].copy_from_slice(&self.input[self.start..self.end]);
            self.input = larger;
        }
        self.start = 0;
        self.end = unread;
        Ok(())
    }

    /// Writes all queued messages. While the socket accepts no data, replies are read into the
    /// input buffer, because a server that cannot send its replies stops reading. `timeout` limits
    /// each wait for progress.
    pub(crate) fn flush(&mut self, timeout: Option<Duration>) -> Result<()> {
        while !self.write_some()? {
            self.wait_to_write(timeout)?;
        }
        Ok(())
    }

    /// Writes as much of the queued messages as the socket accepts. Returns whether all of them are written.
    pub(crate) fn write_some(&mut self) -> Result<bool> {
        self.begin_to_write();
        self.write_rest()
    }

    /// The same for what [`Buffered::write_some`] has left. Messages that were queued since then stay queued.
    pub(crate) fn write_rest(&mut self) -> Result<bool> {
        while self.is_writing() {
            let result = match self.writing.front() {
                Some(messages) => self.stream.write(&messages[self.written..]),
                None => self.stream.push().map(|()| 0),
            };
            match result {
                Ok(count) => self.wrote(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(self.write_failed(error)),
            }
        }
        Ok(true)
    }

    /// Whether messages that [`Buffered::write_some`] has taken are not completely written.
    pub(crate) fn is_writing(&self) -> bool {
        !self.writing.is_empty() || self.stream.has_unsent()
    }

    fn begin_to_write(&mut self) {
        if self.out.is_empty() {
            return;
        }
        match self.writing.back_mut() {
            // Many small pieces would be as many writes.
            Some(last)
                if self.out.len() <= INPUT_SIZE
                    && last.capacity() - last.len() >= self.out.len() =>
            {
                last.extend_from_slice(&self.out);
                self.out.clear();
            }
            _ => {
                let messages = self.take_queued();
                self.writing.push_back(messages);
            }
        }
    }

    fn wrote(&mut self, count: usize) {
        self.written += count;
        if self.writing.front().is_some_and(|messages| self.written == messages.len())
            && let Some(written) = self.writing.pop_front()
        {
            self.written = 0;
            self.keep(written);
        }
        self.stream.set_inside_message(self.written > 0);
    }

    /// Discards the queued messages that are not being written.
    pub(crate) fn forget_queued(&mut self) {
        self.out.clear();
    }

    /// Takes the queued messages that are not being written.
    pub(crate) fn take_queued(&mut self) -> BytesMut {
        std::mem::replace(&mut self.out, self.spare.pop().unwrap_or_default())
    }

    /// Queues messages that were [taken](Self::take_queued). None are queued now.
    pub(crate) fn put_back(&mut self, messages: BytesMut) {
        let empty = std::mem::replace(&mut self.out, messages);
        self.keep(empty);
    }

    /// Keeps a buffer for later messages.
    fn keep(&mut self, mut buffer: BytesMut) {
        buffer.clear();
        if buffer.capacity() > MAX_RETAINED {
            return;
        }
        if self.out.capacity() == 0 {
            self.out = buffer;
        } else if self.spare.len() < SPARE && buffer.capacity() > 0 {
            self.spare.push(buffer);
        }
    }

    /// Number of queued bytes that are not written yet.
    pub(crate) fn queued(&self) -> usize {
        let writing: usize = self.writing.iter().map(BytesMut::len).sum();
        self.out.len() + writing - self.written
    }

    fn wait_to_write(&mut self, timeout: Option<Duration>) -> Result<()> {
        let deadline = timeout.and_then(after);
        let want = Want { read: true, write: true };
        match self.wait(want, deadline) {
            Ok(Some(ready)) if ready.readable => match self.try_fill() {
                Ok(_) => Ok(()),
                Err(error) => Err(self.explain(error)),
            },
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(Error::Timeout),
            Err(error) => Err(self.fail(error.into())),
        }
    }

    /// A failed write usually means that the server has closed the connection: read its last
    /// message to learn why.
    fn write_failed(&mut self, error: io::Error) -> Error {
        while let Ok(true) = self.try_fill() {}
        let error = self.fail(from_io(error));
        self.explain(error)
    }

    /// Replaces a connection loss by the FATAL error that announced it, if it has arrived.
    fn explain(&mut self, loss: Error) -> Error {
        let mut at = self.start;
        while let Ok(Some((tag, length))) = header(&self.input[at..self.end]) {
            if self.end - at < length {
                break;
            }
            if tag == b'E' {
                let error = ServerError::parse(&self.input[at + 5..at + length]);
                if error.is_fatal() {
                    return Error::Server(Box::new(error));
                }
            }
            at += length;
        }
        loss
    }

    /// Marks the connection as unusable and returns the error. If this process has given the session up, the server has
    /// closed nothing.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.set_broken();
        match &self.activity {
            Some(session) if session.is_given_up() => Error::Timeout,
            _ => error,
        }
    }

    fn set_parameter(&mut self, body: Range<usize>) {
        let text = String::from_utf8_lossy(&self.input[body]);
        let mut parts = text.split('\0');
        let (Some(name), Some(value)) = (parts.next(), parts.next()) else { return };
        match self.parameters.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => value.clone_into(known),
            None => self.parameters.push((name.to_owned(), value.to_owned())),
        }
    }
}

/// Tag and total length (tag included) of the first message, once its header is complete.
pub(crate) fn header(bytes: &[u8]) -> Result<Option<(u8, usize)>> {
    let Some((&[tag, a, b, c, d], _)) = bytes.split_first_chunk::<5>() else { return Ok(None) };
    let length = i32::from_be_bytes([a, b, c, d]);
    match usize::try_from(length) {
        Ok(length) if (4..=MAX_RECEIVED_MESSAGE).contains(&length) => Ok(Some((tag, length + 1))),
        _ => Err(Error::Protocol(format!(
            "message type 0x{tag:02x} has the impossible length {length}"
        ))),
    }
}

/// Converts an I/O error of the stream; TLS wraps its errors in `io::Error`.
pub(crate) fn from_io(error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Error::Closed;
    }
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(error) => tls_error(error),
        None => Error::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use socket2::{Domain, Socket, Type};

    use super::*;

    /// Drops a connection with a queue of this many bytes, for which there is no room at first. Returns what
    /// the server reads.
    fn read_after_drop(length: usize) -> Vec<u8> {
        let (mut server, client) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut stream = Stream::on(client);
        stream.set_established();
        let mut channel = Buffered::new(stream);
        channel.out.extend_from_slice(&vec![b'x'; length]);
        let mut read = Vec::new();
        if !channel.write_some().unwrap() {
            read.resize(64 << 10, 0);
            server.read_exact(&mut read).unwrap();
        }
        drop(channel);
        server.read_to_end(&mut read).unwrap();
        read
    }

    fn channel(activity: &Activity) -> (Socket, Buffered) {
        let (server, client) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let mut channel = Buffered::new(Stream::on(client));
        channel.set_activity(activity, 7);
        (server, channel)
    }

    #[test]
    fn only_sessions_that_wait_are_given_up() {
        let activity = Activity::default();
        let ((_silent, mut waiting), (mut server, mut idle)) =
            (channel(&activity), channel(&activity));
        assert!(!activity.give_up_waiting());
        let waiter = std::thread::spawn(move || {
            let result = waiting.next(None);
            (result.map(drop), waiting.is_broken())
        });
        while !activity.give_up_waiting() {
            std::thread::yield_now();
        }
        assert!(matches!(waiter.join().unwrap(), (Err(Error::Timeout), true)));
        server.write_all(b"Z\0\0\0\x05I").unwrap();
        assert_eq!(idle.next(None).unwrap().tag, b'Z');
        drop(server);
        assert!(matches!(idle.next(None), Err(Error::Closed)));
    }

    #[test]
    fn a_wait_is_known_until_its_answer_arrives() {
        let activity = Activity::default();
        let (mut server, mut channel) = channel(&activity);
        let waiter = std::thread::spawn(move || {
            let first = channel.next(None).map(|message| message.tag);
            (first, channel.next(None).map(drop), channel.is_broken())
        });
        let waits = || loop {
            match activity.waits().pop() {
                Some(wait) => return wait,
                None => std::thread::yield_now(),
            }
        };
        let first = waits();
        assert!(first.is(&waits()));
        assert_eq!(first.waiting_backend(), Some(7));
        server.write_all(b"Z\0\0\0\x05I").unwrap();
        while first.waiting_backend().is_some() {
            std::thread::yield_now();
        }
        assert!(!first.give_up());
        let second = waits();
        assert!(!first.is(&second) && second.give_up());
        assert!(matches!(waiter.join().unwrap(), (Ok(b'Z'), Err(Error::Timeout), true)));
        assert!(!second.give_up());
        assert!(activity.is_abandoned());
    }

    #[test]
    fn terminate_is_sent_only_between_messages() {
        assert!(read_after_drop(100).ends_with(b"xX\0\0\0\x04"));
        let cut_off = read_after_drop(100 << 20);
        assert!(cut_off.len() < 100 << 20, "the socket has accepted everything");
        assert!(cut_off.iter().all(|byte| *byte == b'x'));
    }
}
