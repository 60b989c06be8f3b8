//! How far a recording has come, as its messages tell.

use pgoutput::{Frame, Lsn, Timestamp};

use super::Tail;
use crate::error::{Class, Failure, Result};

/// Bytes before the payload of each CopyData message.
const COPY_HEAD: usize = 5;

/// Where the messages so far have led.
#[derive(Debug, Default)]
pub(super) struct RecordedSoFar {
    bytes: u64,
    /// Between the first and the last message of a transaction, or of a block of a streamed one.
    open: bool,
    changes: u64,
    first: Option<Timestamp>,
    last: Timestamp,
    /// At the last moment without a transaction.
    tail: Tail,
}

impl RecordedSoFar {
    pub(super) fn new(start: Lsn) -> Self {
        Self { tail: Tail { end: start.0, ..Tail::default() }, ..Self::default() }
    }

    pub(super) fn tail(&self) -> Tail {
        self.tail
    }

    /// Whether no transaction is being sent.
    pub(super) fn is_whole(&self) -> bool {
        !self.open
    }

    /// The next message, without the head of CopyData. Returns whether the publisher wants an answer.
    pub(super) fn add(&mut self, message: &[u8]) -> Result<bool> {
        let malformed =
            |e| Failure::new(Class::Publisher, format!("the stream has a malformed message: {e}"));
        let frame = Frame::decode(message).map_err(malformed)?;
        self.bytes += (COPY_HEAD + message.len()) as u64;
        let (sent, answer, end) = match frame {
            Frame::XLogData { sent, payload, .. } => (sent, false, self.payload(payload)?),
            Frame::Keepalive { wal_end, sent, reply_requested } => {
                (sent, reply_requested, Some(wal_end))
            }
            Frame::PrimaryStatus { sent, .. } => (sent, false, None),
        };
        let first = *self.first.get_or_insert(sent);
        self.last = self.last.max(sent);
        if self.open {
            return Ok(answer);
        }
        let end = end.map_or(self.tail.end, |end| end.0.max(self.tail.end));
        self.tail = Tail {
            whole: self.bytes,
            end,
            transactions: self.tail.transactions,
            changes: self.changes,
            milliseconds: u64::try_from((self.last.0 - first.0) / 1000).unwrap_or_default(),
        };
        Ok(answer)
    }

    /// Returns the end of the transaction that this message ends.
    fn payload(&mut self, payload: &[u8]) -> Result<Option<Lsn>> {
        let lsn = |at: usize| {
            let bytes = payload.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            let bytes = bytes.ok_or_else(|| {
                Failure::new(Class::Publisher, "the stream has a message that is too short")
            })?;
            Ok(Lsn(u64::from_be_bytes(bytes)))
        };
        match payload.first() {
            Some(b'B' | b'S') => self.open = true,
            Some(b'E') => self.open = false,
            Some(b'I' | b'U' | b'D' | b'T') => self.changes += 1,
            // Flags, the LSN of the commit, its end.
            Some(b'C') => {
                self.open = false;
                self.tail.transactions += 1;
                return lsn(10).map(Some);
            }
            // The same behind the transaction id.
            Some(b'c') => {
                self.tail.transactions += 1;
                return lsn(14).map(Some);
            }
            _ => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(sent: i64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let sent = Timestamp(sent);
        Frame::XLogData { start: Lsn(0), end: Lsn(0), sent, payload }.encode(&mut bytes);
        bytes
    }

    fn keepalive(sent: i64, wal_end: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let (wal_end, sent) = (Lsn(wal_end), Timestamp(sent));
        Frame::Keepalive { wal_end, sent, reply_requested: true }.encode(&mut bytes);
        bytes
    }

    fn commit(end: u64) -> Vec<u8> {
        [&b"C\0"[..], &1_u64.to_be_bytes(), &end.to_be_bytes(), &[0; 8]].concat()
    }

    #[test]
    fn the_end_lies_where_no_transaction_is_being_sent() {
        let mut so_far = RecordedSoFar::new(Lsn(5));
        assert!(so_far.add(&keepalive(1_000_000, 7)).unwrap());
        assert_eq!((so_far.tail().end, so_far.tail().transactions), (7, 0));
        so_far.add(&message(1_000_000, b"B")).unwrap();
        so_far.add(&message(1_000_000, b"I")).unwrap();
        // A keepalive inside a transaction is no such moment.
        so_far.add(&keepalive(2_000_000, 900)).unwrap();
        assert!(!so_far.is_whole());
        assert_eq!((so_far.tail().end, so_far.tail().changes), (7, 0));
        so_far.add(&message(3_000_000, &commit(40))).unwrap();
        let whole = so_far.tail();
        assert_eq!((whole.end, whole.transactions, whole.changes), (40, 1, 1));
        assert_eq!(whole.milliseconds, 2000);
        so_far.add(&message(4_000_000, b"S")).unwrap();
        assert_eq!(so_far.tail(), whole);
        so_far.add(&message(4_000_000, b"E")).unwrap();
        let streamed = [&b"c\0\0\0\x07"[..], &commit(60)[1..]].concat();
        so_far.add(&message(4_000_000, &streamed)).unwrap();
        assert_eq!((so_far.tail().end, so_far.tail().transactions), (60, 2));
        assert_eq!(so_far.tail().whole, so_far.bytes);
    }
}
