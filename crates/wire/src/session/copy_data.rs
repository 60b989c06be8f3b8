//! COPY FROM STDIN inside a pipeline: its data is queued directly after its Execute.
//!
//! The server reads the data when it executes the COPY. If an earlier message fails, the server
//! discards CopyData and CopyDone up to the Sync, like all other messages. If the COPY itself
//! fails, it discards the rest of the data in the same way.
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-COPY>.

use bytes::{BufMut, BytesMut};
use postgres_protocol::message::frontend;

use super::Session;
use crate::error::Error;
use crate::memory;
use crate::stream::MAX_MESSAGE;

/// Size in bytes of the tag and length word of a message.
const HEADER: usize = 5;
/// A CopyData message ends after the row that reaches this size, in bytes.
const FRAME: usize = 64 * 1024;

/// The data of one COPY, written directly into the output buffer. See [`Session::queue_copy_data`].
#[derive(Debug)]
pub struct CopyData<'s> {
    out: &'s mut BytesMut,
    /// Start of the unfinished message, if there is one.
    frame: Option<usize>,
    /// Start of the unfinished row.
    row: usize,
    failure: Option<Error>,
}

impl Session {
    /// Queues the data of a COPY FROM STDIN, followed by CopyDone. The Execute of the COPY must
    /// directly precede it. The replies to the COPY are [`CopyIn`](super::Reply::CopyIn) and
    /// CommandComplete.
    pub fn queue_copy_data<T>(&mut self, write: impl FnOnce(&mut CopyData<'_>) -> T) -> T {
        let row = self.channel.out.len();
        let mut data = CopyData { out: &mut self.channel.out, frame: None, row, failure: None };
        let result = write(&mut data);
        data.undo_row();
        data.seal();
        if data.has_room(HEADER) {
            frontend::copy_done(data.out);
        }
        if let Some(failure) = data.failure {
            self.queue_failure.get_or_insert(failure);
        }
        result
    }
}

impl CopyData<'_> {
    /// Appends to the current row. Write a header or trailer as if it were a row.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        self.open();
        if self.has_room(bytes.len()) {
            self.out.extend_from_slice(bytes);
        }
    }

    /// Appends one byte to the current row.
    #[inline]
    pub fn put_u8(&mut self, byte: u8) {
        self.open();
        if self.has_room(1) {
            self.out.put_u8(byte);
        }
    }

    /// Size of the unfinished row, in bytes.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.out.len() - self.row
    }

    /// Removes everything that was written since the end of the last row.
    pub fn undo_row(&mut self) {
        self.out.truncate(self.row);
    }

    /// Ends the current row.
    #[inline]
    pub fn end_row(&mut self) {
        self.row = self.out.len();
        if self.frame.is_some_and(|frame| self.row - frame >= FRAME) {
            self.seal();
        }
    }

    /// Makes room. Without it, nothing of the queue is sent any more.
    #[inline]
    fn has_room(&mut self, bytes: usize) -> bool {
        match memory::reserve(self.out, bytes) {
            Ok(()) => true,
            Err(error) => {
                self.failure.get_or_insert(error);
                false
            }
        }
    }

    #[inline]
    fn open(&mut self) {
        if self.frame.is_none() && self.has_room(HEADER) {
            self.frame = Some(self.out.len());
            self.out.put_u8(b'd');
            self.out.put_u32(0);
            self.row = self.out.len();
        }
    }

    /// Writes the length of the unfinished message.
    fn seal(&mut self) {
        let Some(frame) = self.frame.take() else { return };
        if self.out.len() == frame + HEADER {
            self.out.truncate(frame);
            return;
        }
        let length = self.out.len() - frame - 1;
        match u32::try_from(length) {
            Ok(word) if length <= MAX_MESSAGE => {
                self.out[frame + 1..frame + HEADER].copy_from_slice(&word.to_be_bytes());
            }
            _ => {
                self.out.truncate(frame);
                self.row = frame;
                let failure = Error::MessageTooLarge { bytes: length, limit: MAX_MESSAGE };
                self.failure.get_or_insert(failure);
            }
        }
    }
}
