//! The receiver: the thread that owns the replication connection.
//!
//! It never waits for apply workers. It hands chunks to the leader, answers keepalives and sends
//! status messages on time, whatever the subscriber does. When memory is full it stops reading, but
//! still sends status messages. Where few commits wait, it lends the connection to the leader, which then
//! does all of this itself.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver as Channel, Sender, bounded, unbounded};
use engine::progress::Positions;
use pgoutput::{Frame, Lsn};
use wire::{EndReason, Haste, Received, StatusSender, Waker};

use crate::error::{Class, Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::announced::{Announcer, MESSAGE};
use crate::publisher::feedback::Feedback;
use crate::publisher::source::ChangeSource;
use crate::sqlstate;

/// Longest time between two status messages while nothing is read. The receiver then does not see
/// the publisher's requests for a reply, and the publisher ends a silent connection after
/// wal_sender_timeout.
const PAUSED_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// With this many bytes received and not yet applied, the receiver need not hurry.
const PLENTY: usize = 512 << 10;

/// A message from the receiver to the leader.
#[derive(Debug)]
pub(crate) enum FromPublisher {
    /// Complete CopyData messages, headers included.
    Chunk(Chunk),
    /// The publisher sent a WARNING: it may have left changes out.
    Warned,
    /// The stream ended; nothing follows.
    Ended(Failure),
    /// The connection is lent; nothing follows before it is given back. See [`Receiver::take_connection`].
    Lent,
}

/// Received bytes. They return to the memory budget when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Shared bytes, which can be sliced without copying.
    pub(crate) bytes: Bytes,
}

/// The timing and memory limit of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceiverOptions {
    /// Longest time between two status messages.
    pub(crate) status_interval: Duration,
    /// After this long without any data, the publisher is considered lost (`wal_receiver_timeout`).
    pub(crate) receive_timeout: Duration,
    /// Reading stops above this many bytes that were received and not yet released.
    pub(crate) memory_limit: usize,
    /// Whether commits on the publisher wait for the subscription.
    pub(crate) commits_wait: bool,
}

/// The memory budget: bytes that were received, or read back from the spool, and are still
/// referenced.
#[derive(Debug)]
pub(crate) struct Memory {
    used: AtomicUsize,
    /// Bytes reserved for other uses.
    reserved: AtomicUsize,
    limit: usize,
    waker: Waker,
}

impl Memory {
    /// Accounts bytes that did not come from the receiver, until their last reference is dropped.
    /// Never blocks.
    pub(crate) fn account(memory: &Arc<Self>, bytes: Bytes) -> Bytes {
        memory.used.fetch_add(bytes.len(), Ordering::AcqRel);
        Bytes::from_owner(Accounted { bytes, memory: Arc::clone(memory) })
    }

    /// Sets the number of bytes reserved for other uses. At least half of the budget stays for
    /// received bytes, so that reading never stops for good.
    pub(crate) fn reserve(&self, bytes: usize) {
        let was_full = self.is_full();
        self.reserved.store(bytes.min(self.limit / 2), Ordering::Release);
        if was_full && !self.is_full() {
            self.waker.wake();
        }
    }

    /// The part of the budget for received bytes.
    fn room(&self) -> usize {
        self.limit - self.reserved.load(Ordering::Acquire)
    }

    /// Bytes that are used, and their limit.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.used.load(Ordering::Relaxed) as u64, self.limit as u64)
    }

    /// Whether the receiver stops reading.
    pub(crate) fn is_full(&self) -> bool {
        self.used.load(Ordering::Acquire) >= self.room()
    }
}

/// The bytes of a chunk, accounted in the budget until they are dropped.
struct Accounted {
    bytes: Bytes,
    memory: Arc<Memory>,
}

impl AsRef<[u8]> for Accounted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Accounted {
    fn drop(&mut self) {
        let length = self.bytes.len();
        let before = self.memory.used.fetch_sub(length, Ordering::AcqRel);
        let room = self.memory.room();
        if before >= room && before - length < room {
            self.memory.waker.wake();
        }
    }
}

/// A running receiver thread. It lends the connection to the leader while that reads the stream itself.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) chunks: Channel<FromPublisher>,
    pub(crate) memory: Arc<Memory>,
    /// Time spent waiting for memory.
    pub(crate) waits: Stopwatch,
    feedback: Feedback,
    /// If commits on the publisher wait.
    status_sender: Option<StatusSender>,
    waker: Waker,
    orders: Arc<Orders>,
    /// Set once per chunk, so a mutex is enough.
    haste: Arc<Mutex<Haste>>,
    /// The connection, while the leader has it.
    reader: Option<Box<StreamReader>>,
    giving_back: Option<Sender<Box<StreamReader>>>,
    thread: Option<JoinHandle<()>>,
}

