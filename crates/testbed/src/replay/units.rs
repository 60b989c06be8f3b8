//! The units of a recorded stream, so that it can continue at a position.
//!
//! A walsender that starts at a position sends the transactions that commit there or later, each as
//! a whole. So a unit is everything that belongs to one decision: a transaction from BEGIN to
//! COMMIT, a block of a streamed transaction, or a message outside of both. The position of a
//! streamed block is known only when the transaction ends.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

use super::protocol::{be_u32, be_u64, invalid};

/// Head of a CopyData message: type and length.
const COPY_HEAD: usize = 5;
/// Head of an `XLogData` message: type, two positions, a time.
const WAL_HEAD: usize = 25;

/// A unit: its bytes and the position that decides whether it is sent.
#[derive(Debug)]
struct Unit {
    bytes: Range<usize>,
    /// The end of the message that begins a transaction.
    begun: Option<usize>,
    lsn: u64,
}

/// The units of a stream, found message by message.
#[derive(Debug, Default)]
pub(super) struct Units {
    units: Vec<Unit>,
    /// Descriptions of relations and types with their units. A client needs those of units that are
    /// left out, too.
    described: Vec<(usize, Range<usize>)>,
    /// Units of streamed transactions that have not ended.
    streamed: HashMap<u32, Vec<usize>>,
    open: Option<Open>,
}

/// The begin of a unit that has several messages.
#[derive(Debug)]
struct Open {
    first: Range<usize>,
    /// Position of a transaction, or the ID of a streamed one.
    of: Of,
}

#[derive(Debug, Clone, Copy)]
enum Of {
    Position(u64),
    Transaction(u32),
}

impl Units {
    /// Adds the CopyData message at these bytes of the stream. Returns the WAL position of a
    /// keepalive.
    pub(super) fn add(&mut self, stream: &[u8], bytes: Range<usize>) -> io::Result<Option<u64>> {
        let message = &stream[bytes.clone()];
        match message.get(COPY_HEAD) {
            Some(b'k') => {
                let wal_end = be_u64(message, COPY_HEAD + 1)?;
                if self.open.is_none() {
                    self.units.push(Unit { bytes, begun: None, lsn: wal_end });
                }
                Ok(Some(wal_end))
            }
            Some(b'w') => {
                let position = be_u64(message, COPY_HEAD + 1)?;
                let payload = message.get(COPY_HEAD + WAL_HEAD..).unwrap_or_default();
                self.payload(payload, position, bytes)?;
                Ok(None)
            }
            _ => Err(invalid("a message of the stream")),
        }
    }

    fn payload(&mut self, payload: &[u8], position: u64, bytes: Range<usize>) -> io::Result<()> {
        let kind = payload.first().copied().ok_or_else(|| invalid("an empty message"))?;
        if matches!(kind, b'R' | b'Y') {
            self.described.push((self.units.len(), bytes.clone()));
        }
        match kind {
            b'B' | b'b' => self.begin(bytes, Of::Position(be_u64(payload, 1)?)),
            b'S' => self.begin(bytes, Of::Transaction(be_u32(payload, 1)?)),
            b'C' | b'P' | b'E' => self.end(bytes.end),
            _ if self.open.is_some() => Ok(()),
            b'c' => self.streamed_ended(be_u32(payload, 1)?, be_u64(payload, 6)?, bytes),
            b'p' => self.streamed_ended(be_u32(payload, 26)?, be_u64(payload, 2)?, bytes),
            b'A' => match (be_u32(payload, 1)?, be_u32(payload, 5)?) {
                (top, sub) if top == sub => self.streamed_ended(top, position, bytes),
                (top, _) => {
                    self.push(bytes, None, Of::Transaction(top));
                    Ok(())
                }
            },
            b'K' => self.alone(bytes, be_u64(payload, 2)?),
            b'r' => self.alone(bytes, be_u64(payload, 10)?),
            b'M' => self.alone(bytes, be_u64(payload, 2)?),
            _ => Err(invalid("a message outside of a transaction")),
        }
    }

    fn begin(&mut self, first: Range<usize>, of: Of) -> io::Result<()> {
        match self.open.replace(Open { first, of }) {
            None => Ok(()),
            Some(_) => Err(invalid("a transaction inside of another one")),
        }
    }

    fn end(&mut self, end: usize) -> io::Result<()> {
        let open = self.open.take().ok_or_else(|| invalid("the end of a transaction"))?;
        self.push(open.first.start..end, Some(open.first.end), open.of);
        Ok(())
    }

    fn push(&mut self, bytes: Range<usize>, begun: Option<usize>, of: Of) {
        let lsn = match of {
            Of::Position(lsn) => lsn,
            Of::Transaction(id) => {
                self.streamed.entry(id).or_default().push(self.units.len());
                // Until its transaction ends, a block is sent in any case.
                u64::MAX
            }
        };
        self.units.push(Unit { bytes, begun, lsn });
    }

    fn alone(&mut self, bytes: Range<usize>, lsn: u64) -> io::Result<()> {
        self.push(bytes, None, Of::Position(lsn));
        Ok(())
    }

