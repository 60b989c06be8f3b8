//! The messages to the server on a replication connection: status messages, and CopyDone at its end.
//!
//! The thread that reads the stream sends. Another thread may send a status message too, which saves a
//! wake-up: a session of the publisher may wait for it.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{BufMut as _, BytesMut};
use socket2::Socket;

use postgres_protocol::message::frontend;

use super::{MAX_UNSENT, Waker};
use crate::error::{Error, Result};
use crate::stream::{MAX_MESSAGE, Stream, from_io, retry};

/// Messages that the socket has not accepted yet.
///
/// Both threads write under its lock, for as long as a call takes that does not block, and only from
/// the first byte that was not written: a message is never torn.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: BytesMut,
    written: usize,
    /// CopyDone is the last message, or the connection is closed.
    ended: bool,
    /// The socket, for the other thread. An encrypted connection has none: its state belongs to the
    /// thread that reads.
    socket: Option<Socket>,
}

impl Outgoing {
    fn queue(&mut self, copy_data: &[u8]) -> Result<()> {
        let length = copy_data.len() + 4;
        let word = match u32::try_from(length) {
            Ok(word) if length <= MAX_MESSAGE => word,
            _ => return Err(Error::MessageTooLarge { bytes: length, limit: MAX_MESSAGE }),
        };
        self.bytes.put_u8(b'd');
        self.bytes.put_u32(word);
        self.bytes.put_slice(copy_data);
        Ok(())
    }

    fn unsent(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Writes as much as `write` accepts now.
    fn push(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while !self.unsent().is_empty() {
            self.written += write(self.unsent())?;
        }
        self.bytes.clear();
        self.written = 0;
        Ok(())
    }

    /// The same, to the stream and as far as it goes.
    fn push_to(&mut self, stream: &mut Stream) -> Result<()> {
        let pushed = self.push(|bytes| stream.write(bytes)).and_then(|()| stream.push());
        stream.set_inside_message(self.written > 0);
        match pushed {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(from_io(error)),
            _ => Ok(()),
        }
    }

    /// The same, from the other thread. Returns whether nothing is left.
    fn push_from_outside(&mut self) -> bool {
        let Some(socket) = self.socket.take() else { return false };
        let sent = self.push(|bytes| retry(|| (&socket).write(bytes))).is_ok();
        self.socket = Some(socket);
        sent
    }
}

fn lock(outgoing: &Mutex<Outgoing>) -> MutexGuard<'_, Outgoing> {
    outgoing.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The messages of a connection, for the thread that reads it.
#[derive(Debug, Default)]
pub(super) struct StreamOutgoing(Arc<Mutex<Outgoing>>);

impl StreamOutgoing {
    pub(super) fn send(&self, stream: &mut Stream, copy_data: &[u8]) -> Result<()> {
        let mut outgoing = lock(&self.0);
        outgoing.queue(copy_data)?;
        outgoing.push_to(stream)?;
        if outgoing.unsent().len() > MAX_UNSENT {
            return Err(Error::protocol("the server has stopped reading replication feedback"));
        }
        Ok(())
    }

    /// Sends CopyDone if it was not sent yet.
    pub(super) fn end(&self, stream: &mut Stream) -> Result<()> {
        let mut outgoing = lock(&self.0);
        if !std::mem::replace(&mut outgoing.ended, true) {
            frontend::copy_done(&mut outgoing.bytes);
        }
        outgoing.push_to(stream)
    }

    pub(super) fn has_unsent(&self, stream: &Stream) -> bool {
        stream.has_unsent() || !lock(&self.0).unsent().is_empty()
    }

    /// Writes as much as the socket accepts now.
    pub(super) fn push(&self, stream: &mut Stream) -> Result<()> {
        lock(&self.0).push_to(stream)
    }

    /// See [`super::ReplicationStream::status_sender`].
    pub(super) fn sender(&self, stream: &Stream, waker: &Waker) -> io::Result<StatusSender> {
        let plain = (!stream.is_encrypted()).then(|| stream.socket().try_clone());
        lock(&self.0).socket = plain.transpose()?;
        Ok(StatusSender { outgoing: Arc::clone(&self.0), waker: waker.clone() })
    }
}

impl Drop for StreamOutgoing {
    /// The connection is closed with the stream, whether or not the other thread still has its sender.
    fn drop(&mut self) {
        let mut outgoing = lock(&self.0);
        (outgoing.ended, outgoing.socket) = (true, None);
    }
}

/// Sends status messages from another thread than the one that reads the stream.
#[derive(Clone)]
pub struct StatusSender {
    outgoing: Arc<Mutex<Outgoing>>,
    waker: Waker,
}

impl StatusSender {
    /// Queues one CopyData message, sends as much as the socket accepts, and never blocks. The thread
    /// that reads sends the rest, and meets the error if the connection is broken. After the end of the
    /// stream nothing is sent.
    ///
    /// # Errors
    /// The message is too large for the protocol.
    pub fn send(&self, copy_data: &[u8]) -> Result<()> {
        let mut outgoing = lock(&self.outgoing);
        if outgoing.ended {
            return Ok(());
        }
        outgoing.queue(copy_data)?;
        let sent = outgoing.push_from_outside();
        drop(outgoing);
        if !sent {
            self.waker.wake();
        }
        Ok(())
    }
}

impl fmt::Debug for StatusSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StatusSender").finish_non_exhaustive()
    }
}