/// What the leader wants of the thread.
#[derive(Debug, Default)]
struct Orders {
    stop: AtomicBool,
    lend: AtomicBool,
    /// The connection, until the leader takes it. A mutex, because it is used once for each time it is lent.
    lent: Mutex<Option<Box<StreamReader>>>,
}

impl Orders {
    fn take(&self) -> Option<Box<StreamReader>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, reader: Box<StreamReader>) {
        *self.lent.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader);
    }
}

impl Receiver {
    /// Starts the thread on a running stream.
    pub(crate) fn spawn(
        stream: ChangeSource,
        feedback: Feedback,
        options: ReceiverOptions,
        announcer: Announcer,
    ) -> Result<Self> {
        let ((sender, chunks), (giving_back, given_back)) = (unbounded(), bounded(1));
        let waker = stream.waker();
        let status_sender = if options.commits_wait { stream.status_sender()? } else { None };
        let haste = Arc::new(Mutex::new(Haste::default()));
        let memory = Arc::new(Memory {
            used: AtomicUsize::new(0),
            reserved: AtomicUsize::new(0),
            limit: options.memory_limit,
            waker: waker.clone(),
        });
        let waits = Stopwatch::default();
        let reader = Box::new(StreamReader {
            stream,
            feedback: feedback.clone(),
            options,
            memory: Arc::clone(&memory),
            waits: waits.clone(),
            announcer,
            haste: Arc::clone(&haste),
            last_heard: Instant::now(),
            asked: false,
        });
        let orders = Arc::<Orders>::default();
        let thread = ReceiverThread { sender, given_back, orders: Arc::clone(&orders) };
        let thread = std::thread::Builder::new()
            .name("receiver".to_owned())
            .spawn(move || thread.run(reader))
            .map_err(|e| Failure::internal(format!("cannot start the receiver thread: {e}")))?;
        Ok(Self {
            chunks,
            memory,
            waits,
            feedback,
            status_sender,
            waker,
            orders,
            haste,
            reader: None,
            giving_back: Some(giving_back),
            thread: Some(thread),
        })
    }

    /// Tells the publisher of these positions, if they are new.
    pub(crate) fn tell(&self, positions: Positions) {
        if !self.feedback.set(positions) {
            return;
        }
        let sent = self
            .status_sender
            .as_ref()
            .is_some_and(|sender| self.feedback.send_news(|message| sender.send(message)).is_ok());
        if !sent {
            self.waker.wake();
        }
    }

    /// How long the receiver may collect data from now on.
    pub(crate) fn set_haste(&self, haste: Haste) {
        *self.haste.lock().unwrap_or_else(PoisonError::into_inner) = haste;
    }

    /// Whether the receiver may collect data for as long as much arrives.
    pub(crate) fn is_without_haste(&self) -> bool {
        *self.haste.lock().unwrap_or_else(PoisonError::into_inner) == Haste::None
    }

