//! The receiver: one thread that owns the replication connection.
//!
//! It never waits for apply: it hands chunks over, answers keepalives and sends status on time
//! whatever the subscriber does. When memory is full it stops reading, and still sends status.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver as Channel, Sender, unbounded};
use engine::progress::Positions;
use pgoutput::{Frame, StatusUpdate, Timestamp};
use wire::{EndReason, Haste, Received, ReplicationStream, Waker};

use crate::error::{Class, Failure, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::feedback::Feedback;

/// Longest time between two status messages while nothing is read: what the publisher asks for is
/// not seen then, and it ends a connection that is silent for wal_sender_timeout.
const PAUSED_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// With so many bytes received and not yet applied, apply does not wait for more.
const PLENTY: usize = 512 << 10;

/// What the receiver hands to the leader.
#[derive(Debug)]
pub(crate) enum FromPublisher {
    /// Complete CopyData messages, headers included.
    Chunk(Chunk),
    /// The publisher warns: it may have left something out.
    Warned,
    /// The stream ended; nothing follows.
    Ended(Failure),
}

/// Received bytes. The memory budget gets them back when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Shared bytes, to be sliced without copying.
    pub(crate) bytes: Bytes,
}

/// Timing of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceiverOptions {
    /// Longest time between two status messages.
    pub(crate) status_interval: Duration,
    /// A publisher that says nothing for this long is gone (`wal_receiver_timeout`).
    pub(crate) receive_timeout: Duration,
    /// Bytes received and not yet released, above which reading stops.
    pub(crate) memory_limit: usize,
}

/// The memory budget: bytes that were received, or read back, and are still referred to.
#[derive(Debug)]
pub(crate) struct Memory {
    used: AtomicUsize,
    /// What is kept beside them.
    reserved: AtomicUsize,
    limit: usize,
    waker: Waker,
}

impl Memory {
    /// Gives bytes that did not come from the receiver their place in the budget, until the last
    /// reference to them is dropped. Never waits.
    pub(crate) fn account(memory: &Arc<Self>, bytes: Bytes) -> Bytes {
        memory.used.fetch_add(bytes.len(), Ordering::AcqRel);
        Bytes::from_owner(Accounted { bytes, memory: Arc::clone(memory) })
    }

    /// Sets what is kept beside them. Half of the budget stays for what is received, so that
    /// reading goes on whatever is kept.
    pub(crate) fn reserve(&self, bytes: usize) {
        let was_full = self.is_full();
        self.reserved.store(bytes.min(self.limit / 2), Ordering::Release);
        if was_full && !self.is_full() {
            self.waker.wake();
        }
    }

    /// What may be received.
    fn room(&self) -> usize {
        self.limit - self.reserved.load(Ordering::Acquire)
    }

    /// Whether nothing more is received.
    pub(crate) fn is_full(&self) -> bool {
        self.used.load(Ordering::Acquire) >= self.room()
    }
}

/// The bytes of a chunk together with their place in the budget.
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

/// A running receiver thread.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) chunks: Channel<FromPublisher>,
    pub(crate) memory: Arc<Memory>,
    /// How long it has waited for memory.
    pub(crate) waits: Stopwatch,
    waker: Waker,
    stop: Arc<AtomicBool>,
    flow: Arc<Flow>,
    thread: Option<JoinHandle<()>>,
}

impl Receiver {
    /// Starts the thread on a stream that has been started.
    pub(crate) fn spawn(
        stream: ReplicationStream,
        feedback: Feedback,
        options: ReceiverOptions,
    ) -> Result<Self> {
        let (sender, chunks) = unbounded();
        let waker = stream.waker();
        let stop = Arc::new(AtomicBool::new(false));
        let flow = Arc::new(Flow::default());
        let memory = Arc::new(Memory {
            used: AtomicUsize::new(0),
            reserved: AtomicUsize::new(0),
            limit: options.memory_limit,
            waker: waker.clone(),
        });
        let waits = Stopwatch::default();
        let state = State {
            stream,
            feedback,
            options,
            memory: Arc::clone(&memory),
            waits: waits.clone(),
            sender,
            stop: Arc::clone(&stop),
            flow: Arc::clone(&flow),
            sent: None,
            last_sent: Instant::now(),
            last_heard: Instant::now(),
            asked: false,
        };
        let thread = std::thread::Builder::new()
            .name("receiver".to_owned())
            .spawn(move || state.run())
            .map_err(|e| Failure::internal(format!("cannot start the receiver thread: {e}")))?;
        Ok(Self { chunks, memory, waits, waker, stop, flow, thread: Some(thread) })
    }

    /// Has the receiver send the positions if they changed.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Says whether what is received is a backlog, for which nobody waits by the millisecond; or else
    /// whether many sessions commit side by side.
    pub(crate) fn set_flow(&self, backlog: bool, company: bool) {
        self.flow.backlog.store(backlog, Ordering::Relaxed);
        self.flow.company.store(company, Ordering::Relaxed);
    }

    /// Sends the last positions, ends the stream in order and waits for the thread.
    pub(crate) fn finish(mut self) {
        self.stop_and_join();
    }

