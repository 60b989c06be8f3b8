//! The connection to the walsender, for the thread that receives: it reads chunks, and sends status messages
//! on time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pgoutput::{Frame, Lsn};
use wire::{EndReason, Haste, Received, quote_literal};

use crate::encoding_error;
use crate::error::{Class, Failure, Recovery, Result};
use crate::observe::stopwatch::{Reason, Stopwatch};
use crate::publisher::announced::{Announcer, MESSAGE};
use crate::publisher::feedback::Feedback;
use crate::publisher::memory::Memory;
use crate::publisher::source::ChangeSource;
use crate::publisher::watch::Commits;
use crate::sqlstate;

/// Longest time between two status messages while nothing is read. The receiver then does not see
/// the publisher's requests for a reply, and the publisher ends a silent connection after
/// wal_sender_timeout.
const PAUSED_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// With this many bytes received and not yet applied, the receiver need not hurry.
const PLENTY: u64 = 512 << 10;

/// A message from the receiver to the leader.
#[derive(Debug)]
pub(crate) enum FromPublisher {
    /// Complete CopyData messages, headers included.
    Chunk(Chunk),
    /// The publisher sent a WARNING: it may have left changes out.
    Warned,
    /// The stream ended; nothing follows.
    Ended(Failure),
}

/// Received bytes. They return to the memory budget when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Shared bytes, which can be sliced without copying.
    pub(crate) bytes: Bytes,
}

/// What a walsender decodes, for the next step after its errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// Prepared transactions at their PREPARE, until `two_phase` of the slot is switched off.
    TwoPhase,
    /// The same, and the server cannot switch it off: a copy of the slot does not have it.
    TwoPhaseOfSlot(String),
    /// Anything else.
    Other,
}

impl Decoding {
    /// Of a slot that has `two_phase`, which the publisher can switch off or not.
    pub(crate) fn two_phase(slot: &str, can_end: bool) -> Self {
        if can_end { Self::TwoPhase } else { Self::TwoPhaseOfSlot(slot.to_owned()) }
    }

    /// The next step after an error that no SQLSTATE explains.
    fn hint(&self) -> String {
        let failed = "The publisher failed while it decoded its WAL. If it comes back each time, ";
        let rebase = "pgapace rebase makes a new slot behind it, and mends the rows that differ.";
        match self {
            Self::TwoPhase => format!(
                "{failed}start pgapace run with --two-phase=false: prepared transactions are then sent at their COMMIT \
                 PREPARED, and --two-phase can be set again later. If that does not help, {rebase}"
            ),
            Self::TwoPhaseOfSlot(slot) => {
                let (name, copy) = (quote_literal(slot), quote_literal(&copied(slot)));
                format!(
                    "{failed}have prepared transactions sent at their COMMIT PREPARED. That needs a slot without \
                     two_phase, as a copy is. Stop pgapace run, and in the database of the publications: SELECT \
                     pg_copy_logical_replication_slot({name}, {copy}); SELECT pg_drop_replication_slot({name}); SELECT \
                     pg_copy_logical_replication_slot({copy}, {name}); SELECT pg_drop_replication_slot({copy}); Then \
                     start pgapace run with --two-phase=false; --two-phase can be set again later. If that does not \
                     help, {rebase}"
                )
            }
            Self::Other => format!("{failed}{rebase}"),
        }
    }
}

/// The name of a copy of a slot. A name has no more than 63 bytes, which are ASCII.
fn copied(slot: &str) -> String {
    const COPY: &str = "_copy";
    format!("{}{COPY}", slot.get(..63 - COPY.len()).unwrap_or(slot))
}

/// The timing and memory limit of the connection.
#[derive(Debug, Clone)]
pub(crate) struct ReceiverOptions {
    /// Longest time between two status messages.
    pub(crate) status_interval: Duration,
    /// After this long without any data, the publisher is considered lost (`wal_receiver_timeout`).
    pub(crate) receive_timeout: Duration,
    /// Reading stops above this many bytes that were received and not yet released.
    pub(crate) memory_limit: usize,
    /// Whether commits on the publisher wait for the subscription.
    pub(crate) commits: Commits,
    /// What the walsender decodes.
    pub(crate) decoding: Decoding,
}

/// The connection, for the thread that receives.
pub(crate) struct StreamReader {
    stream: ChangeSource,
    feedback: Feedback,
    options: ReceiverOptions,
    announcer: Announcer,
    pub(super) memory: Arc<Memory>,
    /// Time spent waiting for memory.
    pub(super) waits: Stopwatch,
    /// How long it may collect data. Set once per chunk, so a mutex is enough.
    pub(super) haste: Arc<Mutex<Haste>>,
    last_heard: Instant,
    /// A silent publisher was asked for a reply.
    asked: bool,
    /// Whether the log names the silent publisher already.
    told: bool,
    /// The publisher has asked for a status message.
    owes_reply: bool,
}

impl std::fmt::Debug for StreamReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamReader").finish_non_exhaustive()
    }
}

impl StreamReader {
    pub(super) fn new(
        stream: ChangeSource,
        feedback: Feedback,
        options: ReceiverOptions,
        announcer: Announcer,
    ) -> Self {
        let memory = Arc::new(Memory::new(options.memory_limit, stream.waker()));
        Self {
            stream,
            feedback,
            options,
            announcer,
            memory,
            waits: Stopwatch::default(),
            haste: Arc::default(),
            last_heard: Instant::now(),
            asked: false,
            told: false,
            owes_reply: false,
        }
    }

