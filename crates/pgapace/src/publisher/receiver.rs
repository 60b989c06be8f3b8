//! The receiver: the thread that owns the replication connection.
//!
//! It never waits for apply workers. It hands chunks to the leader, answers keepalives and sends
//! status messages on time, whatever the subscriber does. When memory is full it stops reading, but
//! still sends status messages. Where few commits wait, it lends the connection to the leader, which then
//! does all of this itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver as Channel, Sender, bounded, unbounded};
use engine::progress::Positions;
use wire::{Haste, StatusSender, Waker};

use crate::apply::thread;
use crate::error::Result;
use crate::observe::stopwatch::Stopwatch;
use crate::publisher::announced::Announcer;
use crate::publisher::feedback::Feedback;
use crate::publisher::memory::Memory;
use crate::publisher::reader::{FromPublisher, ReceiverOptions, StreamReader};
use crate::publisher::source::ChangeSource;

/// A running receiver thread. It lends the connection to the leader while that reads the stream itself.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) chunks: Channel<FromPublisher>,
    /// The connection, when the thread lends it. It is to be [taken](Receiver::take_connection).
    pub(crate) lent: Channel<Box<StreamReader>>,
    /// Kept, so that [`Self::lent`] has no end: `chunks` says how the thread has ended.
    _lending: Sender<Box<StreamReader>>,
    pub(crate) memory: Arc<Memory>,
    /// Time spent waiting for memory.
    pub(crate) waits: Stopwatch,
    feedback: Feedback,
    /// If commits on the publisher wait.
    status_sender: Option<StatusSender>,
    waker: Waker,
    orders: Arc<Orders>,
    haste: Arc<Mutex<Haste>>,
    /// The connection, while the leader has it.
    reader: Option<Box<StreamReader>>,
    giving_back: Option<Sender<Box<StreamReader>>>,
    /// Returns whether the publisher has got the last positions.
    thread: Option<JoinHandle<bool>>,
}

/// Requests of the leader to the thread.
#[derive(Debug, Default)]
struct Orders {
    stop: AtomicBool,
    lend: AtomicBool,
}

impl Receiver {
    /// Starts the thread on a running stream.
    pub(crate) fn spawn(
        stream: ChangeSource,
        feedback: Feedback,
        options: ReceiverOptions,
        announcer: Announcer,
    ) -> Result<Self> {
        let ((sender, chunks), (lending, lent)) = (unbounded(), bounded(1));
        let (giving_back, given_back) = bounded(1);
        let waker = stream.waker();
        let status_sender =
            if options.commits.are_synchronous() { stream.status_sender()? } else { None };
        let reader = Box::new(StreamReader::new(stream, feedback.clone(), options, announcer));
        let (memory, haste) = (Arc::clone(&reader.memory), Arc::clone(&reader.haste));
        let waits = reader.waits.clone();
        let orders = Arc::<Orders>::default();
        let receiver = ReceiverThread {
            sender,
            lending: lending.clone(),
            lent: lent.clone(),
            given_back,
            orders: Arc::clone(&orders),
        };
        let thread = thread::spawn("receiver".to_owned(), move || receiver.run(reader))?;
        Ok(Self {
            chunks,
            lent,
            _lending: lending,
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

    /// Asks the thread for the connection, which comes through [`Self::lent`].
    pub(crate) fn ask_for_connection(&self) {
        if !self.orders.lend.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Takes the connection, to [receive](Self::receive) in the calling thread. If chunks were received
    /// before it and are not taken, those come first: then it goes back.
    pub(crate) fn take_connection(&mut self, reader: Box<StreamReader>) {
        self.reader = Some(reader);
        if self.chunks.is_empty() {
            tracing::debug!("the leader reads the stream itself");
        } else {
            self.give_connection_back();
        }
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

    /// Sends the last positions, ends the stream in order, and waits for the thread. Returns whether the publisher
    /// has got them.
    pub(crate) fn finish(mut self) -> bool {
        self.stop_and_join()
    }

    fn stop_and_join(&mut self) -> bool {
        self.orders.stop.store(true, Ordering::Release);
        self.give_connection_back();
        // A thread that has just lent it takes it again.
        self.giving_back = None;
        self.waker.wake();
        let Some(thread) = self.thread.take() else { return false };
        thread.join().unwrap_or_else(|_| {
            tracing::error!(event = "thread_panicked", "receiver thread panicked");
            false
        })
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

struct ReceiverThread {
    sender: Sender<FromPublisher>,
    lending: Sender<Box<StreamReader>>,
    lent: Channel<Box<StreamReader>>,
    given_back: Channel<Box<StreamReader>>,
    orders: Arc<Orders>,
}

impl ReceiverThread {
    /// Returns whether the stream has ended in order, with the last positions.
    fn run(self, mut reader: Box<StreamReader>) -> bool {
        while !self.orders.stop.load(Ordering::Acquire) {
            if self.orders.lend.load(Ordering::Acquire) {
                match self.lend(reader) {
                    Some(given_back) => reader = given_back,
                    None => return false,
                }
                continue;
            }
            let received = match reader.receive(Duration::MAX) {
                Ok(None) => continue,
                Ok(Some(received)) => received,
                Err(failure) => {
                    // The leader may have ended already.
                    let _ = self.sender.send(FromPublisher::Ended(failure));
                    return false;
                }
            };
            if self.sender.send(received).is_err() {
                break;
            }
        }
        // The leader stopped the receiver: the publisher gets the last positions before the connection
        // closes.
        let finished = reader.finish();
        if let Err(error) = &finished {
            tracing::debug!(%error, "the stream did not end in order");
        }
        finished.is_ok()
    }

    /// Lends the connection to the leader until that gives it back; `None` if the leader has closed it.
    fn lend(&self, reader: Box<StreamReader>) -> Option<Box<StreamReader>> {
        let _ = self.lending.send(reader);
        // The leader may end before it has taken it.
        self.given_back.recv().or_else(|_| self.lent.try_recv()).ok()
    }
}
