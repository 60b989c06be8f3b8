//! Queueing of extended-protocol messages, and their replies.
//!
//! The queue functions only append to the output buffer. The caller must keep track of which reply
//! belongs to which message; after an error the server continues at the next Sync.
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-PIPELINING>.

use std::time::{Duration, Instant};

use bytes::BufMut;
use postgres_protocol::message::frontend;

use super::Session;
use super::reply::{Reply, TransactionStatus};
use crate::error::{Error, Result};
use crate::memory;
use crate::stream::{MAX_MESSAGE, Message, Want, after};

/// A parameter value of a Bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Param<'a> {
    /// NULL.
    Null,
    /// The text form.
    Text(&'a [u8]),
    /// The binary form.
    Binary(&'a [u8]),
}

/// Queued messages that were set aside. See [`Session::set_aside`].
#[derive(Debug)]
pub struct Queued {
    bytes: bytes::BytesMut,
    ready_expected: usize,
}

impl Param<'_> {
    fn format(&self) -> i16 {
        i16::from(matches!(self, Param::Binary(_)))
    }
}

impl Session {
    /// Queues a Parse. The empty name is the unnamed statement. The server infers parameters of
    /// type 0.
    pub fn queue_parse(&mut self, statement: &str, sql: &str, param_types: &[u32]) {
        self.queue_message(statement.len() + sql.len() + 16 + 4 * param_types.len(), |out| {
            frontend::parse(statement, sql, param_types.iter().copied(), out)
        });
    }