    /// Sends a status message if one is due, and waits for the publisher, for `longest` at most. A reply that
    /// the publisher asks for is sent by the next call.
    pub(super) fn receive(&mut self, longest: Duration) -> Result<Option<FromPublisher>> {
        let replies = std::mem::take(&mut self.owes_reply);
        if replies || self.feedback.silence() >= self.options.status_interval {
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
                (self.asked, self.told) = (false, false);
                let mut ended = None;
                for (_, frame) in chunk.frames() {
                    self.owes_reply |= wants_reply(frame);
                    ended = end_of_transaction(frame).or(ended);
                    self.announcer.frame(frame);
                }
                // Before the leader gets the chunk.
                self.announcer.end(chunk.bytes().len());
                if let Some(end) = ended
                    && self.options.commits.are_synchronous()
                {
                    // With synchronous_commit = remote_write, its session waits for that alone. The
                    // leader, which has more to do, need not wake this thread for it.
                    self.feedback.read(end);
                }
                let bytes = Memory::account(&self.memory, chunk.bytes().clone());
                Ok(Some(FromPublisher::Chunk(Chunk { bytes })))
            }
            Received::Warning(_) => Ok(Some(FromPublisher::Warned)),
            Received::Idle | Received::Woken => Ok(None),
            Received::Ended(reason) => Err(ended(reason, &self.options.decoding)),
        }
    }

    /// Sends the last positions, and ends the stream in order.
    pub(super) fn finish(mut self) -> Result<()> {
        self.send_status(false).and_then(|()| self.stream.finish())
    }

    fn haste(&self) -> Haste {
        if self.memory.used().0 >= PLENTY {
            Haste::None
        } else {
            *self.haste.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Requests a reply from a silent publisher, logs that none arrives, and fails at last.
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
        if silence >= self.options.receive_timeout * 3 / 4 && !self.told {
            self.told = true;
            tracing::warn!(
                event = "publisher_silent",
                seconds = silence.as_secs(),
                limit = self.options.receive_timeout.as_secs(),
                "publisher has not answered; the run ends at the limit of --receive-timeout, and is retried"
            );
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

fn ended(reason: EndReason, decoding: &Decoding) -> Failure {
    match reason {
        EndReason::Error(error) => {
            explain(Failure::publisher(&wire::Error::Server(error), "streaming changes"), decoding)
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

/// Gives errors of a walsender that streams their class and next step. If it has lost its slot, the next run sees
/// that: the check before the stream says it in more than the words of the server.
pub(crate) fn explain(mut failure: Failure, decoding: &Decoding) -> Failure {
    match failure.sqlstate.as_deref() {
        // Before 18, decoding a change fails if the publication does not exist as of that change:
        // it is missing now, or it was missing then.
        Some(sqlstate::UNDEFINED_OBJECT) => {
            failure = failure.transient(true).hint(
                "If the publication was dropped, create it again. If it exists, it was created \
                 after changes that the slot must still send, which PostgreSQL before 18 cannot \
                 do. Then stop pgapace run: pgapace rebase makes a new slot, and mends the rows that differ.",
            );
        }
        // A slot can say that its WAL is there although the server never had it: its directory was copied from another one.
        Some(sqlstate::UNDEFINED_FILE) => {
            failure = failure.transient(false).hint(
                "A file that the slot needs is not on this server. If it is WAL, it does not come back by itself: stop \
                 pgapace run, and pgapace rebase makes a new slot, and mends the rows that differ.",
            );
            failure.recovery = Recovery::DecodeAgain;
        }
        Some(sqlstate::CHARACTER_NOT_IN_REPERTOIRE | sqlstate::UNTRANSLATABLE_CHARACTER) => {
            failure = failure.hint(encoding_error::IN_STREAM_HINT);
        }
        _ if !failure.is_transient() => {
            failure.recovery = Recovery::DecodeAgain;
            failure.hint.get_or_insert_with(|| decoding.hint());
        }
        _ => {}
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::{Decoding, Lsn, end_of_transaction, explain};
    use crate::error::{Class, Failure, Recovery};

    /// A frame at 1/2, with a message of this kind.
    fn frame(kind: u8) -> Vec<u8> {
        let lsn = [0, 0, 0, 1, 0, 0, 0, 2];
        [b"w".as_slice(), &lsn, &lsn, &[0; 8], &[kind]].concat()
    }

    #[test]
    fn a_slot_that_need_not_stay_two_phase_has_a_cheaper_next_step() {
        let hint = |decoding| {
            let failure = Failure::new(Class::Publisher, "could not map filenumber");
            explain(failure, &decoding).hint.unwrap_or_default()
        };
        let (first, last) = (hint(Decoding::TwoPhase), hint(Decoding::Other));
        assert!(first.find("--two-phase=false") < first.find("pgapace rebase"), "{first}");
        let copied = hint(Decoding::two_phase(&"s".repeat(63), false));
        assert!(copied.find("--two-phase=false") < copied.find("pgapace rebase"), "{copied}");
        assert!(copied.contains(&format!("('{}_copy', '{}')", "s".repeat(58), "s".repeat(63))));
        assert!(last.contains("pgapace rebase") && !last.contains("two-phase"), "{last}");
    }

    #[test]
    fn wal_that_is_not_there_does_not_come_back() {
        let failure =
            Failure::new(Class::Publisher, "requested WAL segment has already been removed");
        let failure = Failure { sqlstate: Some("58P01".to_owned()), ..failure }.transient(true);
        let failure = explain(failure, &Decoding::Other);
        assert!(!failure.is_transient());
        assert!(matches!(failure.recovery, Recovery::DecodeAgain));
        assert!(failure.hint.unwrap_or_default().contains("pgapace rebase"));
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