    fn stop_and_join(&mut self) {
        self.stop.store(true, Ordering::Release);
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

/// What the leader says of what it gets.
#[derive(Debug, Default)]
struct Flow {
    backlog: AtomicBool,
    company: AtomicBool,
}

struct State {
    stream: ReplicationStream,
    feedback: Feedback,
    options: ReceiverOptions,
    memory: Arc<Memory>,
    waits: Stopwatch,
    sender: Sender<FromPublisher>,
    stop: Arc<AtomicBool>,
    flow: Arc<Flow>,
    sent: Option<Positions>,
    last_sent: Instant,
    last_heard: Instant,
    asked: bool,
}

impl State {
    fn run(mut self) {
        match self.receive_until_stopped() {
            Ok(()) => {
                // Stopped by us: let the publisher see the last positions before it closes.
                if let Err(error) = self.send_status(false).and_then(|()| {
                    self.stream.finish().map_err(|e| Failure::publisher(&e, "ending the stream"))
                }) {
                    tracing::debug!(%error, "the stream did not end in order");
                }
            }
            Err(failure) => {
                // The leader may be gone already.
                let _ = self.sender.send(FromPublisher::Ended(failure));
            }
        }
    }

    fn receive_until_stopped(&mut self) -> Result<()> {
        while !self.stop.load(Ordering::Acquire) {
            if self.sent != Some(self.feedback.get())
                || self.last_sent.elapsed() >= self.options.status_interval
            {
                self.send_status(false)?;
            }
            if self.memory.is_full() {
                // Paused for memory: the publisher's silence is our doing.
                self.last_heard = Instant::now();
                if self.last_sent.elapsed() >= PAUSED_STATUS_INTERVAL {
                    self.send_status(false)?;
                }
                self.waits.set(Some(Reason::Memory));
                let waited = self.stream.wait_without_reading(PAUSED_STATUS_INTERVAL);
                self.waits.set(None);
                waited.map_err(|e| Failure::publisher(&e, "waiting for memory"))?;
                continue;
            }
            let timeout = self.options.status_interval.saturating_sub(self.last_sent.elapsed());
            self.watch_silence()?;
            let timeout = timeout.min(self.options.receive_timeout / 4);
            self.stream.set_haste(self.haste());
            let received =
                self.stream.receive(timeout).map_err(|e| Failure::publisher(&e, "receiving"))?;
            match received {
                Received::Chunk(chunk) => {
                    self.last_heard = Instant::now();
                    self.asked = false;
                    let reply = chunk.frames().any(|(_, payload)| wants_reply(payload));
                    let chunk =
                        Chunk { bytes: Memory::account(&self.memory, chunk.bytes().clone()) };
                    if self.sender.send(FromPublisher::Chunk(chunk)).is_err() {
                        return Ok(());
                    }
                    if reply {
                        self.send_status(false)?;
                    }
                }
                Received::Warning(_) => {
                    if self.sender.send(FromPublisher::Warned).is_err() {
                        return Ok(());
                    }
                }
                Received::Idle | Received::Woken => {}
                Received::Ended(reason) => return Err(ended(reason)),
            }
        }
        Ok(())
    }

    fn haste(&self) -> Haste {
        if self.memory.used.load(Ordering::Relaxed) >= PLENTY
            || self.flow.backlog.load(Ordering::Relaxed)
        {
            Haste::None
        } else if self.flow.company.load(Ordering::Relaxed) {
            Haste::ConcurrentCommitters
        } else {
            Haste::Prompt
        }
    }

    /// Asks a silent publisher for a sign of life, and gives up when none comes.
    fn watch_silence(&mut self) -> Result<()> {
        // A huge value takes its time; its bytes are a sign of life before it is whole.
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
        let positions = self.feedback.get();
        let status = StatusUpdate {
            write: positions.write,
            flush: positions.flush,
            apply: positions.apply,
            clock: now(),
            reply_requested,
        };
        let mut payload = Vec::with_capacity(34);
        status.encode(&mut payload);
        self.stream.send(&payload).map_err(|e| Failure::publisher(&e, "sending status"))?;
        self.sent = Some(positions);
        self.last_sent = Instant::now();
        Ok(())
    }
}

fn wants_reply(payload: &[u8]) -> bool {
    // The first byte decides for nearly all frames; the leader reports malformed ones.
    payload.first() == Some(&b'k')
        && matches!(Frame::decode(payload), Ok(Frame::Keepalive { reply_requested: true, .. }))
}

fn ended(reason: EndReason) -> Failure {
    match reason {
        EndReason::Error(error) => {
            explain(Failure::publisher(&wire::Error::Server(error), "streaming changes"))
        }
        EndReason::Done => Failure::new(Class::Publisher, "the publisher ended the stream")
            .hint("It is shutting down, or a standby was promoted.")
            .transient(true),
        EndReason::Closed => {
            Failure::new(Class::Publisher, "the publisher closed the connection").transient(true)
        }
    }
}

/// Errors of the walsender that concern the slot have their own class and next step.
pub(crate) fn explain(mut failure: Failure) -> Failure {
    let text = failure.message.to_lowercase();
    let invalidated = text.contains("can no longer get changes")
        || text.contains("invalidat")
        || text.contains("requested wal segment");
    match failure.sqlstate.as_deref() {
        Some("55006") => {
            failure.class = Class::Busy;
            failure.transient = true;
        }
        _ if invalidated => {
            failure.class = Class::Slot;
            failure.transient = false;
        }
        // The walsender of a server before 18 does not find a publication as of a change that it
        // decodes: it is gone now, or it was then.
        Some("42704") => {
            failure.transient = true;
            failure = failure.hint(
                "If the publication was dropped, create it again. If it is there, it was created after \
                 changes that the slot still has to send, and PostgreSQL before 18 cannot send those: \
                 the tables have to be copied again, with pgapace drop and then pgapace run.",
            );
        }
        _ => {}
    }
    failure
}

/// Microseconds since 2000, as the protocol counts.
fn now() -> Timestamp {
    let since_epoch =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX))
}
