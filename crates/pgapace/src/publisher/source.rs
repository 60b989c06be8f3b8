//! Where the receiver's messages come from: a walsender, or a recording of one.

use std::time::{Duration, Instant};

use wire::{Haste, Received, ReplicationStream, StatusSender, Waker};

use crate::error::{Failure, Result};
use crate::recording::player::Player;

/// A stream of changes. A recording ignores the messages that are sent to it.
pub(crate) enum ChangeSource {
    Publisher(Box<ReplicationStream>),
    Recording(Player),
}

impl ChangeSource {
    pub(super) fn waker(&self) -> Waker {
        match self {
            Self::Publisher(stream) => stream.waker(),
            Self::Recording(player) => player.waker(),
        }
    }

    /// For status messages of another thread; a recording takes none.
    pub(super) fn status_sender(&self) -> Result<Option<StatusSender>> {
        match self {
            Self::Publisher(stream) => {
                let sender = stream.status_sender();
                sender.map(Some).map_err(|e| Failure::publisher(&e, "starting the stream"))
            }
            Self::Recording(_) => Ok(None),
        }
    }

    pub(super) fn set_haste(&mut self, haste: Haste) {
        if let Self::Publisher(stream) = self {
            stream.set_haste(haste);
        }
    }

    /// See [`ReplicationStream::receive`].
    pub(super) fn receive(&mut self, timeout: Duration) -> Result<Received> {
        match self {
            Self::Publisher(stream) => {
                stream.receive(timeout).map_err(|e| Failure::publisher(&e, "receiving"))
            }
            Self::Recording(player) => player.receive(timeout),
        }
    }

    /// Waits for a wake-up.
    pub(super) fn wait_without_reading(&mut self, timeout: Duration) -> Result<()> {
        match self {
            Self::Publisher(stream) => {
                let waited = stream.wait_without_reading(timeout).map(drop);
                waited.map_err(|e| Failure::publisher(&e, "waiting for memory"))
            }
            Self::Recording(player) => player.wait(timeout).map(drop),
        }
    }

    /// When the last data of the server arrived. A recording is never silent too long.
    pub(super) fn last_data(&self) -> Option<Instant> {
        match self {
            Self::Publisher(stream) => stream.last_data(),
            Self::Recording(_) => Some(Instant::now()),
        }
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Result<()> {
        match self {
            Self::Publisher(stream) => {
                stream.send(message).map_err(|e| Failure::publisher(&e, "sending status"))
            }
            Self::Recording(_) => Ok(()),
        }
    }

    pub(super) fn finish(self) -> Result<()> {
        match self {
            Self::Publisher(stream) => {
                stream.finish().map_err(|e| Failure::publisher(&e, "ending the stream"))
            }
            Self::Recording(_) => Ok(()),
        }
    }
}
