//! A run of changes of one source transaction, kept as references into the received bytes.
//!
//! A change is four integers: which received chunk, where in it, which relation version. The
//! chunk is reference-counted, so nothing is copied between the socket and the statement, and a
//! worker decodes the change again where it needs the columns.

use std::sync::Arc;

use bytes::Bytes;
use pgoutput::{DecodeError, Lsn, Message, Timestamp, Xid, decode_change};

use crate::history::Identity;
use crate::relation::RemoteRelation;

/// Where a change lies: chunk, byte range of its payload, relation version.
#[derive(Debug, Clone, Copy)]
struct ChangeRef {
    chunk: u32,
    offset: u32,
    length: u32,
    /// Index into `relations`, or into `truncates` when `is_truncate`.
    relation: u32,
    is_truncate: bool,
}

/// What Begin says of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionHead {
    /// LSN of the commit record: what sync LSNs and skips compare.
    pub commit_lsn: Lsn,
    /// The publisher's commit time.
    pub commit_time: Timestamp,
    /// The publisher's transaction id.
    pub xid: Xid,
}

impl TransactionHead {
    /// What identifies the transaction in the publisher's history; its commit record ends at `end`.
    #[must_use]
    pub fn ends_at(&self, end: Lsn) -> Identity {
        let Self { commit_lsn, commit_time, xid } = *self;
        Identity { commit_lsn, end_lsn: end, xid, commit_time }
    }
}

/// Which relations a change touches.
#[derive(Debug, Clone, Copy)]
pub enum Touched<'a> {
    /// Insert, update or delete: one relation version.
    One(usize, &'a Arc<RemoteRelation>),
    /// Truncate: several, by index into [`TransactionPart::relations`].
    Many(&'a [u32]),
}

/// Consecutive changes of one source transaction; most transactions are one part.
///
/// A transaction larger than the assembler's part limit arrives in several parts, in order and
/// with no other transaction between them, so that memory stays bounded.
#[derive(Debug, Clone)]
pub struct TransactionPart {
    /// What Begin said.
    pub head: TransactionHead,
    /// Whether this part opens the transaction.
    pub first: bool,
    /// End of the commit record, on the part that ends the transaction.
    pub end_lsn: Option<Lsn>,
    chunks: Vec<Bytes>,
    relations: Vec<Arc<RemoteRelation>>,
    truncates: Vec<Vec<u32>>,
    changes: Vec<ChangeRef>,
    bytes: usize,
}

impl TransactionPart {
    pub(crate) fn new(head: TransactionHead, first: bool) -> Self {
        Self {
            head,
            first,
            end_lsn: None,
            chunks: Vec::new(),
            relations: Vec::new(),
            truncates: Vec::new(),
            changes: Vec::new(),
            bytes: 0,
        }
    }

    /// An empty transaction that only carries progress to `lsn`: filtered or foreign work.
    #[must_use]
    pub fn idle(lsn: Lsn) -> Self {
        let head = TransactionHead { commit_lsn: lsn, commit_time: Timestamp(0), xid: Xid(0) };
        Self::empty(head, lsn)
    }

    /// A transaction without changes here that ends at `end`.
    #[must_use]
    pub fn empty(head: TransactionHead, end: Lsn) -> Self {
        Self { end_lsn: Some(end), ..Self::new(head, true) }
    }

    /// The end of a transaction whose changes were handed out before.
    #[must_use]
    pub fn end_of(head: TransactionHead, end_lsn: Lsn) -> Self {
        Self { end_lsn: Some(end_lsn), ..Self::new(head, false) }
    }

    /// Whether it holds a TRUNCATE.
    #[must_use]
    pub fn truncates(&self) -> bool {
        !self.truncates.is_empty()
    }

    /// Whether this only carries progress (see [`Self::idle`]).
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.head.xid == Xid(0)
    }

    /// Number of changes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether the part has no change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Payload bytes that its changes refer to.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The relation versions that [`Touched`] indexes.
    #[must_use]
    pub fn relations(&self) -> &[Arc<RemoteRelation>] {
        &self.relations
    }

    /// Decodes change `index` again and says what it touches.
    ///
    /// # Errors
    /// Never for bytes that the assembler accepted; the type is kept so that nobody unwraps.
    ///
    /// # Panics
    /// When `index` is not below [`Self::len`].
    pub fn change(&self, index: usize) -> Result<(Message<'_>, Touched<'_>), DecodeError> {
        Ok((decode_change(self.payload(index), false)?, self.touched(index)))
    }

    /// What a change touches.
    pub(crate) fn touched(&self, index: usize) -> Touched<'_> {
        let at = self.changes[index];
        if at.is_truncate {
            Touched::Many(&self.truncates[at.relation as usize])
        } else {
            Touched::One(at.relation as usize, &self.relations[at.relation as usize])
        }
    }

    /// A change as it was received, outside of streams.
    pub(crate) fn payload(&self, index: usize) -> &[u8] {
        let at = self.changes[index];
        let chunk = &self.chunks[at.chunk as usize];
        &chunk[at.offset as usize..(at.offset + at.length) as usize]
    }

    pub(crate) fn push(&mut self, at: Location<'_>, relation: &Arc<RemoteRelation>) {
        let relation = self.relation_index(relation);
        self.push_ref(at, relation, false);
    }

    pub(crate) fn push_truncate(&mut self, at: Location<'_>, relations: &[Arc<RemoteRelation>]) {
        let indexes = relations.iter().map(|relation| self.relation_index(relation)).collect();
        self.truncates.push(indexes);
        let index = index_u32(self.truncates.len() - 1);
        self.push_ref(at, index, true);
    }

    fn push_ref(&mut self, at: Location<'_>, relation: u32, is_truncate: bool) {
        // Changes arrive chunk by chunk, so only the last chunk can be the same one.
        let same = self
            .chunks
            .last()
            .is_some_and(|last| last.as_ptr() == at.chunk.as_ptr() && last.len() == at.chunk.len());
        if !same {
            self.chunks.push(at.chunk.clone());
        }
        self.bytes += at.length;
        self.changes.push(ChangeRef {
            chunk: index_u32(self.chunks.len() - 1),
            offset: index_u32(at.offset),
            length: index_u32(at.length),
            relation,
            is_truncate,
        });
    }

    fn relation_index(&mut self, relation: &Arc<RemoteRelation>) -> u32 {
        // A transaction touches few relations, and mostly the same one again: search backwards.
        let known = self.relations.iter().rposition(|version| Arc::ptr_eq(version, relation));
        index_u32(known.unwrap_or_else(|| {
            self.relations.push(Arc::clone(relation));
            self.relations.len() - 1
        }))
    }
}

/// A message's payload inside a received chunk.
#[derive(Debug, Clone, Copy)]
pub struct Location<'a> {
    /// The chunk that holds it.
    pub chunk: &'a Bytes,
    /// Offset of the payload (after the XLogData header) in the chunk.
    pub offset: usize,
    /// Length of the payload.
    pub length: usize,
}

impl<'a> Location<'a> {
    /// The payload itself.
    pub(crate) fn payload(&self) -> &'a [u8] {
        &self.chunk[self.offset..self.offset + self.length]
    }
}

/// Chunks are below 4 GiB (a message is below 1 GiB) and parts below `u32::MAX` changes (the
/// assembler closes them long before), so an index always fits.
fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("parts and chunks are bounded well below 4 Gi")
}
