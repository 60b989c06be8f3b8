//! Recordings: the stream of a publisher in a file, to be applied to a clone as often as needed.
//!
//! A recording has the messages exactly as the publisher sent them, with the publisher's time of
//! sending, and the facts that a replay needs to read them: published tables with their types,
//! options of the stream, versions. `pgapace record` reads them through a temporary slot and applies
//! nothing.
//!
//! ```text
//!  "PGAPACE" version │ head (JSON) │ messages │ messages │ … │ end (JSON)
//!                    └──────────────── blocks ───────────────────────┘
//! ```
//!
//! Each block is compressed and has a checksum that covers its number too, so that no block can be
//! lost, repeated or swapped. A file without its last block is truncated. `record` writes to
//! `FILE.partial` and renames it when it is whole, so an interrupted `record` leaves no such file.
//!
//! The stream may be cut off anywhere. The end says how many bytes lie before the last moment at
//! which no transaction was being sent; a reader sees nothing behind it. Streamed transactions that
//! are open at that moment do not commit in the recording.
//!
//! Recordings are made without two-phase commit: a prepared transaction is sent when it is committed.

pub(crate) mod file;
pub(crate) mod player;
pub(crate) mod progress;
pub(crate) mod recorder;

use pgoutput::{Lsn, Streaming};
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::SystemIdentity;

/// The facts that a replay must know before the first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// Version of the program that recorded it.
    pub(crate) pgapace: String,
    /// When it began, by the clock of the machine that recorded it. In seconds since 1970.
    pub(crate) recorded_at: u64,
    pub(crate) publisher: PublisherFacts,
    pub(crate) publications: Vec<String>,
    /// Every transaction that commits at or behind this LSN is in it.
    pub(crate) start: u64,
    pub(crate) options: StreamFacts,
    /// The tables that were published when it began.
    pub(crate) tables: Vec<PublishedTable>,
}

/// Facts about the publisher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublisherFacts {
    pub(crate) system_identifier: String,
    pub(crate) timeline: u32,
    /// Major version.
    pub(crate) version: u32,
    pub(crate) server_encoding: String,
    pub(crate) client_encoding: String,
}

/// The options of the stream, and of START_REPLICATION.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamFacts {
    pub(crate) binary: bool,
    /// `off`, `on` or `parallel`.
    pub(crate) streaming: String,
    pub(crate) origin_none: bool,
}

/// The facts that are known only at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tail {
    /// Bytes of messages before the last moment without a transaction.
    pub(crate) whole: u64,
    /// Everything that commits before this LSN is in it.
    pub(crate) end: u64,
    pub(crate) transactions: u64,
    pub(crate) changes: u64,
    /// Milliseconds between the first and the last message, by the publisher's clock.
    pub(crate) milliseconds: u64,
}

impl Head {
    pub(crate) fn start(&self) -> Lsn {
        Lsn(self.start)
    }

    pub(crate) fn identity(&self) -> SystemIdentity {
        SystemIdentity {
            system_identifier: self.publisher.system_identifier.clone(),
            timeline: self.publisher.timeline,
            flushed: self.start(),
        }
    }

    /// The value in place of a slot's name in the state of a replay.
    pub(crate) fn slot(&self) -> String {
        format!("recording_{}", self.publisher.system_identifier)
    }

    pub(crate) fn streaming(&self) -> Result<Streaming> {
        [Streaming::Off, Streaming::On, Streaming::Parallel]
            .into_iter()
            .find(|streaming| streaming_name(*streaming) == self.options.streaming)
            .ok_or_else(|| {
                Failure::internal(format!("unknown streaming {:?}", self.options.streaming))
            })
    }
}

/// The name of the option of START_REPLICATION.
pub(crate) fn streaming_name(streaming: Streaming) -> &'static str {
    match streaming {
        Streaming::Off => "off",
        Streaming::On => "on",
        Streaming::Parallel => "parallel",
    }
}
