//! COPY FROM STDIN inside a pipeline: its data is queued directly behind its Execute.
//!
//! The server takes the data when it comes to it. If it does not come to it, because something
//! failed before, it discards CopyData and CopyDone up to the Sync as it does everything else; so
//! it does with the rest of the data when the COPY itself fails.
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-COPY>.

use bytes::{BufMut, BytesMut};
use postgres_protocol::message::frontend;

use super::Session;
use crate::error::Error;
use crate::stream::MAX_MESSAGE;

/// A CopyData message ends after the row with which it reaches this length.
const FRAME: usize = 64 * 1024;

/// The data of one COPY, written straight into the output buffer. See
/// [`Session::queue_copy_data`].
#[derive(Debug)]
pub struct CopyData<'s> {
    out: &'s mut BytesMut,
    /// Where the message that is being filled starts, if one is.
    frame: Option<usize>,
    /// Where the row that is being written starts.
    row: usize,
    failure: Option<Error>,
}

impl Session {
    /// Queues the data of a COPY FROM STDIN, and CopyDone after it. It must follow the Execute of
    /// the COPY directly. The replies to the COPY are [`CopyIn`](super::Reply::CopyIn) and
    /// CommandComplete.
    pub fn queue_copy_data<T>(&mut self, write: impl FnOnce(&mut CopyData<'_>) -> T) -> T {
        let row = self.channel.out.len();
        let mut data = CopyData { out: &mut self.channel.out, frame: None, row, failure: None };
        let result = write(&mut data);
        data.undo_row();
        data.seal();
        frontend::copy_done(data.out);
        if let Some(failure) = data.failure {
            self.queue_failure.get_or_insert(failure);
        }
        result
    }
}

impl CopyData<'_> {
    /// Appends to the row. (A header or trailer is written as if it were one.)
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        self.open();
        self.out.extend_from_slice(bytes);
    }

    /// Appends one byte to the row.
    #[inline]
    pub fn put_u8(&mut self, byte: u8) {
        self.open();
        self.out.put_u8(byte);
    }

    /// The length of the row so far.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.out.len() - self.row
    }

    /// Forgets what was written since the end of the last row.
    pub fn undo_row(&mut self) {
        self.out.truncate(self.row);
    }

    /// Ends a row.
    #[inline]
    pub fn end_row(&mut self) {
        self.row = self.out.len();
        if self.frame.is_some_and(|frame| self.row - frame >= FRAME) {
            self.seal();
        }
    }

    #[inline]
    fn open(&mut self) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.put_u8(b'd');
            self.out.put_u32(0);
            self.row = self.out.len();
        }
    }

    /// Writes the length of the message being filled.
    fn seal(&mut self) {
        let Some(frame) = self.frame.take() else { return };
        if self.out.len() == frame + 5 {
            self.out.truncate(frame);
            return;
        }
        let length = self.out.len() - frame - 1;
        match u32::try_from(length) {
            Ok(word) if length <= MAX_MESSAGE => {
                self.out[frame + 1..frame + 5].copy_from_slice(&word.to_be_bytes());
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