    fn streamed_ended(&mut self, id: u32, lsn: u64, bytes: Range<usize>) -> io::Result<()> {
        for unit in self.streamed.remove(&id).unwrap_or_default() {
            self.units[unit].lsn = lsn;
        }
        self.alone(bytes, lsn)
    }

    /// Whether the stream ends between two units.
    pub(super) fn is_whole(&self) -> bool {
        self.open.is_none()
    }

    /// The bytes to send from a position on, in order.
    pub(super) fn from(&self, position: u64) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut add = |bytes: Range<usize>| match ranges.last_mut() {
            Some(last) if last.end == bytes.start => last.end = bytes.end,
            _ => ranges.push(bytes),
        };
        let mut left_out = HashSet::new();
        for (number, unit) in self.units.iter().enumerate() {
            if unit.lsn < position {
                left_out.insert(number);
                continue;
            }
            let Some(begun) = unit.begun.filter(|_| !left_out.is_empty()) else {
                add(unit.bytes.clone());
                continue;
            };
            // The client must know the relations before the first change, and learns of them inside
            // of a transaction.
            add(unit.bytes.start..begun);
            for (_, described) in self.described.iter().filter(|(of, _)| left_out.contains(of)) {
                add(described.clone());
            }
            left_out.clear();
            add(begun..unit.bytes.end);
        }
        ranges
    }

    /// The last position up to which everything is sent once these bytes of the stream are.
    pub(super) fn position_at(&self, offset: usize) -> u64 {
        let sent = self.units.iter().take_while(|unit| unit.bytes.end <= offset);
        sent.filter(|unit| unit.lsn != u64::MAX).map(|unit| unit.lsn).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of messages, which begin with a letter.
    #[derive(Default)]
    struct Stream {
        bytes: Vec<u8>,
        units: Units,
    }

    impl Stream {
        fn copy_data(&mut self, body: &[u8]) -> io::Result<Option<u64>> {
            let start = self.bytes.len();
            self.bytes.extend(super::super::protocol::message(b'd', body));
            self.units.add(&self.bytes, start..self.bytes.len())
        }

        fn message(&mut self, kind: u8, fields: &[&[u8]]) {
            let mut body = vec![b'w'];
            body.extend([0; WAL_HEAD - 1]);
            body.push(kind);
            body.extend(fields.concat());
            self.copy_data(&body).unwrap();
        }

        fn transaction(&mut self, commit: u64) {
            self.message(b'B', &[&commit.to_be_bytes(), &[0; 12]]);
            self.message(b'R', &[&commit.to_be_bytes()]);
            self.message(b'I', &[b"row"]);
            self.message(b'C', &[&[0], &commit.to_be_bytes(), &[0; 16]]);
        }

        fn streamed_block(&mut self, id: u32) {
            self.message(b'S', &[&id.to_be_bytes(), &[1]]);
            self.message(b'I', &[b"row"]);
            self.message(b'E', &[]);
        }

        /// The letters of the messages from a position on.
        fn from(&self, position: u64) -> String {
            let mut letters = String::new();
            for range in self.units.from(position) {
                let mut rest = &self.bytes[range];
                while let Some(length) = rest.get(1..5) {
                    let length = 1 + be_u32(length, 0).unwrap() as usize;
                    let kind = match rest[COPY_HEAD] {
                        b'k' => b'k',
                        _ => rest[COPY_HEAD + WAL_HEAD],
                    };
                    letters.push(char::from(kind));
                    rest = &rest[length..];
                }
            }
            letters
        }
    }

    #[test]
    fn transactions_before_the_position_are_left_out_but_their_relations_are_known() {
        let mut stream = Stream::default();
        stream.transaction(10);
        stream.transaction(20);
        let keepalive = [&[b'k'][..], &30_u64.to_be_bytes(), &[0; 9]].concat();
        assert_eq!(stream.copy_data(&keepalive).unwrap(), Some(30));
        assert_eq!(stream.from(0), "BRICBRICk");
        assert_eq!(stream.from(10), "BRICBRICk");
        assert_eq!(stream.from(11), "BRRICk");
        assert_eq!(stream.from(21), "k");
        assert_eq!(stream.from(31), "");
        assert!(stream.units.is_whole());
    }

    #[test]
    fn a_streamed_transaction_belongs_to_its_commit() {
        let mut stream = Stream::default();
        stream.streamed_block(7);
        stream.transaction(10);
        stream.streamed_block(7);
        stream.message(b'A', &[&7_u32.to_be_bytes(), &8_u32.to_be_bytes()]);
        stream.message(b'c', &[&7_u32.to_be_bytes(), &[0], &20_u64.to_be_bytes(), &[0; 16]]);
        assert_eq!(stream.from(11), "SIESRIEAc");
        assert_eq!(stream.from(21), "");
        assert_eq!(stream.units.position_at(stream.bytes.len()), 20);
    }

    #[test]
    fn messages_that_cannot_follow_each_other_are_refused() {
        let mut stream = Stream::default();
        let begin = [&[b'w'][..], &[0; WAL_HEAD - 1], b"B", &[0; 20]].concat();
        stream.copy_data(&begin).unwrap();
        assert!(!stream.units.is_whole());
        assert!(stream.copy_data(&begin).is_err());
        assert!(Stream::default().copy_data(b"x").is_err());
    }
}