    /// Asks the thread for the connection. [`FromPublisher::Lent`] says when it is to be
    /// [taken](Self::take_connection).
    pub(crate) fn ask_for_connection(&self) {
        if !self.orders.lend.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Takes the connection that the thread has lent, with [`Self::receive`].
    pub(crate) fn take_connection(&mut self) {
        self.reader = self.orders.take();
        tracing::debug!("the leader reads the stream itself");
    }

    /// Whether the calling thread has the connection.
    pub(crate) fn has_connection(&self) -> bool {
        self.reader.is_some()
    }

    /// Gives the connection back to the thread, if that has lent it.
    pub(crate) fn give_connection_back(&mut self) {
        self.orders.lend.store(false, Ordering::Release);
        if let (Some(reader), Some(giving_back)) = (self.reader.take(), &self.giving_back) {
            // Fails only if the thread has ended, which then has said so.
            let _ = giving_back.send(reader);
        }
    }

    /// Receives in the calling thread, if it has the connection. Returns nothing after `longest`, or earlier.
    pub(crate) fn receive(&mut self, longest: Duration) -> Result<Option<FromPublisher>> {
        let Some(mut reader) = self.reader.take() else { return Ok(None) };
        // After an error it is of no use any more.
        let received = reader.receive(longest)?;
        self.reader = Some(reader);
        Ok(received)
    }

    /// Sends the last positions, ends the stream in order, and waits for the thread.
    pub(crate) fn finish(mut self) {
        self.stop_and_join();
    }

    fn stop_and_join(&mut self) {
        self.orders.stop.store(true, Ordering::Release);
        self.give_connection_back();
        self.giving_back = None;
        self.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(event = "thread_panicked", "receiver thread panicked");
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

struct ReceiverThread {
    sender: Sender<FromPublisher>,
    given_back: Channel<Box<StreamReader>>,
    orders: Arc<Orders>,
}

impl ReceiverThread {
    fn run(self, mut reader: Box<StreamReader>) {
        while !self.orders.stop.load(Ordering::Acquire) {
            if self.orders.lend.load(Ordering::Acquire) {
                match self.lend(reader) {
                    Some(given_back) => reader = given_back,
                    None => return,
                }
                continue;
            }
            let received = match reader.receive(Duration::MAX) {
                Ok(None) => continue,
                Ok(Some(received)) => received,
                Err(failure) => {
                    // The leader may have ended already.
                    let _ = self.sender.send(FromPublisher::Ended(failure));
                    return;
                }
            };
            if self.sender.send(received).is_err() {
                break;
            }
        }
        // The leader stopped the receiver: the publisher gets the last positions before the connection
        // closes.
        if let Err(error) = reader.finish() {
            tracing::debug!(%error, "the stream did not end in order");
        }
    }

    /// Lends the connection to the leader until that gives it back; `None` if it has closed it.
    fn lend(&self, reader: Box<StreamReader>) -> Option<Box<StreamReader>> {
        self.orders.put(reader);
        let _ = self.sender.send(FromPublisher::Lent);
        // The leader may end before it has taken it.
        self.given_back.recv().ok().or_else(|| self.orders.take())
    }
}

/// The connection, for the thread that receives.
struct StreamReader {
    stream: ChangeSource,
    feedback: Feedback,
    options: ReceiverOptions,
    memory: Arc<Memory>,
    waits: Stopwatch,
    announcer: Announcer,
    haste: Arc<Mutex<Haste>>,
    last_heard: Instant,
    asked: bool,
}

impl std::fmt::Debug for StreamReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamReader").finish_non_exhaustive()
    }
}

impl StreamReader {
    /// Sends a status message if one is due, and waits for the publisher, for `longest` at most.
    fn receive(&mut self, longest: Duration) -> Result<Option<FromPublisher>> {
        if self.feedback.silence() >= self.options.status_interval {
            self.send_status(false)?;
        } else {
            self.feedback.send_news(|message| self.stream.send(message))?;
        }
        if self.memory.is_full() {
            // The receiver does not read, so the publisher's silence means nothing.
            self.last_heard = Instant::now();
            if self.feedback.silence() >= PAUSED_STATUS_INTERVAL {
                self.send_status(false)?;
            }
            self.waits.set(Some(Reason::Memory));
            let waited = self.stream.wait_without_reading(PAUSED_STATUS_INTERVAL.min(longest));
            self.waits.set(None);
            waited?;
            return Ok(None);
        }
        let timeout = self.options.status_interval.saturating_sub(self.feedback.silence());
        self.watch_silence()?;
        let timeout = timeout.min(self.options.receive_timeout / 4).min(longest);
        self.stream.set_haste(self.haste());
        match self.stream.receive(timeout)? {
            Received::Chunk(chunk) => {
                self.last_heard = Instant::now();
                self.asked = false;
                let (mut reply, mut ended) = (false, None);
                for (_, frame) in chunk.frames() {
                    reply |= wants_reply(frame);
                    ended = end_of_transaction(frame).or(ended);
                    self.announcer.frame(frame);
                }
                // Before the leader gets the chunk.
                self.announcer.end(chunk.bytes().len());
                if let Some(end) = ended
                    && self.options.commits_wait
                {
                    // With synchronous_commit = remote_write, its session waits for that alone. The
                    // leader, which has more to do, need not wake this thread for it.
                    self.feedback.read(end);
                }
                if reply {
                    self.send_status(false)?;
                }
                let bytes = Memory::account(&self.memory, chunk.bytes().clone());
                Ok(Some(FromPublisher::Chunk(Chunk { bytes })))
            }
            Received::Warning(_) => Ok(Some(FromPublisher::Warned)),
            Received::Idle | Received::Woken => Ok(None),
            Received::Ended(reason) => Err(ended(reason)),
        }
    }

    /// Sends the last positions, and ends the stream in order.
    fn finish(mut self) -> Result<()> {
        self.send_status(false).and_then(|()| self.stream.finish())
    }

