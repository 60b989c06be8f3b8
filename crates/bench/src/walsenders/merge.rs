//! Merges the streams of several slots, each of which has a part of every transaction, into the transactions of the
//! publisher again.
//!
//! Every walsender sends its parts in commit order, and leaves out transactions of which its publication has nothing. So
//! a transaction is complete as soon as every stream has sent something that commits later, or a keepalive beyond it.
//! Changes are put into the order of their LSNs, which XLogData carries (`WalSndPrepareWrite` in `walsender.c`). One
//! UPDATE that moves a row from one row filter to another arrives twice, with the same LSN: the DELETE goes first.

use std::collections::VecDeque;

use pgoutput::{Lsn, Xid};

/// A change of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) lsn: Lsn,
    /// The first byte of the message: `I`, `U`, `D` or `T`.
    pub(crate) kind: u8,
    /// A hash of the message.
    pub(crate) hash: u64,
}

/// A transaction, or the part of it that one stream has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Transaction {
    /// Start of the commit record.
    pub(crate) commit_lsn: Lsn,
    pub(crate) xid: Xid,
    pub(crate) changes: Vec<Change>,
}

/// One stream: complete parts that are not merged yet, and how far it has come.
#[derive(Debug, Default)]
struct Stream {
    parts: VecDeque<Transaction>,
    /// Everything that commits before this LSN has arrived.
    passed: Lsn,
}

/// The streams of all slots.
#[derive(Debug)]
pub(crate) struct Merge {
    streams: Vec<Stream>,
}

impl Merge {
    pub(crate) fn new(streams: usize) -> Self {
        Self { streams: (0..streams).map(|_| Stream::default()).collect() }
    }

    /// Adds the next part of a stream.
    pub(crate) fn push(&mut self, stream: usize, part: Transaction) {
        let stream = &mut self.streams[stream];
        stream.passed = stream.passed.max(part.commit_lsn);
        stream.parts.push_back(part);
    }

    /// A keepalive: the stream has sent everything that ends at or before this LSN.
    pub(crate) fn pass(&mut self, stream: usize, wal_end: Lsn) {
        let stream = &mut self.streams[stream];
        stream.passed = stream.passed.max(wal_end);
    }

    /// The next transaction in commit order, if every stream has passed its commit.
    pub(crate) fn pop(&mut self) -> Option<Transaction> {
        let heads = self.streams.iter().filter_map(|stream| stream.parts.front());
        let commit_lsn = heads.map(|part| part.commit_lsn).min()?;
        let is_complete = |stream: &Stream| {
            stream.parts.front().is_some_and(|part| part.commit_lsn >= commit_lsn)
                || stream.passed > commit_lsn
        };
        if !self.streams.iter().all(is_complete) {
            return None;
        }
        let mut whole = Transaction::default();
        for stream in &mut self.streams {
            let mine = |part: &mut Transaction| part.commit_lsn == commit_lsn;
            let Some(part) = stream.parts.pop_front_if(mine) else { continue };
            (whole.commit_lsn, whole.xid) = (part.commit_lsn, part.xid);
            whole.changes.extend(part.changes);
        }
        // Stable, so that changes of one stream with the same LSN keep their order.
        whole.changes.sort_by_key(|change| (change.lsn, change.kind != b'D'));
        Some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(lsn: u64, kind: u8) -> Change {
        Change { lsn: Lsn(lsn), kind, hash: lsn }
    }

    fn part(commit_lsn: u64, changes: &[u64]) -> Transaction {
        Transaction {
            commit_lsn: Lsn(commit_lsn),
            xid: Xid(7),
            changes: changes.iter().map(|lsn| change(*lsn, b'U')).collect(),
        }
    }

    #[test]
    fn a_transaction_waits_for_every_stream() {
        let mut merge = Merge::new(2);
        merge.push(0, part(100, &[10, 30]));
        assert_eq!(merge.pop(), None, "the other stream may have a part");
        merge.pass(1, Lsn(100));
        assert_eq!(merge.pop(), None, "the commit record begins where that stream has come to");
        merge.push(1, part(100, &[20]));
        assert_eq!(merge.pop(), Some(part(100, &[10, 20, 30])));
        assert_eq!(merge.pop(), None);
    }

    #[test]
    fn a_stream_without_a_part_is_passed_by_a_keepalive_or_by_a_later_commit() {
        let mut merge = Merge::new(2);
        merge.push(0, part(100, &[10]));
        merge.pass(1, Lsn(101));
        assert_eq!(merge.pop(), Some(part(100, &[10])));
        merge.push(0, part(200, &[110]));
        merge.push(1, part(300, &[210]));
        assert_eq!(merge.pop(), Some(part(200, &[110])));
        assert_eq!(merge.pop(), None, "the first stream may have a part of the second transaction");
        merge.pass(0, Lsn(400));
        assert_eq!(merge.pop(), Some(part(300, &[210])));
    }

    #[test]
    fn a_row_that_moves_between_filters_is_deleted_first() {
        let mut merge = Merge::new(2);
        let of = |kind| Transaction { changes: vec![change(10, kind)], ..part(100, &[]) };
        merge.push(0, of(b'I'));
        merge.push(1, of(b'D'));
        let kinds = |whole: Transaction| whole.changes.iter().map(|c| c.kind).collect::<Vec<_>>();
        assert_eq!(merge.pop().map(kinds), Some(vec![b'D', b'I']));
    }
}
