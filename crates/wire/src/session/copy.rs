//! COPY in both directions, over the simple query protocol.
//!
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-COPY>.

use std::ops::Range;

use bytes::BufMut;
use postgres_protocol::message::frontend;

use super::Session;
use super::reply::{affected_rows, command_tag, unexpected};
use crate::error::{Error, Result, ServerError};
use crate::stream::Message;

/// Size in bytes at which collected CopyData is sent.
const COPY_BATCH: usize = 128 * 1024;

impl Session {
    /// Runs a `COPY ... TO STDOUT`.
    pub fn copy_out(&mut self, sql: &str) -> Result<CopyOut<'_>> {
        self.start_copy(sql, b'H')?;
        Ok(CopyOut { session: self, state: CopyState::Running, rows: 0 })
    }

    /// Runs a `COPY ... FROM STDIN`.
    pub fn copy_in(&mut self, sql: &str) -> Result<CopyIn<'_>> {
        self.start_copy(sql, b'G')?;
        Ok(CopyIn { session: self, state: CopyState::Running, frame: None })
    }

    fn start_copy(&mut self, sql: &str, wanted: u8) -> Result<()> {
        self.begin_exchange()?;
        self.queue_simple(sql);
        self.send_exchange()?;
        let message = self.channel.next(self.read_timeout).map_err(|error| self.give_up(error))?;
        match message.tag {
            tag if tag == wanted => Ok(()),
            b'E' => {
                let error = self.server_error(message.body);
                Err(self.drain_after(error))
            }
            tag => {
                let error = unexpected(tag, "where a COPY response was expected");
                Err(self.channel.fail(error))
            }
        }
    }

    /// Sends START_REPLICATION and returns the first message of the answer.
    pub(crate) fn start_streaming(&mut self, command: &str) -> Result<Message> {
        self.begin_exchange()?;
        self.queue_simple(command);
        self.send_exchange()?;
        self.channel.next(self.read_timeout)
    }

    pub(super) fn server_error(&self, body: Range<usize>) -> Error {
        Error::Server(Box::new(ServerError::parse(self.channel.bytes(body))))
    }

    /// Reads up to ReadyForQuery after an error, so that the session stays usable, and returns the
    /// error.
    fn drain_after(&mut self, error: Error) -> Error {
        if error.server_error().is_some_and(ServerError::is_fatal) {
            return self.channel.fail(error);
        }
        loop {
            match self.channel.next(self.read_timeout) {
                Ok(message) if message.tag == b'Z' => {
                    return self.note_ready(&message).err().unwrap_or(error);
                }
                Ok(_) => {}
                Err(_) => return self.channel.fail(error),
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyState {
    Running,
    /// ReadyForQuery has arrived: the session is free again.
    Over,
}

/// A running `COPY ... TO STDOUT`. Dropping it before the end makes the session unusable.
pub struct CopyOut<'s> {
    session: &'s mut Session,
    state: CopyState,
    rows: u64,
}

impl CopyOut<'_> {
    /// The payload of the next CopyData message: one row, in the text and CSV formats. `None` at
    /// the end of the COPY. An error ends the COPY, too.
    #[expect(clippy::should_implement_trait, reason = "lends from the session, so no Iterator")]
    pub fn next(&mut self) -> Result<Option<&[u8]>> {
        match self.advance()? {
            Some(body) => Ok(Some(self.session.channel.bytes(body))),
            None => Ok(None),
        }
    }

    /// The number of rows, available after the end.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    fn advance(&mut self) -> Result<Option<Range<usize>>> {
        let session = &mut *self.session;
        while self.state == CopyState::Running {
            let message = session.channel.next(session.read_timeout)?;
            match message.tag {
                b'd' => return Ok(Some(message.body)),
                b'c' => {}
                b'C' => {
                    let tag = command_tag(session.channel.bytes(message.body));
                    self.rows = affected_rows(tag.map_err(|error| session.channel.fail(error))?);
                }
                b'Z' => {
                    session.note_ready(&message)?;
                    self.state = CopyState::Over;
                }
                b'E' => {
                    self.state = CopyState::Over;
                    let error = session.server_error(message.body);
                    return Err(session.drain_after(error));
                }
                tag => return Err(session.channel.fail(unexpected(tag, "in COPY data"))),
            }
        }
        Ok(None)
    }
}

impl Drop for CopyOut<'_> {
    fn drop(&mut self) {
        if self.state == CopyState::Running {
            self.session.channel.set_broken();
        }
    }
}

