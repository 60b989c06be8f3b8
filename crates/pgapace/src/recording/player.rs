//! Plays a recording to the receiver, in place of a publisher.

use std::time::{Duration, Instant};

use bytes::Bytes;
use pgoutput::{Frame, Lsn, Timestamp};
use wire::{CopyChunk, Frames, Received, Waker};

use super::file::{Messages, Recording};
use crate::error::{Failure, Result};

/// How fast a recording is played.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Pace {
    /// As fast as it is applied.
    Full,
    /// With the times between messages as the publisher sent them.
    Recorded,
}

/// Bytes that are handed over at once, as a network would deliver them.
const CHUNK: usize = 64 << 10;

/// A recording that is being played.
#[derive(Debug)]
pub(crate) struct Player {
    messages: Messages,
    end: Lsn,
    pace: Pace,
    waker: Waker,
    /// Read, and not handed over.
    pending: Bytes,
    /// The time at which the first message was sent, and when it was handed over.
    begun: Option<(Timestamp, Instant)>,
    stage: Stage,
}

/// `Messages` until the last one, then `End` until a last keepalive was handed over.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Messages,
    End,
    Silent,
}

impl Player {
    pub(crate) fn new(recording: &Recording, pace: Pace) -> Result<Self> {
        let waker =
            Waker::new().map_err(|e| Failure::internal(format!("cannot make a waker: {e}")))?;
        Ok(Self {
            messages: recording.messages()?,
            end: Lsn(recording.tail.end),
            pace,
            waker,
            pending: Bytes::new(),
            begun: None,
            stage: Stage::Messages,
        })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// The next messages that are due, if any become due within `timeout`. The end of the recording
    /// is a keepalive.
    pub(crate) fn receive(&mut self, timeout: Duration) -> Result<Received> {
        if self.waker.take() {
            return Ok(Received::Woken);
        }
        if self.stage == Stage::Messages && self.pending.is_empty() {
            match self.messages.next()? {
                Some(bytes) => self.pending = bytes,
                None => self.stage = Stage::End,
            }
        }
        match self.stage {
            Stage::Messages => {
                let (length, early) = self.due()?;
                if length > 0 {
                    return Ok(chunk(self.pending.split_to(length)));
                }
                self.wait(timeout.min(early))
            }
            Stage::End => {
                self.stage = Stage::Silent;
                let mut message = Vec::new();
                let sent = self.begun.map_or(Timestamp(0), |(sent, _)| sent);
                Frame::Keepalive { wal_end: self.end, sent, reply_requested: false }
                    .encode(&mut message);
                Ok(chunk(copy_data(&message)))
            }
            Stage::Silent => self.wait(timeout),
        }
    }

    /// The length of the messages that are due, and how long there are none.
    fn due(&mut self) -> Result<(usize, Duration)> {
        let mut length = 0;
        for (offset, message) in Frames::new(&self.pending) {
            if self.pace == Pace::Recorded {
                let sent = sent(message)?;
                let (first, begun) = *self.begun.get_or_insert_with(|| (sent, Instant::now()));
                let after = u64::try_from(sent.0 - first.0).unwrap_or_default();
                let early = Duration::from_micros(after).saturating_sub(begun.elapsed());
                if !early.is_zero() {
                    return Ok((length, early));
                }
            }
            length = offset + message.len();
            if length >= CHUNK {
                break;
            }
        }
        Ok((length, Duration::ZERO))
    }

    /// Waits for a wake-up.
    pub(crate) fn wait(&self, longest: Duration) -> Result<Received> {
        self.waker.wait(longest).map_err(|e| Failure::internal(format!("cannot wait: {e}")))?;
        Ok(if self.waker.take() { Received::Woken } else { Received::Idle })
    }
}

/// When the publisher sent a message.
fn sent(message: &[u8]) -> Result<Timestamp> {
    match Frame::decode(message) {
        Ok(
            Frame::XLogData { sent, .. }
            | Frame::Keepalive { sent, .. }
            | Frame::PrimaryStatus { sent, .. },
        ) => Ok(sent),
        Err(error) => Err(Failure::internal(format!("a recorded message is malformed: {error}"))),
    }
}

fn chunk(bytes: Bytes) -> Received {
    Received::Chunk(CopyChunk::new(bytes))
}

/// A message with the head of CopyData.
fn copy_data(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len() + 4).unwrap_or(u32::MAX);
    [&b"d"[..], &length.to_be_bytes(), message].concat().into()
}
