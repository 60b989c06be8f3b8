//! The positions that the publisher may be told: the leader sets them, and the receiver knows what it has
//! read.
//!
//! Both threads send them. Where sessions of the publisher wait for commits, the leader tells of those
//! without waking the receiver. Otherwise the receiver does, once for several of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::progress::Positions;
use pgoutput::{Lsn, StatusUpdate, Timestamp};

/// Shared positions. A mutex is enough: it is taken a few times per batch, and held for at most one send
/// that does not block. So the publisher never gets an older position after a newer one.
#[derive(Debug, Clone)]
pub(crate) struct Feedback(Arc<Mutex<SharedPositions>>);

#[derive(Debug)]
struct SharedPositions {
    /// As the leader has set them.
    positions: Positions,
    /// The receiver has read everything before, whether or not the leader has.
    read: Lsn,
    sent: Option<Positions>,
    sent_at: Instant,
}

impl SharedPositions {
    fn positions(&self) -> Positions {
        Positions { write: self.positions.write.max(self.read), ..self.positions }
    }

    fn has_news(&self) -> bool {
        self.sent != Some(self.positions())
    }

    fn send<E>(
        &mut self,
        reply_requested: bool,
        send: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let positions = self.positions();
        let Positions { write, flush, apply } = positions;
        let status = StatusUpdate { write, flush, apply, clock: now(), reply_requested };
        let mut message = Vec::with_capacity(34);
        status.encode(&mut message);
        send(&message)?;
        self.sent = Some(positions);
        self.sent_at = Instant::now();
        Ok(())
    }
}

impl Feedback {
    pub(crate) fn new(positions: Positions) -> Self {
        let (read, sent_at) = (positions.write, Instant::now());
        Self(Arc::new(Mutex::new(SharedPositions { positions, read, sent: None, sent_at })))
    }

    /// The leader's positions. Returns whether there is anything new to send.
    pub(crate) fn set(&self, positions: Positions) -> bool {
        let mut known = self.lock();
        known.positions = positions;
        known.has_news()
    }

    /// Everything before this position was read.
    pub(crate) fn read(&self, lsn: Lsn) {
        let mut known = self.lock();
        known.read = known.read.max(lsn);
    }

    /// The time since the last status message.
    pub(crate) fn silence(&self) -> Duration {
        self.lock().sent_at.elapsed()
    }

    /// Sends a status message if anything is new in it.
    pub(crate) fn send_news<E>(&self, send: impl FnOnce(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut known = self.lock();
        if known.has_news() { known.send(false, send) } else { Ok(()) }
    }

    /// Sends a status message.
    pub(crate) fn send<E>(
        &self,
        reply_requested: bool,
        send: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.lock().send(reply_requested, send)
    }

    fn lock(&self) -> MutexGuard<'_, SharedPositions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Microseconds since 2000-01-01, as in the protocol.
fn now() -> Timestamp {
    let since_epoch =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::{Feedback, Lsn, Positions, StatusUpdate};

    fn positions(write: u64, applied: u64) -> Positions {
        Positions { write: Lsn(write), flush: Lsn(applied), apply: Lsn(applied) }
    }

    fn news(feedback: &Feedback) -> Option<Positions> {
        let mut sent = None;
        let result = feedback.send_news(|message| {
            let StatusUpdate { write, flush, apply, .. } = StatusUpdate::decode(message).unwrap();
            sent = Some(Positions { write, flush, apply });
            Ok::<(), Infallible>(())
        });
        result.map(|()| sent).unwrap_or_default()
    }

    /// The receiver reports a position when it has read it; the leader, which gets there later, does not
    /// report it again.
    #[test]
    fn a_receipt_is_news_once() {
        let feedback = Feedback::new(positions(10, 10));
        assert_eq!(news(&feedback), Some(positions(10, 10)));
        feedback.read(Lsn(30));
        assert_eq!(news(&feedback), Some(positions(30, 10)));
        for (leader, told) in [
            (positions(20, 10), None),
            (positions(30, 10), None),
            (positions(30, 20), Some(positions(30, 20))),
            (positions(40, 20), Some(positions(40, 20))),
            (positions(40, 20), None),
        ] {
            assert_eq!(feedback.set(leader), told.is_some());
            assert_eq!(news(&feedback), told);
        }
    }

    /// The next attempt sends a status message that could not be sent.
    #[test]
    fn news_that_were_not_sent_are_news() {
        let feedback = Feedback::new(positions(10, 10));
        feedback.send_news(|_| Err(())).unwrap_err();
        assert_eq!(news(&feedback), Some(positions(10, 10)));
    }
}