/// A running `COPY ... FROM STDIN`. Dropping it without [`CopyIn::finish`] or [`CopyIn::abort`]
/// makes the session unusable; the server then rolls the COPY back.
pub struct CopyIn<'s> {
    session: &'s mut Session,
    state: CopyState,
    /// Offset of the header of the unfinished CopyData message in the output buffer.
    frame: Option<usize>,
}

impl CopyIn<'_> {
    /// Sends data, which may be split anywhere, even within a row. An error that the server reports
    /// meanwhile ends the COPY and leaves the session usable.
    pub fn send(&mut self, data: &[u8]) -> Result<()> {
        if self.state == CopyState::Over {
            return Err(Error::protocol("this COPY has already failed"));
        }
        for piece in data.chunks(COPY_BATCH) {
            let out = &mut self.session.channel.out;
            if self.frame.is_none() {
                self.frame = Some(out.len());
                out.put_u8(b'd');
                out.put_u32(0);
            }
            out.put_slice(piece);
            if out.len() >= COPY_BATCH {
                self.seal();
                self.session.flush()?;
                self.check()?;
            }
        }
        Ok(())
    }

    /// Ends the data, waits for the server, and returns the number of copied rows.
    pub fn finish(mut self) -> Result<u64> {
        if self.state == CopyState::Over {
            return Err(Error::protocol("this COPY has already failed"));
        }
        self.seal();
        frontend::copy_done(&mut self.session.channel.out);
        self.session.flush()?;
        let mut rows = 0;
        let session = &mut *self.session;
        loop {
            let message = session.channel.next(session.read_timeout)?;
            match message.tag {
                b'C' => {
                    let tag = command_tag(session.channel.bytes(message.body));
                    rows = affected_rows(tag.map_err(|error| session.channel.fail(error))?);
                }
                b'Z' => {
                    session.note_ready(&message)?;
                    self.state = CopyState::Over;
                    return Ok(rows);
                }
                b'E' => {
                    let error = session.server_error(message.body);
                    self.state = CopyState::Over;
                    return Err(session.drain_after(error));
                }
                tag => return Err(session.channel.fail(unexpected(tag, "after COPY data"))),
            }
        }
    }

    /// Makes the COPY fail with `reason`, which rolls it back, and leaves the session usable.
    pub fn abort(mut self, reason: &str) -> Result<()> {
        if self.state == CopyState::Over {
            return Ok(());
        }
        self.seal();
        let reason = reason.replace('\0', " ");
        let out = &mut self.session.channel.out;
        frontend::copy_fail(&reason, out).map_err(|error| Error::Protocol(error.to_string()))?;
        self.session.flush()?;
        let session = &mut *self.session;
        loop {
            let message = session.channel.next(session.read_timeout)?;
            match message.tag {
                b'Z' => {
                    session.note_ready(&message)?;
                    self.state = CopyState::Over;
                    return Ok(());
                }
                // 57014: "COPY from stdin failed: reason".
                b'E' => {
                    let error = session.server_error(message.body);
                    if error.is_connection_loss() {
                        return Err(session.channel.fail(error));
                    }
                }
                tag => return Err(session.channel.fail(unexpected(tag, "after CopyFail"))),
            }
        }
    }

    /// Writes the length of the unfinished CopyData message.
    fn seal(&mut self) {
        if let Some(frame) = self.frame.take() {
            let out = &mut self.session.channel.out;
            // At most two batches: far below the limit of a message.
            let length = u32::try_from(out.len() - frame - 1).unwrap_or(u32::MAX);
            out[frame + 1..frame + 5].copy_from_slice(&length.to_be_bytes());
        }
    }

    /// Checks whether the server has reported an error. The server does not wait for the client: it
    /// discards the rest of the data and has already sent ReadyForQuery.
    fn check(&mut self) -> Result<()> {
        let session = &mut *self.session;
        session.channel.try_fill()?;
        let taken = session.channel.take();
        match taken.map_err(|error| session.channel.fail(error))? {
            None => Ok(()),
            Some(message) if message.tag == b'E' => {
                self.state = CopyState::Over;
                let error = session.server_error(message.body);
                Err(session.drain_after(error))
            }
            Some(message) => {
                Err(session.channel.fail(unexpected(message.tag, "while COPY data is sent")))
            }
        }
    }
}

impl Drop for CopyIn<'_> {
    fn drop(&mut self) {
        if self.state == CopyState::Running {
            self.session.channel.set_broken();
        }
    }
}