    /// Queues a Bind of the unnamed portal with all results as text. Allocates nothing once the
    /// output buffer has its working size.
    ///
    /// On error nothing is queued.
    pub fn queue_bind<'v>(
        &mut self,
        statement: &str,
        params: impl ExactSizeIterator<Item = Param<'v>> + Clone,
    ) -> Result<()> {
        let Ok(count) = u16::try_from(params.len()) else {
            return Err(Error::Protocol(format!(
                "{} parameters, but a statement can have 65535 at most",
                params.len()
            )));
        };
        if statement.as_bytes().contains(&0) {
            return Err(Error::protocol("a statement name contains a NUL character"));
        }
        let mut values = 0;
        let mut formats = [false; 2];
        for param in params.clone() {
            values += 4;
            match param {
                Param::Null => {}
                Param::Text(value) => {
                    formats[0] = true;
                    values += value.len();
                }
                Param::Binary(value) => {
                    formats[1] = true;
                    values += value.len();
                }
            }
        }
        // No format code: all text. One code: applies to all. Otherwise one code for each
        // parameter.
        let format_codes = match formats {
            [true, true] => usize::from(count),
            [false, true] => 1,
            _ => 0,
        };
        let length = 4 + 1 + statement.len() + 1 + 2 + 2 * format_codes + 2 + values + 2;
        let word = match i32::try_from(length) {
            Ok(word) if length <= MAX_MESSAGE => word,
            _ => return Err(Error::MessageTooLarge { bytes: length, limit: MAX_MESSAGE }),
        };

        let out = &mut self.channel.out;
        let start = out.len();
        memory::reserve(out, length + 1)?;
        out.put_u8(b'B');
        out.put_i32(word);
        out.put_u8(0);
        out.put_slice(statement.as_bytes());
        out.put_u8(0);
        match formats {
            [true, true] => {
                out.put_u16(count);
                for param in params.clone() {
                    out.put_i16(param.format());
                }
            }
            [false, true] => {
                out.put_u16(1);
                out.put_i16(1);
            }
            _ => out.put_u16(0),
        }
        out.put_u16(count);
        for param in params {
            match param {
                Param::Null => out.put_i32(-1),
                Param::Text(value) | Param::Binary(value) => {
                    // The length fits, because it is part of a message whose whole length fits.
                    out.put_i32(i32::try_from(value.len()).unwrap_or(i32::MAX));
                    out.put_slice(value);
                }
            }
        }
        out.put_u16(0);
        debug_assert_eq!(out.len() - start, length + 1, "params gave different items twice");
        Ok(())
    }

    /// Queues a statement that is used once: Parse, Bind and Execute.
    ///
    /// On error the session can only be dropped.
    pub fn queue_statement<'v>(
        &mut self,
        sql: &str,
        param_types: &[u32],
        params: impl ExactSizeIterator<Item = Param<'v>> + Clone,
    ) -> Result<()> {
        self.queue_parse("", sql, param_types);
        self.queue_bind("", params)?;
        self.queue_execute();
        Ok(())
    }

    /// Queues an Execute of the unnamed portal, without a row limit.
    pub fn queue_execute(&mut self) {
        self.queue_message(16, |out| frontend::execute("", 0, out));
    }

    /// Queues a Describe of the unnamed portal.
    pub fn queue_describe_portal(&mut self) {
        self.queue_message(16, |out| frontend::describe(b'P', "", out));
    }

    /// Queues a Describe of a statement.
    pub fn queue_describe_statement(&mut self, statement: &str) {
        self.queue_message(16 + statement.len(), |out| frontend::describe(b'S', statement, out));
    }

    /// Queues a Close of a statement.
    pub fn queue_close_statement(&mut self, statement: &str) {
        self.queue_message(16 + statement.len(), |out| frontend::close(b'S', statement, out));
    }

    /// Queues a Sync.
    pub fn queue_sync(&mut self) {
        self.queue_message(8, |out| {
            frontend::sync(out);
            Ok(())
        });
        self.ready_expected += 1;
    }

    /// Queues a Flush message: the server then sends pending replies without a Sync.
    pub fn queue_flush(&mut self) {
        self.queue_message(8, |out| {
            frontend::flush(out);
            Ok(())
        });
    }

    /// Queues a simple query.
    pub fn queue_simple(&mut self, sql: &str) {
        self.queue_message(16 + sql.len(), |out| frontend::query(sql, out));
        self.ready_expected += 1;
    }

    /// Appends one message, or nothing if it cannot be sent. The next [`Session::flush`] then
    /// reports the error.
    fn queue_message(
        &mut self,
        size: usize,
        write: impl FnOnce(&mut bytes::BytesMut) -> std::io::Result<()>,
    ) {
        let out = &mut self.channel.out;
        let start = out.len();
        let failure = if size > MAX_MESSAGE {
            Error::MessageTooLarge { bytes: size, limit: MAX_MESSAGE }
        } else {
            match memory::reserve(out, size).map(|()| write(out)) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => Error::Protocol(format!("cannot send a message: {error}")),
                Err(error) => error,
            }
        };
        out.truncate(start);
        self.queue_failure.get_or_insert(failure);
    }

    /// Removes the queued messages, so that they can be queued again after other messages. Those that are
    /// [being sent](Self::send_queued) stay. `ready_before` is the value of [`Session::pending_ready`] before
    /// they were queued.
    pub fn set_aside(&mut self, ready_before: usize) -> Queued {
        let ready_expected = self.ready_expected - ready_before;
        self.ready_expected = ready_before;
        Queued { bytes: self.channel.take_queued(), ready_expected }
    }

    /// Queues messages that were set aside.
    pub fn queue_set_aside(&mut self, queued: Queued) {
        self.ready_expected += queued.ready_expected;
        if self.channel.out.is_empty() {
            self.channel.put_back(queued.bytes);
            return;
        }
        match memory::reserve(&mut self.channel.out, queued.bytes.len()) {
            Ok(()) => self.channel.out.extend_from_slice(&queued.bytes),
            Err(error) => {
                self.queue_failure.get_or_insert(error);
            }
        }
    }

    /// Number of queued bytes that are not written yet.
    pub fn queued(&self) -> usize {
        self.channel.queued()
    }

    /// Writes all queued messages. While the socket accepts no data, replies are read into the
    /// input buffer, so that a pipeline of any length cannot deadlock with the server.
    ///
    /// If the connection is lost and the server has sent a reason, that reason is the returned
    /// error.
    pub fn flush(&mut self) -> Result<()> {
        self.check_queue()?;
        self.channel.flush(self.read_timeout)
    }

    /// Writes as much of the queued messages as the socket accepts at once. [`Session::wait_readable`] writes
    /// the rest, so the caller can take replies while the server executes a statement and reads nothing.
    /// Errors are those of [`Session::flush`].
    pub fn send_queued(&mut self) -> Result<()> {
        self.check_queue()?;
        self.channel.write_some().map(|_| ())
    }

    fn check_queue(&mut self) -> Result<()> {
        match self.queue_failure.take() {
            // A message is missing in the middle of the queue, so the messages after it cannot be
            // sent.
            Some(failure) => Err(self.channel.fail(failure)),
            None => Ok(()),
        }
    }

    /// Runs all queued messages: sends a Sync and reads every reply up to ReadyForQuery. Results
    /// are discarded. The first error is returned; the session stays usable.
    pub fn finish_queued(&mut self) -> Result<()> {
        self.queue_sync();
        let started = Instant::now();
        self.flush()?;
        let mut refused = Ok(());
        while self.ready_expected > 0 {
            match self.read_to_ready() {
                Err(Error::Server(error)) if !self.is_broken() => {
                    refused = refused.and(Err(Error::Server(error)));
                }
                other => other?,
            }
        }
        self.note_round_trip(started);
        refused
    }

    /// Reads every reply up to the next ReadyForQuery, and discards results. The first error is
    /// returned; the session stays usable.
    pub fn read_to_ready(&mut self) -> Result<()> {
        let mut refused = None;
        loop {
            match self.next_reply()? {
                Reply::Ready(_) => {
                    return refused.map_or(Ok(()), |error| Err(Error::Server(error)));
                }
                Reply::Error(error) if error.is_fatal() => return Err(Error::Server(error)),
                Reply::Error(error) => {
                    refused.get_or_insert(error);
                }
                _ => {}
            }
        }
    }

    /// Takes the next reply and waits for it if necessary (see [`Session::set_read_timeout`]). Does
    /// not flush.
    pub fn next_reply(&mut self) -> Result<Reply<'_>> {
        let message = self.channel.next(self.read_timeout)?;
        self.reply(message)
    }

    /// Takes a reply that has already arrived, after at most one non-blocking read.
    pub fn try_reply(&mut self) -> Result<Option<Reply<'_>>> {
        let mut message = self.take_message()?;
        if message.is_none() && self.channel.try_fill()? {
            message = self.take_message()?;
        }
        match message {
            Some(message) => self.reply(message).map(Some),
            None => Ok(None),
        }
    }

    /// Waits until a whole reply can be taken without blocking; false after `timeout`.
    pub fn poll_reply(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = after(timeout);
        loop {
            if self.channel.has_message()? {
                return Ok(true);
            }
            match self.channel.fill(deadline) {
                Ok(()) => {}
                Err(Error::Timeout) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the socket is readable (true), `wake` is readable, or the timeout expires. For a
    /// worker that waits for its session and its own queue at the same time. Meanwhile it writes what
    /// [`Session::send_queued`] has left.
    pub fn wait_readable(
        &mut self,
        wake: Option<std::os::fd::BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<bool> {
        if self.channel.has_message()? {
            return Ok(true);
        }
        let deadline = after(timeout);
        loop {
            let want = Want { read: true, write: self.channel.is_writing() };
            match self.channel.stream().wait(want, wake, deadline) {
                Ok(Some(ready)) if ready.writable && !ready.readable && !ready.woken => {
                    self.channel.write_rest()?;
                }
                Ok(ready) => return Ok(ready.is_some_and(|ready| ready.readable)),
                Err(error) => return Err(self.channel.fail(error.into())),
            }
        }
    }

    fn take_message(&mut self) -> Result<Option<Message>> {
        self.channel.take().map_err(|error| self.channel.fail(error))
    }

    /// Turns a message into a reply and updates the state of the session.
    fn reply(&mut self, message: Message) -> Result<Reply<'_>> {
        if message.tag == b'Z' {
            self.note_ready(&message)?;
        }
        let reply = Reply::parse(message.tag, self.channel.bytes(message.body));
        match &reply {
            Err(_) => self.channel.set_broken(),
            Ok(Reply::Error(error)) if error.is_fatal() => self.channel.set_broken(),
            Ok(_) => {}
        }
        reply
    }

    pub(super) fn note_ready(&mut self, message: &Message) -> Result<TransactionStatus> {
        let body = self.channel.bytes(message.body.clone());
        let status = TransactionStatus::parse(body).map_err(|error| self.channel.fail(error))?;
        self.status = status;
        self.ready_expected = self.ready_expected.saturating_sub(1);
        if self.ready_expected == 0 && !self.channel.is_writing() {
            self.channel.stream().note_answered();
        }
        Ok(status)
    }
}
