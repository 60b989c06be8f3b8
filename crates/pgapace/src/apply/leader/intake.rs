//! Received chunks to messages, which [`engine::intake`] takes.

use std::time::Duration;

use bytes::Bytes;
use engine::barrier::commits_at;
use engine::dispatch::ReaderGathering;
use engine::transaction::Location;
use pgoutput::{DecodeErrorKind, Frame, Message, Timestamp};
use wire::{Frames, Haste};

use crate::apply::leader::Leader;
use crate::encoding_error;
use crate::error::{Class, Failure, Result};

/// A chunk of this many bytes that ends inside a transaction is part of a long one. Of a short one, the
/// rest is sent already, and a session of the publisher may wait for it.
const LONG: usize = 16 << 10;
/// Age at which pgapace warns of a transaction that is prepared and not resolved.
const OVERDUE: Duration = Duration::from_secs(60);

impl Leader<'_> {
    pub(super) fn take_chunk(&mut self, chunk: &Bytes) -> Result<()> {
        self.watched.received_bytes += chunk.len() as u64;
        let (mut streamed, now) = (false, self.now());
        let (mut next, mut left) = (0, 0);
        for (offset, payload) in Frames::new(chunk) {
            let begin = std::mem::replace(&mut next, offset + payload.len());
            if self.intake.is_shut() {
                // Nothing of the rest is dispatched, so nothing of it may count as received: the
                // publisher sends it again next time.
                break;
            }
            match Frame::decode(payload).map_err(|e| undecodable(&e))? {
                Frame::XLogData { payload, sent, start, .. } => {
                    let at = Location {
                        chunk,
                        // The payload is the rest of the frame.
                        offset: offset + frame_header(&chunk[offset..], payload),
                        length: payload.len(),
                    };
                    let message = self.decoder.decode(payload).map_err(|e| undecodable(&e))?;
                    if let Some(commit_lsn) = commits_at(&message)
                        && !self.barrier.admits(commit_lsn)
                    {
                        self.barrier.keep(chunk.slice(begin..));
                        left = chunk.len() - begin;
                        break;
                    }
                    match &message {
                        Message::Begin(begin) => self.sent(begin.commit_time, sent),
                        Message::StreamCommit(commit) => self.sent(commit.commit_time, sent),
                        Message::CommitPrepared(commit) => self.sent(commit.commit_time, sent),
                        Message::StreamStart(_) => streamed = true,
                        _ => {}
                    }
                    self.intake.take_message(at, &message, start, now, &mut self.around)?;
                    if self.intake.incoming.has_parts() {
                        self.rest = chunk.slice(at.offset + at.length..);
                        left = self.rest.len();
                        break;
                    }
                }
                Frame::Keepalive { wal_end, reply_requested, .. } => {
                    self.asked |= reply_requested;
                    self.intake.take_keepalive(wal_end, &mut self.around)?;
                }
                Frame::PrimaryStatus { .. } => {}
            }
        }
        self.around.taken(chunk.len() - left);
        self.intake.look_at_block();
        // A few milliseconds do not matter for the rest of a long transaction either.
        streamed |= self.intake.incoming.in_transaction() && chunk.len() >= LONG;
        let haste = if streamed { Haste::None } else { self.haste(now) };
        self.receiver.set_haste(haste);
        let spool = self.intake.incoming.spool();
        spool.memory.reserve(self.intake.incoming.memory());
        self.intake.hold(self.intake.progress.durable());
        Ok(())
    }

    /// How long the receiver may gather.
    fn haste(&mut self, now: Duration) -> Haste {
        let (short, sessions) = (self.processors.are_short(), self.watch.committing_sessions());
        let commits_wait = self.commits_wait();
        let dispatch = self.around.pool.dispatch_mut();
        dispatch.observed(short, sessions, now);
        match dispatch.gathering(commits_wait) {
            ReaderGathering::Nothing => Haste::Immediate,
            ReaderGathering::Little => Haste::Prompt,
            ReaderGathering::ConcurrentCommitters => Haste::ConcurrentCommitters,
            ReaderGathering::ScarceProcessors => Haste::ScarceProcessors,
            ReaderGathering::Backlog => Haste::None,
        }
    }

    /// A transaction that committed at a time of the publisher's clock was sent at a later one.
    fn sent(&mut self, committed: Timestamp, sent: Timestamp) {
        self.watched.sent(self.intake.progress.last_dispatched(), committed);
        self.around.pool.dispatch_mut().sent_after(age(committed, sent));
    }

    /// Goes on with a spooled transaction that has committed, and then with the messages behind it.
    pub(super) fn take_rest(&mut self) -> Result<()> {
        self.intake.take_parts(&mut self.around)?;
        if self.intake.incoming.has_parts() || self.rest.is_empty() {
            return Ok(());
        }
        let rest = std::mem::take(&mut self.rest);
        // It was counted with its chunk.
        self.watched.received_bytes -= rest.len() as u64;
        self.take_chunk(&rest)
    }

    /// Warns of transactions that the publisher has left prepared.
    pub(super) fn warn_of_overdue(&mut self) {
        let now = self.now();
        for gid in self.intake.incoming.take_overdue(OVERDUE, now) {
            tracing::warn!(
                event = "prepared_transaction_unresolved",
                gid,
                "transaction is prepared on the publisher and not resolved"
            );
        }
    }
}

/// The time between two readings of the publisher's clock.
fn age(committed: Timestamp, sent: Timestamp) -> Duration {
    Duration::from_micros(u64::try_from(sent.0.saturating_sub(committed.0)).unwrap_or(0))
}

/// Length of the header before the payload in a frame: the payload is the frame's tail.
fn frame_header(frame: &[u8], payload: &[u8]) -> usize {
    payload.as_ptr() as usize - frame.as_ptr() as usize
}

fn undecodable(error: &pgoutput::DecodeError) -> Failure {
    let message = format!("cannot read what the publisher sends: {error}");
    if error.kind == DecodeErrorKind::NotUtf8 {
        return Failure::new(Class::Mismatch, message).hint(encoding_error::NAMES_HINT);
    }
    Failure::new(Class::Publisher, message).hint(
        "The publisher is newer than this program, or damaged data arrived. Nothing of the \
         message was applied.",
    )
}