    fn haste(&self) -> Haste {
        if self.memory.used.load(Ordering::Relaxed) >= PLENTY {
            Haste::None
        } else {
            *self.haste.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Requests a reply from a silent publisher, and fails if none arrives.
    fn watch_silence(&mut self) -> Result<()> {
        // A huge value takes long to arrive; its first bytes already prove that the publisher is
        // alive.
        if let Some(last) = self.stream.last_data() {
            self.last_heard = self.last_heard.max(last);
        }
        let silence = self.last_heard.elapsed();
        if silence >= self.options.receive_timeout {
            return Err(Failure::new(
                Class::Publisher,
                format!("the publisher has been silent for {} s", silence.as_secs()),
            )
            .transient(true));
        }
        if silence >= self.options.receive_timeout / 2 && !self.asked {
            self.asked = true;
            self.send_status(true)?;
        }
        Ok(())
    }

    fn send_status(&mut self, reply_requested: bool) -> Result<()> {
        self.feedback.send(reply_requested, |message| self.stream.send(message))
    }
}

fn wants_reply(payload: &[u8]) -> bool {
    // The first byte decides for nearly all frames; the leader reports malformed ones.
    payload.first() == Some(&b'k')
        && matches!(Frame::decode(payload), Ok(Frame::Keepalive { reply_requested: true, .. }))
}

/// The end of the transaction that the publisher has finished with this frame: COMMIT, PREPARE TRANSACTION,
/// COMMIT PREPARED or ROLLBACK PREPARED.
fn end_of_transaction(frame: &[u8]) -> Option<Lsn> {
    let ends = matches!(frame.get(MESSAGE), Some(b'C' | b'c' | b'P' | b'p' | b'K' | b'r'));
    if !ends {
        return None;
    }
    match Frame::decode(frame) {
        Ok(Frame::XLogData { start, .. }) => Some(start),
        _ => None,
    }
}

fn ended(reason: EndReason) -> Failure {
    match reason {
        EndReason::Error(error) => {
            explain(Failure::publisher(&wire::Error::Server(error), "streaming changes"))
        }
        EndReason::Done => Failure::new(Class::Publisher, "the publisher ended the stream")
            .hint(
                "The server is shutting down, or a standby was promoted. pgapace reconnects by \
                 itself.",
            )
            .transient(true),
        EndReason::Closed => {
            Failure::new(Class::Publisher, "the publisher closed the connection").transient(true)
        }
    }
}

/// Gives errors of the walsender about the slot their own class and next step.
pub(crate) fn explain(mut failure: Failure) -> Failure {
    let text = failure.message.to_lowercase();
    let invalidated = text.contains("can no longer get changes")
        || text.contains("invalidat")
        || text.contains("requested wal segment");
    match failure.sqlstate.as_deref() {
        Some(sqlstate::OBJECT_IN_USE) => {
            failure.class = Class::Busy;
            failure.transient = true;
        }
        _ if invalidated => {
            failure.class = Class::Slot;
            failure.transient = false;
        }
        // Before 18, decoding a change fails if the publication does not exist as of that change:
        // it is missing now, or it was missing then.
        Some(sqlstate::UNDEFINED_OBJECT) => {
            failure.transient = true;
            failure = failure.hint(
                "If the publication was dropped, create it again. If it exists, it was created \
                 after changes that the slot must still send, which PostgreSQL before 18 cannot \
                 do: copy the tables again, with pgapace drop and then pgapace run.",
            );
        }
        _ if !failure.transient => {
            failure.in_decoding = true;
            failure.hint.get_or_insert_with(|| {
                "The publisher failed while it decoded its WAL; a native subscription would meet the \
                 same error. If it comes back each time, pgapace rebase makes a new slot behind it, \
                 and mends the rows that differ."
                    .to_owned()
            });
        }
        _ => {}
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::{Lsn, end_of_transaction};

    /// A frame at 1/2, with a message of this kind.
    fn frame(kind: u8) -> Vec<u8> {
        let lsn = [0, 0, 0, 1, 0, 0, 0, 2];
        [b"w".as_slice(), &lsn, &lsn, &[0; 8], &[kind]].concat()
    }

    #[test]
    fn a_receipt_is_for_a_transaction_that_has_ended() {
        let end = Some(Lsn(1 << 32 | 2));
        for kind in *b"CcPpKr" {
            assert_eq!(end_of_transaction(&frame(kind)), end, "{}", char::from(kind));
        }
        for kind in *b"BIUDTRYOMSEAb" {
            assert_eq!(end_of_transaction(&frame(kind)), None, "{}", char::from(kind));
        }
        for no_message in [b"".as_slice(), b"w", b"k\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0"] {
            assert_eq!(end_of_transaction(no_message), None);
        }
    }
}
